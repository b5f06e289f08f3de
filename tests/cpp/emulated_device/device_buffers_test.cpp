// Buffers that replicas on streams merge without waiting for their devices.
#include "window/device_buffers.h"

#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/polar.h>
#include <ATen/ops/scalar_tensor.h>

#include "comm/communicator.h"
#include "cpp/catch.h"
#include "cpp/emulated_device/device_job.h"
#include "support/operators.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::testing;

namespace {

// Replica 0 wrote 1 into the first of two floating elements, replica 1 wrote 5 there and raised the count; their
// weights are 3 and 1. What both have then: the elements, and the count.
std::vector<double> merged(Buffers policy, double weight_of_all) {
  const auto groups = comm::make_local(2, Seconds(60));
  std::vector<std::vector<double>> seen(2);
  CHECK(run_threads(2, [&](int rank) {
          auto& group = *groups[static_cast<size_t>(rank)];
          const DeviceBuffers::Tensors tensors{at::full({2}, 0.1, at::kDouble), at::ones({1}, at::kLong)};
          DeviceBuffers buffers;
          buffers.note(tensors);
          tensors[0].mutable_data_ptr<double>()[0] = rank == 0 ? 1 : 5;  // past the version counter, as batch norm
          if (rank == 1) tensors[1].fill_(7);
          const auto written = at::full({2}, 0, at::kDouble);
          buffers.add_written(tensors, written.mutable_data_ptr<double>());
          MUSTER_CHECK(written[1].item<double>() == rank);
          group.all_reduce(written, ReduceOp::sum).wait();
          const auto weight = at::scalar_tensor(rank == 0 ? 3 : 1, at::kDouble);
          buffers.reduce(group, tensors, written.const_data_ptr<double>(), weight, policy);
          buffers.wait();
          buffers.merge(tensors, at::scalar_tensor(weight_of_all, at::kDouble), policy);
          const auto* values = tensors[0].const_data_ptr<double>();
          seen[static_cast<size_t>(rank)] = {values[0], values[1], tensors[1].item<double>()};
        }).empty());
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

// Counts of writers, of buffers of integers alone.
std::vector<double> all_written(const DeviceBuffers::Tensors& buffers) {
  std::vector<double> counts;
  for (const auto& buffer : buffers) counts.push_back(at::isIntegralType(buffer.scalar_type(), true) ? 2 : 0);
  return counts;
}

// Operators of the end of a window with so many floating and as many integer buffers; views left out.
int operators_of_a_window(int64_t buffers) {
  std::vector<int> seen(2);
  const auto groups = comm::make_local(2, Seconds(60));
  CHECK(run_threads(2, [&](int rank) {
          auto& group = *groups[static_cast<size_t>(rank)];
          DeviceBuffers::Tensors tensors;
          for (int64_t b = 0; b < buffers; ++b) tensors.push_back(at::full({b + 2}, rank, at::kFloat));
          for (int64_t b = 0; b < buffers; ++b) tensors.push_back(at::full({}, rank, at::kLong));
          DeviceBuffers merged;
          merged.note(tensors);
          const auto written = all_written(tensors);
          const auto weight = at::scalar_tensor(1, at::kDouble);
          const OperatorCount count;
          merged.reduce(group, tensors, written.data(), weight, Buffers::mean);
          merged.wait();
          merged.merge(tensors, weight, Buffers::mean);
          seen[static_cast<size_t>(rank)] = count.without_views();
        }).empty());
  return seen[0];
}

}  // namespace

TEST_CASE("a window's operators do not grow with the number of buffers", "[window]") {
  const int of_three = operators_of_a_window(3);
  CHECK(of_three > 0);
  CHECK(operators_of_a_window(100) == of_three);
}

TEST_CASE("buffers of any dtype and layout become the mean, rounded once", "[window]") {
  const auto groups = comm::make_local(2, Seconds(60));
  const auto failures = run_threads(2, [&](int rank) {
    auto& group = *groups[static_cast<size_t>(rank)];
    const auto own = mixed(rank), first = mixed(0), second = mixed(1);
    DeviceBuffers buffers;
    buffers.note({});  // everything counts as written
    const auto written = all_written(own);
    const auto weight = at::scalar_tensor(rank == 0 ? 3 : 1, at::kDouble);
    buffers.reduce(group, own, written.data(), weight, Buffers::mean);
    buffers.wait();
    buffers.merge(own, at::scalar_tensor(4, at::kDouble), Buffers::mean);
    for (size_t b = 0; b < own.size(); ++b) {
      const auto dtype = own[b].scalar_type();
      const auto wide = own[b].is_complex() ? at::kComplexDouble : at::kDouble;
      const auto mean = (first[b].to(wide) * 3 + second[b].to(wide)) / 4;
      const auto expected = at::isIntegralType(dtype, true) ? first[b].maximum(second[b]) : mean.to(dtype);
      if (!own[b].equal(expected)) throw std::runtime_error("buffer " + std::to_string(b) + " is wrong");
    }
  });
  INFO(failures);
  CHECK(failures.empty());
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
