#include "device/host_copy.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cstdint>
#include <vector>

#include "cpp/catch.h"

using namespace muster;

TEST_CASE("tensors are copied, whatever they are like", "[device]") {
  const auto large = at::arange(3'000'001, at::kFloat);  // of several pieces, the last one short
  const auto image = at::arange(24, at::kFloat).view({1, 2, 3, 4});
  struct Case {
    at::Tensor to, from;
  };
  const std::vector<Case> cases = {
      {at::empty({3'000'001}, at::kFloat), large},
      {at::zeros({1, 2, 3, 4}), image.contiguous(at::MemoryFormat::ChannelsLast)},
      {at::zeros({1, 2, 3, 4}).contiguous(at::MemoryFormat::ChannelsLast),
       image.contiguous(at::MemoryFormat::ChannelsLast)},
      {at::zeros({2, 3}, at::kBFloat16), at::arange(6, at::kFloat).view({2, 3})},
      {at::zeros({8}).slice(0, 0, 8, 2), at::arange(4, at::kFloat)},
      {at::zeros({4}, at::kComplexFloat), at::arange(4).to(at::kComplexFloat).mul(c10::complex<float>(0, 1)).conj()},
      {at::empty({0}), at::empty({0})},
  };
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  std::vector<uint32_t> versions;
  for (const auto& [to, from] : cases) {
    copies.emplace_back(to, from);
    versions.push_back(to._version());
  }
  copy_all(copies);
  for (size_t i = 0; i < cases.size(); ++i) {
    CAPTURE(i);
    CHECK(cases[i].to.equal(cases[i].from.to(cases[i].to.scalar_type())));
    CHECK(cases[i].to._version() > versions[i]);
  }
}

TEST_CASE("a parameter is copied into without a trace in autograd", "[device]") {
  const auto parameter = at::zeros({5}).requires_grad_();
  copy_all({{parameter, at::arange(5, at::kFloat)}});
  CHECK(parameter.is_leaf());
  CHECK(parameter.equal(at::arange(5, at::kFloat)));
}
