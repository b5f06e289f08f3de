// Scopes over NCCL: when ranks ask one another what they do next, when they know, and what becomes of what their
// devices wait for. The suite of all communicators has the rest.
#include "comm/nccl/roll_call.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/nccl/communicator.h"
#include "cpp/catch.h"
#include "support/eventually.h"
#include "support/fake_nccl.h"
#include "support/passing_communicator.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::comm;
using namespace muster::testing;

namespace {

using namespace std::chrono_literals;

constexpr int kRanks = 3;

/// A rank's two handles, and the group in which the second one's ranks ask one another.
struct Rank {
  Communicator& gradients;
  Communicator& step;
  CountedCommunicator& control;
};

NcclOptions options_with(CommunicatorPtr control) {
  NcclOptions options;
  options.timeout = 30s;
  options.control = std::move(control);
  return options;
}

/// Runs body(rank) on kRanks ranks, in processes of their own or in one.
std::string run_scopes(FakeNccl& fake, bool together, const std::function<void(const Rank&)>& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const c10::Device host(c10::kCPU);
  const auto control = make_local(kRanks, 30s);
  const auto of_scopes = make_local(kRanks, 30s);
  std::vector<CommunicatorPtr> all;
  if (together) {
    std::vector<NcclOptions> options;
    for (const auto& handle : control) options.push_back(options_with(handle));
    all = nccl::make_communicators(fake.nccl(), fake.device(), *store, 0, kRanks,
                                   std::vector<c10::Device>(kRanks, host), options);
  }
  return run_threads(kRanks, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    const auto gradients = together ? all[r]
                                    : nccl::make_communicators(fake.nccl(), fake.device(), *store, rank, kRanks, {host},
                                                               {options_with(control[r])})[0];
    const auto counted = std::make_shared<CountedCommunicator>(of_scopes[r]);
    const auto step = make_another(gradients, counted);
    body({*gradients, *step, *counted});
  });
}

nccl::UniqueId make_id(FakeNccl& fake) {
  nccl::UniqueId id{};
  fake.nccl().get_unique_id(&id);
  return id;
}

/// Of a rank in a process of its own.
std::shared_ptr<nccl::Clique> make_clique(FakeNccl& fake, const nccl::UniqueId& id, int rank) {
  nccl::Clique::Options options;
  options.first_rank = rank;
  options.size = kRanks;
  options.devices = {0};
  return std::make_shared<nccl::Clique>(fake.nccl(), fake.device(), id, options);
}

int bit(const Communicator& c) { return 1 << c.rank(); }
constexpr int kAll = (1 << kRanks) - 1;

/// Sums over those who take part, `count` times.
void sum(const Rank& rank, int count, int expected = kAll) {
  for (int i = 0; i < count; ++i) {
    const at::Tensor value = at::full({5}, bit(rank.step), at::kInt);
    rank.step.all_reduce(value, ReduceOp::sum).wait();
    MUSTER_CHECK(value.eq(expected).all().item<bool>());
  }
}

/// A scope to its end: `count` sums.
void scope_of(const Rank& rank, uint64_t number, int count) {
  rank.step.begin_scope(number);
  sum(rank, count);
  rank.step.end_scope(ScopeEnd::finished).wait();
}

/// Buckets that leave over `handle`, as many as are `ready_` by now.
class Buckets final : public QueuedOperations {
 public:
  explicit Buckets(Communicator& handle) : handle_(handle) {}

  int64_t num_issued() const noexcept override { return static_cast<int64_t>(sums_.size()); }
  int64_t num_ready() const noexcept override { return std::max(ready_, num_issued()); }
  void issue(int64_t count) noexcept override {
    while (num_issued() < std::min(count, num_ready())) {
      sums_.push_back(at::full({7}, bit(handle_), at::kInt));
      works_.push_back(handle_.all_reduce(sums_.back(), ReduceOp::sum));
    }
  }
  void hold() noexcept override { is_held_ = true; }
  void let_go() noexcept override {
    is_held_ = false;
    issue(num_ready());
  }

