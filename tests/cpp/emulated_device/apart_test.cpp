// Replicas of one process, each on a device of its own: they have no memory in common.
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include "cpp/catch.h"
#include "cpp/emulated_device/device_job.h"
#include "cpp/emulated_device/played_link.h"
#include "device/peer_access.h"
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
  SECTION("without peer access") { play_peer_access(false); }
  check_job(job, kNormOfSums);
  play_peer_access(true);
  CHECK(link.reductions_to_one() > 0);
}

TEST_CASE("what was stepped or written on the first device is broadcast to the others, packed", "[device]") {
  const Apart apart(true);
  play_peer_access(false);
  PlayedLink link(Link::nccl);
  WatchedJob job;
  job.step(0);
  const int before = link.broadcasts();
  job.step(1);
  CHECK(link.broadcasts() == before + 1);
  const at::Tensor bias = job.model->last->bias;
  // torch counts no write to data, nor to what is frozen.
  job.model->unused->bias.requires_grad_(false);
  job.model->unused->bias.data().fill_(3);
  bias.data().fill_(5);
  job.step(2);
  for (const auto& parameters : job.seen) {
    CHECK(parameters.back().equal(at::full({2}, 3.F)));
    CHECK(parameters.at(5).equal(at::full({5}, 5.F)));
  }
  CHECK(link.broadcasts() == before + 2);
  play_peer_access(true);
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
