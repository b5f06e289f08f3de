// One set of parameters that are updated together (those of the optimizers of a step): its engines, its window, and the
// end of the window: sums to mean gradients, norm, clipping, `.grad`.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gradient/gradient_engine.h"
#include "job/topology.h"
#include "kernels/kernels.h"
#include "muster/options.h"
#include "muster/step.h"
#include "optimizer/flat_optimizer.h"
#include "optimizer/gradient_norm.h"
#include "optimizer/parameter_home.h"
#include "window/agreement.h"
#include "window/brief.h"
#include "window/device_buffers.h"
#include "window/device_window.h"
#include "window/parameter_registry.h"
#include "window/server_window.h"

namespace muster {

/// How a replica's step failed, in words that travel to other ranks; empty `type` means it did not.
struct Failure {
  enum class Kind {
    own,        ///< raised here
    remote,     ///< the consequence of another replica's failure
    transport,  ///< communication broke: nothing can be agreed any more
  };
  std::string type;
  std::string text;
  Kind kind = Kind::own;
  explicit operator bool() const noexcept { return !type.empty(); }
};

/// What a closed window amounted to; equal on all ranks. Where replicas work on streams, the numbers are those of
/// `on_device`; a window that is not dropped here may be there, and `finite` is true unless the host had to look.
struct WindowSums {
  /// The tensors of the step's result, on replica 0's device; empty where the numbers below count.
  std::optional<StepResult> on_device;
  /// With `on_device`, of a closed window.
  DeviceReport report;
  double weight = 0;
  double loss = 0;       ///< mean, or sum for Reduction::sum
  double grad_norm = 0;  ///< before clipping; NaN or inf when not finite
  bool stop_requested = false;
  bool dropped = false;  ///< weight 0: nothing changes
  bool finite = true;
  std::map<std::string, double> metrics;  ///< means over the losses that brought them
  /// Who failed: worker rank, replica, type and text; empty when nobody did.
  struct Failed {
    int rank;
    int replica;
    Failure failure;
  };
  std::vector<Failed> failures;
  /// With locate_non_finite: "parameter 'x' of replica 2", or empty.
  std::string non_finite_at;
};

/// Whether each replica steps what it owns, for all: where they see one another's memory.
bool divides_steps(const Topology& topology, const Groups& groups, const StrategyOptions& options);

/// Methods taking `local_replica` are called by that replica's thread, all others by the thread that steps, while no
/// replica thread is in the set.
class GradientSet {
 public:
  GradientSet(ParameterRegistry& registry, const Topology& topology, const Groups& groups,
              const StrategyOptions& options, const void* strategy, std::vector<int> parameters);

  /// The set's parameters (registry indices, ascending), trainable or not.
  const std::vector<int>& parameters() const noexcept { return parameters_; }
  /// Replaces them, from the next window on.
  void set_parameters(std::vector<int> parameters);

  bool window_open() const noexcept { return micro_batches_ > 0; }
  int micro_batches() const noexcept { return micro_batches_; }

  /// Gradients arriving in steps of other sets are dropped while true.
  void set_ignored(bool ignored) noexcept;

  /// Whether the parameters live on servers that are not connected yet; connect_servers() comes before the first
  /// window.
  bool awaits_servers() const noexcept { return groups_.servers && !servers_; }

  /// Connects, for `optimizer`, whose parameter i has registry index `parameters[i]`: from here on servers step. See
  /// ServerWindow. Throws InvalidArgument if it lacks a parameter to train.
  void connect_servers(const FlatOptimizer& optimizer, const std::vector<int>& parameters, const FlatGroups& groups);

  /// Synchronous, on servers. A worker that joined watches: its windows are empty until it knows what the others do.
  bool watches() const noexcept { return watches_; }
  /// Whether somebody watched in the last window: this one's record then carries a brief.
  bool is_asked() const noexcept { return is_asked_ && !watches_; }
  /// The steps, calls and passes of this window's brief.
  void give_brief(Brief brief) { brief_ = std::move(brief); }
  /// After a window of one that watches, which `stepped` or was dropped: what the others told. It no longer watches
  /// then, nor where there are no others who know.
  std::optional<Brief> learn(bool stepped);

