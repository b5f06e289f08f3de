// Buffers that replicas cannot merge, since they differ in size.
#include "window/buffer_sizes.h"

#include <ATen/ops/ones.h>

#include "comm/communicator.h"
#include "cpp/catch.h"
#include "muster/error.h"

using namespace muster;

TEST_CASE("sizes of buffers have a digest", "[window]") {
  const auto digest = [](const std::vector<std::vector<int64_t>>& sizes) {
    std::vector<at::Tensor> buffers;
    for (const auto& each : sizes) buffers.push_back(at::ones(each));
    return digest_of_sizes(buffers);
  };
  CHECK(digest({{2, 3}, {}, {4}}) == digest({{2, 3}, {}, {4}}));
  CHECK(digest({{2, 3}}) != digest({{3, 2}}));
  CHECK(digest({{2, 3}}) != digest({{2}, {3}}));
  CHECK(digest({{}}) != digest({}));
  CHECK(digest({{2, 3}}) < double(uint64_t{1} << 52));
}

TEST_CASE("buffers that have changed in size are named", "[window]") {
  ParameterRegistry registry({c10::Device(c10::kCPU)});
  ModuleTensors module;
  module.parameters.resize(1);
  module.buffers.push_back({{"mean", at::ones({3})}, {"last", at::ones({0, 4})}});
  registry.add(std::move(module), *comm::make_single());
  CHECK_THROWS_WITH(throw_sizes_differ(registry, 0, "sizes differ"), "sizes differ");
  registry.set_buffers(0, 0, {at::ones({3}), at::ones({2, 4})});
  CHECK_THROWS_AS(throw_sizes_differ(registry, 0, "sizes differ"), LayoutMismatch);
  CHECK_THROWS_WITH(throw_sizes_differ(registry, 0, "sizes differ"),
                    Catch::Matchers::Contains("'last' ([2, 4], at prepare() [0, 4]);"));
}
