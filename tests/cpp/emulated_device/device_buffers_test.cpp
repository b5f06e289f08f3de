// Buffers that replicas on streams merge without waiting for their devices.
#include "window/device_buffers.h"

#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/polar.h>
#include <ATen/ops/scalar_tensor.h>

#include <functional>
#include <limits>

#include "comm/communicator.h"
#include "cpp/catch.h"
#include "cpp/emulated_device/device_job.h"
#include "support/cuda_emulation.h"
#include "support/operators.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::testing;

namespace {

// A window's end for one replica's buffers, whose losses weigh `weight`, as DeviceWindow has it.
void merge(comm::Communicator& group, DeviceBuffers& merged, const DeviceBuffers::Tensors& buffers, double weight,
           double weight_of_all, Buffers policy = Buffers::mean) {
  const auto written = at::full({static_cast<int64_t>(buffers.size())}, 0, at::kDouble);
  merged.add_written(buffers, written.mutable_data_ptr<double>());
  group.all_reduce(written, ReduceOp::sum).wait();
  const auto sums = at::empty({merged.begin(buffers, written.const_data_ptr<double>(), group.size())}, at::kDouble);
  merged.gather(group, sums, &weight, policy);
  group.all_reduce(sums, ReduceOp::sum).wait();
  merged.wait();
  merged.merge(buffers, sums, &weight_of_all, policy);
}

// Of two replicas, on a thread each.
void merge_on_each(const std::function<void(comm::Communicator& group, int rank)>& replica) {
  const auto groups = comm::make_local(2, Seconds(60));
  const auto failures = run_threads(2, [&](int rank) { replica(*groups[static_cast<size_t>(rank)], rank); });
  INFO(failures);
  CHECK(failures.empty());
}

// Replica 0 wrote 1 into the first of two floating elements, replica 1 wrote 5 there and raised the count; their
// weights are 3 and 1. What both have then: the elements, and the count.
std::vector<double> merged(Buffers policy, double weight_of_all) {
  std::vector<std::vector<double>> seen(2);
  merge_on_each([&](comm::Communicator& group, int rank) {
    const DeviceBuffers::Tensors tensors{at::full({2}, 0.1, at::kDouble), at::ones({1}, at::kLong)};
    DeviceBuffers buffers;
    merge(group, buffers, tensors, 1, 2);                          // notes what is there
    tensors[0].mutable_data_ptr<double>()[0] = rank == 0 ? 1 : 5;  // past the version counter, as batch norm
    if (rank == 1) tensors[1].fill_(7);
    merge(group, buffers, tensors, rank == 0 ? 3 : 1, weight_of_all, policy);
    const auto* values = tensors[0].const_data_ptr<double>();
    seen[static_cast<size_t>(rank)] = {values[0], values[1], tensors[1].item<double>()};
  });
  if (weight_of_all > 0) CHECK(seen[0] == seen[1]);
  return seen[1];
}

// Floating and integer buffers of many dtypes and layouts, with values by replica.
DeviceBuffers::Tensors mixed(int rank) {
  const auto values = [&](std::initializer_list<int64_t> sizes) {
    const auto count = c10::multiply_integers(sizes);
    return (at::linspace(0.1, 3 + rank, count, at::kDouble).sin() * 3).view(sizes);
  };
  DeviceBuffers::Tensors tensors{values({3, 5}).to(at::kFloat),
                                 values({7}),
                                 at::complex(values({3}), values({3}).cos()),
                                 values({4, 6}).to(at::kFloat).t(),
                                 at::complex(values({5}), values({5}).cos()).to(at::kComplexFloat),
                                 values({}).to(at::kBFloat16),
                                 at::empty({0}, at::kFloat),
                                 values({9}).to(at::kHalf),
                                 at::complex(values({2}), values({2}).cos()).conj(),
                                 values({2, 1, 3}).to(at::kFloat),
                                 at::full({2}, rank + 5, at::kLong),
                                 at::full({3}, rank == 1, at::kBool),
                                 at::full({4}, 9 - rank, at::kInt)};
  return tensors;
}

// What is launched at the end of a window with so many floating and as many integer buffers, beside the reduction.
int launches_of_a_window(int64_t buffers) {
  std::vector<int> seen(2);
  merge_on_each([&](comm::Communicator& group, int rank) {
    DeviceBuffers::Tensors tensors;
    for (int64_t b = 0; b < buffers; ++b) tensors.push_back(at::full({b + 2}, rank, at::kFloat));
    for (int64_t b = 0; b < buffers; ++b) tensors.push_back(at::full({}, rank, at::kLong));
    DeviceBuffers merged;
    merge(group, merged, tensors, 1, 2);
    for (const auto& tensor : tensors) tensor.add_(1);
    const std::vector<double> written(tensors.size(), 2);
    const auto sums = at::empty({merged.begin(tensors, written.data(), 2)}, at::kDouble);
    const double weight = 1;
    const OperatorCount operators;
    const int before = kernels::cuda::emulation::launches;
    merged.gather(group, sums, &weight, Buffers::mean);
    merged.wait();
    merged.merge(tensors, sums, &weight, Buffers::mean);
    seen[static_cast<size_t>(rank)] = kernels::cuda::emulation::launches - before + operators.without_views();
  });
  CHECK(seen[0] == seen[1]);
  return seen[0];
}

}  // namespace