  void set_ready(int64_t count) { ready_ = count; }
  bool is_held() const { return is_held_; }
  /// Issues all at the end of a scope, waits for that, and checks what came.
  void finish(int64_t count, Work end) {
    ready_ = count;
    issue(count);
    end.wait();
    for (Work& work : works_) work.wait();
    for (const at::Tensor& value : sums_) MUSTER_CHECK(value.eq(kAll).all().item<bool>());
  }

 private:
  Communicator& handle_;
  int64_t ready_ = 0;
  bool is_held_ = false;
  std::vector<at::Tensor> sums_;
  std::vector<Work> works_;
};

}  // namespace

TEST_CASE("ranks ask one another at a known scope's first operation and at its end", "[nccl]") {
  FakeNccl fake;
  const bool together = GENERATE(false, true);
  CHECK(run_scopes(fake, together, [](const Rank& rank) {
          const auto training = [&](uint64_t number) {
            rank.step.begin_scope(number);
            sum(rank, 2);
            const at::Tensor highest = at::full({2}, rank.step.rank(), at::kFloat);
            rank.step.all_reduce(highest, ReduceOp::max).wait();
            MUSTER_CHECK(highest.eq(kRanks - 1).all().item<bool>());
            const at::Tensor sent = at::full({3}, rank.step.rank(), at::kShort);
            rank.step.broadcast(sent, 1).wait();
            MUSTER_CHECK(sent.eq(1).all().item<bool>());
            Work gather = rank.step.all_gather(at::full({1, 4}, rank.step.rank()), GatherSizes::equal);
            gather.wait();
            for (int r = 0; r < kRanks; ++r) {
              MUSTER_CHECK(gather.outputs()[static_cast<size_t>(r)].equal(at::full({1, 4}, r)));
            }
            rank.step.barrier().wait();
            rank.step.end_scope(ScopeEnd::finished).wait();
            return rank.control.take_gathers();
          };
          // Twice the same is taken for what comes next.
          MUSTER_CHECK(training(0) == 6);
          MUSTER_CHECK(training(1) == 6);
          for (uint64_t number = 2; number < 4; ++number) MUSTER_CHECK(training(number) == 3);  // and at the barrier
          // An evaluation in between begins otherwise, and is known, too.
          const auto evaluation = [&](uint64_t number) {
            rank.step.begin_scope(number);
            for (int i = 0; i < 4; ++i) rank.step.all_reduce(at::zeros({9}), ReduceOp::sum).wait();
            rank.step.end_scope(ScopeEnd::finished).wait();
            return rank.control.take_gathers();
          };
          MUSTER_CHECK(evaluation(4) == 4);
          MUSTER_CHECK(training(5) == 3);
          MUSTER_CHECK(evaluation(6) == 4);
          MUSTER_CHECK(evaluation(7) == 2);
          rank.step.begin_scope(8);
          rank.step.end_scope(ScopeEnd::finished).wait();
          MUSTER_CHECK(rank.control.take_gathers() == 0);
        }) == "");
}

TEST_CASE("gathers of any sizes ask for them each time", "[nccl]") {
  FakeNccl fake;
  const bool together = GENERATE(false, true);
  CHECK(run_scopes(fake, together, [](const Rank& rank) {
          for (uint64_t number = 0; number < 4; ++number) {
            rank.step.begin_scope(number);
            sum(rank, 3);
            // Rows change at one rank alone.
            const auto rows_of = [&](int r) { return r == 1 ? static_cast<int64_t>(number) : 2; };
            Work gather = rank.step.all_gather(at::full({rows_of(rank.step.rank())}, rank.step.rank()));
            gather.wait();
            for (int r = 0; r < kRanks; ++r) {
              MUSTER_CHECK(gather.outputs()[static_cast<size_t>(r)].equal(at::full({rows_of(r)}, r)));
            }
            sum(rank, 2);
            rank.step.end_scope(ScopeEnd::finished).wait();
            MUSTER_CHECK(rank.control.take_gathers() == (number < 2 ? 6 : 3));
          }
        }) == "");
}