  /// Where the parameters live; null unless on servers.
  ServerWindow* servers() noexcept { return servers_.get(); }
  const std::vector<int>& trainable() const noexcept { return trainable_; }

  /// Opens a micro-batch; rebuilds the engines when the trainable parameters changed and no window is open.
  /// Throws InvalidArgument if no parameter is trainable.
  /// `fused`: as finish_window's.
  void open_micro_batch(bool last, bool fused);

  /// Before a replica's first micro-batch of a window; collective over replicas when the layout is new, and in the
  /// first window. `rows`: samples of a usual part, not above 0 when unknown. Throws LayoutMismatch if the replicas
  /// train different parameters: nothing can be reduced then.
  void open_window(int local_replica, double rows);

  /// Between open_micro_batch of a window's last micro-batch and its close, where workers are to compare what they step
  /// from: the optimizers of the set.
  void agree_on(std::vector<OptimizerStep> steps);

  /// The parameters' values are equal over workers, as a step leaves them: unless other optimizers than flat ones step.
  void note_agreed();

  /// Runs backward of one replica's loss, weighted. Throws InvalidArgument for a loss that is not a 0-dim floating
  /// tensor with a graph, or a metric that is not 0-dim.
  /// Without `overlaps` nothing is reduced before backward has ended.
  void backward(int local_replica, const Loss& loss, double rows, bool overlaps);

  /// Ends the replica's micro-batch, after backward or instead of it (no part, or failed). Never throws for the step's
  /// own errors: returns what the engine found. On the last micro-batch the replica's buckets have left.
  std::exception_ptr end_micro_batch(int local_replica, bool failed) noexcept;

  /// Collective over replicas, on the last micro-batch: the tail, texts of failures, metrics, sparse rows, gradient
  /// order.
  void close_window(int local_replica, const Failure& failure, bool stop_requested);

  /// After all local replicas closed the window: takes the norm and merges buffers. Ends the window. Gradients are left
  /// as means, clipped, in `.grad` of replica 0's parameters; with `fused` as sums, for step().
  WindowSums finish_window(bool fused);

  /// Calls `work(local_replica)` for every local replica, on its thread.
  using OnReplicas = std::function<void(const std::function<void(int local_replica)>& work)>;

  /// After a fused finish_window that was finite: steps `optimizer`, whose parameter i has registry index
  /// `parameters[i]`. With keep_gradients, `.grad` is the mean afterwards. Collective where replicas divide the step.
  void step(FlatOptimizer& optimizer, const std::vector<int>& parameters, const FlatGroups& groups,
            const OnReplicas& on_replicas);

  /// Between a fused finish_window and step(): leaves means in `.grad`, lets `edit` change them there, and takes the
  /// norm of what it left.
  void edit_means(const std::function<void()>& edit);

  /// Gives parameters and optimizer state that other processes see memory of their own, with their values: nobody
  /// writes to them any more. Local; once the group has ended, or before it is left.
  void leave_memory();

  /// Whether there are hooks to call before the optimizers' steps, for the next window's end.
  void set_has_hooks(bool has_hooks) noexcept { has_hooks_ = has_hooks; }
  /// Whether any replica of the job said so for the last window.
  bool hooked() const noexcept { return hooked_; }

  /// After edit_means, what the host steps by: equal on all ranks where hooks are. Empty where the device has it.
  std::string step_scalars() const;
  void set_step_scalars(const std::string& scalars);

  /// The sum of the version counters of the parameters to train: grows when one is written.
  uint64_t versions() const;

  /// Norm of the mean gradient that the last fused window steps from, before clipping; 0-dim.
  at::Tensor grad_norm() const;

