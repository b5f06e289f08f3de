// What is particular to the NCCL backend, against a fake of NCCL and CUDA: states, deadlines, errors, order of launch
// and of destruction. The suite of all communicators runs over the same fake.
#include "comm/nccl/communicator.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/nccl/launcher.h"
#include "core/wait_hook.h"
#include "cpp/catch.h"
#include "kernels/cuda/cuda_kernels.h"
#include "support/eventually.h"
#include "support/fake_nccl.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::comm;
using namespace muster::testing;

namespace {

using namespace std::chrono_literals;

const c10::Device kHost(c10::kCPU);

NcclOptions options_of(Milliseconds timeout, CommunicatorPtr control = nullptr) {
  NcclOptions options;
  options.timeout = timeout;
  options.control = std::move(control);
  options.blocking = false;
  return options;
}

c10::intrusive_ptr<c10d::Store> make_store() { return c10::make_intrusive<c10d::HashStore>(); }

/// A group of one rank.
CommunicatorPtr make_alone(FakeNccl& fake, const NcclOptions& options = options_of(30s)) {
  return nccl::make_communicators(fake.nccl(), fake.device(), *make_store(), 0, 1, {kHost}, {options})[0];
}

/// The ranks of one process.
std::vector<CommunicatorPtr> make_together(FakeNccl& fake, int size, Milliseconds timeout = 30s) {
  const auto ranks = static_cast<size_t>(size);
  return nccl::make_communicators(fake.nccl(), fake.device(), *make_store(), 0, size,
                                  std::vector<c10::Device>(ranks, kHost),
                                  std::vector<NcclOptions>(ranks, options_of(timeout)));
}

/// Ranks that are processes of their own: body(rank, handle).
std::string run_apart(FakeNccl& fake, int size, Milliseconds timeout, const Body& body, bool has_control = true) {
  const auto store = make_store();
  const std::vector<CommunicatorPtr> control = make_local(size, 30s);
  return run_threads(size, [&](int rank) {
    const NcclOptions options = options_of(timeout, has_control ? control[static_cast<size_t>(rank)] : nullptr);
    const auto own = nccl::make_communicators(fake.nccl(), fake.device(), *store, rank, size, {kHost}, {options});
    body(*own[0]);
  });
}

size_t position(const std::vector<std::string>& log, const std::string& entry) {
  return static_cast<size_t>(std::find(log.begin(), log.end(), entry) - log.begin());
}

}  // namespace

TEST_CASE("a build without NCCL says what to rebuild with", "[nccl]") {
  if (has_nccl()) return;
  const auto store = make_store();
  const std::string text = message_of<NotBuilt>([&] { make_nccl(*store, 0, 1, kHost, {}); });
  CHECK(contains(text, "MUSTER_CUDA=ON"));
  CHECK(contains(text, "nvcc"));
  CHECK(message_of<NotBuilt>([&] { make_nccl(*store, 0, 1, std::vector<c10::Device>{kHost}, {{}}); }) == text);
}

TEST_CASE("replicas that share a GPU say what a build without CUDA needs", "[nccl]") {
  if (kernels::cuda::is_built()) return;
  CHECK(contains(message_of<NotBuilt>([&] { make_device_local({kHost}, {{}}); }), "MUSTER_CUDA=ON"));
}

// --- start and end -------------------------------------------------------------------------------------------------

TEST_CASE("a rank that never gets past its start: Timeout, abort, nothing else", "[nccl]") {
  FakeNccl fake;
  fake.hang(0);
  const std::string text = message_of<Timeout>([&] { make_alone(fake, options_of(100ms)); });
  CHECK(contains(text, "rank 0 waited 100 ms for ncclCommInitRankConfig"));
  CHECK(contains(text, "NCCL_SOCKET_IFNAME"));
  CHECK(fake.count("abort 0") == 1);
  CHECK(fake.count("finalize 0") + fake.count("destroy 0") == 0);
}

TEST_CASE("peers that never come: Timeout", "[nccl]") {
  FakeNccl fake;
  const auto store = make_store();
  const auto make = [&](int rank) {
    nccl::make_communicators(fake.nccl(), fake.device(), *store, rank, 2, {kHost}, {options_of(100ms)});
  };
  CHECK(contains(message_of<Timeout>([&] { make(1); }), "rank 0"));  // its id
  CHECK(contains(message_of<Timeout>([&] { make(0); }), "all 2 ranks"));
}

