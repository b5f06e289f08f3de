#include "core/write_trace.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace muster {

WriteTrace WriteTrace::of(const at::Tensor& tensor, size_t samples) {
  WriteTrace trace{static_cast<int64_t>(tensor._version())};
  if (!tensor.has_storage()) return trace;
  trace.memory = tensor.const_data_ptr();
  const size_t size = tensor.nbytes();
  if (!tensor.is_cpu() || !tensor.is_non_overlapping_and_dense() || size == 0) return trace;
  const auto* const bytes = static_cast<const std::byte*>(trace.memory);
  const size_t last = size < sizeof(uint64_t) ? 0 : size - sizeof(uint64_t);
  for (size_t i = 0; i < samples; ++i) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + last * i / (samples - 1), std::min(sizeof(word), size));
    trace.sample = (trace.sample ^ word) * 0x9E3779B97F4A7C15U;  // as Fibonacci hashing
    trace.sample ^= trace.sample >> 32;                          // or signs would cancel one another
  }
  return trace;
}

}  // namespace muster
