#include "core/sparse_rows.h"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_unique2.h>
#include <ATen/ops/zeros.h>

#include <tuple>

#include "core/plain_memory.h"

namespace muster {

at::Tensor by_rows(const at::Tensor& gradient) {
  if (!gradient.is_sparse()) return in_plain_memory(gradient).to_sparse(1);
  if (gradient.sparse_dim() == 1) return gradient;
  if (gradient.sparse_dim() == 0) return gradient.to_dense().to_sparse(1);
  const auto whole = gradient.coalesce();
  const auto indices = whole._indices();
  const auto [rows, place, counts] = at::_unique2(indices.select(0, 0), /*sorted=*/true, /*return_inverse=*/true);
  auto sizes = gradient.sizes().vec();
  sizes.front() = rows.numel();
  const auto values = at::zeros(sizes, whole._values().options());
  c10::List<std::optional<at::Tensor>> places({place});
  for (int64_t d = 1; d < whole.sparse_dim(); ++d) places.push_back(indices.select(0, d));
  values.index_put_(places, whole._values());
  return at::_sparse_coo_tensor_unsafe(rows.unsqueeze(0), values, gradient.sizes(),
                                       values.options().layout(at::kSparse))
      ._coalesced_(true);
}

}  // namespace muster
