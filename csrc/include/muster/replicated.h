// A prepared module: one copy for each replica of this worker.
#pragma once

#include <torch/nn/module.h>

#include <concepts>
#include <memory>
#include <utility>
#include <vector>

namespace muster {

class StrategyCore;

namespace detail {
/// The calling replica's index within this worker; 0 outside a step.
size_t current_or_first(const StrategyCore& core);
}  // namespace detail

/// Inside a step the current replica's module, outside a step replica 0's. Parameters are shared by the replicas of
/// this worker, so what is written to replica 0's between steps holds for all; its buffers and training mode
/// (`train()`, `eval()`) are taken over by the other replicas when the next step or run begins. A value; copies refer
/// to the same modules. Thread-safe where the module is.
template <std::derived_from<torch::nn::Module> M>
class Replicated {
 public:
  /// Made by Strategy::prepare.
  Replicated(std::vector<std::shared_ptr<M>> replicas, std::shared_ptr<const StrategyCore> core)
      : replicas_(std::move(replicas)), core_(std::move(core)) {}

  /// The module of the replica whose step or run the calling thread is in (torch's at::ThreadLocalState takes that
  /// along to a thread of the program's own), else replica 0's.
  M* operator->() const { return replicas_[detail::current_or_first(*core_)].get(); }

  /// The current replica's; see operator->.
  M& operator*() const { return *operator->(); }

  /// Replica 0's: the one whose parameters optimizers hold, and the one to save.
  M& module() const { return *replicas_.front(); }
  /// The owner of module().
  const std::shared_ptr<M>& ptr() const noexcept { return replicas_.front(); }

 private:
  std::vector<std::shared_ptr<M>> replicas_;
  std::shared_ptr<const StrategyCore> core_;
};

}  // namespace muster