  /// What the loss is scaled by, and for how many windows in a row it was finite. Waits for the device.
  kernels::LossScaleState loss_scale() const;
  void set_loss_scale(const kernels::LossScaleState& state);

  /// A local replica failed in a micro-batch that is not the last: the window's end reports it to all ranks.
  void poison(int local_replica, Failure failure) {
    windows_[static_cast<size_t>(local_replica)].failure = std::move(failure);
  }

  /// This process raised for another's failure in a micro-batch that is not the last: the window's end need not again.
  void note_told() noexcept { told_ = true; }
  bool told() const noexcept { return told_; }

  /// Whether the window that was closed last was dropped for a failure.
  bool has_failed() const noexcept { return has_failed_; }

  /// Forgets the window while replica threads may still be in it (an interrupt): the next one starts afresh.
  void abandon_window() noexcept { micro_batches_ = 0; }

  /// Forgets the window without communication.
  void drop_window() noexcept;

  /// Loss, metrics and weight of this worker's share of the open window.
  WindowSums local_sums() const;

  /// Look for the first non-finite gradient in the next window.
  void locate_non_finite(bool locate) noexcept { locate_non_finite_ = locate; }

  const GradientEngine& engine(int local_replica) const { return *engines_[static_cast<size_t>(local_replica)]; }

 private:
  struct Tail;

  /// A buffer as the last window left it. Its values are kept because batch norm writes running statistics without
  /// touching their version counter.
  struct NotedBuffer {
    at::Tensor buffer;
    int64_t version;
    at::Tensor values;
  };

  /// A metric as a replica adds it up.
  struct Metric {
    double sum = 0;     // of weight * value
    double weight = 0;  // of the losses that brought it
    void add(const Metric& other) {
      sum += other.sum;
      weight += other.weight;
    }
  };

  struct ReplicaWindow {
    double unit = 1;  // of its weights
    double weight = 0;
    double weighted_loss = 0;
    double contributions = 0;
    double mean_losses = 0;
    double sum_losses = 0;
    std::map<std::string, Metric> metrics;
    Failure failure;                    // of an earlier micro-batch of this window
    bool began = false;                 // the engine's micro-batch is open
    at::Tensor tail;                    // reduced, after close_window
    at::Tensor integer_buffers;         // reduced
    std::vector<std::string> failures;  // by replica, "type\ntext"
    std::vector<std::string> metric_texts;
    std::vector<std::string> noted_metrics;  // by any replica, where replicas work on streams
  };

