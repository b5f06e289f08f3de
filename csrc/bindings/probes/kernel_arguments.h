// Arguments of kernels on their way from Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>

#include "kernels/cuda/cuda_kernels.h"
#include "muster/error.h"

namespace muster {

using OptionalTensor = std::optional<at::Tensor>;

inline kernels::cuda::Stream stream_of(uintptr_t handle) { return reinterpret_cast<kernels::cuda::Stream>(handle); }

/// Data of a contiguous tensor of `device`.
inline void* data_of(const at::Tensor& tensor, c10::Device device) {
  if (tensor.device() != device) {
    throw InvalidArgument("a tensor of " + tensor.device().str() + " came with one of " + device.str() +
                          "; move all of them to one device");
  }
  if (!tensor.is_contiguous()) throw InvalidArgument("a tensor is not contiguous; call contiguous() on it");
  return tensor.data_ptr();
}

template <class T>
T* data_as(const at::Tensor& tensor, c10::Device device, int64_t count, c10::ScalarType dtype) {
  void* data = data_of(tensor, device);
  if (tensor.scalar_type() != dtype || tensor.numel() < count) {
    throw InvalidArgument(std::string("a tensor needs at least ") + std::to_string(count) + " elements of " +
                          c10::toString(dtype) + ", not " + std::to_string(tensor.numel()) + " of " +
                          c10::toString(tensor.scalar_type()));
  }
  return static_cast<T*>(data);
}

template <class T>
T* optional_data_as(const OptionalTensor& tensor, c10::Device device, int64_t count, c10::ScalarType dtype) {
  return tensor ? data_as<T>(*tensor, device, count, dtype) : nullptr;
}

/// A struct in a tensor of bytes.
template <class T>
at::Tensor bytes_of(const T& value) {
  at::Tensor bytes = at::empty({sizeof(T)}, c10::kByte);
  memcpy(bytes.data_ptr(), &value, sizeof(T));
  return bytes;
}

template <class T>
T from_bytes(const at::Tensor& bytes) {
  const at::Tensor on_host = bytes.cpu();
  T value;
  memcpy(&value, data_as<T>(on_host, c10::kCPU, sizeof(T), c10::kByte), sizeof(T));
  return value;
}

template <class T>
T* struct_in(const at::Tensor& bytes, c10::Device device) {
  return data_as<T>(bytes, device, sizeof(T), c10::kByte);
}

/// (clip_norm, loss_scale, growth, backoff, interval).
inline kernels::WindowOptions window_options(const std::tuple<double, double, double, double, int32_t>& options) {
  const auto& [clip_norm, loss_scale, growth, backoff, interval] = options;
  return {clip_norm, loss_scale, growth, backoff, interval};
}

}  // namespace muster