TEST_CASE("a constant keeps its bits from the first window on", "[window]") {
  merge_on_each([&](comm::Communicator& group, int rank) {
    // For many of these (3 v + v) / 4 or (v / 3 + v / 7) / (1 / 3 + 1 / 7) is another number.
    const auto values = at::linspace(0.1, 999, 1000, at::kDouble).sin() * 1e3;
    const DeviceBuffers::Tensors tensors{values.clone(), at::complex(values, values.cos())};
    const auto complex = tensors[1].clone();
    DeviceBuffers buffers;
    buffers.open(tensors);
    merge(group, buffers, tensors, rank == 0 ? 1.0 / 3 : 1.0 / 7, 1.0 / 3 + 1.0 / 7);
    MUSTER_CHECK(tensors[0].equal(values));
    MUSTER_CHECK(tensors[1].equal(complex));
    DeviceBuffers unopened;
    merge(group, unopened, tensors, rank == 0 ? 1.0 / 3 : 1.0 / 7, 1.0 / 3 + 1.0 / 7);
    MUSTER_CHECK(!tensors[0].equal(values));
  });
}

TEST_CASE("a window's buffers are gathered in one launch and merged in another", "[window]") {
  CHECK(launches_of_a_window(3) == 2);
  CHECK(launches_of_a_window(100) == 2);
}

TEST_CASE("buffers of any dtype and layout become the mean, rounded once", "[window]") {
  merge_on_each([&](comm::Communicator& group, int rank) {
    const auto own = mixed(rank), first = mixed(0), second = mixed(1);
    DeviceBuffers buffers;  // everything counts as written
    merge(group, buffers, own, rank == 0 ? 3 : 1, 4);
    for (size_t b = 0; b < own.size(); ++b) {
      const auto dtype = own[b].scalar_type();
      const auto wide = own[b].is_complex() ? at::kComplexDouble : at::kDouble;
      const auto mean = (first[b].to(wide) * 3 + second[b].to(wide)) / 4;
      const auto expected = at::isIntegralType(dtype, true) ? first[b].maximum(second[b]) : mean.to(dtype);
      if (!own[b].equal(expected)) throw std::runtime_error("buffer " + std::to_string(b) + " is wrong");
    }
  });
}

TEST_CASE("integers of any size and sign keep their bits", "[window]") {
  const auto policy = GENERATE(Buffers::mean, Buffers::chief);
  const int64_t length = GENERATE(7, 40'000);  // few travel with the sums, many by themselves
  constexpr auto kLimits = std::numeric_limits<int64_t>();
  merge_on_each([&](comm::Communicator& group, int rank) {
    const auto values = [&](int64_t of) {
      auto all = at::full({length}, of - 3, at::kLong);
      const std::vector<int64_t> some{kLimits.min() + of, kLimits.max() - of, -(int64_t{1} << 32) - of,
                                      (int64_t{1} << 53) + of, -of};
      for (size_t i = 0; i < some.size(); ++i) all[static_cast<int64_t>(i)] = some[i];
      return all;
    };
    const DeviceBuffers::Tensors tensors{values(rank)};
    DeviceBuffers buffers;
    merge(group, buffers, tensors, 1, 2, policy);
    const auto expected = policy == Buffers::chief ? values(0) : values(0).maximum(values(1));
    if (!tensors[0].equal(expected)) throw std::runtime_error("an integer is wrong");
  });
}

TEST_CASE("buffers that are replaced by others of another size are merged", "[window]") {
  merge_on_each([&](comm::Communicator& group, int rank) {
    DeviceBuffers buffers;
    for (const int64_t length : {3, 5000, 2}) {
      const DeviceBuffers::Tensors tensors{at::full({length}, rank, at::kFloat), at::full({length}, rank, at::kInt)};
      merge(group, buffers, tensors, 1, 2);
      MUSTER_CHECK(tensors[0].eq(0.5).all().item<bool>());
      MUSTER_CHECK(tensors[1].eq(1).all().item<bool>());
    }
  });
}

TEST_CASE("what a replica wrote becomes the mean by weight, and the largest integer", "[window]") {
  CHECK(merged(Buffers::mean, 4) == std::vector<double>{2, 0.1, 7});
}

TEST_CASE("with the chief's buffers replicas have replica 0's", "[window]") {
  CHECK(merged(Buffers::chief, 4) == std::vector<double>{1, 0.1, 1});
}

TEST_CASE("a window without weight leaves every replica's buffers alone", "[window]") {
  CHECK(merged(Buffers::mean, 0) == std::vector<double>{5, 0.1, 7});
}

TEST_CASE("buffers that nobody writes stay as they are on a device", "[device]") {
  struct Constants : torch::nn::Module {
    Constants()
        : last(register_module("last", torch::nn::Linear(7, 1))),
          mask(register_buffer("mask", at::ones({3, 3}, at::kBool).tril())),
          turns(register_buffer("turns", at::polar(at::ones({3}), at::linspace(0, 1, 3)))),
          wide(register_buffer("wide", at::full({1}, 0.1).expand({4}))),
          third(register_buffer("third", at::full({5}, 1.0 / 3))) {}
    at::Tensor forward(const at::Tensor& x) { return last(x); }

    torch::nn::Linear last;
    at::Tensor mask, turns, wide, third;
  };
  MirroredStrategy strategy({"cpu", "cpu"});
  auto model = strategy.prepare([] { return std::make_shared<Constants>(); });
  optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  strategy.prepare(optimizer);
  std::vector<at::Tensor> before;
  for (const auto& buffer : model->buffers()) before.push_back(buffer.clone());
  for (int step = 0; step < 3; ++step) {
    strategy.step([&](const at::Tensor& x) { return model->forward(x).square().mean(); }, batch(9, step));
  }
  check_same(model->buffers(), before);
}