TEST_CASE("arguments that no group can be made of", "[nccl]") {
  FakeNccl fake;
  const auto store = make_store();
  const auto make = [&](int rank, const NcclOptions& options) {
    nccl::make_communicators(fake.nccl(), fake.device(), *store, rank, 2, {kHost}, {options});
  };
  message_of<InvalidArgument>([&] { make(2, {}); });
  NcclOptions options;
  options.check = true;
  CHECK(contains(message_of<InvalidArgument>([&] { make(0, options); }), "NcclOptions::control"));
  options.control = make_local(2, 1s)[1];
  CHECK(contains(message_of<InvalidArgument>([&] { make(0, options); }), "from rank 1 of 2"));
  CHECK(fake.log().empty());
}

TEST_CASE("two ranks on one GPU are refused on every rank, unless NCCL takes it for two or is told to share",
          "[nccl]") {
  FakeNccl fake;
  const std::string kind = GENERATE("same", "two", "shared");
  const auto control = make_local(3, 30s);
  const auto store = make_store();
  CHECK(run_threads(3, [&](int rank) {
          nccl::DeviceApi api = fake.device();
          api.identity = [&](int) {
            if (kind == "shared") return std::string();
            return std::string(kind == "two" || rank == 1 ? "host " + std::to_string(rank) : "") + " GPU-7";
          };
          const auto make = [&] {
            nccl::make_communicators(fake.nccl(), api, *store, rank, 3, {kHost},
                                     {options_of(30s, control[static_cast<size_t>(rank)])});
          };
          if (kind != "same") {
            make();
            return;
          }
          const std::string text = message_of<InvalidArgument>(make);
          MUSTER_CHECK(contains(text, "ranks 0 and 2 are on the same GPU ( GPU-7)"));
          MUSTER_CHECK(contains(text, "CUDA_VISIBLE_DEVICES"));
        }) == "");
  CHECK(fake.count("start 0") == (kind == "same" ? 0 : 1));
}

TEST_CASE("two ranks of one process on one GPU are refused", "[nccl]") {
  FakeNccl fake;
  nccl::DeviceApi api = fake.device();
  api.identity = [](int) { return std::string("GPU-7"); };
  const bool has_control = GENERATE(false, true);
  std::vector<NcclOptions> options;
  for (const auto& control : make_local(4, 30s)) options.push_back(options_of(30s, has_control ? control : nullptr));
  const auto store = make_store();
  CHECK(run_threads(2, [&](int process) {
          const auto first = static_cast<size_t>(2 * process);
          const std::string text = message_of<InvalidArgument>([&] {
            nccl::make_communicators(fake.nccl(), api, *store, 2 * process, 4, {kHost, kHost},
                                     {options[first], options[first + 1]});
          });
          MUSTER_CHECK(contains(text, has_control || process == 0 ? "ranks 0 and 1" : "ranks 2 and 3"));
        }) == "");
}

TEST_CASE("the normal end: tensors, deregister, finalize, destroy, free", "[nccl]") {
  FakeNccl fake;
  at::Tensor tensor;
  {
    const CommunicatorPtr c = make_alone(fake);
    tensor = c->allocate(1000, at::kFloat).narrow(0, 10, 20);
    c->all_reduce(tensor, ReduceOp::sum).wait();
  }
  CHECK(fake.live_streams() == 0);
  CHECK(fake.count("deregister 0") + fake.count("destroy 0") + fake.count("free") == 0);
  tensor.fill_(1);
  tensor = at::Tensor();
  const std::vector<std::string> log = fake.log();
  REQUIRE(log.size() >= 4);
  CHECK(position(log, "deregister 0") < position(log, "finalize 0"));
  CHECK(position(log, "finalize 0") < position(log, "destroy 0"));
  CHECK(position(log, "destroy 0") < position(log, "free"));
  CHECK(log.back() == "free");
  CHECK(fake.count("abort 0") == 0);
  CHECK(fake.live_events() == 0);
}

