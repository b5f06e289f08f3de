// Compiled with OpenMP where torch has it: at::parallel_for is a template that runs its body alone otherwise.
#include "device/host_copy.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "kernels/cpu/stream_copy.h"

namespace muster {

namespace {

// Large enough that threads share the work at no cost, small enough that all have some.
constexpr size_t kPieceBytes = size_t{1} << 20;

bool are_alike(const at::Tensor& to, const at::Tensor& from) {
  const auto is_plain = [](const at::Tensor& tensor) {
    return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.is_non_overlapping_and_dense() &&
           !tensor.is_conj() && !tensor.is_neg();
  };
  return is_plain(to) && is_plain(from) && to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() &&
         to.strides() == from.strides();
}

}  // namespace

void copy_all(const std::vector<HostCopy>& copies) {
  std::vector<HostCopy> pieces;
  size_t all_bytes = 0;
  for (const auto& [to, from, bytes] : copies) {
    for (size_t begin = 0; begin < bytes; begin += kPieceBytes) {
      pieces.push_back({static_cast<std::byte*>(to) + begin, static_cast<const std::byte*>(from) + begin,
                        std::min(kPieceBytes, bytes - begin)});
    }
    all_bytes += bytes;
  }
  const auto copy = kernels::copy_for(all_bytes);
  const auto copy_some = [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const auto& [to, from, bytes] = pieces[static_cast<size_t>(p)];
      copy(to, from, bytes);
    }
  };
  const auto count = static_cast<int64_t>(pieces.size());
  // Little takes one thread no time, and in a forked child there are no others: as torch's own copies, which are
  // divided from a size on, too.
  if (all_bytes <= kPieceBytes) return copy_some(0, count);
  at::parallel_for(0, count, 1, copy_some);
}

void copy_all(const std::vector<std::pair<at::Tensor, at::Tensor>>& copies) {
  const at::NoGradGuard no_grad;
  std::vector<HostCopy> plain;
  for (const auto& [to, from] : copies) {
    if (are_alike(to, from)) {
      plain.push_back({to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes()});
      to.unsafeGetTensorImpl()->bump_version();
    } else {
      to.copy_(from);
    }
  }
  copy_all(plain);
}

}  // namespace muster
