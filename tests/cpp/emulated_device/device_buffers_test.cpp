// Buffers that replicas on streams merge without waiting for their devices.
#include "window/device_buffers.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/polar.h>
#include <ATen/ops/scalar_tensor.h>

#include "comm/communicator.h"
#include "cpp/catch.h"
#include "cpp/emulated_device/device_job.h"
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

}  // namespace

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
