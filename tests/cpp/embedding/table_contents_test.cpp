#include "embedding/table_contents.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "cpp/catch.h"

using namespace muster;

TEST_CASE("rows of a table ascend within it, whatever a file says they are", "[embedding]") {
  const auto rows = [](const std::vector<int64_t>& numbers) { return at::tensor(numbers, at::kLong); };
  CHECK(are_rows_of(rows({0, 3, 9}), 10));
  CHECK(are_rows_of(at::empty({0}, at::kLong), 0));
  CHECK_FALSE(are_rows_of(rows({0, 3, 10}), 10));
  CHECK_FALSE(are_rows_of(rows({-1, 3}), 10));
  CHECK_FALSE(are_rows_of(rows({3, 3}), 10));
  CHECK_FALSE(are_rows_of(rows({4, 3}), 10));
  CHECK_FALSE(are_rows_of(rows({0, 1}).to(at::kFloat), 10));
  CHECK_FALSE(are_rows_of(rows({0, 1}).unsqueeze(0), 10));
  CHECK_FALSE(are_rows_of(at::zeros({2, 3}, at::kLong).select(1, 0), 10));
  CHECK(are_of_rows(at::ones({2, 5}), rows({0, 1})));
  CHECK_FALSE(are_of_rows(at::ones({3, 5}), rows({0, 1})));
  CHECK_FALSE(are_of_rows(at::ones({2}), rows({0, 1})));
  CHECK_FALSE(are_of_rows(at::ones({5, 2}).t(), rows({0, 1, 2, 3, 4}).slice(0, 0, 2)));
  CHECK_FALSE(are_of_rows(at::ones({2, 5}, at::kDouble), rows({0, 1})));
}
