// Tensors that move to other memory: what comes along, and when the memory where they were is free.
#include "optimizer/own_memory.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>

#include "cpp/catch.h"

using namespace muster;

namespace {

// Six ones, and whether their memory is still in use.
struct Ones {
  float values[6] = {1, 1, 1, 1, 1, 1};
  bool is_in_use = true;
  at::Tensor tensor = at::from_blob(values, {6}, [this](void*) { is_in_use = false; }, at::kFloat);
};

}  // namespace

TEST_CASE("memory that a tensor leaves is free where nobody else may read it", "[optimizer]") {
  Ones alone;
  const auto values = at::full({6}, 2.0F);
  const auto* const home = values.const_data_ptr();
  move_to(values, alone.tensor);
  CHECK_FALSE(alone.is_in_use);
  CHECK(alone.tensor.const_data_ptr() == home);

  Ones of_replicas;
  const auto other = of_replicas.tensor.detach();
  move_to(at::full({6}, 2.0F), of_replicas.tensor, 2);
  CHECK_FALSE(of_replicas.is_in_use);
  CHECK(other.eq(2).all().item<bool>());

  Ones shown;
  {
    const auto view = shown.tensor.view({2, 3});
    move_to(at::full({6}, 2.0F), shown.tensor);
    CHECK(shown.is_in_use);
    CHECK(view.eq(2).all().item<bool>());
    CHECK(shown.values[0] == 1);
  }
  shown.tensor = at::Tensor();
  CHECK_FALSE(shown.is_in_use);
}

TEST_CASE("a part of a storage moves alone", "[optimizer]") {
  const auto whole = at::full({6}, 1.0F);
  const auto part = whole.narrow(0, 2, 3).detach();
  move_to(at::full({3}, 2.0F), part);
  CHECK(part.eq(2).all().item<bool>());
  CHECK(whole.eq(1).all().item<bool>());
}

TEST_CASE("a tensor of its own has its values in other memory", "[optimizer]") {
  Ones ones;
  const auto turned = ones.tensor.view({2, 3}).t();
  give_own_memory(turned);
  CHECK(turned.const_data_ptr() != ones.values);
  CHECK(turned.strides() == at::IntArrayRef({1, 3}));
  CHECK(turned.eq(1).all().item<bool>());
}
