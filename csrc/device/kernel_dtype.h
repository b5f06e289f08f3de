// The kernel dtype of a torch dtype. Header-only: the kernels room knows no torch.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>

#include "kernels/kernels.h"
#include "muster/error.h"

namespace muster {

/// Empty for a dtype that no kernel serves.
inline std::optional<kernels::DType> find_kernel_dtype(c10::ScalarType dtype) noexcept {
  switch (dtype) {
    case c10::ScalarType::Float:
      return kernels::DType::f32;
    case c10::ScalarType::Double:
      return kernels::DType::f64;
    case c10::ScalarType::BFloat16:
      return kernels::DType::bf16;
    case c10::ScalarType::Half:
      return kernels::DType::f16;
    case c10::ScalarType::Long:
      return kernels::DType::i64;
    case c10::ScalarType::Int:
      return kernels::DType::i32;
    case c10::ScalarType::Short:
      return kernels::DType::i16;
    case c10::ScalarType::Char:
      return kernels::DType::i8;
    case c10::ScalarType::Byte:
      return kernels::DType::u8;
    case c10::ScalarType::Bool:
      return kernels::DType::boolean;
    default:
      return std::nullopt;
  }
}

/// Throws InvalidArgument for a dtype that no kernel serves.
inline kernels::DType kernel_dtype(c10::ScalarType dtype) {
  if (const auto found = find_kernel_dtype(dtype)) return *found;
  throw InvalidArgument(std::string("dtype ") + c10::toString(dtype) +
                        " cannot be communicated; convert the tensor to a floating, integer or bool dtype");
}

}  // namespace muster
