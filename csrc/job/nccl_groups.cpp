#include "job/nccl_groups.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace muster {

bool& uses_nccl_alone() noexcept {
  static bool is_wanted = false;
  return is_wanted;
}

PlayedGroup& played_group() noexcept {
  static PlayedGroup group;
  return group;
}

std::vector<comm::NcclOptions> with_control(const std::vector<comm::CommunicatorPtr>& control,
                                            comm::Milliseconds timeout, int max_ctas) {
  std::vector<comm::NcclOptions> options;
  for (const auto& handle : control) {
    options.emplace_back();
    options.back().timeout = timeout;
    options.back().control = handle;
    options.back().max_ctas = max_ctas;
  }
  return options;
}

void use_nccl(Groups& groups, const net::StorePtr& store, const Topology& topology,
              const std::function<std::vector<comm::CommunicatorPtr>(const std::string& name)>& make_control,
              comm::Milliseconds timeout) {
  groups.control = make_control("control");
  const bool is_alone = topology.num_replicas == 1 && !uses_nccl_alone();
  const auto make = [&](const std::string& name, int max_ctas) -> std::vector<comm::CommunicatorPtr> {
    if (is_alone) return {comm::make_single(topology.devices.front())};
    c10d::PrefixStore prefixed("nccl_" + name, store);
    return comm::make_nccl(prefixed, topology.first_replica, topology.num_replicas, topology.devices,
                           with_control(make_control(name + "_control"), timeout, max_ctas));
  };
  groups.gradients = make("gradients", 0);
  groups.step = make("step", kStepCtas);
  groups.workers = comm::make_staged(groups.workers, topology.devices.front(),
                                     topology.has_one_replica_each() && !is_alone ? groups.gradients.front() : nullptr);
  groups.backend = is_alone ? "nothing: there is one replica" : "NCCL";
  groups.overlap = true;
}

}  // namespace muster
