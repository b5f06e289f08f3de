#include "muster/batch.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>

#include <cstdint>

#include "cpp/catch.h"

using namespace muster;
using Example = torch::data::Example<>;

TEST_CASE("parts are contiguous, and their sizes differ by one at most, larger first", "[data]") {
  CHECK(muster::detail::part_sizes(9, 4) == std::vector<int64_t>{3, 2, 2, 2});
  CHECK(muster::detail::part_sizes(2, 3) == std::vector<int64_t>{1, 1, 0});
  const auto parts = muster::detail::split(at::arange(5), 2);
  CHECK(parts[0].equal(at::arange(3)));
  CHECK(parts[1].equal(at::arange(3, 5)));
}

TEST_CASE("an example is divided with its target, and a tensor without dimensions goes to all", "[data]") {
  const auto parts = muster::detail::split(Example(at::arange(4).view({2, 2}), at::scalar_tensor(7, at::kLong)), 2);
  CHECK(parts[1].data.equal(at::arange(2, 4).view({1, 2})));
  CHECK(parts[1].target.item<int64_t>() == 7);
  CHECK(muster::detail::rows_of(parts[1]) == 1);
}

TEST_CASE("what cannot be divided names the leaf", "[data]") {
  CHECK_THROWS_WITH(muster::detail::split(Example(at::arange(4), at::arange(3)), 2),
                    ContainsSubstring("the batch.target"));
  CHECK_THROWS_WITH(muster::detail::split(at::scalar_tensor(1), 2), ContainsSubstring("no tensor that tells its rows"));
  CHECK_THROWS_WITH(muster::detail::split(3, 2), ContainsSubstring("cannot be divided"));
  CHECK(muster::detail::rows_of(Example(at::arange(4), at::arange(3))) == -1);
}

TEST_CASE("placed tensors start on 64 bytes", "[data]") {
  const auto shifted = at::arange(9).slice(0, 1);
  const auto aligned = muster::detail::aligned(shifted);
  CHECK(reinterpret_cast<uintptr_t>(aligned.const_data_ptr()) % 64 == 0);
  CHECK(aligned.equal(shifted));
  CHECK(muster::detail::aligned(aligned).const_data_ptr() == aligned.const_data_ptr());
}
