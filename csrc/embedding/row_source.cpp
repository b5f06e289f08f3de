#include "embedding/row_source.h"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_unique2.h>
#include <ATen/ops/full.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "core/plain_memory.h"
#include "muster/error.h"

namespace muster {

namespace {

struct Sources {
  std::mutex mutex;
  std::unordered_map<const c10::StorageImpl*, std::weak_ptr<RowSource>> by_storage;  // guarded by mutex
};

Sources& sources() {
  static auto* const all = new Sources;  // lives as long as any thread
  return *all;
}

const c10::StorageImpl* storage_of(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

// From a weight to rows of it that were pulled.
class FromWeight : public torch::autograd::Function<FromWeight> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& weight,
                            const at::Tensor& numbers, RowSource* source) {
    context->save_for_backward({numbers});
    context->saved_data["sizes"] = weight.sizes();
    return source->pull(numbers);
  }

  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* context,
                                          std::vector<at::Tensor> gradients) {
    const auto numbers = context->get_saved_variables().front();
    const auto& gradient = gradients.front();
    at::Tensor indices;
    at::Tensor values;
    if (gradient.is_sparse()) {
      indices = numbers.index_select(0, gradient._indices().view({-1})).unsqueeze(0);
      values = gradient._values();
    } else {
      indices = numbers.unsqueeze(0);
      values = in_plain_memory(gradient).contiguous();
    }
    const auto sizes = context->saved_data["sizes"].toIntVector();
    return {at::_sparse_coo_tensor_unsafe(indices, values, sizes, values.options().layout(at::kSparse)), at::Tensor(),
            at::Tensor()};
  }
};

}  // namespace

at::Tensor make_row_stub(int64_t num_rows, int64_t dim) {
  return at::full({1}, std::numeric_limits<float>::quiet_NaN(), at::kFloat).as_strided({num_rows, dim}, {0, 0});
}

bool is_row_stub(const at::Tensor& weight) {
  return weight.defined() && weight.layout() == at::kStrided && weight.device().is_cpu() && weight.dim() == 2 &&
         weight.scalar_type() == at::kFloat && weight.stride(0) == 0 && weight.stride(1) == 0 && weight.numel() > 0 &&
         weight.storage().nbytes() == sizeof(float) && std::isnan(*weight.const_data_ptr<float>());
}

void set_row_source(const at::Tensor& stub, const std::shared_ptr<RowSource>& source) {
  auto& all = sources();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.by_storage, [](const auto& entry) { return entry.second.expired(); });
  all.by_storage[storage_of(stub)] = source;
}

std::shared_ptr<RowSource> row_source_of(const at::Tensor& weight) {
  if (!is_row_stub(weight)) return nullptr;
  auto& all = sources();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_storage.find(storage_of(weight));
  if (found != all.by_storage.end()) {
    if (auto source = found->second.lock()) return source;
  }
  throw InvalidArgument(
      "an embedding's rows are on parameter servers, and this copy of it is not connected to them: its strategy takes "
      "the first step later, was closed, or has another copy, or no prepared optimizer steps its weight (give it that, "
      "with requires_grad)");
}

std::optional<PulledRows> pull_rows(const at::Tensor& weight, const at::Tensor& ids) {
  const auto source = row_source_of(weight);
  if (!source) return std::nullopt;
  const auto [numbers, places, counts] = at::_unique2(ids.to(at::kLong), /*sorted=*/true, /*return_inverse=*/true);
  return PulledRows{FromWeight::apply(weight, numbers, source.get()), places};
}

at::Tensor whole_rows(const at::Tensor& weight) {
  const auto source = row_source_of(weight);
  return source ? source->whole() : weight;
}

}  // namespace muster
