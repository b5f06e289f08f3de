// FlatLayout maps each parameter, by qualified name, to a bucket, an offset and a shape. Communication, optimizers,
// shards and checkpoints all use it; nothing keeps a second list of parameters.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace muster {

/// What a layout needs to know of one parameter. A value; equal on all ranks.
struct ParameterSpec {
  std::string name;  ///< qualified name of its first use
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  ///< the parameter's own; in elements
  c10::ScalarType dtype = c10::ScalarType::Float;

  bool operator==(const ParameterSpec&) const = default;
};

/// One parameter's place. Elements lie in the parameter's memory order where it is dense and non-overlapping
/// (channels_last and transposed weights keep theirs), else contiguous.
struct Slot {
  int bucket = 0;
  int64_t offset = 0;  ///< in elements of the bucket's dtype; a multiple of 64 bytes
  int64_t numel = 0;
  std::vector<int64_t> strides;  ///< of a view of the slot with the parameter's sizes; in elements
};

/// A contiguous range that is reduced at once.
struct BucketSpec {
  c10::ScalarType dtype = c10::ScalarType::Float;  ///< Float for every dtype up to 32 bits, Double for Double
  int64_t numel = 0;                               ///< including the padding after each slot: a multiple of 64 bytes
  std::vector<int> parameters;                     ///< indices of its parameters, in slot order
};

/// Immutable once built; safe to share between threads.
class FlatLayout {
 public:
  /// Every slot starts on this many bytes: MKL's sums depend on alignment, and bit equality needs one answer.
  static constexpr int64_t kSlotAlignment = 64;

  FlatLayout() = default;

  /// Lays `parameters` (indexed in registration order) into buckets of at most about `bucket_bytes`, filled in `order`
  /// (a permutation of the indices; empty: reverse registration order, in which gradients usually appear). A bucket
  /// holds one accumulation dtype; a parameter larger than `bucket_bytes` has a bucket to itself; the first bucket is
  /// cut at `first_bucket_bytes` so that communication starts early, and the gradients that come last, as many as fit
  /// into `last_bucket_bytes`, have a bucket to themselves (0: they need not). Buckets are numbered by the position of
  /// their last parameter in `order`, which is when they can leave. Throws InvalidArgument for a duplicate name, an
  /// order that is no permutation, or a dtype that has no floating accumulation (integers, complex, quantised), naming
  /// the parameter.
  FlatLayout(std::vector<ParameterSpec> parameters, std::vector<int> order, int64_t bucket_bytes,
             int64_t first_bucket_bytes, int64_t last_bucket_bytes = 0);

  const std::vector<ParameterSpec>& parameters() const noexcept { return parameters_; }
  const std::vector<Slot>& slots() const noexcept { return slots_; }            ///< by parameter index
  const std::vector<BucketSpec>& buckets() const noexcept { return buckets_; }  ///< in launch order
  const std::vector<int>& order() const noexcept { return order_; }

  /// 64-bit hash over names, shapes, slots' strides, dtypes, order and buckets: equal on two ranks exactly when their
  /// layouts agree (up to hash collisions). Independent of machine and build.
  uint64_t digest() const noexcept { return digest_; }

  /// The first difference between two layouts in words ("parameter 'fc.weight' has shape [3, 4] here and [4, 4]
  /// there"), or an empty string.
  static std::string describe_difference(const FlatLayout& here, const FlatLayout& there);

 private:
  size_t beginning_of_last(int64_t bytes) const;

  std::vector<ParameterSpec> parameters_;
  std::vector<Slot> slots_;
  std::vector<BucketSpec> buckets_;
  std::vector<int> order_;
  uint64_t digest_ = 0;
};

/// The dtype in which gradients of `dtype` are accumulated: Double for Double, else Float.
c10::ScalarType accumulation_dtype(c10::ScalarType dtype);

/// True if a tensor of these sizes and strides covers its memory without gaps or overlap, in any order of dimensions.
bool is_dense(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides);

/// Strides of the slot of a parameter of these sizes and strides: see Slot.
std::vector<int64_t> slot_strides(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides);

/// 64-bit FNV-1a; a stable digest for names and texts that ranks compare.
uint64_t stable_hash(std::string_view bytes, uint64_t seed = 0xcbf29ce484222325ULL) noexcept;

}  // namespace muster
