// Whether a tensor was written.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace muster {

/// What a write to a tensor changes: equal before and after where nothing was written, by its version counter, its
/// address and, since writes through `.data` leave both alone, a sample of its values where the host has them. A value.
struct WriteTrace {
  int64_t version = -1;
  const void* memory = nullptr;
  uint64_t sample = 0;

  static WriteTrace of(const at::Tensor& tensor);
  bool operator==(const WriteTrace&) const = default;
};

}  // namespace muster
