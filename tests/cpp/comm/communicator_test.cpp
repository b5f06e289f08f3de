// What every Communicator must do. One suite; each backend runs all of it.
#include "comm/communicator.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <thread>

#include "comm/peer_memory.h"
#include "cpp/catch.h"
#include "cpp/comm/shared_value.h"
#include "support/fake_nccl.h"
#include "support/local_process_group.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::comm;
using namespace muster::testing;

namespace {

constexpr int64_t kSizes[] = {0, 1, 17, 1025, 40'003};
constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong};

// Values that differ by rank and index and whose sums need rounding.
at::Tensor values(int rank, int64_t n, at::ScalarType dtype) {
  at::Tensor index = at::arange(n, at::kDouble);
  if (dtype == at::kLong) return (index * 3 + rank * 1'000'003).to(dtype);
  return ((index.remainder(97) + 1) / (rank + 3.0) - rank).to(dtype);
}

// The tree ((0+1)+(2+3))+... in the dtype's accumulation type, over the ranks in `present`.
at::Tensor expected_reduction(const std::vector<at::Tensor>& terms, ReduceOp op) {
  const at::ScalarType dtype = terms[0].scalar_type();
  const bool is_low = dtype == at::kBFloat16 || dtype == at::kHalf;
  std::vector<at::Tensor> level;
  for (const at::Tensor& term : terms) level.push_back(is_low ? term.to(at::kFloat) : term);
  while (level.size() > 1) {
    std::vector<at::Tensor> next;
    for (size_t i = 0; i + 1 < level.size(); i += 2) {
      next.push_back(op == ReduceOp::sum   ? level[i] + level[i + 1]
                     : op == ReduceOp::min ? level[i].minimum(level[i + 1])
                                           : level[i].maximum(level[i + 1]));
    }
    if (level.size() % 2 == 1) next.push_back(level.back());
    level = std::move(next);
  }
  return level[0].to(dtype);
}

at::Tensor expected_over(int size, int64_t n, at::ScalarType dtype, ReduceOp op) {
  std::vector<at::Tensor> terms;
  for (int r = 0; r < size; ++r) terms.push_back(values(r, n, dtype));
  return expected_reduction(terms, op);
}

// A rank that takes part in nothing learns that the group has ended when it next uses it.
void use_until_it_ends(Communicator& c) {
  for (;;) {
    c.allocate(1, at::kFloat);
    std::this_thread::yield();
  }
}

}  // namespace

#define COMMUNICATOR_TEST(name)                                                                          \
  TEMPLATE_TEST_CASE(name, "[comm]", Local, Host, HostWithReplicas, C10d, Hierarchical, OverHosts, Nccl, \
                     NcclOneProcess, DeviceLocal)
// What a process group cannot promise: word of an ending reaches its peers by their deadlines alone.
#define SHARED_MEMORY_TEST(name) TEMPLATE_TEST_CASE(name, "[comm]", Local, Host, HostWithReplicas)

COMMUNICATOR_TEST("all_reduce follows the tree to the last bit") {
  const int size = GENERATE(2, 3, 4);
  CHECK(TestType::run(size, [](Communicator& c) {
          for (const at::ScalarType dtype : kDtypes) {
            for (const int64_t n : kSizes) {
              for (const ReduceOp op : {ReduceOp::sum, ReduceOp::min, ReduceOp::max}) {
                const at::Tensor expected = expected_over(c.size(), n, dtype, op);
                at::Tensor own = values(c.rank(), n, dtype);
                c.all_reduce(own, op).wait();
                MUSTER_CHECK(own.equal(expected));
                at::Tensor shared = c.allocate(n, dtype);
                shared.copy_(values(c.rank(), n, dtype));
                c.all_reduce(shared, op).wait();
                MUSTER_CHECK(shared.equal(expected));
              }
            }
          }
        }) == "");
}

