#include "window/copy_check.h"

#include <ATen/ops/full.h>
#include <ATen/ops/linspace.h>

#include "cpp/catch.h"
#include "cpp/emulated_device/device_job.h"

using namespace muster;
using namespace muster::testing;

TEST_CASE("a check mends copies of any sizes and types, and leaves what is equal", "[device]") {
  std::vector<at::Tensor> tensors = {at::linspace(0, 1, 3, at::kFloat),
                                     at::linspace(0, 9, 300001, at::kFloat),
                                     at::linspace(0, 1, 7, at::kFloat).to(at::kBFloat16),
                                     at::linspace(0, 1, 24, at::kDouble).view({4, 6}).t(),
                                     at::full({0}, 1.F),
                                     at::full({}, 2.F)};
  std::vector<std::vector<at::Tensor>> of_device(3, tensors);
  for (size_t d = 1; d < of_device.size(); ++d) {
    for (auto& tensor : of_device[d]) tensor = tensor.clone();
  }
  std::vector<size_t> all;
  for (size_t p = 0; p < tensors.size(); ++p) all.push_back(p);
  CopyCheck check;
  const auto check_equal = [&] {
    check.mend(of_device, all);
    for (const auto& copies : of_device) check_same(copies, tensors);
  };
  check_equal();
  tensors[1].select(0, 300000).fill_(1);
  tensors[2].neg_();
  of_device[1][3].select(0, 2).fill_(8);
  of_device[2][5].fill_(8);
  check_equal();
  // Others come, and more of them.
  tensors.push_back(at::linspace(0, 1, 200000, at::kFloat));
  for (auto& copies : of_device) copies.push_back(at::full({200000}, 1.F));
  of_device[0].back() = tensors.back();
  all.push_back(tensors.size() - 1);
  check_equal();
  of_device[1][0].fill_(3);
  check.mend(of_device, {1, 2});
  CHECK(of_device[1][0].equal(at::full({3}, 3.F)));
}