TEST_CASE("after an abort nothing is deregistered or destroyed, and memory is freed", "[nccl]") {
  FakeNccl fake;
  {
    const CommunicatorPtr c = make_alone(fake);
    const at::Tensor tensor = c->allocate(1000, at::kFloat);
    c->abort("the user pressed Ctrl-C");
    c->abort("again");
    CHECK(message_of<CommError>([&] { c->all_reduce(tensor, ReduceOp::sum); }) == "the user pressed Ctrl-C");
    CHECK(message_of<CommError>([&] { c->allocate(1, at::kFloat); }) == "the user pressed Ctrl-C");
  }
  CHECK(fake.count("abort 0") == 1);
  CHECK(fake.count("deregister 0") + fake.count("finalize 0") + fake.count("destroy 0") == 0);
  CHECK(fake.count("free") == 1);
}

// --- memory --------------------------------------------------------------------------------------------------------

TEST_CASE("allocations share one registered piece of the size asked for", "[nccl]") {
  FakeNccl fake;
  NcclOptions options = options_of(30s);
  options.arena_bytes = 10'000;
  const CommunicatorPtr c = make_alone(fake, options);
  const at::Tensor a = c->allocate(1000, at::kFloat);
  const at::Tensor b = c->allocate(1000, at::kFloat);
  CHECK(fake.count("register 0") == 1);
  CHECK(reinterpret_cast<uintptr_t>(b.data_ptr()) % 64 == 0);
  CHECK(static_cast<char*>(b.data_ptr()) >= static_cast<char*>(a.data_ptr()) + 4000);
  CHECK(b.count_nonzero().item<int64_t>() == 0);
  const at::Tensor larger = c->allocate(5000, at::kFloat);
  CHECK(fake.count("register 0") == 2);
  CHECK(c->allocate(0, at::kFloat).numel() == 0);
}

TEST_CASE("memory that torch keeps is given back where NCCL finds none", "[nccl]") {
  FakeNccl fake;
  const CommunicatorPtr c = make_alone(fake);
  fake.fail_next("allocate", 1);
  CHECK(c->allocate(1000, at::kFloat).numel() == 1000);
  CHECK(fake.count("allocate 4096") == 2);
  CHECK(fake.count("release_cached") == 1);
}

TEST_CASE("an NCCL without windows", "[nccl]") {
  FakeNccl fake;
  fake.has_windows = false;
  {
    const CommunicatorPtr c = make_alone(fake);
    at::Tensor tensor = c->allocate(3, at::kFloat).fill_(2);
    c->all_reduce(tensor, ReduceOp::sum).wait();
    CHECK(tensor.eq(2).all().item<bool>());
  }
  CHECK(fake.count("register 0") == 0);
  CHECK(fake.count("free") == 1);
}

// --- errors --------------------------------------------------------------------------------------------------------

TEST_CASE("an error of a call names the rank and NCCL's text, closes its group and ends everything", "[nccl]") {
  FakeNccl fake;
  const CommunicatorPtr c = make_alone(fake);
  fake.fail_next("all_reduce", 3);
  at::Tensor tensor = at::zeros({4});
  const std::string text = message_of<CommError>([&] { c->all_reduce(tensor, ReduceOp::sum); });
  CHECK(contains(text, "all_reduce(sum) of 4 Float values failed at rank 0: fake status 3"));
  CHECK(contains(text, "NCCL_DEBUG=INFO"));
  CHECK(fake.log().back() == "abort 0");
  CHECK(message_of<CommError>([&] { c->barrier(); }) == text);
  const CommunicatorPtr other = make_alone(fake);  // its start is in a group of its own
  CHECK(fake.log().back() == "group 1");
}

TEST_CASE("an asynchronous error is thrown by done, wait and the next operation", "[nccl]") {
  const std::string where = GENERATE("done", "wait", "issue");
  FakeNccl fake;
  const CommunicatorPtr c = make_alone(fake);
  fake.hold_streams(true);
  at::Tensor tensor = at::zeros({4});
  Work work = c->all_reduce(tensor, ReduceOp::sum);
  CHECK_FALSE(work.done());
  fake.set_async_error(0, 6);
  const std::string text = message_of<CommError>([&] {
    if (where == "done") work.done();
    if (where == "wait") work.wait();
    if (where == "issue") c->barrier();
  });
  CHECK(contains(text, "rank 0: fake status 6"));
  fake.hold_streams(false);
  // The stream passes an aborted operation; that is no success.
  CHECK(eventually([&] { return fake.count("abort 0") == 1; }));
  for (int i = 0; i < 20; ++i) message_of<CommError>([&] { work.done(); });
}

