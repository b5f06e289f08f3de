#include "cpp/cuda/peer_group.h"

namespace muster::kernels::cuda {
namespace {

// --- sums ------------------------------------------------------------------------------------------------------------

template <class S>
void compare_reduce(DType dtype, int ranks, size_t n) {
  CAPTURE(ranks, n);
  PeerGroup group(ranks, 1);
  // The same signals serve launches of any number of blocks.
  for (const unsigned blocks : {2u, 1u, 3u}) {
    CAPTURE(blocks);
    group.peers.blocks = blocks;
    std::vector<Buffer<S>> buffers = filled<S>(ranks, n, blocks, true);
    const Buffer<S> expected = sum_of(dtype, buffers);
    const std::vector<void*> list = pointers(buffers);
    group.run(blocks != 3, [&](const Peers& peers) { return peer_reduce(peers, dtype, list.data(), n, nullptr); });
    for (auto& buffer : buffers) {
      CHECK(first_difference(buffer, expected) == -1);
      CHECK(buffer.is_intact());
    }
  }
}

TEST_CASE("peer_reduce equals the CPU's tree", "[cuda]") {
  for (const uint32_t seed : kSeeds) {
    CAPTURE(seed);
    const Schedule schedule(seed);
    for (const int ranks : {1, 2, 3, 4}) compare_reduce<float>(DType::f32, ranks, 5003);
    compare_reduce<double>(DType::f64, 3, 2001);
    compare_reduce<BFloat16>(DType::bf16, 2, 4099);
  }
  for (const size_t n : {0, 1, 3, 4}) compare_reduce<float>(DType::f32, 2, n);
}

TEST_CASE("peer_reduce takes up to eight ranks", "[cuda][.long]") {
  for (const uint32_t seed : {0u, 1u, 2u, 3u, 4u, 5u, 6u, 7u}) {
    CAPTURE(seed);
    const Schedule schedule(seed);
    for (const int ranks : {1, 2, 3, 4, 5, 6, 7, 8}) {
      compare_reduce<float>(DType::f32, ranks, 3001);
      compare_reduce<double>(DType::f64, ranks, 1001);
      compare_reduce<BFloat16>(DType::bf16, ranks, 3001);
    }
  }
}

TEST_CASE("tree_sum equals the CPU's tree on one device", "[cuda]") {
  for (int sources = 1; sources <= kMaxPeers; ++sources) {
    CAPTURE(sources);
    std::vector<Buffer<float>> buffers = filled<float>(sources, 2051, 1, true);
    const Buffer<float> expected = sum_of(DType::f32, buffers);
    std::vector<Buffer<float>> sums = filled<float>(2, 2051, 2);
    const std::vector<void*> from = pointers(buffers), to = pointers(sums);
    check_ok(tree_sum(DType::f32, from.data(), sources, to.data(), 2, 2051, nullptr));
    CHECK(first_difference(sums[0], expected) == -1);
    CHECK(first_difference(sums[1], expected) == -1);
    CHECK((sums[0].is_intact() && sums[1].is_intact()));
  }
}

TEST_CASE("peer kernels refuse what they cannot play", "[cuda]") {
  float value = 1;
  void* buffer = &value;
  PeerGroup group(1, 1);
  CHECK(peer_reduce(group.peers, DType::i32, &buffer, 1, nullptr).code == Status::Code::invalid);
  group.peers.size = kMaxPeers + 1;
  CHECK(peer_reduce(group.peers, DType::f32, &buffer, 1, nullptr).code == Status::Code::invalid);
  group.peers.size = 1;
  group.peers.blocks = kMaxPeerBlocks + 1;
  CHECK(peer_reduce(group.peers, DType::f32, &buffer, 1, nullptr).code == Status::Code::invalid);
}

// --- several rounds in one launch ------------------------------------------------------------------------------------
// What a barrier forgets shows only where something comes before and after it: each rank uses the sum and writes the
// next round's values over it.

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
