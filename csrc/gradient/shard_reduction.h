// Sums of gradients that go to those ranks alone that step from them, by the communicator's own reduction.
#pragma once

#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "core/ownership.h"
#include "gradient/bucket_reduction.h"
#include "gradient/buckets.h"

namespace muster {

/// Reduces every element of a bucket to the rank in whose shard it is.
class ShardReduction final : public BucketReduction {
 public:
  /// Local. References outlive this.
  ShardReduction(comm::Communicator& communicator, const Buckets& buckets, std::shared_ptr<const Shards> shards);

  const std::shared_ptr<const Shards>& shards() const noexcept { return shards_; }

  comm::Work reduce(size_t bucket) override;
  void finish() override;

 private:
  comm::Communicator& communicator_;
  const Buckets& buckets_;
  const std::shared_ptr<const Shards> shards_;
  std::vector<comm::Receivers> receivers_;  // by bucket
};

/// One rank has everything.
std::shared_ptr<const Shards> whole_for(int rank, int size, const Buckets& buckets);

/// The runs of a bucket that belong to ranks, in its order, neighbours of one rank as one.
std::vector<comm::OwnedRun> runs_in_bucket(const Buckets& buckets, size_t bucket, const Shards& shards);

}  // namespace muster
