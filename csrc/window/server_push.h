// The sums of a worker's gradients on their way to parameter servers.
#pragma once

#include <cstddef>
#include <functional>
#include <utility>

#include "comm/communicator.h"
#include "gradient/bucket_reduction.h"
#include "gradient/buckets.h"

namespace muster {

/// Adds the worker's replicas, and hands each parameter's sum over the window to servers, which add over workers. The
/// first replica does so for all.
class ServerPush final : public BucketReduction {
 public:
  /// Takes a parameter's sum, a view of its bucket, which stays as it is until the window ends: ServerWindow::take.
  using Take = std::function<void(size_t parameter, const at::Tensor& sum)>;

  /// Local. The ranks of `replicas` are the worker's, and all of them have the same buckets. Both references outlive
  /// this. `take` is rank 0's, called by who advances or awaits a bucket's Work, which throws what it throws.
  ServerPush(comm::Communicator& replicas, const Buckets& buckets, Take take)
      : replicas_(replicas), buckets_(buckets), take_(std::move(take)) {}

  /// Done once servers were handed the bucket's sums, or, of another rank than 0, those are in rank 0's bucket.
  comm::Work reduce(size_t bucket) override;

 private:
  class Delivery;

  comm::Communicator& replicas_;
  const Buckets& buckets_;
  const Take take_;
};

}  // namespace muster
