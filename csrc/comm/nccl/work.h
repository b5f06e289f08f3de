// The Work of an operation that a launcher launches on its rank's stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "comm/nccl/launcher.h"
#include "comm/work.h"

namespace muster::comm::nccl {

/// Of local rank `local`. wait() makes the caller's current stream follow the operation, or blocks the host until it is
/// finished.
class NcclWork final : public Work::Impl {
 public:
  enum class Joins { stream, host };

  NcclWork(std::shared_ptr<Launcher> launcher, int local, LaunchPtr launch, Joins joins,
           std::vector<at::Tensor> outputs = {})
      : launcher_(std::move(launcher)),
        local_(local),
        launch_(std::move(launch)),
        joins_(joins),
        outputs_(std::move(outputs)) {}

  bool advance() override {
    if (is_joined_) return true;
    if (!launcher_->is_finished(local_, *launch_)) {
      launcher_->clique().check();
      return false;
    }
    return true;
  }

  void wait(Milliseconds timeout) override {
    if (is_joined_) return;
    if (timeout.count() < 0) timeout = launcher_->clique().options().timeout;
    launcher_->clique().check();
    if (joins_ == Joins::host) {
      launcher_->await_finished(local_, *launch_, timeout);
    } else {
      launcher_->await_launched(local_, *launch_, timeout);
      launcher_->join(local_, *launch_);
    }
    is_joined_ = true;
  }

  std::vector<at::Tensor> outputs() override { return outputs_; }

 private:
  const std::shared_ptr<Launcher> launcher_;
  const int local_;
  const LaunchPtr launch_;
  const Joins joins_;
  const std::vector<at::Tensor> outputs_;
  bool is_joined_ = false;
};

}  // namespace muster::comm::nccl