TEST_CASE("a rank that sits a known scope out is left out, and the next one asks again", "[nccl]") {
  FakeNccl fake;
  const bool together = GENERATE(false, true);
  CHECK(run_scopes(fake, together, [](const Rank& rank) {
          for (uint64_t number = 0; number < 3; ++number) scope_of(rank, number, 4);
          rank.control.take_gathers();
          rank.step.begin_scope(3);
          if (rank.step.rank() == 1) {
            rank.step.end_scope(ScopeEnd::absent).wait();
          } else {
            sum(rank, 4, kAll - 2);
            rank.step.end_scope(ScopeEnd::finished).wait();
            MUSTER_CHECK(rank.control.take_gathers() == 4);
          }
          // Nothing was learned of it, nor forgotten.
          scope_of(rank, 4, 4);
          scope_of(rank, 5, 4);
          MUSTER_CHECK(rank.control.take_gathers() == 4);
        }) == "");
}

TEST_CASE("where all ranks leave a known scope at one place they ask one another from there", "[nccl]") {
  FakeNccl fake;
  const bool is_longer = GENERATE(false, true);
  const bool together = GENERATE(false, true);
  CHECK(run_scopes(fake, together, [&](const Rank& rank) {
          const auto longer = [&](uint64_t number) {
            rank.step.begin_scope(number);
            sum(rank, is_longer ? 5 : 3);
            rank.step.all_reduce(at::zeros({2}), ReduceOp::sum).wait();
            sum(rank, 2);
            rank.step.end_scope(ScopeEnd::finished).wait();
            return rank.control.take_gathers();
          };
          const auto plain = [&](uint64_t number, int count) {
            scope_of(rank, number, count);
            return rank.control.take_gathers();
          };
          const int all = is_longer ? 8 : 6;
          plain(0, 5);
          plain(1, 5);
          MUSTER_CHECK(plain(2, 5) == 2);
          MUSTER_CHECK(longer(3) == 4);
          // What varies is not assumed.
          MUSTER_CHECK(plain(4, 5) == 5);
          MUSTER_CHECK(longer(5) == all);
          MUSTER_CHECK(longer(6) == all);
          MUSTER_CHECK(longer(7) == 2);
          MUSTER_CHECK(plain(8, 3) == 2);  // ends before what is known does
          MUSTER_CHECK(plain(9, 3) == 3);
          MUSTER_CHECK(plain(10, 3) == 2);
        }) == "");
}

TEST_CASE("a rank that fails in a known scope: its peers hear of it, no device waits, and the next one goes well",
          "[nccl]") {
  FakeNccl fake;
  const int before = GENERATE(0, 1, 2, 4);
  const bool meets = GENERATE(false, true);
  const bool together = GENERATE(false, true);
  CHECK(run_scopes(fake, together, [&](const Rank& rank) {
          const auto run = [&](uint64_t number, int count) {
            rank.step.begin_scope(number);
            for (int i = 0; i < count; ++i) {
              const at::Tensor value = at::full({5}, bit(rank.step), at::kInt);
              if (meets && i == 3) {
                rank.step.all_gather(value).wait();
              } else {
                rank.step.all_reduce(value, ReduceOp::sum).wait();
              }
            }
          };
          for (uint64_t number = 0; number < 3; ++number) {
            run(number, 5);
            rank.step.end_scope(ScopeEnd::finished).wait();
          }
          MUSTER_CHECK(rank.control.take_gathers() == 5 + 5 + (meets ? 3 : 2));
          if (rank.step.rank() == 1) {
            run(3, before);
            rank.step.end_scope(ScopeEnd::failed, "ValueError: no such class").wait();
          } else {
            bool has_ended = false;
            const std::string text = message_of<RemoteError>([&] {
              try {
                run(3, 5);
              } catch (const RemoteError&) {
                rank.step.end_scope(ScopeEnd::failed, "because of rank 1").wait();
                has_ended = true;
                throw;
              }
              rank.step.end_scope(ScopeEnd::finished).wait();
            });
            MUSTER_CHECK(contains(text, "rank 1 failed") && contains(text, "no such class"));
            MUSTER_CHECK(has_ended == (before == 0 || (meets && before < 4)));
          }
          run(4, 5);
          rank.step.end_scope(ScopeEnd::finished).wait();
          scope_of(rank, 5, 5);
        }) == "");
  CHECK(fake.count("abort 0") == 0);
}

