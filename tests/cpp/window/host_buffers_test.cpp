// Buffers on the host: who wrote them, and what replicas make of it.
#include "window/host_buffers.h"

#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones.h>

#include "comm/communicator.h"
#include "cpp/catch.h"

using namespace muster;

namespace {

struct TwoReplicas {
  TwoReplicas() : registry({c10::Device(c10::kCPU), c10::Device(c10::kCPU)}), buffers(registry, 2, /*merges=*/true) {
    ModuleTensors module;
    module.parameters.resize(2);
    for (int r = 0; r < 2; ++r) {
      module.buffers.push_back({{"mean", at::full({3}, 0.1)}, {"count", at::ones({2}, at::kLong)}});
    }
    const auto workers = comm::make_single();
    registry.add(std::move(module), *workers);
    buffers.open();
  }

  // Sums both replicas' tails and takes the larger integers, as their communicator would.
  Tail exchange(double first_share, double second_share) {
    std::vector<Tail> tails;
    for (size_t r = 0; r < 2; ++r) {
      tails.push_back(Tail::make(2, 0, 2, buffers.num_doubles(r)));
      buffers.fill(tails.back(), r, r == 0 ? first_share : second_share);
    }
    buffers.set_integers(0, at::maximum(buffers.integers_of(0), buffers.integers_of(1)));
    tails[0].tensor.add_(tails[1].tensor);
    return tails[0];
  }

  const at::Tensor& mean(size_t r) { return registry.buffers(r)[0]; }
  const at::Tensor& count(size_t r) { return registry.buffers(r)[1]; }

  ParameterRegistry registry;
  HostBuffers buffers;
};

}  // namespace

TEST_CASE("floating buffers become their mean by weight, integers the largest", "[window]") {
  TwoReplicas job;
  job.mean(0).fill_(1);
  job.mean(1).fill_(5);
  job.count(1).fill_(7);
  job.buffers.merge(job.exchange(3, 1), 4, /*adopts=*/false);
  for (const size_t r : {size_t{0}, size_t{1}}) {
    CHECK(job.mean(r).eq(2).all().item<bool>());
    CHECK(job.count(r).eq(7).all().item<bool>());
  }
}

TEST_CASE("a buffer that nobody wrote keeps its bits, unless it is adopted", "[window]") {
  TwoReplicas job;
  const auto before = job.mean(0).clone();
  const auto tail = job.exchange(3, 4);
  CHECK(tail.written()[0] == 0);
  job.buffers.merge(tail, 7, /*adopts=*/false);
  CHECK(job.mean(0).equal(before));
  job.buffers.merge(job.exchange(0.5, 1.5), 1, /*adopts=*/true);
  CHECK(job.mean(1)[0].item<double>() == Approx(0.2));
}

TEST_CASE("writes that leave no trace in a version counter are seen", "[window]") {
  TwoReplicas job;
  *job.mean(1).mutable_data_ptr<float>() = 9;
  CHECK(job.exchange(1, 1).written()[0] == 1);
}

TEST_CASE("an expanded buffer stays as it is", "[window]") {
  TwoReplicas job;
  for (const size_t r : {size_t{0}, size_t{1}}) {
    job.registry.set_buffers(0, r, {at::full({1}, static_cast<double>(r)).expand({3}), at::full({2}, r, at::kLong)});
  }
  job.buffers.merge(job.exchange(1, 1), 2, /*adopts=*/false);
  CHECK(job.mean(0)[0].item<double>() == 0);
  CHECK(job.mean(1)[0].item<double>() == 1);
  CHECK(job.count(0).eq(1).all().item<bool>());
}

TEST_CASE("buffers of a lone replica take no part in a window", "[window]") {
  ParameterRegistry registry({c10::Device(c10::kCPU)});
  ModuleTensors module;
  module.parameters.resize(1);
  module.buffers.push_back({{"mean", at::full({3}, 0.1, at::kDouble)}, {"count", at::ones({2}, at::kLong)}});
  const auto workers = comm::make_single();
  registry.add(std::move(module), *workers);
  HostBuffers buffers(registry, 1, /*merges=*/false);
  buffers.open();
  registry.buffers(0)[0].fill_(0.7);
  CHECK(buffers.num_doubles(0) == 0);
  CHECK(buffers.integers_of(0).numel() == 0);
  const auto tail = Tail::make(1, 0, 2, 0);
  buffers.fill(tail, 0, 3);
  buffers.set_integers(0, buffers.integers_of(0));
  const auto version = registry.buffers(0)[0]._version();
  buffers.merge(tail, 3, /*adopts=*/false);
  CHECK(registry.buffers(0)[0]._version() == version);
}
