// Sums of gradients over all ranks, for every rank.
#pragma once

#include "gradient/bucket_reduction.h"
#include "gradient/buckets.h"

namespace muster {

/// Reduces whole buckets through the communicator, in the dtype they travel in.
class AllReduction final : public BucketReduction {
 public:
  /// Local. With `receive` false this rank contributes alone, and its buckets are left unspecified. Both references
  /// outlive this.
  AllReduction(comm::Communicator& communicator, const Buckets& buckets, bool receive)
      : communicator_(communicator), buckets_(buckets), receive_(receive) {}

  comm::Work reduce(size_t bucket) override;
  void finish() override;

 private:
  comm::Communicator& communicator_;
  const Buckets& buckets_;
  const bool receive_;
};

}  // namespace muster
