// The check that buffers have the same sizes on all replicas, which merge them where a window ends.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>
#include <vector>

#include "window/parameter_registry.h"

namespace muster {

/// Equal for buffers of equal sizes. Below 2^52, so that it is exact in fp64.
double digest_of_sizes(const std::vector<at::Tensor>& buffers) noexcept;

/// Throws LayoutMismatch that names the buffers of a local replica whose sizes differ from those at prepare(). `what`:
/// how it was found that replicas differ, which is all that it says where there are none.
[[noreturn]] void throw_sizes_differ(const ParameterRegistry& registry, size_t local_replica, const std::string& what);

}  // namespace muster
