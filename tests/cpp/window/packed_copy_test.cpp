#include "window/packed_copy.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include "cpp/catch.h"
#include "support/operators.h"

using namespace muster;

namespace {

std::vector<at::Tensor> like(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> made;
  for (const auto& tensor : tensors) made.push_back(at::full_like(tensor, 7));
  return made;
}

int operators_for(size_t count) {
  std::vector<at::Tensor> from;
  for (size_t i = 0; i < count; ++i) from.push_back(at::randn({3, 5}));
  const auto to = like(from);
  const testing::OperatorCount operators;
  copy_packed(from, to);
  int copies = 0;
  for (const auto& [name, calls] : operators.by_name()) {
    if (name != "aten::detach" && name != "aten::as_strided") copies += calls;
  }
  return copies;
}

}  // namespace

TEST_CASE("tensors arrive whatever their sizes, types and strides", "[packed_copy]") {
  std::vector<at::Tensor> from;
  from.push_back(at::randn({3, 5}));
  from.push_back(at::randn({7}).to(at::kBFloat16));
  from.push_back(at::randn({4, 6}).t());
  from.push_back(at::randn({1024, 1024}));  // travels by itself
  from.push_back(at::randn({}));
  from.push_back(at::zeros({0}));
  from.push_back(at::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast));
  from.push_back(at::randn({10, 4}).narrow(1, 1, 2));  // with gaps
  from.push_back(at::randn({5}, at::kDouble));
  for (int i = 0; i < 40; ++i) from.push_back(at::randn({400'000}));  // several pieces
  const auto to = like(from);
  copy_packed(from, to);
  for (size_t i = 0; i < from.size(); ++i) {
    INFO("tensor " << i);
    CHECK(at::equal(to[i], from[i]));
    CHECK(to[i].strides() == at::empty_like(from[i]).strides());
  }
}

TEST_CASE("what lies between a tensor's elements stays", "[packed_copy]") {
  const auto room = at::full_like(at::randn({10, 4}), 7);
  const auto values = at::randn({10, 4}).narrow(1, 1, 2);
  copy_packed({values}, {room.narrow(1, 1, 2)});
  CHECK(at::equal(room.narrow(1, 1, 2), values));
  CHECK(room.narrow(1, 0, 1).eq(7).all().item<bool>());
  CHECK(room.narrow(1, 3, 1).eq(7).all().item<bool>());
}

TEST_CASE("the number of copies does not grow with that of small tensors", "[packed_copy]") {
  CHECK(operators_for(200) == operators_for(2));
  CHECK(operators_for(2) <= 4);
}
