// Ranks in one process, for the tests of the peer kernels.
#pragma once

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "cpp/cuda/emulated.h"
#include "kernels/cuda/peers.h"

namespace muster::kernels::cuda {

/// Ranks and their signals.
struct PeerGroup {
  std::vector<std::unique_ptr<PeerSignals>> signals;
  Peers peers{};

  PeerGroup(int size, unsigned blocks) {
    peers.size = size;
    peers.rank = kAllRanks;
    peers.blocks = blocks;
    for (int r = 0; r < size; ++r) {
      signals.push_back(std::make_unique<PeerSignals>());
      peers.signals[r] = signals.back().get();
    }
  }

  /// As one launch for all ranks, or as one for each, at the same time.
  template <class Launch>
  void run(bool is_one_launch, const Launch& launch) const {
    if (is_one_launch) return check_ok(launch(peers));
    std::vector<std::thread> threads;
    std::atomic<int> failures{0};
    for (int r = 0; r < peers.size; ++r) {
      threads.emplace_back([&, r] {
        Peers own = peers;
        own.rank = r;
        if (!launch(own).ok()) ++failures;
      });
    }
    for (auto& thread : threads) thread.join();
    CHECK(failures == 0);
  }
};

template <class S>
std::vector<Buffer<S>> filled(int count, size_t n, uint32_t seed, bool has_specials = false) {
  Values values(seed, has_specials);
  std::vector<Buffer<S>> buffers;
  for (int r = 0; r < count; ++r) {
    buffers.emplace_back(n);
    values.fill(buffers.back());
  }
  return buffers;
}

template <class S>
std::vector<void*> pointers(std::vector<Buffer<S>>& buffers) {
  std::vector<void*> list;
  for (auto& buffer : buffers) list.push_back(buffer.data());
  return list;
}

/// The sum by the CPU.
template <class S>
Buffer<S> sum_of(DType dtype, std::vector<Buffer<S>>& buffers) {
  Buffer<S> sum(buffers[0].size());
  const std::vector<void*> sources = pointers(buffers);
  void* destination = sum.data();
  kernels::tree_reduce(dtype, Reduction::sum, sources.data(), static_cast<int>(sources.size()), &destination, 1,
                       sum.size());
  return sum;
}

}  // namespace muster::kernels::cuda
