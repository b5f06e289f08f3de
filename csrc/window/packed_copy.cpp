#include "window/packed_copy.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <utility>

#include "comm/wait_all.h"

namespace muster {

namespace {

constexpr size_t kAloneBytes = size_t{2} << 20;  // such a tensor travels by itself
constexpr size_t kPackedBytes = size_t{32} << 20;

// Whether its memory is its values, without gaps.
bool is_gapless(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor flattened(const at::Tensor& tensor) { return tensor.detach().as_strided({tensor.numel()}, {1}); }

// What carries tensors from one device to others.
class Carrier {
 public:
  virtual ~Carrier() = default;
  // Plain tensors.
  virtual void copy(const at::Tensor& from, const std::vector<at::Tensor>& to) const = 0;
  // A plain tensor of the first device: what is made of it on each other one.
  virtual std::vector<at::Tensor> move(const at::Tensor& from) const = 0;
};

class Copying final : public Carrier {
 public:
  explicit Copying(c10::Device to) : to_(to) {}

  void copy(const at::Tensor& from, const std::vector<at::Tensor>& to) const override {
    to.front().copy_(from, /*non_blocking=*/true);
  }
  std::vector<at::Tensor> move(const at::Tensor& from) const override {
    return {from.to(to_, /*non_blocking=*/true, /*copy=*/true)};
  }

 private:
  const c10::Device to_;
};

class Broadcasting final : public Carrier {
 public:
  explicit Broadcasting(const std::vector<comm::CommunicatorPtr>& ranks) : ranks_(ranks) {}

  void copy(const at::Tensor& from, const std::vector<at::Tensor>& to) const override {
    std::vector<comm::Work> parts = {ranks_.front()->broadcast(from, 0)};
    for (size_t r = 1; r < ranks_.size(); ++r) parts.push_back(ranks_[r]->broadcast(to[r - 1], 0));
    comm::wait_all(parts, ranks_.front()->device());
    for (const auto& target : to) target.unsafeGetTensorImpl()->bump_version();  // as copy_ does
  }
  std::vector<at::Tensor> move(const at::Tensor& from) const override {
    std::vector<at::Tensor> moved;
    for (size_t r = 1; r < ranks_.size(); ++r) {
      moved.push_back(at::empty(from.sizes(), from.options().device(ranks_[r]->device())));
    }
    copy(from, moved);
    return moved;
  }

 private:
  const std::vector<comm::CommunicatorPtr>& ranks_;
};

/// Small tensors of one dtype.
struct Piece {
  std::vector<at::Tensor> from;
  std::vector<std::vector<at::Tensor>> to;  // by device
  std::vector<int64_t> sizes;
  size_t bytes = 0;

  void add(const at::Tensor& source, const std::vector<at::Tensor>& targets) {
    from.push_back(flattened(source));
    to.resize(targets.size());
    for (size_t d = 0; d < targets.size(); ++d) to[d].push_back(flattened(targets[d]));
    sizes.push_back(source.numel());
    bytes += source.nbytes();
  }

  void send(const Carrier& carrier) {
    if (from.empty()) return;
    const auto moved = carrier.move(at::cat(from));
    for (size_t d = 0; d < to.size(); ++d) at::_foreach_copy_(to[d], moved[d].split_with_sizes(sizes));
    *this = {};
  }
};

// `of_device[d][i]` is what from[i] becomes on the d-th device.
void carry_packed(const std::vector<at::Tensor>& from, const std::vector<std::vector<at::Tensor>>& of_device,
                  const Carrier& carrier) {
  std::map<at::ScalarType, Piece> pieces;
  for (size_t i = 0; i < from.size(); ++i) {
    if (from[i].numel() == 0) continue;
    std::vector<at::Tensor> to;
    for (const auto& tensors : of_device) to.push_back(tensors[i].detach());
    if (!is_gapless(from[i]) || !std::all_of(to.begin(), to.end(), is_gapless)) {
      for (const auto& target : to) target.copy_(from[i].detach(), /*non_blocking=*/true);
      continue;
    }
    if (from[i].nbytes() >= kAloneBytes) {
      carrier.copy(from[i].detach(), to);
      continue;
    }
    auto& piece = pieces[from[i].scalar_type()];
    piece.add(from[i], to);
    if (piece.bytes >= kPackedBytes) piece.send(carrier);
  }
  for (auto& [dtype, piece] : pieces) piece.send(carrier);
}

}  // namespace

void copy_packed(const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to) {
  if (!from.empty()) carry_packed(from, {to}, Copying(to.front().device()));
}

void broadcast_packed(const std::vector<std::vector<at::Tensor>>& tensors,
                      const std::vector<comm::CommunicatorPtr>& ranks) {
  carry_packed(tensors.front(), {tensors.begin() + 1, tensors.end()}, Broadcasting(ranks));
}

}  // namespace muster