COMMUNICATOR_TEST("all_reduce of ten million values, shared on some ranks and private on others") {
  CHECK(TestType::run(2, [](Communicator& c) {
          constexpr int64_t n = 10'000'000;
          const int64_t rows = n / 10'000;
          const at::Tensor shared = c.allocate(n, at::kFloat);
          at::Tensor tensor = c.rank() == 0 ? shared : at::zeros({n});
          tensor.view({rows, 10'000}).copy_(values(c.rank(), 10'000, at::kFloat).expand({rows, 10'000}));
          c.all_reduce(tensor, ReduceOp::sum).wait();
          const at::Tensor expected = expected_over(2, 10'000, at::kFloat, ReduceOp::sum);
          MUSTER_CHECK(tensor.view({rows, 10'000}).equal(expected.expand({rows, 10'000})));
        }) == "");
}

COMMUNICATOR_TEST("all_reduce of shards that end with, before and after a piece") {
  const int size = GENERATE(2, 3, 4);
  CHECK(TestType::run(size, [](Communicator& c) {
          const int64_t even = c.size() * 2 * int64_t{65'536};  // two pieces of fp32 values a shard
          for (const int64_t n : {even - 1, even, even + 1, even + 40'003}) {
            at::Tensor tensor = c.allocate(n, at::kFloat);
            tensor.copy_(values(c.rank(), n, at::kFloat));
            c.all_reduce(tensor, ReduceOp::sum).wait();
            MUSTER_CHECK(tensor.equal(expected_over(c.size(), n, at::kFloat, ReduceOp::sum)));
          }
        }) == "");
}

COMMUNICATOR_TEST("sub-views, dense permutations and ranks that do not receive") {
  CHECK(TestType::run(3, [](Communicator& c) {
          const at::Tensor whole = c.allocate(30'000, at::kFloat);
          at::Tensor view = whole.narrow(0, 777, 20'011);
          view.copy_(values(c.rank(), 20'011, at::kFloat));
          c.all_reduce(view, ReduceOp::sum, 0, {c.rank() != 1}).wait();
          if (c.rank() != 1) MUSTER_CHECK(view.equal(expected_over(3, 20'011, at::kFloat, ReduceOp::sum)));
          MUSTER_CHECK(whole.narrow(0, 0, 777).count_nonzero().item<int64_t>() == 0);
          MUSTER_CHECK(whole.narrow(0, 777 + 20'011, 9'000).count_nonzero().item<int64_t>() == 0);

          at::Tensor transposed = at::full({40, 50}, c.rank() + 1.0F).t();
          c.all_reduce(transposed, ReduceOp::sum).wait();
          MUSTER_CHECK(transposed.eq(6).all().item<bool>());
          message_of<InvalidArgument>([&] { c.all_reduce(whole.slice(0, 0, 100, 2), ReduceOp::sum); });
          message_of<InvalidArgument>([&] { c.all_reduce(whole, ReduceOp::mean); });
          c.barrier().wait();
        }) == "");
}

COMMUNICATOR_TEST("runs of a tensor are reduced to those who own them") {
  CHECK(TestType::run(3, [](Communicator& c) {
          constexpr int64_t n = 20'011;
          // In no order of ranks; some elements belong to nobody, and one rank has nothing.
          const std::vector<OwnedRun> runs = {{2, 0, 4'099}, {0, 4'099, 1}, {2, 5'000, 15'011}};
          for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
            const at::Tensor sum = expected_over(3, n, dtype, ReduceOp::sum);
            at::Tensor tensor = c.allocate(n, dtype);
            tensor.copy_(values(c.rank(), n, dtype));
            c.all_reduce(tensor, ReduceOp::sum, 5, Receivers::owners(runs, c.rank())).wait();
            for (const auto& run : runs) {
              if (run.rank != c.rank()) continue;
              MUSTER_CHECK(tensor.narrow(0, run.begin, run.count).equal(sum.narrow(0, run.begin, run.count)));
            }
          }
          c.begin_scope(7);
          at::Tensor in_scope = values(c.rank(), n, at::kFloat);
          c.all_reduce(in_scope, ReduceOp::sum, 0, Receivers::owners({{1, 0, n}}, c.rank())).wait();
          if (c.rank() == 1) MUSTER_CHECK(in_scope.equal(expected_over(3, n, at::kFloat, ReduceOp::sum)));
          c.end_scope(ScopeEnd::finished).wait();
        }) == "");
}

COMMUNICATOR_TEST("max and min propagate NaN") {
  CHECK(TestType::run(2, [](Communicator& c) {
          for (const ReduceOp op : {ReduceOp::min, ReduceOp::max}) {
            for (int bad = 0; bad < 2; ++bad) {
              at::Tensor tensor =
                  at::full({9}, c.rank() == bad ? std::numeric_limits<double>::quiet_NaN() : 1.0, at::kFloat);
              c.all_reduce(tensor, op).wait();
              MUSTER_CHECK(tensor.isnan().all().template item<bool>());
            }
          }
        }) == "");
}

COMMUNICATOR_TEST("broadcast from every rank") {
  const int size = GENERATE(2, 4);
  CHECK(TestType::run(size, [](Communicator& c) {
          for (int source = 0; source < c.size(); ++source) {
            for (const int64_t n : {0L, 3L, 5'000L, 700'001L}) {
              at::Tensor own = values(c.rank(), n, at::kDouble);
              c.broadcast(own, source).wait();
              MUSTER_CHECK(own.equal(values(source, n, at::kDouble)));
            }
          }
          message_of<InvalidArgument>([&] { c.broadcast(at::zeros({1}), c.size()); });
        }) == "");
}

COMMUNICATOR_TEST("all_gather of parts of different size") {
  const int size = GENERATE(2, 3);
  CHECK(TestType::run(size, [](Communicator& c) {
          for (const int64_t rows : {0L, 2L, 3'000L, 400'000L}) {
            const at::Tensor input = at::full({rows + 100 * c.rank(), 3}, c.rank() + 1, at::kInt);
            Work work = c.all_gather(input);
            work.wait();
            const std::vector<at::Tensor> parts = work.outputs();
            MUSTER_CHECK(parts.size() == static_cast<size_t>(c.size()));
            for (int r = 0; r < c.size(); ++r) {
              MUSTER_CHECK(parts[r].sizes() == at::IntArrayRef({rows + 100 * r, 3}));
              MUSTER_CHECK(parts[r].eq(r + 1).all().item<bool>());
            }
          }
          Work scalars = c.all_gather(at::full({}, c.rank(), at::kLong));
          scalars.wait();
          for (int r = 0; r < c.size(); ++r) {
            MUSTER_CHECK(scalars.outputs()[r].dim() == 0 && scalars.outputs()[r].item<int64_t>() == r);
          }
        }) == "");
}

COMMUNICATOR_TEST("reduce_scatter") {
  const int size = GENERATE(2, 3);
  CHECK(TestType::run(size, [](Communicator& c) {
          for (const int64_t n : {0L, 1L, 900L, 300'007L}) {
            const at::Tensor input = values(c.rank(), n * c.size(), at::kFloat);
            const at::Tensor output = at::zeros({n});
            c.reduce_scatter(output, input, ReduceOp::sum).wait();
            const at::Tensor expected = expected_over(c.size(), n * c.size(), at::kFloat, ReduceOp::sum);
            MUSTER_CHECK(output.equal(expected.narrow(0, n * c.rank(), n)));
            MUSTER_CHECK(input.equal(values(c.rank(), n * c.size(), at::kFloat)));
          }
          message_of<InvalidArgument>([&] { c.reduce_scatter(at::zeros({2}), at::zeros({3}), ReduceOp::sum); });
        }) == "");
}

COMMUNICATOR_TEST("many collectives under way, waited for in any order") {
  const int size = GENERATE(2, 4);
  CHECK(TestType::run(size, [](Communicator& c) {
          constexpr int kCount = 150;  // more than a ring of headers holds
          for (int repeat = 0; repeat < 3; ++repeat) {
            std::vector<at::Tensor> tensors;
            std::vector<Work> works;
            for (int i = 0; i < kCount; ++i) {
              const int64_t n = (i % 7) * (i % 7) * 1'500 + 1;
              tensors.push_back(i % 3 == 0 ? c.allocate(n, at::kFloat) : at::zeros({n}));
              tensors.back().fill_(c.rank() + i);
              works.push_back(c.all_reduce(tensors.back(), ReduceOp::sum));
            }
            if (repeat == 1) std::reverse(works.begin(), works.end());
            for (size_t i = (repeat == 2 ? kCount - 1 : 0); i < kCount; ++i) works[i].wait();
            for (Work& work : works) MUSTER_CHECK(work.done());
            for (int i = 0; i < kCount; ++i) {
              const int expected = c.size() * i + c.size() * (c.size() - 1) / 2;
              MUSTER_CHECK(tensors[i].eq(expected).all().item<bool>());
            }
          }
        }) == "");
}

COMMUNICATOR_TEST("nothing is issued late: a rank may drop its handles and wait for the last alone") {
  CHECK(TestType::run(2, [](Communicator& c) {
          at::Tensor tensor = at::full({100'000}, c.rank() + 1.0F);
          c.all_reduce(tensor, ReduceOp::sum);
          c.barrier().wait();
          MUSTER_CHECK(tensor.eq(3).all().item<bool>());
        }) == "");
}

COMMUNICATOR_TEST("a rank that asks for something else: every rank gets a LayoutMismatch naming both requests") {
  const int size = GENERATE(2, 3);
  const std::string what = GENERATE("size", "dtype", "operation", "reduction", "source", "tag", "large");
  CHECK(TestType::run(size, [what](Communicator& c) {
          const bool is_odd = c.rank() == c.size() - 1;
          const std::string text = message_of<LayoutMismatch>([&] {
            at::Tensor tensor = at::zeros({10});
            Work work;
            if (what == "size") {
              work = c.all_reduce(is_odd ? at::zeros({12}) : tensor, ReduceOp::sum);
            } else if (what == "large") {
              work = c.all_reduce(at::zeros({is_odd ? 3'000'000 : 2'000'000}), ReduceOp::sum);
            } else if (what == "dtype") {
              work = c.all_reduce(is_odd ? at::zeros({10}, at::kDouble) : tensor, ReduceOp::sum);
            } else if (what == "operation") {
              work = is_odd ? c.barrier() : c.all_reduce(tensor, ReduceOp::sum);
            } else if (what == "reduction") {
              work = c.all_reduce(tensor, is_odd ? ReduceOp::max : ReduceOp::sum);
            } else if (what == "source") {
              work = c.broadcast(tensor, is_odd ? 1 : 0);
            } else {
              work = c.all_reduce(tensor, ReduceOp::sum, is_odd ? 7 : 8);
            }
            work.wait();
          });
          MUSTER_CHECK(contains(text, "rank 0 asked for"));
          MUSTER_CHECK(contains(text, "rank " + std::to_string(c.size() - 1) + " for"));
          if (what == "size") MUSTER_CHECK(contains(text, "of 10 Float") && contains(text, "of 12 Float"));
          if (what == "dtype") MUSTER_CHECK(contains(text, "10 Float") && contains(text, "10 Double"));
          if (what == "operation") MUSTER_CHECK(contains(text, "all_reduce") && contains(text, "barrier"));
          message_of<LayoutMismatch>([&] { c.barrier().wait(); });
        }) == "");
}

SHARED_MEMORY_TEST("a late rank: Timeout names it, on every rank, and the group stays ended") {
  CHECK(TestType::run(3, [](Communicator& c) {
          if (c.rank() != 2) {
            const std::string text =
                message_of<Timeout>([&] { c.all_reduce(at::zeros({5}), ReduceOp::sum).wait(Milliseconds(150)); });
            MUSTER_CHECK(contains(text, "late: rank 2"));
            MUSTER_CHECK(contains(text, "all_reduce(sum) of 5 Float"));
            message_of<Timeout>([&] { c.barrier().wait(); });
          } else {
            MUSTER_CHECK(contains(message_of<Timeout>([&] { use_until_it_ends(c); }), "late: rank 2"));
          }
        }) == "");
}

SHARED_MEMORY_TEST("a rank that computes holds nobody up who reduces memory that all ranks reach") {
  struct State {
    std::atomic<bool> is_posted{false};
    std::atomic<int> finished{0};
  };
  const int size = GENERATE(2, 3);
  const SharedValue<State> state;
  CHECK(TestType::run(size, [&](Communicator& c) {
          constexpr int64_t n = 700'000;
          at::Tensor tensor = c.allocate(n, at::kFloat);
          tensor.copy_(values(c.rank(), n, at::kFloat));
          const auto wait_for = [](const auto& condition) {
            const auto deadline = std::chrono::steady_clock::now() + Seconds(30);
            while (!condition() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
            MUSTER_CHECK(condition());
          };
          if (c.rank() == 0) {
            Work work = c.all_reduce(tensor, ReduceOp::sum);
            state->is_posted = true;
            wait_for([&] { return state->finished == c.size() - 1; });
            work.wait();
          } else {
            wait_for([&] { return state->is_posted.load(); });
            c.all_reduce(tensor, ReduceOp::sum).wait(Seconds(20));
            ++state->finished;
          }
          MUSTER_CHECK(tensor.equal(expected_over(c.size(), n, at::kFloat, ReduceOp::sum)));
        }) == "");
}

SHARED_MEMORY_TEST("ranks that sleep are woken: more of them than cores, many collectives, no slice is slept out") {
  const int size = std::clamp(2 * static_cast<int>(std::thread::hardware_concurrency()), 2, 8);
  CHECK(TestType::run(size, [](Communicator& c) {
          const auto deadline = std::chrono::steady_clock::now() + Seconds(20);
          const at::Tensor in_header = at::zeros({1}), reached = c.allocate(3'000, at::kFloat);
          const at::Tensor staged = at::zeros({3'000}), large = c.allocate(150'000, at::kFloat);
          for (int repeat = 0; repeat < 500; ++repeat) {
            for (const at::Tensor& tensor : {in_header, reached, staged}) c.all_reduce(tensor, ReduceOp::sum).wait();
            if (repeat % 20 == 0) c.all_reduce(large, ReduceOp::sum).wait();
          }
          MUSTER_CHECK(std::chrono::steady_clock::now() < deadline);
        }) == "");
}

SHARED_MEMORY_TEST("abort ends what is under way and what comes later, on every rank") {
  CHECK(TestType::run(3, [](Communicator& c) {
          if (c.rank() == 1) {
            std::thread other([&] { c.abort("the user pressed Ctrl-C"); });
            const std::string text = message_of<CommError>([&] {
              c.all_reduce(at::zeros({100'000}), ReduceOp::sum).wait();
              c.barrier().wait();
              for (;;) c.barrier().wait();
            });
            other.join();
            MUSTER_CHECK(contains(text, "the user pressed Ctrl-C"));
          } else if (c.rank() == 0) {
            const std::string text =
                message_of<CommError>([&] { c.all_reduce(at::zeros({100'000}), ReduceOp::sum).wait(); });
            MUSTER_CHECK(contains(text, "the user pressed Ctrl-C"));
          } else {
            message_of<CommError>([&] { use_until_it_ends(c); });
          }
          message_of<CommError>([&] { c.barrier().wait(); });
        }) == "");
}

// --- scopes --------------------------------------------------------------------------------------------------------

COMMUNICATOR_TEST("absent ranks are skipped in sums and gathers") {
  CHECK(TestType::run(4, [](Communicator& c) {
          for (uint64_t step = 0; step < 40; ++step) {
            const auto is_absent = [step](int rank) { return (step + static_cast<uint64_t>(rank)) % 4 < step % 3; };
            c.begin_scope(step);
            if (is_absent(c.rank())) {
              c.end_scope(ScopeEnd::absent).wait();
            } else {
              for (const int64_t n : {3L, 20'000L}) {
                at::Tensor tensor = at::full({n}, 1 << c.rank(), at::kFloat);
                c.all_reduce(tensor, ReduceOp::sum).wait();
                int expected = 0;
                for (int r = 0; r < c.size(); ++r) expected += is_absent(r) ? 0 : 1 << r;
                MUSTER_CHECK(tensor.eq(expected).all().item<bool>());
                Work work = c.all_gather(at::full({n + c.rank()}, c.rank()));
                work.wait();
                for (int r = 0; r < c.size(); ++r) {
                  const at::Tensor part = work.outputs()[static_cast<size_t>(r)];
                  MUSTER_CHECK(part.defined() == !is_absent(r));
                  if (part.defined()) MUSTER_CHECK(part.size(0) == n + r && part.eq(r).all().item<bool>());
                }
              }
              c.end_scope(ScopeEnd::finished).wait();
            }
            if (step % 5 == 0) {
              at::Tensor all = at::full({2'000}, 1.0F);
              c.all_reduce(all, ReduceOp::sum).wait();
              MUSTER_CHECK(all.eq(4).all().item<bool>());
            }
          }
          c.barrier().wait();
        }) == "");
}

COMMUNICATOR_TEST("a failed rank: peers that wait for it get RemoteError with its reason, and the group stays usable") {
  CHECK(TestType::run(3, [](Communicator& c) {
          for (uint64_t step = 0; step < 5; ++step) {
            c.begin_scope(step);
            at::Tensor tensor = at::full({50'000}, 1.0F);
            c.all_reduce(tensor, ReduceOp::sum).wait();
            MUSTER_CHECK(tensor.eq(3).all().item<bool>());
            if (c.rank() == 1) {
              c.end_scope(ScopeEnd::failed, "ValueError: no such class").wait();
            } else {
              try {
                c.all_reduce(tensor, ReduceOp::sum).wait();
                MUSTER_CHECK(false);
              } catch (const RemoteError& error) {
                MUSTER_CHECK(error.replica() == 1 && error.type() == "ValueError" && error.text() == "no such class");
              }
              c.end_scope(ScopeEnd::failed, "because of rank 1").wait();
            }
            at::Tensor all = at::full({3}, 2.0F);
            c.all_reduce(all, ReduceOp::sum).wait();
            MUSTER_CHECK(all.eq(6).all().item<bool>());
          }
        }) == "");
}

COMMUNICATOR_TEST(
    "fewer collectives in a scope: the peer that issued more gets LayoutMismatch, and the group stays usable") {
  CHECK(TestType::run(2, [](Communicator& c) {
          c.begin_scope(11);
          c.barrier().wait();
          if (c.rank() == 0) {
            const std::string text =
                message_of<LayoutMismatch>([&] { c.all_reduce(at::zeros({9'000}), ReduceOp::sum).wait(); });
            MUSTER_CHECK(contains(text, "rank 1"));
          }
          c.end_scope(ScopeEnd::finished).wait();
          at::Tensor all = at::full({3'000}, 2.0F);
          c.all_reduce(all, ReduceOp::sum).wait();
          MUSTER_CHECK(all.eq(4).all().item<bool>());
        }) == "");
}

COMMUNICATOR_TEST("scopes that nobody communicates in cost no synchronisation up to a bounded lead") {
  CHECK(TestType::run(2, [](Communicator& c) {
          for (uint64_t step = 0; step < 500; ++step) {
            c.begin_scope(step);
            c.end_scope(step % 2 == 0 ? ScopeEnd::finished : ScopeEnd::absent).wait();
          }
          c.barrier().wait();
          message_of<InvalidArgument>([&] { c.end_scope(ScopeEnd::finished).wait(); });
        }) == "");
}

// --- across backends -----------------------------------------------------------------------------------------------

SHARED_MEMORY_TEST("a visit sees the memory of all ranks") {
  CHECK(TestType::run(3, [](Communicator& c) {
          PeerMemory* const peers = c.peer_memory();
          MUSTER_CHECK(peers != nullptr);
          for (const int64_t n : {1, 5'000}) {
            const at::Tensor mine = c.allocate(n, at::kDouble);
            mine.copy_(values(c.rank(), n, at::kDouble));
            std::vector<at::Tensor> seen;
            peers
                ->visit(mine, 7,
                        [&](void* const* data) {
                          for (int r = 0; r < c.size(); ++r)
                            seen.push_back(at::from_blob(data[r], {n}, at::kDouble).clone());
                        })
                .wait();
            for (int r = 0; r < c.size(); ++r) MUSTER_CHECK(seen.at(r).equal(values(r, n, at::kDouble)));
            c.barrier().wait();
          }
        }) == "");
}

SHARED_MEMORY_TEST("a visit that ranks disagree about") {
  CHECK(TestType::run(2, [](Communicator& c) {
          const at::Tensor mine = c.allocate(10, at::kFloat);
          const auto tag = static_cast<uint64_t>(c.rank());
          message_of<LayoutMismatch>([&] { c.peer_memory()->visit(mine, tag, [](void* const*) {}).wait(); });
        }) == "");
}

SHARED_MEMORY_TEST("of a group that has ended nobody begins to store, and who fails knows whether somebody had begun") {
  const bool stores = GENERATE(false, true);
  CHECK(TestType::run(2, [&](Communicator& c) {
          PeerMemory& memory = *c.peer_memory();
          memory.begin_stores();
          c.barrier().wait();
          memory.end_stores();
          MUSTER_CHECK(!memory.may_have_stores());
          MUSTER_CHECK(!memory.has_ended());
          c.barrier().wait();
          if (stores && c.rank() == 1) memory.begin_stores();
          // The other may end the group before this one has looked at the barrier.
          message_of<CommError>([&] {
            c.barrier().wait();
            if (c.rank() == 0) c.abort("enough");
            use_until_it_ends(c);
          });
          MUSTER_CHECK(memory.has_ended());
          MUSTER_CHECK(memory.may_have_stores() == stores);
          if (c.rank() == 0) message_of<CommError>([&] { memory.begin_stores(); });
        }) == "");
}

TEMPLATE_TEST_CASE("peers cannot visit memory of another process's own", "[comm]", Host, HostWithReplicas) {
  CHECK(TestType::run(2, [](Communicator& c) {
          const at::Tensor own = at::zeros({10});
          message_of<InvalidArgument>([&] { c.peer_memory()->visit(own, 0, [](void* const*) {}); });
        }) == "");
}

TEMPLATE_TEST_CASE("common memory is one for all processes", "[comm]", Host) {
  CHECK(TestType::run(3, [](Communicator& c) {
          for (const int64_t bytes : {3, 100'000}) {
            const at::Tensor memory = c.peer_memory()->allocate_common(bytes);
            MUSTER_CHECK(memory.count_nonzero().template item<int64_t>() == 0);
            c.barrier().wait();
            memory.narrow(0, c.rank(), 1).fill_(c.rank() + 1);
            c.barrier().wait();
            for (int r = 0; r < c.size(); ++r) MUSTER_CHECK(memory[r].template item<int>() == r + 1);
            c.barrier().wait();
          }
        }) == "");
}

TEST_CASE("ranks that do not see one another's memory have no peer memory", "[comm]") {
  CHECK(make_single()->peer_memory() == nullptr);
  CHECK(C10d::run(2, [](Communicator& c) { MUSTER_CHECK(c.peer_memory() == nullptr); }) == "");
}

TEST_CASE("a group of one", "[comm]") {
  const CommunicatorPtr c = make_single();
  at::Tensor tensor = values(0, 100, at::kFloat);
  c->all_reduce(tensor, ReduceOp::sum).wait();
  c->broadcast(tensor, 0).wait();
  CHECK(tensor.equal(values(0, 100, at::kFloat)));
  Work gathered = c->all_gather(tensor);
  gathered.wait();
  REQUIRE(gathered.outputs().size() == 1);
  CHECK(gathered.outputs()[0].equal(tensor));
  const at::Tensor output = c->allocate(100, at::kFloat);
  CHECK(output.count_nonzero().item<int64_t>() == 0);
  c->reduce_scatter(output, tensor, ReduceOp::max).wait();
  CHECK(output.equal(tensor));
  c->begin_scope(0);
  c->end_scope(ScopeEnd::finished).wait();
  c->abort("enough");
  CHECK_THROWS_AS(c->barrier(), CommError);
}

TEST_CASE("a rank that closes while another waits for it is PeerLost", "[comm]") {
  std::vector<CommunicatorPtr> group = make_local(2, Seconds(30));
  CHECK(run_threads(2, [&](int rank) {
          CommunicatorPtr c = std::move(group[static_cast<size_t>(rank)]);
          at::Tensor tensor = at::full({20'000}, 1.0F);
          c->all_reduce(tensor, ReduceOp::sum).wait();
          MUSTER_CHECK(tensor.eq(2).all().item<bool>());
          if (rank == 1) return;
          MUSTER_CHECK(contains(message_of<PeerLost>([&] { c->barrier().wait(); }), "rank 1 left"));
        }) == "");
}
