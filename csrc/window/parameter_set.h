// One set of parameters that are updated together (those of the optimizers of a step), and its windows of
// micro-batches.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "job/topology.h"
#include "muster/options.h"
#include "muster/step.h"
#include "window/agreement.h"
#include "window/divided_update.h"
#include "window/gradient_sums.h"
#include "window/parameter_registry.h"
#include "window/server_window.h"
#include "window/window.h"

namespace muster {

/// Owns the set's engines and the end of its windows (see Window). Methods taking `local_replica` are called by that
/// replica's thread, all others by the thread that steps, while no replica thread is in the set.
class ParameterSet {
 public:
  ParameterSet(ParameterRegistry& registry, const Topology& topology, const Groups& groups,
               const StrategyOptions& options, const void* strategy, std::vector<int> parameters);

  /// The set's parameters (registry indices, ascending), trainable or not.
  const std::vector<int>& parameters() const noexcept { return parameters_; }
  /// Replaces them, from the next window on.
  void set_parameters(std::vector<int> parameters) { parameters_ = std::move(parameters); }
  /// Those that the engines train.
  const std::vector<int>& trainable() const noexcept { return sums_.trainable(); }

  bool window_open() const noexcept { return micro_batches_ > 0; }
  int micro_batches() const noexcept { return micro_batches_; }

  /// While true, gradients that arrive are of steps of another set, which takes those of the parameters that are
  /// `shared`; others are dropped.
  void set_ignored(bool ignored, const std::vector<int>& shared = {}) { sums_.set_ignored(ignored, shared); }

  /// See ServerWindow::connect, which comes before the first window. Throws InvalidArgument without servers.
  void connect_servers(FlatOptimizer& optimizer, const std::vector<int>& parameters, const FlatGroups& groups);
  /// The exchange with the servers that hold the parameters; null unless connected to some.
  ServerExchange* servers() noexcept { return servers_ == nullptr ? nullptr : servers_->exchange(); }
  /// The window's end, where parameters live on servers, connected or not; else null.
  ServerWindow* server_window() noexcept { return servers_; }

  /// Opens a micro-batch; rebuilds the engines when the trainable parameters changed and no window is open.
  /// Throws InvalidArgument if no parameter is trainable. `last`: of its window; `fused`: as finish_window's. `steps`:
  /// by what it is stepped then. `outsiders`: parameters in no set, which this one compares where they were written.
  /// `computes`: a function gives losses, which may need parameters that the window was opened without.
  void open_micro_batch(bool last, bool fused, const std::vector<OptimizerStep>& steps = {},
                        const std::vector<size_t>& outsiders = {}, bool computes = true);

  /// Before a replica's first micro-batch of a window; collective over replicas when the layout is new, and in the
  /// first window. `rows`: samples of a usual part, not above 0 when unknown. Throws LayoutMismatch if the replicas
  /// train different parameters: nothing can be reduced then.
  /// Returns the replica's buckets, where they may leave in this micro-batch; else null.
  comm::QueuedOperations* open_window(int local_replica, double rows);

  /// Between open_micro_batch of a window's last micro-batch and its close, where workers are to compare what they step
  /// from: the optimizers of the set.
  void agree_on(std::vector<OptimizerStep> steps);

  /// Runs backward of one replica's loss, weighted. Throws InvalidArgument for a loss that is not a 0-dim floating
  /// tensor with a graph, or a metric that is not 0-dim.
  void backward(int local_replica, const Loss& loss, double rows);

  /// Ends the replica's micro-batch, after backward or instead of it (no part, or failed). Never throws for the step's
  /// own errors: returns what the engine found. On the last micro-batch the replica's buckets have left.
  std::exception_ptr end_micro_batch(int local_replica, bool failed) noexcept;

  /// Collective over replicas, on the last micro-batch: see Window::close.
  void close_window(int local_replica, const Failure& failure, bool stop_requested);

  /// After all local replicas closed the window: ends it; see Window::finish.
  WindowSums finish_window(bool fused);

