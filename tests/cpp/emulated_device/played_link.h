// How replicas that play devices communicate.
#pragma once

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <string>
#include <vector>

#include "comm/nccl/communicator.h"
#include "comm/nccl/in_process.h"
#include "device/device.h"
#include "job/nccl_groups.h"
#include "support/fake_nccl.h"

namespace muster::testing {

enum class Link : uint8_t { none, nccl, shared_device };

/// While one lives, replicas that play devices do so over tables of functions: NCCL's, each on a device of its own, or
/// those of one device.
class PlayedLink {
 public:
  explicit PlayedLink(Link link) {
    if (link == Link::none) return;
    played_group() = [this, link](const std::vector<comm::NcclOptions>& options) {
      const auto size = static_cast<int>(options.size());
      const std::vector<int> ordinals(options.size(), 0);
      const std::vector<c10::Device> devices(options.size(), c10::Device(c10::kCPU));
      const auto table =
          link == Link::nccl ? fake_.nccl() : comm::nccl::make_in_process_api(fake_.device(), c10::kCPU, ordinals);
      return comm::nccl::make_communicators(table, fake_.device(), *c10::make_intrusive<c10d::HashStore>(), 0, size,
                                            devices, options);
    };
  }
  ~PlayedLink() { played_group() = {}; }
  PlayedLink(const PlayedLink&) = delete;
  PlayedLink& operator=(const PlayedLink&) = delete;

  /// Reductions so far; on a shared device, sums.
  int collectives() { return fake_.count("all_reduce 0") + reductions_to_one() + fake_.count("tree_sum 2"); }
  /// Those of them whose sum one rank gets.
  int reductions_to_one() { return fake_.count("reduce 0"); }
  /// Broadcasts so far.
  int broadcasts() { return fake_.count("broadcast 0"); }
  /// Launches so far that the tables stand for.
  int launches() {
    int count = 0;
    for (const auto& entry : fake_.log()) {
      for (const auto* name : {"all_reduce ", "reduce ", "broadcast ", "all_gather ", "copy ", "tree_sum "}) {
        count += entry.starts_with(name) ? 1 : 0;
      }
    }
    return count;
  }

 private:
  FakeNccl fake_;
};

/// While it lives, replicas that play devices have one each, if they are `apart`.
class Apart {
 public:
  explicit Apart(bool apart) { play_streams_on_cpu(true, apart); }
  ~Apart() { play_streams_on_cpu(true); }
  Apart(const Apart&) = delete;
  Apart& operator=(const Apart&) = delete;
};

}  // namespace muster::testing
