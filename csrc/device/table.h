// Tables that kernels read.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "device/device.h"

namespace muster {

/// Bytes in a device's memory that are replaced by those of the host. Memory for them, on both sides, is that of the
/// most that there were, rounded up to a power of two, and is not given back. Owned by one thread.
class DeviceBytes {
 public:
  DeviceBytes() = default;
  DeviceBytes(DeviceBytes&&) noexcept = default;
  DeviceBytes& operator=(DeviceBytes&&) noexcept = default;

  /// Copies, ordered by the calling thread's current stream, and waits for nothing. Where they lie, on 16 bytes, until
  /// the next call. Throws InvalidArgument where the copy would be captured into a CUDA graph.
  void* replace(const void* data, size_t bytes, c10::Device device);
  void* data() const { return memory_.mutable_data_ptr(); }

 private:
  struct Staging {
    at::Tensor memory;
    StreamPoint copied;
  };

  Staging& staging_for(size_t bytes, c10::Device device);

  at::Tensor memory_;
  std::vector<Staging> staging_;  // smallest first
};

/// Elements (trivially copyable, with ==) in a device's memory that follow those of the host. Owned by one thread.
template <class T>
class DeviceTable {
 public:
  /// Where elements equal to these lie until the next call; null for none. Copies only where they differ from the last
  /// call's; see DeviceBytes::replace.
  T* follow(const std::vector<T>& elements, c10::Device device) {
    if (!holds(elements)) {
      last_.clear();
      if (!elements.empty()) bytes_.replace(elements.data(), elements.size() * sizeof(T), device);
      last_ = elements;
    }
    return data();
  }

  /// Whether follow would copy nothing.
  bool holds(const std::vector<T>& elements) const { return last_ == elements; }
  /// Of the last call.
  T* data() const { return last_.empty() ? nullptr : static_cast<T*>(bytes_.data()); }

 private:
  std::vector<T> last_;
  DeviceBytes bytes_;
};

}  // namespace muster
