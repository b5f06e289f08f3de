// What is particular to a group without NCCL, whose ranks share devices. The suite of all communicators runs over it
// too, on one device.
#include "comm/nccl/in_process.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/nccl/communicator.h"
#include "cpp/catch.h"
#include "support/fake_nccl.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::comm;
using namespace muster::comm::nccl;
using namespace muster::testing;

namespace {

using namespace std::chrono_literals;

constexpr int64_t kNumel = 5'003;

/// Rank r on device `ordinals[r]`, all of them host memory.
std::vector<CommunicatorPtr> make_group(FakeNccl& fake, const std::vector<int>& ordinals) {
  NcclOptions options;
  options.timeout = 30s;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const size_t size = ordinals.size();
  return make_communicators(make_in_process_api(fake.device(), c10::kCPU, ordinals), fake.device(), *store, 0,
                            static_cast<int>(size), std::vector<c10::Device>(size, c10::Device(c10::kCPU)),
                            std::vector<NcclOptions>(size, options));
}

std::vector<int> ordinals_of(int size, int devices) {
  std::vector<int> ordinals;
  for (int r = 0; r < size; ++r) ordinals.push_back(r % devices);
  return ordinals;
}

// Sums of these need rounding at every node of the tree.
at::Tensor values(int rank, int64_t n, at::ScalarType dtype) {
  return ((at::arange(n, at::kDouble).remainder(997) + 1) / (rank + 3.0) - 7.0 * rank).to(dtype);
}

/// Every rank's sums of private and allocated tensors, on 16 bytes and not, and its part of a reduce_scatter.
std::vector<std::vector<at::Tensor>> sums_of(const std::vector<CommunicatorPtr>& group, at::ScalarType dtype) {
  std::vector<std::vector<at::Tensor>> sums(group.size());
  const std::string failed = run_threads(static_cast<int>(group.size()), [&](int rank) {
    Communicator& c = *group[static_cast<size_t>(rank)];
    std::vector<at::Tensor>& own = sums[static_cast<size_t>(rank)];
    for (const int64_t offset : {0L, 1L}) {
      own.push_back(c.allocate(kNumel + offset, dtype).narrow(0, offset, kNumel));
      own.push_back(at::zeros({kNumel + offset}, dtype).narrow(0, offset, kNumel));
    }
    for (at::Tensor& tensor : own) {
      tensor.copy_(values(rank, kNumel, dtype));
      c.all_reduce(tensor, ReduceOp::sum).wait();
    }
    own.push_back(at::zeros({kNumel}, dtype));
    c.reduce_scatter(own.back(), values(rank, kNumel * c.size(), dtype), ReduceOp::sum).wait();
    c.barrier().wait();
  });
  CHECK(failed == "");
  return sums;
}

struct Table {
  FakeNccl fake;
  NcclApi api;
  std::vector<Comm> comms;

  explicit Table(size_t size) : comms(size) {
    api = make_in_process_api(fake.device(), c10::kCPU, std::vector<int>(size, 0));
    for (size_t r = 0; r < size; ++r) {
      CHECK(api.start(&comms[r], static_cast<int>(size), {}, static_cast<int>(r), 0) == kSuccess);
    }
  }

  /// The error of a group of these calls.
  std::string error_of(const std::function<void()>& calls) {
    api.group_start();
    calls();
    const Status status = api.group_end();
    return status == kSuccess ? "" : api.describe(status, nullptr);
  }
};

}  // namespace

TEST_CASE("sums have the bits of a local group", "[nccl]") {
  const int size = GENERATE(1, 2, 3, 4, 9);  // 9: more than a kernel takes
  const int devices = GENERATE(1, 2);
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf);
  FakeNccl fake;
  const auto expected = sums_of(make_local(size, 30s), dtype);
  const auto sums = sums_of(make_group(fake, ordinals_of(size, devices)), dtype);
  for (size_t r = 0; r < sums.size(); ++r) {
    for (size_t i = 0; i < sums[r].size(); ++i) {
      INFO("rank " << r << ", sum " << i);
      CHECK(sums[r][i].equal(expected[r][i]));
    }
  }
  const bool has_kernel = size <= 8 && dtype != at::kHalf;
  CHECK((fake.count("tree_sum " + std::to_string(size)) > 0) == has_kernel);
}

TEST_CASE(
    "data go between devices by copies, and nothing is copied within one "
    "without need",
    "[nccl]") {
  FakeNccl fake;
  const auto group = make_group(fake, {0, 1});
  CHECK(run_threads(2, [&](int rank) {
          Communicator& c = *group[static_cast<size_t>(rank)];
          at::Tensor tensor = at::full({64}, rank + 1.0F);
          c.all_reduce(tensor, ReduceOp::sum).wait();
          c.barrier().wait();
          MUSTER_CHECK(tensor.eq(3).all().item<bool>());
        }) == "");
  CHECK(fake.count("copy 0 1") == 2);  // the tensor and the barrier's token
  CHECK(fake.count("copy 1 0") == 2);
  CHECK(fake.count("copy 0 0") + fake.count("copy 1 1") == 0);
}

