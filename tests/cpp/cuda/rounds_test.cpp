// Several rounds of peer_reduce in one launch.
// What a barrier forgets shows only where something comes before and after it: each rank uses the sum and writes the
// next round's values over it.
#include "cpp/cuda/peer_group.h"

namespace muster::kernels::cuda {
namespace {

struct Rounds {
  int count;
  float* sums[kMaxPeers];  // count * n each
};

template <int kCount>
MUSTER_KERNEL void rounds_kernel(MUSTER_GRID_CONSTANT(PeerReduction<float>) a, Rounds rounds) {
  Place place = enter_peers(a.peers);
  float* own = a.buffers[place.rank];
  for (int round = 0; round < rounds.count; ++round) {
    peer_reduce_round<kCount>(a, place);
    for (uint64_t v = uint64_t{place.block} * kCount * kPeerThreads + threadIdx.x; 4 * v < a.n;
         v += uint64_t{a.peers.blocks} * kCount * kPeerThreads) {
      for (uint64_t r = 0; r < kCount; ++r) {
        for (uint64_t i = 4 * (v + r * kPeerThreads); i < 4 * (v + r * kPeerThreads) + 4 && i < a.n; ++i) {
          rounds.sums[place.rank][round * a.n + i] = own[i];
          own[i] = own[i] * 0.5f + static_cast<float>(place.rank);
        }
      }
    }
  }
  leave_peers(a.peers, place);
}

template <int kRanks>
void compare_rounds(size_t n, unsigned blocks, int count) {
  CAPTURE(kRanks, n, blocks);
  const PeerGroup group(kRanks, blocks);
  std::vector<Buffer<float>> buffers = filled<float>(kRanks, n, 9), on_cpu = filled<float>(kRanks, n, 9);
  std::vector<Buffer<float>> sums = filled<float>(kRanks, n * static_cast<size_t>(count), 1);
  PeerReduction<float> arguments{group.peers, {}, n};
  Rounds rounds{count, {}};
  for (int r = 0; r < kRanks; ++r) arguments.buffers[r] = buffers[r].data(), rounds.sums[r] = sums[r].data();
  check_ok(launch(rounds_kernel<kRanks>, {kRanks * blocks, kPeerThreads, true}, nullptr, arguments, rounds));
  for (int round = 0; round < count; ++round) {
    const Buffer<float> expected = sum_of(DType::f32, on_cpu);
    for (int r = 0; r < kRanks; ++r) {
      CHECK(memcmp(sums[r].data() + static_cast<size_t>(round) * n, expected.data(), n * sizeof(float)) == 0);
      for (size_t i = 0; i < n; ++i) on_cpu[r][i] = expected[i] * 0.5f + static_cast<float>(r);
    }
  }
}

TEST_CASE("rounds of peer_reduce in one launch", "[cuda][rounds]") {
  for (const uint32_t seed : {0u, 3u, 7u}) {
    CAPTURE(seed);
    const Schedule schedule(seed);
    compare_rounds<2>(4099, 2, 5);
    compare_rounds<4>(4099, 1, 4);
  }
}

TEST_CASE("rounds of peer_reduce under many schedules", "[cuda][.long]") {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    CAPTURE(seed);
    const Schedule schedule(seed);
    compare_rounds<1>(1001, 2, 4);
    compare_rounds<2>(9001, 3, 6);
    compare_rounds<3>(5003, 2, 6);
    compare_rounds<4>(5003, 2, 6);
  }
}

}  // namespace
}  // namespace muster::kernels::cuda
