#include <atomic>
#include <chrono>
#include <thread>

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
    group.run(blocks != 1, [&](const Peers& peers) { return peer_reduce(peers, dtype, list.data(), n, nullptr); });
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

TEST_CASE("a rank that is told to stop waits for no peer", "[cuda]") {
  for (const uint32_t seed : kSeeds) {
    const Schedule schedule(seed);
    PeerGroup group(2, 3);
    group.peers.rank = 0;  // rank 1 never comes
    std::vector<Buffer<float>> buffers = filled<float>(2, 5003, 1);
    const std::vector<Buffer<float>> before = buffers;
    const std::vector<void*> list = pointers(buffers);
    const auto launch = [&] { return peer_reduce(group.peers, DType::f32, list.data(), 5003, nullptr); };
    std::atomic<bool> is_over = false;
    Status ended;
    std::thread rank([&] {
      ended = launch();
      is_over = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const bool was_over = is_over;
    store_release_system(&group.signals[0]->stop, 1u);
    rank.join();
    CHECK_FALSE(was_over);
    check_ok(ended);
    check_ok(launch());  // nor does any later one
    CHECK(first_difference(buffers[0], before[0]) == -1);
    CHECK(first_difference(buffers[1], before[1]) == -1);
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

}  // namespace
}  // namespace muster::kernels::cuda
