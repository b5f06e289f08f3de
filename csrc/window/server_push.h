// The sums of a worker's gradients on their way to parameter servers.
#pragma once

#include <functional>
#include <utility>

#include "gradient/bucket_reduction.h"
#include "gradient/buckets.h"

namespace muster {

/// Hands each parameter's sum over the window to servers, which add over workers, in place of a reduction here.
class ServerPush final : public BucketReduction {
 public:
  /// Takes a parameter's sum, a view of its bucket, which stays as it is until the window ends: ServerWindow::take.
  using Take = std::function<void(size_t parameter, const at::Tensor& sum)>;

  /// Local. `buckets` outlives this.
  ServerPush(const Buckets& buckets, Take take) : buckets_(buckets), take_(std::move(take)) {}

  comm::Work reduce(size_t bucket) override;

 private:
  const Buckets& buckets_;
  const Take take_;
};

}  // namespace muster