  /// See Window::update.
  void step(FlatOptimizer& optimizer, const std::vector<int>& parameters, const FlatGroups& groups,
            const OnReplicas& on_replicas);

  /// Between a fused finish_window and step(): see Window::leave_means.
  kernels::StepScalars* leave_means(const std::function<void()>& edit);

  /// See DividedUpdate::leave_memory.
  void leave_memory();

  /// The window's end, for what a strategy asks in between.
  Window& window() noexcept { return *window_; }

  /// What ranks tell each other of a window besides its numbers.
  struct Told {
    std::atomic<bool> has_hooks =
        false;            ///< this rank calls hooks before the optimizers' steps, for the next window's end
    bool hooked = false;  ///< a replica of the job said so for the last window
    bool raised = false;  ///< this process raised for another's failure before the window's end, which need not again
    bool failed = false;  ///< the window that was closed last was dropped for a failure
    /// After leave_means(), what the host steps the last window by; else null.
    const kernels::StepScalars* edited = nullptr;
  };
  Told& told() noexcept { return told_; }

  /// A local replica failed in a micro-batch that is not the last: the window's end reports it to all ranks.
  void poison(int local_replica, Failure failure) {
    replicas_[static_cast<size_t>(local_replica)].failure = std::move(failure);
  }

  /// Forgets the window while replica threads may still be in it (an interrupt): the next one starts afresh.
  void abandon_window() noexcept { micro_batches_ = 0; }
  /// Forgets the window without communication.
  void drop_window() noexcept;

  /// Look for the first non-finite gradient in the next window.
  void locate_non_finite(bool locate) noexcept { locate_non_finite_ = locate; }

 private:
  /// What a window knows of a local replica.
  struct Replica {
    bool began = false;  // the engine's micro-batch is open
    Failure failure;     // of an earlier micro-batch of this window
    ClosedWindow closed;
  };

  void check_no_complex() const;
  void build_engines();
  void find_written(const std::vector<size_t>& outsiders);
  void find_written_within();
  void note_if_written(size_t parameter);
  void drop_gradients_of_frozen();
  void divide(bool fused, const std::vector<OptimizerStep>& steps);
  std::shared_ptr<const Shards> shards_of(const std::vector<OptimizerStep>& steps) const;
  std::shared_ptr<const Shards> own_part(const std::shared_ptr<const Shards>& shards) const;
  void follow_division(bool fused);
  void begin_engine(int local_replica, const NotedPart& part);
  std::vector<WindowSums::Failed> failures_of(const std::vector<std::string>& texts) const;
  std::string non_finite_at(const Tail& tail) const;
  void check_agreement(const Tail& tail);

  ParameterRegistry& registry_;
  const Topology& topology_;
  const Groups& groups_;
  const StrategyOptions& options_;
  std::vector<int> parameters_;
  GradientSums sums_;
  std::unique_ptr<DividedUpdate> divided_;  // null: each process steps for itself
  std::unique_ptr<Window> window_;
  ServerWindow* servers_ = nullptr;  // window_, where parameters live on servers
  std::vector<Replica> replicas_;    // by local replica
  std::vector<int> written_;         // parameters, by user code, before the window
  std::optional<Agreement> agreement_;
  /// Who steps which elements, where each of a process's devices steps a shard, or a part of its worker's, and nobody
  /// asks for whole sums: these go to those that step from them alone. Workers must not differ in it when a sum leaves,
  /// and compare what they step by at a window's end: a window's sums go where the last one that they agreed on says.
  struct Division {
    std::vector<int64_t> made_from;        // trainable parameters and, by optimizer, its parameters and their sizes
    std::shared_ptr<const Shards> shards;  // by replica, of the job where they have shards; null: all get everything
  };
  Division agreed_;
  Division next_;  // of the window
  Told told_;
  int micro_batches_ = 0;
  bool last_ = false;                // the open micro-batch closes the window
  const bool devices_divide_;        // see DeviceShares
  const bool replicas_have_shards_;  // likewise
  bool locate_non_finite_ = false;
};

}  // namespace muster
