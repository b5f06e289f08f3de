#include "window/packed_copy.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/cat.h>

#include <map>
#include <utility>

namespace muster {

namespace {

constexpr size_t kAloneBytes = size_t{2} << 20;  // such a tensor travels by itself
constexpr size_t kPackedBytes = size_t{32} << 20;

at::Tensor flattened(const at::Tensor& tensor) { return tensor.detach().as_strided({tensor.numel()}, {1}); }

/// Small tensors of one dtype.
struct Piece {
  std::vector<at::Tensor> from;
  std::vector<at::Tensor> to;
  std::vector<int64_t> sizes;
  size_t bytes = 0;

  void add(const at::Tensor& source, const at::Tensor& target) {
    from.push_back(flattened(source));
    to.push_back(flattened(target));
    sizes.push_back(source.numel());
    bytes += source.nbytes();
  }

  void send() {
    if (from.empty()) return;
    const auto moved = at::cat(from).to(to.front().device(), /*non_blocking=*/true, /*copy=*/true);
    at::_foreach_copy_(to, moved.split_with_sizes(sizes));
    *this = {};
  }
};

}  // namespace

void copy_packed(const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to) {
  std::map<at::ScalarType, Piece> pieces;
  for (size_t i = 0; i < from.size(); ++i) {
    if (from[i].numel() == 0) continue;
    if (from[i].nbytes() >= kAloneBytes || !from[i].is_non_overlapping_and_dense()) {
      to[i].detach().copy_(from[i].detach(), /*non_blocking=*/true);
      continue;
    }
    auto& piece = pieces[from[i].scalar_type()];
    piece.add(from[i], to[i]);
    if (piece.bytes >= kPackedBytes) piece.send();
  }
  for (auto& [dtype, piece] : pieces) piece.send();
}

}  // namespace muster
