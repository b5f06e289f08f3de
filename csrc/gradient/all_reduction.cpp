#include "gradient/all_reduction.h"

namespace muster {

comm::Work AllReduction::reduce(size_t b) {
  const auto& bucket = buckets_[b];
  fill_wire(bucket);
  return communicator_.all_reduce(bucket.travelling(), ReduceOp::sum, buckets_.layout().digest() + b, {receive_});
}

void AllReduction::finish() {
  if (!receive_) return;
  for (size_t b = 0; b < buckets_.size(); ++b) empty_wire(buckets_[b]);
}

}  // namespace muster
