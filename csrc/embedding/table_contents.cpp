#include "embedding/table_contents.h"

#include <algorithm>
#include <functional>
#include <span>

namespace muster {

bool are_rows_of(const at::Tensor& rows, int64_t num_rows) {
  if (rows.scalar_type() != at::kLong || rows.dim() != 1 || !rows.is_contiguous()) return false;
  const std::span numbers(rows.const_data_ptr<int64_t>(), static_cast<size_t>(rows.numel()));
  const bool ascend = std::adjacent_find(numbers.begin(), numbers.end(), std::greater_equal<>()) == numbers.end();
  return ascend && (numbers.empty() || (numbers.front() >= 0 && numbers.back() < num_rows));
}

bool are_of_rows(const at::Tensor& values, const at::Tensor& rows) {
  return values.scalar_type() == at::kFloat && values.dim() == 2 && values.size(0) == rows.size(0) &&
         values.is_contiguous();
}

}  // namespace muster
