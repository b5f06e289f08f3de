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
                                            comm::Milliseconds timeout) {
  std::vector<comm::NcclOptions> options;
  for (const auto& handle : control) {
    options.emplace_back();
    options.back().timeout = timeout;
    options.back().control = handle;
  }
  return options;
}

void share_order(Groups& groups, const std::vector<comm::CommunicatorPtr>& control) {
  groups.step.clear();
  for (size_t r = 0; r < control.size(); ++r) {
    groups.step.push_back(comm::make_another(groups.gradients[r], control[r]));
  }
  groups.step_shares_order = true;
}

void use_nccl(Groups& groups, const net::StorePtr& store, const Topology& topology,
              const std::function<std::vector<comm::CommunicatorPtr>(const std::string& name)>& make_control,
              comm::Milliseconds timeout) {
  groups.control = make_control("control");
  const bool is_alone = topology.num_replicas == 1 && !uses_nccl_alone();
  if (is_alone) {
    groups.gradients = {comm::make_single(topology.devices.front())};
    groups.step = {comm::make_single(topology.devices.front())};
  } else {
    c10d::PrefixStore prefixed("nccl_gradients", store);
    groups.gradients = comm::make_nccl(prefixed, topology.first_replica, topology.num_replicas, topology.devices,
                                       with_control(make_control("gradients_control"), timeout));
    share_order(groups, make_control("step_control"));
  }
  groups.workers = comm::make_staged(groups.workers, topology.devices.front(),
                                     topology.has_one_replica_each() && !is_alone ? groups.gradients.front() : nullptr);
  groups.backend = is_alone ? "nothing: there is one replica" : "NCCL";
  groups.overlap = true;
}

}  // namespace muster