TEST_CASE("a device that waits too long is freed by the watching thread", "[nccl]") {
  FakeNccl fake;
  const CommunicatorPtr c = make_alone(fake, options_of(200ms));
  fake.hold_streams(true);
  at::Tensor tensor = at::zeros({4});
  const Work work = c->all_reduce(tensor, ReduceOp::sum);
  CHECK(eventually([&] { return fake.count("abort 0") == 1; }));
  const std::string text = message_of<Timeout>([&] { c->barrier(); });
  CHECK(contains(text, "all_reduce(sum) of 4 Float values at rank 0 did not end within 200 ms"));
  fake.hold_streams(false);
}

TEST_CASE("a signal ends the wait of a barrier and the group", "[nccl]") {
  FakeNccl fake;
  const CommunicatorPtr c = make_alone(fake);
  fake.hold_streams(true);
  Work barrier = c->barrier();
  {
    const WaitHook hook([] { throw std::runtime_error("Ctrl-C"); });
    CHECK_THROWS_WITH(barrier.wait(), "Ctrl-C");
  }
  CHECK(contains(message_of<CommError>([&] { c->barrier(); }), "rank 0 was interrupted while it waited for barrier"));
  fake.hold_streams(false);
}

TEST_CASE("an abort at one rank reaches its peers over the control group", "[nccl]") {
  FakeNccl fake;
  CHECK(run_apart(fake, 2, 30s, [](Communicator& c) {
          at::Tensor tensor = at::full({10}, 1.0F);
          c.all_reduce(tensor, ReduceOp::sum).wait();
          if (c.rank() == 0) {
            c.abort("enough");
          } else {
            const std::string text = message_of<CommError>([&] { c.all_gather(tensor); });
            MUSTER_CHECK(contains(text, "enough"));
          }
          message_of<CommError>([&] { c.barrier(); });
        }) == "");
}

// --- operations ----------------------------------------------------------------------------------------------------

TEST_CASE("wait orders streams; done tells whether the device has finished", "[nccl]") {
  FakeNccl fake;
  const CommunicatorPtr c = make_alone(fake);
  fake.hold_streams(true);
  at::Tensor tensor = at::zeros({4});
  Work work = c->all_reduce(tensor, ReduceOp::sum);
  CHECK_FALSE(work.done());
  fake.hold_streams(false);
  CHECK(eventually([&] { return work.done(); }));
}

TEST_CASE("groups without a control group: gathers of any size, no scopes", "[nccl]") {
  FakeNccl fake;
  const auto body = [](Communicator& c) {
    for (const int64_t rows : {0L, 4L}) {
      for (const int64_t step : {0L, 3L}) {
        Work work = c.all_gather(at::full({rows + step * c.rank(), 2}, c.rank() + 1, at::kShort));
        work.wait();
        for (int r = 0; r < c.size(); ++r) {
          const at::Tensor part = work.outputs()[static_cast<size_t>(r)];
          MUSTER_CHECK(part.sizes() == at::IntArrayRef({rows + step * r, 2}) && part.eq(r + 1).all().item<bool>());
        }
      }
    }
    c.barrier().wait();
    MUSTER_CHECK(contains(message_of<InvalidArgument>([&] { c.begin_scope(0); }), "NcclOptions::control"));
    message_of<InvalidArgument>([&] { c.end_scope(ScopeEnd::finished).wait(); });
    message_of<LayoutMismatch>([&] { c.all_gather(at::zeros({2}, c.rank() == 0 ? at::kInt : at::kLong)); });
  };
  CHECK(run_apart(fake, 3, 30s, body, false) == "");
}

