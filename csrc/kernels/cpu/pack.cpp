#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/stream_copy.h"

namespace muster::kernels {
namespace {

size_t bytes_of(const PackItem* items, size_t count) noexcept {
  size_t bytes = 0;
  for (size_t i = 0; i < count; ++i) {
    bytes += items[i].n * (items[i].source_dtype == DType::f64 ? sizeof(double) : sizeof(float));
  }
  return bytes;
}

bool is_plain_copy(const PackItem& item) noexcept {
  return item.source != nullptr && (item.source_dtype == DType::f32 || item.source_dtype == DType::f64);
}

}  // namespace

void pack(const PackItem* items, size_t count, bool accumulate, double factor) noexcept {
  const auto& table = *best_table().table;
  if (accumulate || factor != 1 || !is_streamed(bytes_of(items, count))) {
    return table.pack(items, count, accumulate, factor);
  }
  for (size_t i = 0; i < count; ++i) {
    if (is_plain_copy(items[i])) {
      stream_copy(items[i].destination, items[i].source, items[i].n * size_of(items[i].source_dtype));
    } else {
      table.pack(items + i, 1, accumulate, factor);
    }
  }
}

}  // namespace muster::kernels
