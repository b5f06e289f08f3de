// Whether a tensor was written.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

namespace muster {

/// What a write to a tensor changes: equal before and after where nothing was written, by its version counter, its
/// address and, since writes through `.data` leave both alone, a sample of its values where the host has them. A value.
struct WriteTrace {
  int64_t version = -1;
  const void* memory = nullptr;
  uint64_t sample = 0;

  /// `samples`: from how many places values are taken, 2 at least. Where they are not in a cache, these are what it
  /// costs.
  static WriteTrace of(const at::Tensor& tensor, size_t samples = 16);
  bool operator==(const WriteTrace&) const = default;
};

/// Samples of a buffer, which is small: all of it up to 2 KiB.
constexpr size_t kSamplesOfBuffer = 257;

}  // namespace muster
