// Replicas of one process, each on a device of its own: they have no memory in common.
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <array>

#include "cpp/catch.h"
#include "cpp/emulated_device/device_job.h"
#include "cpp/emulated_device/played_link.h"
#include "window/packed_copy.h"

using namespace muster;
using namespace muster::testing;

TEST_CASE("devices without common memory leave the bits of replicas on the host", "[device]") {
  PlayedLink link(Link::nccl);
  Job job{.replicas = GENERATE(2, 3), .apart = true};
  SECTION("plainly") {}
  SECTION("over several micro-batches, clipped") {
    job.options.accumulate = 2;
    job.options.clip_norm = 0.3;
  }
  SECTION("with momentum") { job.make_optimizer = optimizer<optim::SGD>(torch::optim::SGDOptions(1e-2).momentum(0.9)); }
  check_job(job, kNormOfSums);
  CHECK(link.reductions_to_one() > 0);  // replica 0 alone steps from the sums
}

TEST_CASE("what was stepped or written on the first device is broadcast to the others, packed", "[device]") {
  const Apart apart(true);
  PlayedLink link(Link::nccl);
  MirroredStrategy strategy({"cpu", "cpu", "cpu"}, {});
  auto model = strategy.prepare([] { return Net(); });
  optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  strategy.prepare(optimizer);
  std::array<std::vector<at::Tensor>, 3> seen;  // by replica: what its last passes read
  const auto step = [&](int number) {
    strategy.step(
        [&](const at::Tensor& x) {
          auto& parameters = seen.at(static_cast<size_t>(strategy.replica()));
          parameters.clear();
          for (const auto& parameter : model->parameters()) parameters.push_back(parameter.detach().clone());
          return plain_loss(*model, x, number);
        },
        parts_of(batch(9, number), 3));
    for (size_t r = 1; r < seen.size(); ++r) check_same(seen.at(r), seen.at(0));
  };
  step(0);
  const int before = link.broadcasts();
  step(1);
  CHECK(link.broadcasts() == before + 1);
  const at::Tensor bias = model->last->bias;
  // torch counts no write to data, nor to what is frozen.
  model->unused->bias.requires_grad_(false);
  model->unused->bias.data().fill_(3);
  bias.data().fill_(5);
  step(2);
  for (const auto& parameters : seen) {
    CHECK(parameters.back().equal(at::full({2}, 3.F)));
    CHECK(parameters.at(5).equal(at::full({5}, 5.F)));
  }
  CHECK(link.broadcasts() == before + 2);
}

TEST_CASE("a broadcast carries tensors whatever their sizes, types and strides", "[device]") {
  FakeNccl fake;
  const std::vector<c10::Device> devices(3, c10::Device(c10::kCPU));
  const auto ranks = comm::nccl::make_communicators(fake.nccl(), fake.device(), *c10::make_intrusive<c10d::HashStore>(),
                                                    0, 3, devices, std::vector<comm::NcclOptions>(3));
  std::vector<at::Tensor> from = {at::randn({3, 5}),
                                  at::randn({7}).to(at::kBFloat16),
                                  at::randn({4, 6}).t(),
                                  at::randn({1024, 1024}),  // travels by itself
                                  at::randn({}),
                                  at::zeros({0}),
                                  at::randn({10, 4}).narrow(1, 1, 2),  // with gaps
                                  at::randn({5}, at::kDouble)};
  std::vector<std::vector<at::Tensor>> tensors = {from};
  for (int r = 1; r < 3; ++r) {
    auto& to = tensors.emplace_back();
    for (const auto& tensor : from) to.push_back(at::full_like(tensor, 7));
  }
  tensors[1][0].requires_grad_();
  const auto version = tensors[1][0]._version();
  const at::NoGradGuard no_grad;
  broadcast_packed(tensors, ranks);
  for (const auto& to : tensors) check_same(to, from);
  CHECK(tensors[1][0]._version() > version);  // a graph that has saved it is told
  CHECK(fake.count("broadcast 0") == 4);      // three dtypes and the large one
}