TEST_CASE("dtypes that NCCL lacks", "[nccl]") {
  FakeNccl fake;
  CHECK(run_apart(fake, 2, 30s, [](Communicator& c) {
          at::Tensor flag = at::full({3}, c.rank() == 1, at::kBool);
          c.all_reduce(flag, ReduceOp::sum).wait();
          MUSTER_CHECK(flag.all().item<bool>());
          at::Tensor short_tensor = at::full({3}, c.rank(), at::kShort);
          MUSTER_CHECK(
              contains(message_of<InvalidArgument>([&] { c.all_reduce(short_tensor, ReduceOp::sum); }), "int32"));
          c.broadcast(short_tensor, 1).wait();
          MUSTER_CHECK(short_tensor.eq(1).all().item<bool>());
        }) == "");
}

TEST_CASE("a tensor on another device is refused", "[nccl]") {
  FakeNccl fake;
  const CommunicatorPtr c = make_alone(fake);
  const at::Tensor meta = at::zeros({2}, at::TensorOptions().device(c10::kMeta));
  CHECK(contains(message_of<InvalidArgument>([&] { c->all_reduce(meta, ReduceOp::sum); }), "meta"));
}

TEST_CASE("events are used again, and tensors are kept no longer than the device needs them", "[nccl]") {
  FakeNccl fake;
  const CommunicatorPtr c = make_alone(fake);
  at::Tensor tensor = at::zeros({4});
  for (int i = 0; i < 200; ++i) c->all_reduce(tensor, ReduceOp::sum).wait();
  CHECK(fake.live_events() < 50);
  CHECK(eventually([&] { return tensor.use_count() == 1; }));
}

TEST_CASE("while a stream is captured no event is asked about", "[nccl]") {
  FakeNccl fake;
  const CommunicatorPtr c = make_alone(fake);
  at::Tensor tensor = at::zeros({4});
  fake.hold_streams(true);
  fake.is_capturing = true;
  Work work = c->all_reduce(tensor, ReduceOp::sum);
  CHECK_FALSE(work.done());
  fake.hold_streams(false);
  CHECK_FALSE(work.done());
  work.wait();
  CHECK(work.done());
  const auto together = make_together(fake, 2);
  CHECK(contains(message_of<InvalidArgument>([&] { together[0]->all_reduce(tensor, ReduceOp::sum); }),
                 "one process per GPU"));
}

TEST_CASE("broadcast and reduce_scatter among the ranks that are present", "[nccl]") {
  const auto body = [](Communicator& c) {
    for (uint64_t step = 0; step < 3; ++step) {
      const int absent = static_cast<int>(step);
      c.begin_scope(step);
      if (c.rank() == absent) {
        c.end_scope(ScopeEnd::absent).wait();
        continue;
      }
      at::Tensor tensor = at::full({7}, c.rank(), at::kInt);
      const int source = absent == 2 ? 0 : 2;
      c.broadcast(tensor, source).wait();
      MUSTER_CHECK(tensor.eq(source).all().item<bool>());
      c.broadcast(tensor, absent).wait();  // nobody sends
      MUSTER_CHECK(tensor.eq(source).all().item<bool>());
      const at::Tensor part = at::zeros({2}, at::kBFloat16);
      c.reduce_scatter(part, at::full({6}, c.rank() + 1, at::kBFloat16), ReduceOp::sum).wait();
      MUSTER_CHECK(part.eq(6 - (absent + 1)).all().item<bool>());
      c.barrier().wait();
      c.end_scope(ScopeEnd::finished).wait();
    }
  };
  SECTION("in processes of their own") {
    FakeNccl fake;
    CHECK(run_apart(fake, 3, 30s, body) == "");
  }
  SECTION("in one process") { CHECK(NcclOneProcess::run(3, body) == ""); }
}

// --- several ranks of one process ----------------------------------------------------------------------------------