TEST_CASE("a rank that fails after the last operation of a known scope keeps nobody from anything", "[nccl]") {
  FakeNccl fake;
  const bool together = GENERATE(false, true);
  CHECK(run_scopes(fake, together, [](const Rank& rank) {
          for (uint64_t number = 0; number < 3; ++number) scope_of(rank, number, 4);
          rank.step.begin_scope(3);
          sum(rank, 4);
          rank.step.end_scope(rank.step.rank() == 1 ? ScopeEnd::failed : ScopeEnd::finished, "ValueError: too late")
              .wait();
          scope_of(rank, 4, 4);
        }) == "");
}

TEST_CASE("a rank that asks for something else than the others in a known scope: LayoutMismatch on all", "[nccl]") {
  FakeNccl fake;
  const std::string way = GENERATE("other size", "other order", "more", "fewer");
  const bool together = GENERATE(false, true);
  CHECK(run_scopes(fake, together, [&](const Rank& rank) {
          const auto run = [&](uint64_t number, bool is_known) {
            rank.step.begin_scope(number);
            try {
              const int count = is_known || way == "other size" || way == "other order" ? 5 : way == "more" ? 6 : 3;
              for (int i = 0; i < count; ++i) {
                const int64_t size = i + 1 + (!is_known && way == "other size" && i == 2 ? 1 : 0);
                const int64_t swapped = !is_known && way == "other order" && i >= 2 && i < 4 ? 7 - size : size;
                rank.step.all_reduce(at::zeros({swapped}), ReduceOp::sum).wait();
              }
            } catch (...) {
              rank.step.end_scope(ScopeEnd::failed, "because of that").wait();
              throw;
            }
            rank.step.end_scope(ScopeEnd::finished).wait();
          };
          for (uint64_t number = 0; number < 3; ++number) run(number, true);
          const std::string text = message_of<LayoutMismatch>([&] { run(3, rank.step.rank() != 1); });
          MUSTER_CHECK(contains(text, "ranks disagree: rank 0 ended the step after 5 collectives, rank 1 "));
          MUSTER_CHECK(contains(text, way == "fewer"  ? "ended the step after 3"
                                      : way == "more" ? "asked for all_reduce(sum) of 6 Float values after 5"
                                                      : "after 2 collectives of the step"));
          run(4, true);
        }) == "");
  CHECK(fake.count("abort 0") == 0);
}

TEST_CASE("buckets leave in one order with a scope's operations, wherever each rank has them ready", "[nccl]") {
  FakeNccl fake;
  const bool together = GENERATE(false, true);
  CHECK(run_scopes(fake, together, [&](const Rank& rank) {
          const auto train = [&](uint64_t number, int lag) {
            Buckets buckets(rank.gradients);
            rank.step.begin_scope(number, &buckets);
            std::vector<int64_t> issued;
            for (int i = 0; i < 6; ++i) {
              MUSTER_CHECK(buckets.is_held() == (i > 0));
              // Bucket b is ready at operation 2 b + 2; on rank 2 some operations later.
              buckets.set_ready(std::max(0, i - (rank.step.rank() == 2 ? lag : 0)) / 2);
              sum(rank, 1);
              issued.push_back(buckets.num_issued());
            }
            const int gathers = rank.control.take_gathers();
            // Behind the last operation that ranks know buckets need not wait for others.
            MUSTER_CHECK(buckets.is_held() == (gathers == 6));
            buckets.finish(4, rank.step.end_scope(ScopeEnd::finished));
            issued.push_back(gathers + rank.control.take_gathers());
            return issued;
          };
          using Issued = std::vector<int64_t>;  // behind each operation; then how often ranks asked one another
          MUSTER_CHECK(train(0, 0) == Issued({0, 0, 1, 1, 2, 2, 6}));
          MUSTER_CHECK(train(1, 0) == Issued({0, 0, 1, 1, 2, 2, 6}));
          // From then on they meet where buckets left.
          MUSTER_CHECK(train(2, 0) == Issued({0, 0, 1, 1, 2, 2, 4}));
          MUSTER_CHECK(train(3, 0) == Issued({0, 0, 1, 1, 2, 2, 4}));
          // A rank has them later: none leaves alone, and the next scopes show where they can.
          MUSTER_CHECK(train(4, 1) ==
                       Issued({0, 0, 0, 0, 1, 2, 4}));  // the second one at the last operation, by itself
          MUSTER_CHECK(train(5, 1) == Issued({0, 0, 0, 1, 1, 2, 6}));
          MUSTER_CHECK(train(6, 1) == Issued({0, 0, 0, 1, 1, 2, 6}));
          MUSTER_CHECK(train(7, 1) == Issued({0, 0, 0, 1, 1, 2, 4}));
        }) == "");
}