TEST_CASE(
    "an operation follows what every rank's stream held and precedes "
    "what each is given next",
    "[nccl]") {
  FakeNccl fake;
  const auto group = make_group(fake, {0, 0, 1});
  CHECK(run_threads(3, [&](int rank) {
          Communicator& own = *group[static_cast<size_t>(rank)];
          const at::Tensor tensor = own.allocate(50'000, at::kFloat);
          const at::Tensor seen = at::zeros_like(tensor);
          for (int i = 1; i <= 15; ++i) {
            fake.run_on_stream([&] {
              if (rank == i % 3) std::this_thread::sleep_for(5ms);  // a slow device
              tensor.fill_(rank + i);
            });
            own.all_reduce(tensor, ReduceOp::sum).wait();
            fake.run_on_stream([&] { seen.copy_(tensor); });
            fake.join_stream();
            MUSTER_CHECK(seen.eq(3 * i + 3).all().item<bool>());
          }
        }) == "");
}

TEST_CASE("nothing is left of a group that ends before its memory", "[nccl]") {
  FakeNccl fake;
  std::vector<at::Tensor> tensors;
  {
    const auto group = make_group(fake, {0, 0});
    for (const CommunicatorPtr& c : group) tensors.push_back(c->allocate(100, at::kFloat));
    CHECK(fake.live_events() > 0);
  }
  CHECK(fake.live_streams() == 0);
  for (at::Tensor& tensor : tensors) tensor.fill_(1);
  tensors.clear();
  CHECK(fake.live_events() == 0);
}

TEST_CASE("an error of the device ends the group on every rank", "[nccl]") {
  FakeNccl fake;
  const auto group = make_group(fake, {0, 0});
  fake.fail_next("copy", 1);
  CHECK(run_threads(2, [&](int rank) {
          Communicator& c = *group[static_cast<size_t>(rank)];
          const at::Tensor tensor = at::zeros({5});
          const std::string text = message_of<CommError>([&] { c.broadcast(tensor, 1).wait(); });
          MUSTER_CHECK(contains(text, "broadcast from rank 1") && contains(text, "the fake copy failed"));
          MUSTER_CHECK(message_of<CommError>([&] { c.barrier().wait(); }) == text);
        }) == "");
}

TEST_CASE("calls that do not fit together are an error, and nothing runs", "[nccl]") {
  Table table(2);
  const NcclApi& api = table.api;
  const std::vector<Comm>& comms = table.comms;
  char memory[64] = {};
  const Stream stream = table.fake.device().create_stream();
  const auto all_reduce = [&](size_t rank, size_t count, DataType type = DataType::f32, Reduction op = Reduction::sum) {
    api.reduce(memory, memory, count, type, op, kEveryRank, comms[rank], stream);
  };
  CHECK(contains(table.error_of([&] { all_reduce(0, 4); }), "rank 0 called 1 collectives, rank 1 0"));
  CHECK(contains(table.error_of([&] {
    all_reduce(0, 4);
    all_reduce(1, 5);
  }),
                 "rank 0 called all_reduce of 4, rank 1 called all_reduce of 5"));
  const std::string other_type = table.error_of([&] {
    all_reduce(0, 4);
    all_reduce(1, 4, DataType::i32);
  });
  CHECK(other_type != "");
  const std::string other_reduction = table.error_of([&] {
    all_reduce(0, 4);
    all_reduce(1, 4, DataType::f32, Reduction::max);
  });
  CHECK(other_reduction != "");
  const std::string other_root = table.error_of([&] {
    for (int r = 0; r < 2; ++r) api.broadcast(memory, memory, 4, r, comms[static_cast<size_t>(r)], stream);
  });
  CHECK(other_root != "");
  CHECK(contains(table.error_of([&] { api.send(memory, 4, 1, comms[0], stream); }), "to rank 1, which does not"));
  CHECK(contains(table.error_of([&] { api.receive(memory, 4, 0, comms[1], stream); }), "which sends nothing"));
  const std::string other_size = table.error_of([&] {
    api.send(memory, 4, 1, comms[0], stream);
    api.receive(memory, 5, 0, comms[1], stream);
  });
  CHECK(contains(other_size, "rank 1 called receive of 5, rank 0 called send of 4"));
  CHECK(table.error_of([] {}) == "");
  CHECK(table.fake.log().empty());
  Comm other = nullptr;
  CHECK(api.start(&other, 3, {}, 0, 0) != kSuccess);
  CHECK(api.start(&other, 2, {}, 2, 0) != kSuccess);
  table.fake.device().destroy_stream(stream);
}

TEST_CASE(
    "several messages between two ranks arrive in the order in which "
    "they were sent",
    "[nccl]") {
  Table table(2);
  const std::vector<char> sent = {'a', 'b', 'c'};
  std::vector<char> received(3);
  const Stream stream = table.fake.device().create_stream();
  CHECK(table.error_of([&] {
    for (char& byte : received) table.api.receive(&byte, 1, 1, table.comms[0], stream);
    for (const char& byte : sent) table.api.send(&byte, 1, 0, table.comms[1], stream);
  }) == "");
  table.fake.device().destroy_stream(stream);
  CHECK(received == sent);
}
