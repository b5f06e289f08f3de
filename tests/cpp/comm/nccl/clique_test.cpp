// Communicators that block, aborts while a call waits in one, and the end of a group that a CUDA graph holds, against a
// fake of NCCL.
#include "comm/nccl/clique.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <future>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/nccl/communicator.h"
#include "cpp/catch.h"
#include "support/eventually.h"
#include "support/fake_nccl.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::comm;
using namespace muster::testing;

namespace {

using namespace std::chrono_literals;

std::vector<CommunicatorPtr> make(FakeNccl& fake, int ranks, Milliseconds timeout, bool blocking = true) {
  NcclOptions options;
  options.timeout = timeout;
  options.blocking = blocking;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto size = static_cast<size_t>(ranks);
  return nccl::make_communicators(fake.nccl(), fake.device(), *store, 0, ranks,
                                  std::vector<c10::Device>(size, c10::Device(c10::kCPU)),
                                  std::vector<NcclOptions>(size, options));
}

}  // namespace

TEST_CASE("a blocking group is split off, and its operations are launched when their calls return", "[nccl]") {
  FakeNccl fake;
  {
    const auto c = make(fake, 1, 30s)[0];
    CHECK(fake.log() == std::vector<std::string>{"start 0", "group 1", "split 0", "group 1", "destroy 0"});
    const at::Tensor tensor = c->allocate(100, at::kFloat).fill_(2);
    c->all_reduce(tensor, ReduceOp::sum).wait();
    CHECK(fake.log().back() == "group 1");
    fake.run_on_stream([] {});
    fake.join_stream();
    CHECK(tensor.eq(2).all().item<bool>());
  }
  const auto log = fake.log();
  CHECK(fake.count("finalize 0") == 1);
  CHECK(fake.count("destroy 0") == 2);
  CHECK(fake.count("abort 0") == 0);
  CHECK(std::find(log.begin(), log.end(), "deregister 0") < std::find(log.begin(), log.end(), "finalize 0"));
  CHECK(fake.count("free") == 1);
}

TEST_CASE("what is only split takes little of a device's memory", "[nccl]") {
  FakeNccl fake;
  make(fake, 1, 30s, /*blocking=*/true);
  make(fake, 1, 30s, /*blocking=*/false);
  CHECK(fake.max_ctas() == std::vector<int>{1, 0});
}

TEST_CASE("ranks of one process reduce over blocking communicators, or others where NCCL has none", "[nccl]") {
  FakeNccl fake;
  fake.has_split = GENERATE(true, false);
  const auto c = make(fake, 3, 30s);
  CHECK(fake.count("split 2") == (fake.has_split ? 1 : 0));
  CHECK(run_threads(3, [&](int rank) {
          for (int i = 0; i < 5; ++i) {
            const at::Tensor tensor = at::full({5}, rank + i, at::kInt);
            c[static_cast<size_t>(rank)]->all_reduce(tensor, ReduceOp::sum).wait();
            MUSTER_CHECK(tensor.eq(3 + 3 * i).all().item<bool>());
          }
        }) == "");
}

TEST_CASE("a blocking call that waits too long for its peers is ended by the watching thread", "[nccl]") {
  FakeNccl fake;
  const auto ranks = GENERATE(1, 2);
  const auto c = make(fake, ranks, 300ms);
  fake.hold_groups(true);
  CHECK(run_threads(ranks, [&](int rank) {
          const std::string text = message_of<Timeout>(
              [&] { c[static_cast<size_t>(rank)]->all_reduce(at::zeros({4}), ReduceOp::sum).wait(20s); });
          MUSTER_CHECK(contains(text, "waited 300 ms for all_reduce(sum) of 4 Float values"));
        }) == "");
  CHECK(fake.count("abort 0") == 1);
  message_of<Timeout>([&] { c[0]->barrier(); });
}

TEST_CASE("an abort ends a blocking call of another thread", "[nccl]") {
  FakeNccl fake;
  const auto c = make(fake, 1, 30s)[0];
  fake.hold_groups(true);
  auto text = std::async(std::launch::async,
                         [&] { return message_of<CommError>([&] { c->all_reduce(at::zeros({4}), ReduceOp::sum); }); });
  REQUIRE(eventually([&] { return fake.count("all_reduce 0") == 1; }));
  const auto begin = std::chrono::steady_clock::now();
  c->abort("enough");
  CHECK(std::chrono::steady_clock::now() - begin < 5s);
  CHECK(text.get() == "enough");
  CHECK(fake.count("abort 0") == 1);
}

TEST_CASE("an error of the split ends the start", "[nccl]") {
  FakeNccl fake;
  fake.fail_next("split", 2);
  CHECK(contains(message_of<CommError>([&] { make(fake, 1, 30s); }), "ncclCommSplit failed at rank 0: fake status 2"));
  CHECK(fake.count("abort 0") == 1);
}

TEST_CASE("a group that a CUDA graph holds is closed, or aborted, all the same", "[nccl]") {
  FakeNccl fake;
  const bool blocking = GENERATE(true, false);
  const bool aborts = GENERATE(false, true);
  auto c = make(fake, 1, 500ms, blocking);
  fake.is_capturing = true;
  c[0]->all_reduce(at::zeros({4}), ReduceOp::sum).wait();
  fake.is_capturing = false;
  fake.hold_graphs(true);
  auto closed = std::async(std::launch::async, [&] {
    if (aborts) c[0]->abort("enough");
    c.clear();
  });
  CHECK(closed.wait_for(15s) == std::future_status::ready);
  fake.hold_graphs(false);  // the graph is reset
  closed.get();
  const int parents = blocking ? 1 : 0;
  CHECK(eventually([&] { return fake.count("destroy 0") == (aborts ? parents : parents + 1); }));
  CHECK(fake.count("abort 0") == (aborts ? 1 : 0));
  std::this_thread::sleep_for(50ms);  // the thread that ended it leaves the fake
}

TEST_CASE("what waits on the host for the device is refused in a capture", "[nccl]") {
  FakeNccl fake;
  const auto c = make(fake, 1, 30s)[0];
  fake.is_capturing = true;
  CHECK(contains(message_of<InvalidArgument>([&] { c->barrier(); }), "no CUDA graph can capture"));
  CHECK(contains(message_of<InvalidArgument>([&] { c->all_gather(at::zeros({2})); }), "without a control group"));
  fake.is_capturing = false;
  c->barrier().wait();
}