TEST_CASE("buckets that left on one rank before an operation, and could not on another: LayoutMismatch", "[nccl]") {
  FakeNccl fake;
  CHECK(run_scopes(fake, false, [](const Rank& rank) {
          Buckets buckets(rank.gradients);
          rank.step.begin_scope(0, &buckets);
          if (rank.step.rank() == 1) {
            buckets.set_ready(1);
            buckets.issue(1);
          }
          const std::string text =
              message_of<LayoutMismatch>([&] { rank.step.all_reduce(at::zeros({2}), ReduceOp::sum); });
          MUSTER_CHECK(contains(text, "rank 1 asked for all_reduce(sum) of 2 Float values"));
          MUSTER_CHECK(contains(text, "where 1 buckets of gradients had left and 1 could have"));
          MUSTER_CHECK(contains(text, "call it in forward"));
          buckets.finish(2, rank.step.end_scope(ScopeEnd::failed, "because of that"));
        }) == "");
}

TEST_CASE("buckets wait for the end of a scope that a rank sits out", "[nccl]") {
  FakeNccl fake;
  const bool together = GENERATE(false, true);
  CHECK(run_scopes(fake, together, [](const Rank& rank) {
          for (uint64_t number = 0; number < 4; ++number) {
            Buckets buckets(rank.gradients);
            rank.step.begin_scope(number, &buckets);
            const bool is_absent = number == 3 && rank.step.rank() == 1;
            for (int i = 0; i < 4 && !is_absent; ++i) {
              buckets.set_ready(i);
              sum(rank, 1, number == 3 ? kAll - 2 : kAll);
              MUSTER_CHECK(buckets.num_issued() == (number == 3 ? 0 : i));
            }
            buckets.finish(4, rank.step.end_scope(is_absent ? ScopeEnd::absent : ScopeEnd::finished));
          }
        }) == "");
}

TEST_CASE("where some buckets left before the first operation, the others' that are ready leave before it", "[nccl]") {
  FakeNccl fake;
  CHECK(run_scopes(fake, false, [](const Rank& rank) {
          for (uint64_t number = 0; number < 4; ++number) {
            Buckets buckets(rank.gradients);
            rank.step.begin_scope(number, &buckets);
            buckets.set_ready(2);
            buckets.issue(rank.step.rank());
            sum(rank, 3);
            MUSTER_CHECK(buckets.num_issued() == 2);
            buckets.finish(3, rank.step.end_scope(ScopeEnd::finished));
          }
        }) == "");
}

