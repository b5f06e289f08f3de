// Gradients on their way into buckets: what came for each parameter, and how a micro-batch packs it.
#pragma once

#include <ATen/core/Tensor.h>

namespace muster {

/// The gradients of one parameter, as they come.
struct GradientState {
  int fires = 0;             ///< gradients that came in this micro-batch
  int expected_fires = 0;    ///< learned in the first micro-batch that has any, once the order is; 0: not yet
  bool ready = false;        ///< its fires are complete in this micro-batch
  bool packed = false;       ///< what came in this micro-batch is in the bucket
  bool is_sole = false;      ///< nobody else has the memory of its gradient
  bool dense_used = false;   ///< it had a dense gradient in this window
  bool sparse_used = false;  ///< it had a sparse gradient in this window
  at::Tensor sparse;         ///< the sum of its sparse gradients in this window; undefined without any
};

/// How gradients of a micro-batch go into buckets.
struct Packing {
  bool overwrites = true;  ///< the window's first micro-batch: buckets hold nothing of it yet
  bool drops = false;      ///< gradients count as zeros
  bool may_offer = false;  ///< the reduction may read them where they are
  /// On a device: into Bucket::wire, which becomes the sums once it has travelled. Each part is rounded, where a
  /// gradient comes in two.
  bool to_wire = false;
  double factor = 1;             ///< what they are multiplied by
  const double* gate = nullptr;  ///< on a device, in its memory: instead of `factor`
};

}  // namespace muster