  bool layout_is_stale() const;
  void check_no_complex() const;
  void build_engines();
  void find_written();
  void begin_engine(int local_replica, bool contributes, bool overlaps = true, double factor = 1);
  void close_on_host(size_t local_replica, const Tail& tail, const Failure& failure);
  void close_on_device(size_t local_replica, const Tail& tail, const Failure& failure);
  void close_on_servers(const Tail& tail, const Failure& failure);
  void fill_tail(size_t local_replica, const Tail& tail, const Failure& failure, double buffer_share);
  at::Tensor integers_of(size_t local_replica) const;
  std::string metrics_of(size_t local_replica) const;
  void push_rows(const Failure& failure);
  void end_unchanged();
  void check_dense(const Tail& tail);
  bool is_used_on_servers(const Tail& tail, size_t parameter) const;
  void step_on_servers(const Tail& tail, const FlatGroups& groups);
  void finish_on_device(const Tail& tail, bool fused, WindowSums& sums);
  void enqueue_norm(const Tail& tail, const at::Tensor& numbers, double loss_scale, kernels::LossScaleState* scale,
                    const DeviceReport& report);
  void enqueue_means(const std::vector<at::Tensor>& sums, bool clips);
  std::vector<at::Tensor> used_sums(const Tail& tail) const;
  std::vector<at::Tensor> dense_sums(const Tail& tail) const;  // with the values of sparse ones
  Tail tail_of(const at::Tensor& tail) const;
  void merge_buffers(const Tail& tail);
  void note_buffers();
  /// Whether a local replica's buffer was written since note_buffers().
  bool was_written(size_t local_replica, size_t buffer) const;
  void collect_metrics(WindowSums& sums) const;
  void apply_mean(const Tail& tail, double divisor, WindowSums& sums);
  void apply_mean_on_device(const Tail& tail, WindowSums& sums);
  StepResult result_so_far() const;
  void check_agreement(const Tail& tail);
  kernels::WindowOptions window_options(double loss_scale) const;
  void take_norm(const Tail& tail, double loss_scale);
  bool keeps_means_first(const Tail& tail) const;
  void settle(const Tail& tail);
  const Run& owned_run(size_t parameter, size_t local_replica) const;
  bool owned_are_finite(const Tail& tail) const;
  std::vector<FlatGradient> gradients_of(const Tail& tail, const std::vector<int>& parameters,
                                         size_t local_replica) const;
  void step_divided(FlatOptimizer& optimizer, const Tail& tail, const std::vector<FlatGradient>& means,
                    const std::vector<int>& parameters, const FlatGroups& groups, const OnReplicas& on_replicas);
  bool all_finite(const Tail& tail) const;
  bool is_on_device() const noexcept { return !device_windows_.empty(); }
  const at::Tensor& values_of(const Tail& tail, size_t parameter) const;
  int worker_of(int replica) const;

  ParameterRegistry& registry_;
  const Topology& topology_;
  const Groups& groups_;
  const StrategyOptions& options_;
  const void* strategy_;
  std::vector<int> parameters_;
  std::vector<int> trainable_;  // registry indices of the engines' parameters
  std::vector<std::unique_ptr<GradientEngine>> engines_;
  std::vector<ReplicaWindow> windows_;
  std::vector<std::vector<NotedBuffer>> noted_buffers_;  // [local replica][buffer]
  /// Of the last window. Its `unit`: gradients are multiplied by weight / unit, so that sums stay near them.
  kernels::StepScalars scalars_{.divisor = 1, .clip = 1, .norm = 0, .unit = 1, .finite = 1, .dropped = 0};
  bool has_unit_ = false;  // a window with a weight was closed
  kernels::LossScaleState loss_scale_{.scale = 1, .growth_tracker = 0};
  std::optional<LossScale> loss_scaling_;  // empty: the scale stays 1
  std::vector<int> trainable_index_;       // registry index -> index in trainable_, or -1
  // Where replicas work on streams, by local replica; else empty.
  std::vector<std::unique_ptr<DeviceWindow>> device_windows_;
  std::vector<DeviceBuffers> device_buffers_;
  DeviceNorm device_norm_;
  DeviceSegments<kernels::MeanSegment> mean_segments_;
  DeviceReport report_;  // of the last window
  std::unique_ptr<ServerWindow> servers_;
  bool watches_ = false;
  bool is_asked_ = false;
  bool is_fresh_ = false;                // has not the buffers that the others agreed on
  bool was_fresh_ = false;               // when the last window began
  bool adopts_ = false;                  // buffers, whoever wrote them
  bool has_elders_ = true;               // who knew more in the last window
  Brief brief_;                          // to be given
  std::optional<Brief> heard_;           // in the last window
  std::unique_ptr<ParameterHome> home_;  // where other processes step for this one, too
  // State of flat optimizers where other processes step it.
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> common_states_;
  const bool divides_steps_;
  std::vector<int> written_;  // by user code, before the window
  std::optional<Agreement> agreement_;
  int micro_batches_ = 0;
  bool to_owners_ = false;  // the window's sums
  bool told_ = false;       // in this window
  bool has_failed_ = false;
  bool has_hooks_ = false;
  bool hooked_ = false;  // in the last window
  bool last_ = false;
  bool locate_non_finite_ = false;
};

}  // namespace muster