TEST_CASE("a barrier is never assumed", "[nccl]") {
  FakeNccl fake;
  CHECK(run_scopes(fake, false, [](const Rank& rank) {
          for (uint64_t number = 0; number < 3; ++number) {
            rank.step.begin_scope(number);
            sum(rank, 3);
            rank.step.barrier().wait();
            rank.step.end_scope(ScopeEnd::finished).wait();
          }
          rank.step.begin_scope(3);
          sum(rank, 3);
          if (rank.step.rank() == 0) {
            rank.step.end_scope(ScopeEnd::failed, "OSError: the disk is full").wait();
          } else {
            message_of<RemoteError>([&] { rank.step.barrier().wait(); });
            rank.step.end_scope(ScopeEnd::failed, "because of rank 0").wait();
          }
        }) == "");
}

TEST_CASE("a rank that ends a scope early stands in for what its peers may have issued, up to where they ask",
          "[nccl]") {
  FakeNccl fake;
  const auto control = make_local(kRanks, 30s);
  const nccl::UniqueId id = make_id(fake);
  const size_t called = GENERATE(1, 2, 3, 5);
  const bool is_issued = GENERATE(false, true);
  CHECK(run_threads(kRanks, [&](int rank) {
          std::vector<int64_t> stand_ins;
          nccl::RollCall roll_call(make_clique(fake, id, rank), control[static_cast<size_t>(rank)],
                                   [&](const Request& request, const nccl::Roll& roll) {
                                     MUSTER_CHECK(roll.is_everyone());
                                     stand_ins.push_back(request.numel);
                                   });
          const auto request_of = [](size_t i) {
            const at::Tensor value = at::zeros({static_cast<int64_t>(i + 1)});
            return i == 3 ? all_gather_request(value) : all_reduce_request(value, ReduceOp::sum, 0);
          };
          const auto call = [&](size_t count) {
            for (size_t i = 0; i < count; ++i) {
              Request request = request_of(i);
              roll_call.call(request);
              if (i + 1 < count || is_issued) roll_call.note_issued();
            }
          };
          for (uint64_t number = 0; number < 2; ++number) {
            roll_call.begin_scope(number, nullptr);
            call(6);
            roll_call.note_issued();
            roll_call.end_scope(ScopeEnd::finished, "").wait();
          }
          MUSTER_CHECK(stand_ins.empty());
          roll_call.begin_scope(2, nullptr);
          call(called);
          roll_call.end_scope(ScopeEnd::failed, "ValueError: no such class").wait();
          std::vector<int64_t> expected;  // the fourth asks
          for (size_t i = is_issued ? called : called - 1; i < (called <= 3 ? 3U : 6U); ++i) {
            expected.push_back(static_cast<int64_t>(i + 1));
          }
          MUSTER_CHECK(stand_ins == expected);
        }) == "");
}

TEST_CASE("a step that goes on after it gave an operation up fails on all ranks", "[nccl]") {
  FakeNccl fake;
  const auto control = make_local(kRanks, 30s);
  const nccl::UniqueId id = make_id(fake);
  const int number_of_it = GENERATE(0, 2, 4);
  CHECK(run_threads(kRanks, [&](int rank) {
          int stand_ins = 0;
          nccl::RollCall roll_call(make_clique(fake, id, rank), control[static_cast<size_t>(rank)],
                                   [&](const Request&, const nccl::Roll&) { ++stand_ins; });
          const auto run = [&](uint64_t number, int given_up) {
            roll_call.begin_scope(number, nullptr);
            for (int i = 0; i < 5; ++i) {
              Request request = all_reduce_request(at::zeros({4}), ReduceOp::sum, 0);
              roll_call.call(request);
              if (i != given_up) roll_call.note_issued();
            }
            roll_call.end_scope(ScopeEnd::finished, "").wait();
          };
          for (uint64_t number = 0; number < 3; ++number) run(number, -1);
          if (rank == 1) {
            const std::string text = message_of<InvalidArgument>([&] { run(3, number_of_it); });
            MUSTER_CHECK(contains(text, "went on after an error of all_reduce(sum) of 4 Float values"));
            MUSTER_CHECK(stand_ins == 1);
          } else {
            MUSTER_CHECK(contains(message_of<RemoteError>([&] { run(3, -1); }), "went on after an error"));
            MUSTER_CHECK(stand_ins == 0);
          }
          run(4, -1);
        }) == "");
}
