// Tables that kernels read.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "device/device.h"

namespace muster {

/// A device's memory that kernels write or read, also those of CUDA graphs, which run again with the addresses that
/// they were captured with. Owned by one thread.
class GraphMemory {
 public:
  /// Has room for `bytes`, on 16 bytes: what it had, or memory that nothing was written to.
  void reserve(size_t bytes, c10::Device device);
  /// What was captured so far keeps this memory for as long as this object lives: the next reserve() gives other.
  void leave_to_graphs();
  /// Before a launch with data(): a graph that is being captured reads or writes it.
  void note_launch(c10::Device device);

  void* data() const { return memory_.defined() ? memory_.mutable_data_ptr() : nullptr; }
  const at::Tensor& tensor() const noexcept { return memory_; }

 private:
  at::Tensor memory_;  // uint8
  bool is_in_graph_ = false;
  std::vector<at::Tensor> of_graphs_;  // earlier ones
};

/// Bytes in a device's memory that are replaced by those of the host. Memory for them, on both sides, is that of the
/// most that there were, rounded up to a power of two, and is not given back. Owned by one thread.
class DeviceBytes {
 public:
  DeviceBytes() = default;
  DeviceBytes(DeviceBytes&&) noexcept = default;
  DeviceBytes& operator=(DeviceBytes&&) noexcept = default;

  /// Copies, ordered by the calling thread's current stream, and waits for nothing. Where they lie, on 16 bytes, until
  /// the next call; a CUDA graph that was captured with the bytes before keeps those. Throws InvalidArgument where the
  /// copy would be captured.
  void* replace(const void* data, size_t bytes, c10::Device device);
  /// Before a launch that reads them.
  void note_launch(c10::Device device) { memory_.note_launch(device); }
  void* data() const { return memory_.data(); }

 private:
  struct Staging {
    at::Tensor memory;
    StreamPoint copied;
  };

  Staging& staging_for(size_t bytes, c10::Device device);

  GraphMemory memory_;
  std::vector<Staging> staging_;  // smallest first
};

/// Elements (trivially copyable, with ==) in a device's memory that follow those of the host. Owned by one thread.
template <class T>
class DeviceTable {
 public:
  /// Where elements equal to these lie until the next call, for a launch; null for none. Copies only where they differ
  /// from the last call's; see DeviceBytes::replace.
  T* follow(const std::vector<T>& elements, c10::Device device) {
    if (!holds(elements)) {
      last_.clear();
      const auto* const data = static_cast<const void*>(elements.data());
      if (!elements.empty()) bytes_.replace(data, elements.size() * sizeof(T), device);
      last_ = elements;
    }
    bytes_.note_launch(device);
    return data();
  }

  /// Before a launch that reads what the last follow() left.
  void note_launch(c10::Device device) { bytes_.note_launch(device); }
  /// Whether follow would copy nothing.
  bool holds(const std::vector<T>& elements) const { return last_ == elements; }
  /// Of the last call.
  T* data() const { return last_.empty() ? nullptr : static_cast<T*>(bytes_.data()); }

 private:
  std::vector<T> last_;
  DeviceBytes bytes_;
};

}  // namespace muster
