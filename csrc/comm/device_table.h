// Tables that kernels read.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "core/device.h"

namespace muster {

/// Bytes in a device's memory that follow those of the host. Copies are ordered by the calling thread's current stream
/// and wait for nothing. Owned by one thread.
class DeviceTable {
 public:
  DeviceTable() = default;
  DeviceTable(DeviceTable&&) noexcept = default;
  DeviceTable& operator=(DeviceTable&&) noexcept = default;

  /// Where `bytes` bytes equal to those at `data` lie, on 16 bytes, until the next call; null for none. Copies only
  /// what differs from the last call's. Throws InvalidArgument where that would be captured into a CUDA graph.
  void* follow(const void* data, size_t bytes, c10::Device device);

  /// Whether follow would copy nothing.
  bool holds(const void* data, size_t bytes) const noexcept;
  /// Of the last call.
  void* data() const { return last_.empty() ? nullptr : memory_.mutable_data_ptr(); }

  template <class T>
  T* follow(const std::vector<T>& elements, c10::Device device) {
    return static_cast<T*>(follow(elements.data(), elements.size() * sizeof(T), device));
  }

 private:
  struct Staging {
    at::Tensor memory;
    StreamPoint copied;
  };

  std::vector<std::byte> last_;
  at::Tensor memory_;
  std::vector<Staging> staging_;
};

}  // namespace muster