TEST_CASE("an operation is launched once all ranks of the process have issued it, in one group", "[nccl]") {
  FakeNccl fake;
  const std::vector<CommunicatorPtr> c = make_together(fake, 3);
  CHECK(fake.log().back() == "group 3");  // their start
  std::vector<at::Tensor> tensors;
  for (int r = 0; r < 6; ++r) tensors.push_back(at::full({5}, 1 << r, at::kInt));
  // Rank 2 issues both operations before the others issue the first.
  Work late = c[2]->all_reduce(tensors[2], ReduceOp::sum);
  Work late_too = c[2]->broadcast(tensors[5], 1);
  Work first = c[0]->all_reduce(tensors[0], ReduceOp::sum);
  CHECK_FALSE(late.done());
  CHECK(fake.count("all_reduce 0") + fake.count("all_reduce 2") == 0);
  Work second = c[1]->all_reduce(tensors[1], ReduceOp::sum);
  for (Work* work : {&late, &first, &second}) work->wait();
  for (int r = 0; r < 3; ++r) CHECK(tensors[static_cast<size_t>(r)].eq(7).all().item<bool>());
  CHECK(fake.count("broadcast 2") == 0);
  Work other = c[1]->broadcast(tensors[4], 1);
  Work another = c[0]->broadcast(tensors[3], 1);
  for (Work* work : {&late_too, &other, &another}) work->wait();
  for (size_t r = 3; r < 6; ++r) CHECK(tensors[r].eq(16).all().item<bool>());
  const std::vector<std::string> log = fake.log();
  const std::vector<std::string> tail(log.end() - 8, log.end());
  CHECK(tail == std::vector<std::string>{"all_reduce 0", "all_reduce 1", "all_reduce 2", "group 3", "broadcast 0",
                                         "broadcast 1", "broadcast 2", "group 3"});
}

TEST_CASE("an operation lies between what the rank's stream held before it and what follows its wait", "[nccl]") {
  FakeNccl fake;
  const std::vector<CommunicatorPtr> c = make_together(fake, 2);
  CHECK(run_threads(2, [&](int rank) {
          Communicator& own = *c[static_cast<size_t>(rank)];
          const at::Tensor tensor = own.allocate(50'000, at::kFloat);
          const at::Tensor seen = at::zeros_like(tensor);
          for (int i = 1; i <= 20; ++i) {
            fake.run_on_stream([&] {
              std::this_thread::sleep_for(2ms);
              tensor.fill_(rank + i);
            });
            own.all_reduce(tensor, ReduceOp::sum).wait();
            fake.run_on_stream([&] { seen.copy_(tensor); });
            fake.join_stream();
            MUSTER_CHECK(seen.eq(2 * i + 1).all().item<bool>());
          }
        }) == "");
}

TEST_CASE("ranks of one process that disagree: LayoutMismatch on each, and nothing is launched", "[nccl]") {
  FakeNccl fake;
  const std::vector<CommunicatorPtr> c = make_together(fake, 2);
  CHECK(run_threads(2, [&](int rank) {
          at::Tensor tensor = at::zeros({rank == 0 ? 5 : 6});
          const std::string text = message_of<LayoutMismatch>(
              [&] { c[static_cast<size_t>(rank)]->all_reduce(tensor, ReduceOp::sum).wait(); });
          MUSTER_CHECK(contains(text, "of 5 Float") && contains(text, "of 6 Float"));
        }) == "");
  CHECK(fake.count("all_reduce 0") == 0);
}

TEST_CASE("a rank of the process that is late or has left", "[nccl]") {
  FakeNccl fake;
  std::vector<CommunicatorPtr> c = make_together(fake, 2, 30s);
  const bool leaves = GENERATE(false, true);
  Work work = c[0]->barrier();
  if (leaves) c[1].reset();
  const std::string text = message_of<CommError>([&] { work.wait(leaves ? 20s : 100ms); });
  CHECK(contains(text, leaves ? "rank 1, of this process, has left" : "late: rank 1, in this process"));
  if (leaves) CHECK(contains(message_of<CommError>([&] { c[0]->barrier(); }), "has left"));
}

TEST_CASE("an error at one rank of the process ends all of them", "[nccl]") {
  FakeNccl fake;
  const std::vector<CommunicatorPtr> c = make_together(fake, 2);
  fake.fail_next("all_reduce", 2);
  CHECK(run_threads(2, [&](int rank) {
          at::Tensor tensor = at::zeros({5});
          const std::string text =
              message_of<CommError>([&] { c[static_cast<size_t>(rank)]->all_reduce(tensor, ReduceOp::sum).wait(); });
          MUSTER_CHECK(contains(text, "rank 0: fake status 2"));
        }) == "");
  CHECK(fake.count("abort 0") == 1);
  CHECK(fake.count("abort 1") == 1);
}
