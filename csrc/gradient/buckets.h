// The buckets of one replica's gradients: their layout, their memory, and what they travel in.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/flat_layout.h"
#include "core/ownership.h"

namespace muster {

/// One trainable parameter of a replica: a leaf, and the qualified name that all ranks know it by.
struct NamedParameter {
  std::string name;
  at::Tensor tensor;
  bool has_rows = false;  ///< its gradients are sparse, whatever order is learned: no bucket has room for it
};

/// A contiguous range that is reduced at once.
struct Bucket {
  at::Tensor sums;
  at::Tensor wire;              ///< what travels instead, in less precision; undefined where the sums do
  bool wire_is_packed = false;  ///< gradients were packed into `wire`, and not into `sums`
  std::vector<int> parameters;  ///< in the layout's order

  const at::Tensor& travelling() const noexcept { return wire.defined() ? wire : sums; }
};

/// Rounds a bucket's sums to what travels; no-op where they travel themselves, or what travels was packed.
void fill_wire(const Bucket& bucket);
/// Replaces a bucket's sums by what travelled; no-op where they travelled themselves.
void empty_wire(const Bucket& bucket);
/// Likewise, of these elements of it alone.
void empty_wire(const Bucket& bucket, const Run& run);

/// The parameters of a replica and the buckets that they lie in. Parameters are numbered as they were given; one that
/// is left out has sparse gradients alone and lies in no bucket. A complex parameter lies in its bucket as real and
/// imaginary parts. Owned by the replica thread.
class Buckets {
 public:
  explicit Buckets(std::vector<NamedParameter> parameters);

  /// Local, until the next lay_out(): no bucket has room for the parameter from there on.
  void leave_out(size_t parameter) { layout_index_[parameter] = -1; }

  /// Local. Takes a layout, whose memory allocate() gives, and lets go of every view of the one before. `order` is of
  /// parameters; empty: reverse registration order. False, and nothing has changed, where the layout is the one in use.
  /// Throws InvalidArgument as FlatLayout does.
  bool lay_out(const std::vector<int>& order, int64_t bucket_bytes, int64_t first_bucket_bytes,
               int64_t last_bucket_bytes);

  /// Collective: memory for the layout. `wire`: what fp32 buckets travel in; empty: fp32. What travels lies in one
  /// allocation of the communicator, which the next layout takes over where it is large enough.
  void allocate(comm::Communicator& communicator, const std::optional<at::ScalarType>& wire);

  size_t size() const noexcept { return buckets_.size(); }
  const Bucket& operator[](size_t bucket) const { return buckets_[bucket]; }
  /// Where gradients of a micro-batch are packed.
  void set_wire_is_packed(size_t bucket, bool is_packed) { buckets_[bucket].wire_is_packed = is_packed; }

  const std::vector<NamedParameter>& parameters() const noexcept { return parameters_; }
  const FlatLayout& layout() const noexcept { return layout_; }

  /// Whether a bucket has room for the parameter.
  bool holds(size_t parameter) const noexcept { return layout_index_[parameter] >= 0; }
  /// The place of a parameter that is held.
  const Slot& slot(size_t parameter) const { return layout_.slots()[static_cast<size_t>(layout_index_[parameter])]; }
  /// The parameter's sums in its bucket, with its sizes and the slot's strides, complex where it is; undefined for a
  /// parameter that is not held, and before allocate().
  const at::Tensor& view(size_t parameter) const noexcept { return views_[parameter]; }

  /// Whether kernels may read a gradient of the parameter where it is: in its slot's order, of any dtype that they
  /// take.
  bool is_arranged(size_t parameter, const at::Tensor& gradient) const;
  /// A copy that they may read, in the gradient's dtype if they take that. Rare: autograd keeps gradients in the
  /// parameter's own order. Throws InvalidArgument for another shape.
  at::Tensor arranged(size_t parameter, const at::Tensor& gradient) const;

 private:
  at::ScalarType sums_dtype(size_t parameter) const;
  void take_memory(comm::Communicator& communicator, const std::optional<at::ScalarType>& wire);

  std::vector<NamedParameter> parameters_;
  std::vector<int> layout_index_;  // by parameter: its index in layout_, or -1
  FlatLayout layout_;
  at::Tensor memory_;  // bytes, which what travels lies in
  std::vector<Bucket> buckets_;
  std::vector<at::Tensor> views_;  // by parameter
};

}  // namespace muster
