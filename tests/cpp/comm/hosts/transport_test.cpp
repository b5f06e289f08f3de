#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>

#include <atomic>
#include <cmath>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "comm/hosts/communicator.h"
#include "cpp/catch.h"
#include "muster/error.h"
#include "support/local_process_group.h"

using namespace muster;
using namespace muster::comm;
using namespace muster::testing;

namespace {

constexpr int64_t kSeveralPieces = (int64_t{3} << 20) + 5;

// Of a rank, values whose sum depends on the order of additions.
at::Tensor values_of(int rank, int64_t n) {
  return at::arange(n, at::kFloat).add(1).mul(1.0 + 0.1 * rank).sin().mul(std::pow(10.0, rank % 5));
}

// The sum that replicas of one process have.
at::Tensor sum_in_one_process(int ranks, int64_t n) {
  at::Tensor sum;
  const auto handles = make_local(ranks, Seconds(60));
  const auto errors = run_threads(ranks, [&](int rank) {
    auto own = values_of(rank, n);
    handles[static_cast<size_t>(rank)]->all_reduce(own, ReduceOp::sum).wait();
    if (rank == 0) sum = own;
  });
  CHECK(errors == "");
  return sum;
}

class Word : public LostWorkers {
 public:
  void tell(const PeerLost& lost) noexcept override { told = lost.rank(); }
  bool knows() const noexcept override { return false; }
  std::optional<PeerLost> ask(Milliseconds) noexcept override { return std::nullopt; }
  void begin_wait() noexcept override { ++waits; }
  void end_wait() noexcept override { --waits; }
  std::optional<PeerLost> find_silent() noexcept override { return std::nullopt; }
  std::optional<PeerLost> find_ended() noexcept override { return std::nullopt; }
  void leave() noexcept override {}

  std::atomic<int> told{-1};
  std::atomic<int> waits{0};
};

// Somebody told of worker 7.
class ToldOf7 final : public Word {
 public:
  std::optional<PeerLost> ask(Milliseconds) noexcept override { return PeerLost(7, "worker 7 ended"); }
};

// Worker 7 gives no sign of life.
class SilenceOf7 final : public Word {
 public:
  std::optional<PeerLost> find_silent() noexcept override {
    if (waits == 0) return std::nullopt;
    return PeerLost(7, "worker 7 has given no sign of life");
  }
};

}  // namespace

TEST_CASE("who waits for another host hears of a worker that those beside it have lost", "[comm][hosts]") {
  std::atomic<bool> has_heard = false;
  const OverHostsPlan plan{.host_of_worker = {0, 1}, .replicas_of_worker = {}, .lost = std::make_shared<ToldOf7>()};
  CHECK(run_over_hosts(plan, 2, [&](Communicator& c) {
          if (c.rank() == 1) {
            while (!has_heard) std::this_thread::yield();
            return;
          }
          int lost = -1;
          try {
            c.all_reduce(at::full({1}, 1, at::kFloat), ReduceOp::sum).wait();
          } catch (const PeerLost& error) {
            lost = error.rank();
          }
          has_heard = true;
          MUSTER_CHECK(lost == 7);
        }) == "");
}

TEST_CASE("a wait for another host that took its timeout names who gave no sign of life", "[comm][hosts]") {
  std::atomic<int> have_heard = 0;
  const auto word = std::make_shared<SilenceOf7>();
  const OverHostsPlan plan{.host_of_worker = {0, 0, 1}, .replicas_of_worker = {}, .lost = word};
  const auto body = [&](Communicator& c) {
    if (c.rank() == 2) {
      while (have_heard < 2) std::this_thread::yield();
      return;
    }
    int lost = -1;  // to the one that waits for the other host, and to the one that waits for that one
    try {
      c.all_reduce(at::full({1}, 1, at::kFloat), ReduceOp::sum).wait();
    } catch (const PeerLost& error) {
      lost = error.rank();
    }
    ++have_heard;
    MUSTER_CHECK(lost == 7);
  };
  CHECK(run_over_hosts(plan, 3, body, Milliseconds(500)) == "");
  CHECK(word->told == 7);
  CHECK(word->waits == 0);
}

TEST_CASE("sums over hosts have the bits of one process, however the ranks lie", "[comm][hosts]") {
  const auto [has_one_group, uses_tcp] =
      GENERATE(std::pair(false, false), std::pair(true, false), std::pair(false, true));
  const auto plan = GENERATE(OverHostsPlan{{0, 1}, {1, 1}}, OverHostsPlan{{0, 0, 1, 1}, {1, 1, 1, 1}},
                             OverHostsPlan{{0, 0, 0, 1}, {1, 1, 1, 1}}, OverHostsPlan{{0, 1, 2}, {1, 1, 1}},
                             OverHostsPlan{{0, 1, 0, 1, 2}, {1, 2, 1, 1, 2}}, OverHostsPlan{{0, 1}, {3, 2}});
  int ranks = 0;
  for (const int replicas : plan.replicas_of_worker) ranks += replicas;
  auto chosen = plan;
  chosen.has_one_group = has_one_group;
  chosen.uses_tcp = uses_tcp;
  const int64_t n = GENERATE(int64_t{1}, int64_t{33}, kSeveralPieces);
  const auto expected = sum_in_one_process(ranks, n);
  CHECK(run_over_hosts(chosen, ranks, [&](Communicator& c) {
          const auto seen = c.allocate(n, at::kFloat);
          const auto again = c.allocate(n, at::kFloat);
          const auto own = values_of(c.rank(), n);
          seen.copy_(own);
          again.copy_(own);
          std::vector<Work> works;  // several under way
          for (const auto& tensor : {seen, own, again}) works.push_back(c.all_reduce(tensor, ReduceOp::sum));
          for (auto& work : works) work.wait();
          for (const auto& tensor : {seen, own, again}) MUSTER_CHECK(tensor.equal(expected));
        }) == "");
}

TEST_CASE("large tensors are broadcast and gathered over hosts", "[comm][hosts]") {
  constexpr int64_t n = (int64_t{2} << 20) + 3;
  const OverHostsPlan plan{{0, 1, 0}, {1, 2, 1}, false, GENERATE(false, true)};
  CHECK(run_over_hosts(plan, 4, [&](Communicator& c) {
          for (int source = 0; source < c.size(); ++source) {
            auto tensor = at::full({n}, c.rank() + 10 * source, at::kFloat);
            c.broadcast(tensor, source).wait();
            MUSTER_CHECK(tensor.eq(11 * source).all().item<bool>());
          }
          auto work = c.all_gather(values_of(c.rank(), n));
          work.wait();
          for (int r = 0; r < c.size(); ++r) {
            MUSTER_CHECK(work.outputs()[static_cast<size_t>(r)].equal(values_of(r, n)));
          }
        }) == "");
}
