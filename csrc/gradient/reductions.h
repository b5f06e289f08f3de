// The reductions that a replica's buckets may go through, and the choice of one for each micro-batch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "comm/communicator.h"
#include "gradient/bucket_reduction.h"
#include "gradient/buckets.h"
#include "gradient/gradient_memory.h"
#include "gradient/owner_reduction.h"
#include "gradient/shard_reduction.h"

namespace muster {

/// Whether this replica's buckets get the sums; replicas of one process need them once.
enum class Receive : uint8_t {
  yes,
  no,
  first  ///< rank 0's alone do
};

/// Owned by the replica thread.
class Reductions {
 public:
  /// Makes the reduction of buckets that are allocated and outlive it.
  using Make = std::function<std::unique_ptr<BucketReduction>(const Buckets& buckets)>;

  /// Collective, blocking, where ranks see one another's memory and `make` is null: sums can go to their owners alone
  /// there. `make`: takes the place of the others. See those for the rest.
  Reductions(comm::CommunicatorPtr communicator, const Buckets& buckets, const Make& make, Receive receive,
             size_t least_lent_bytes, double norm_type);

  /// Chooses for the micro-batch that begins: OwnerReduction with `to_owners`, where it is possible, else the first.
  void choose(bool to_owners) noexcept;
  /// Chooses ShardReduction, of shards that are the same on all ranks.
  void choose_shards(const std::shared_ptr<const Shards>& shards);
  BucketReduction& chosen() const noexcept { return *chosen_; }

  /// See BucketReduction: of the chosen one.
  bool reads_gradients() const noexcept { return reads_gradients_; }
  /// See BucketReduction: of both.
  void open_window() noexcept;

  /// Null where sums cannot go to owners.
  const OwnerReduction* owners() const noexcept { return owners_.get(); }

  /// Memory for gradients that the chosen reduction reads in place; may be null.
  GradientMemory* memory() const noexcept { return reads_gradients_ ? memory_.get() : nullptr; }

 private:
  comm::CommunicatorPtr communicator_;
  const Buckets& buckets_;
  std::unique_ptr<BucketReduction> whole_;
  std::unique_ptr<OwnerReduction> owners_;
  std::unique_ptr<ShardReduction> shards_;  // of the last shards that were given
  std::unique_ptr<GradientMemory> memory_;
  BucketReduction* chosen_;
  bool reads_gradients_ = false;
};

}  // namespace muster
