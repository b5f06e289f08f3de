#include <ATen/ops/full.h>

#include <array>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/hosts/tcp_group.h"
#include "comm/nccl/nccl.h"
#include "cpp/catch.h"
#include "job/make_groups.h"
#include "muster/error.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::testing;

namespace {

// A worker's groups over two hosts, "a" and "b", with a worker each.
Groups groups_of(const net::StorePtr& store, int worker, const std::vector<c10::Device>& devices) {
  SeveralHosts several;
  several.hosts = {"a", "b"};
  several.store = store;
  for (auto& [name, group] :
       std::array<std::pair<std::string, comm::ProcessGroupPtr*>, 5>{{{"workers", &several.workers},
                                                                      {"workers_results", &several.workers_results},
                                                                      {"step", &several.step},
                                                                      {"gradients", &several.gradients},
                                                                      {"results", &several.results}}}) {
    c10d::PrefixStore prefixed(name, store);
    *group = comm::make_tcp_group(prefixed, {worker, 2, {1 - worker}, "127.0.0.1"}, Seconds(30));
  }
  Topology topology;
  topology.num_workers = 2;
  topology.rank = worker;
  topology.devices = devices;
  Cluster cluster;
  cluster.rank = worker;
  cluster.num_workers = 2;
  return groups_over_hosts(several, cluster, topology, Seconds(30));
}

}  // namespace

TEST_CASE("replicas of two hosts reduce through groups that do not disturb one another", "[job][hosts]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  CHECK(run_threads(2, [&](int worker) {
          const auto groups = groups_of(store, worker, {c10::kCPU, c10::kCPU});
          MUSTER_CHECK(groups.control.empty());
          MUSTER_CHECK(groups.overlap);
          std::vector<at::Tensor> values;
          std::vector<comm::Work> works;
          for (const auto* const of_replicas : {&groups.gradients, &groups.step}) {
            for (const auto& replica : *of_replicas) {
              values.push_back(at::full({1000}, 1 + replica->rank(), at::kFloat));
              works.push_back(replica->all_reduce(values.back(), ReduceOp::sum));
            }
          }
          auto own = at::full({3}, worker, at::kLong);
          groups.workers->all_reduce(own, ReduceOp::max).wait();
          for (auto& work : works) work.wait();
          for (const auto& value : values) MUSTER_CHECK(value.eq(10).all().item<bool>());
          MUSTER_CHECK(own.eq(1).all().item<bool>());
        }) == "");
}

TEST_CASE("GPUs of two hosts need NCCL, and no process group of the program's", "[job][hosts]") {
  if (comm::has_nccl()) return;  // it would be asked for devices that are not there
  const auto store = c10::make_intrusive<c10d::HashStore>();
  CHECK(run_threads(2, [&](int worker) {
          bool is_asked_for = false;
          try {
            groups_of(store, worker, {c10::Device(c10::kCUDA, 0)});
          } catch (const NotBuilt&) {
            is_asked_for = true;  // once the replicas' control groups were there
          }
          MUSTER_CHECK(is_asked_for);
        }) == "");
}
