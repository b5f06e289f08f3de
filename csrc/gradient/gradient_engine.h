// GradientEngine turns the gradients of one replica's backward passes into sums over all replicas: it hooks autograd,
// packs gradients into the buckets of a FlatLayout and reduces the buckets while backward runs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/queued_operations.h"
#include "core/flat_layout.h"
#include "device/device.h"
#include "gradient/buckets.h"
#include "gradient/device_pack.h"
#include "gradient/layout_check.h"
#include "gradient/packing.h"
#include "gradient/reductions.h"

namespace muster {

struct GradientEngineOptions {
  int64_t bucket_bytes = 8 << 20;
  int64_t first_bucket_bytes = 1 << 20;
  int64_t last_bucket_bytes = 0;
  /// Where sums go to their owners alone, gradients of so many bytes are read where autograd left them. Smaller ones
  /// are packed as long as a cache has them, and their memory is used again while it is there.
  size_t least_lent_bytes = size_t{4} << 20;
  double norm_type = 2;  ///< of the statistics; see kernels::grad_stats
  /// What fp32 buckets travel in; empty: fp32.
  std::optional<at::ScalarType> wire;
  /// Launch buckets from hooks. False where the transport cannot order them against the step's own collectives.
  bool overlap = true;
  Receive receive = Receive::yes;
  /// Takes the place of reducing over the ranks; empty: AllReduction, and OwnerReduction where it is possible.
  Reductions::Make make_reduction;
  /// A parameter whose gradients were only sparse keeps its place in a bucket.
  bool keeps_sparse_slots = false;
  /// A group over the same ranks for what the host tells; null: the gradients' own, whose tensors are on the host.
  comm::CommunicatorPtr control;
  /// Identity of the strategy, compared with ReplicaContext::strategy; and the replica whose parameters these are.
  const void* strategy = nullptr;
  int replica = 0;
  /// Other replicas of this process could use these parameters in their step: their backward then throws
  /// InvalidArgument, before the gradient reaches `.grad`.
  bool has_neighbours = false;
};

/// On CUDA (device/device.h's is_streamed) packing and reduction are enqueued on the stream that is current in begin(),
/// and follow the stream that each gradient came on; nothing waits for the device but sparse gradients and the search
/// for non-finite ones.
///
/// Owned by the replica thread: begin, flush, wait and rebuild are called by it; hooks run on autograd's threads while
/// it waits for backward, one at a time (torch runs one CPU graph task on one thread). Hooks take no lock, no GIL,
/// never block and never throw: an error is kept and rethrown by flush(). The one exception is a gradient of another
/// replica's step, which is that replica's error and must end its backward: see has_neighbours.
///
/// A window is `open_window()` and a sequence of micro-batches: `begin(...)`, backward, `flush()`, ending with one that
/// is `last`, whose flush launches every bucket; `wait()` then ends the window. `.grad` of every parameter is undefined
/// between micro-batches: autograd hands its tensor over instead of adding to one.
///
///   call             may follow                       and leaves
///   open_window()    anything but begin()             an empty window; one that was open is dropped
///   begin()          open_window(), flush()           a micro-batch under way: gradients that come are its
///   abandon()        begin()                          it under way, but what is not packed yet counts as zeros
///   flush()          begin(), abandon()               none under way; with `last` every bucket is launched
///   wait()           the last flush()                 sums in slot(); again: no-op
///   reduce_sparse()  wait()                           sums in sparse_sum()
///   learn_order()    wait()                           a layout to be made by the next open_window()
///   release_...()    wait() and a collective          no gradient that only peers read
///
/// A bucket is pending (parameters of it await gradients), packed (all came, or flush() filled it up with zeros), and
/// launched: those of the last micro-batch, in the layout's order, each as soon as it and all before it are packed.
/// A gradient that comes for a packed bucket is added to it; for a launched one it is LayoutMismatch.
/// Until the order is learned, and for a parameter that has had no gradient yet, nobody knows how many gradients come:
/// its bucket is packed by flush().
class GradientEngine final : private comm::QueuedOperations {
 public:
  struct MicroBatch {
    bool first = true;               ///< of the window: buckets are overwritten
    bool last = true;                ///< of the window: buckets are reduced
    bool contributes = true;         ///< false: gradients of this micro-batch are dropped (its weight is 0)
    double factor = 1;               ///< what its gradients are multiplied by on their way into the sums
    const double* gate = nullptr;    ///< on a device, in its memory: instead of `factor`; 0: as if nothing contributed
    bool to_owners = false;          ///< the sums go to their owners alone, where owners() is not null
    bool locate_non_finite = false;  ///< look for non-finite values before reducing; see first_non_finite()
    std::shared_ptr<const Shards> shards = {};  ///< not null: equal on all, and who gets which sums
  };

  /// Local. Hooks every parameter. Throws InvalidArgument as FlatLayout does.
  GradientEngine(std::vector<NamedParameter> parameters, comm::CommunicatorPtr communicator,
                 const GradientEngineOptions& options);
  ~GradientEngine() override;
  GradientEngine(const GradientEngine&) = delete;
  GradientEngine& operator=(const GradientEngine&) = delete;

  /// Opens a window, before its first micro-batch. Collective when buckets are not allocated yet (the first window, and
  /// the one after an order was learned that differs from the guess): throws LayoutMismatch naming a parameter if the
  /// layouts of the ranks differ.
  void open_window();

  /// Opens a micro-batch, right before its backward; local. A gradient that arrives during a step before begin() means
  /// that the step function called backward(): an error.
  void begin(const MicroBatch& micro_batch);

  /// Packs what hooks have not packed, contributes zeros for parameters without a gradient, and, on the last
  /// micro-batch, launches the remaining buckets. Does not block. Throws what a hook stored, after having launched
  /// everything, so that peers do not wait.
  void flush();

  /// The window's buckets, for a scope that is open while they may leave. Those that are packed are ready; until the
  /// next flush() they can be held. What is wrong with one is thrown by that.
  comm::QueuedOperations& queue() noexcept { return *this; }

  /// Gives up the micro-batch's gradients (the step failed): what is not packed is dropped; flush() still launches
  /// every bucket.
  void abandon() noexcept;

  /// Collective on the last micro-batch. Blocks until every bucket holds its sum.
  void wait();

  /// Where this micro-batch's gradients had best come: for GradientMemory::Scope around backward. May be null.
  GradientMemory* memory() const noexcept { return reductions_ ? reductions_->memory() : nullptr; }

  /// Local, after a collective that the others issued after their wait(): lets go of gradients that they read in place.
  void release_gradients() noexcept;

  /// While true, gradients that arrive belong to a step of other optimizers, and are dropped, but for those of the
  /// parameters `left`, which that step takes.
  void set_ignored(bool ignored, const std::vector<size_t>& left = {});

  /// Makes `.grad` of every parameter undefined.
  void clear_gradients() noexcept;

  /// Adds this replica's part of the counters that travel in the tail: for parameter p, counts[p] grows by one if it
  /// had a dense gradient in the window, counts[num_parameters() + p] if a sparse one.
  void add_counts(double* counts) const noexcept;

  /// Collective. Replaces the window's sparse gradients by their sums over replicas, for the parameters whose sparse
  /// count (reduced over all ranks) is positive. Rows are coalesced and added along the tree.
  void reduce_sparse(const double* counts);

  /// The sum of a parameter's sparse gradients, coalesced, after reduce_sparse; undefined if it had none.
  const at::Tensor& sparse_sum(size_t parameter) const noexcept { return states_[parameter].sparse; }

  /// Collective, after wait() of the first window: rank 0's gradient order becomes the layout's, and parameters whose
  /// gradients were only sparse leave it. Takes effect at the next open_window(), where the order differs from the one
  /// in use. No-op once learned.
  void learn_order(const double* counts);

  /// The first parameter whose local gradient was not finite in this window, or -1; see MicroBatch::locate_non_finite.
  int first_non_finite() const noexcept { return first_non_finite_; }

  /// Who owns what, where sums can go to owners alone; else, and before the first window, null. With
  /// MicroBatch::to_owners, as with MicroBatch::shards, a slot holds the sum in the runs of this rank alone after
  /// wait().
  const OwnerReduction* owners() const noexcept { return reductions_ ? reductions_->owners() : nullptr; }

  size_t num_parameters() const noexcept { return states_.size(); }
  const std::vector<NamedParameter>& parameters() const noexcept { return buckets_.parameters(); }
  const FlatLayout& layout() const noexcept { return buckets_.layout(); }

  /// Dense sums by parameter, with the parameter's sizes and the slot's strides, in the accumulation dtype (complex
  /// where the parameter is, whose bucket has real and imaginary parts): a view of the bucket or, after wait() of sums
  /// that go to owners, the gradient itself (BucketReduction::sum_of). Undefined for a parameter that is not in the
  /// layout (sparse only).
  const at::Tensor& slot(size_t parameter) const noexcept;

  /// Whether the parameter still has the accumulator that is hooked: a change of dtype makes another one.
  bool watches(size_t parameter) const;

  /// Number of collectives launched since construction: buckets only.
  int64_t launches() const noexcept { return launched_.count; }

 private:
  struct Hook;
  struct NeighbourHook;
  /// Of a micro-batch.
  struct BucketState {
    size_t pending = 0;  // parameters whose gradients have not all come
    bool packed = false;
  };
  /// Of buckets.
  struct Launches {
    std::vector<comm::Work> works;  // of the window
    size_t next = 0;                // in the window: buckets before it are launched
    int64_t count = 0;              // since construction
    bool is_held = false;           // packed ones leave by issue() and flush() alone
  };

  void on_gradient(size_t parameter, const std::vector<at::Tensor>& handed_over);
  void take_sparse(size_t parameter);
  void make_hooks();
  void lay_out(const std::vector<int>& order);
  void allocate_buckets();
  bool reads_gradients() const noexcept { return reductions_ && reductions_->reads_gradients(); }
  bool drops() const noexcept { return abandoned_ || !micro_batch_.contributes; }
  at::Tensor factor() const;
  void join_stream(const at::Tensor& gradient);
  comm::Communicator& control() const noexcept { return options_.control ? *options_.control : *communicator_; }
  void pack(size_t bucket);
  void launch_ready();
  void launch_next();
  void poll_works();

  int64_t num_issued() const noexcept override { return static_cast<int64_t>(launched_.next); }
  int64_t num_ready() const noexcept override;
  void issue(int64_t count) noexcept override;
  void hold() noexcept override { launched_.is_held = true; }
  void let_go() noexcept override;
  void keep_error(std::exception_ptr error) noexcept;
  void locate_non_finite(const Bucket& bucket);

  comm::CommunicatorPtr communicator_;
  GradientEngineOptions options_;
  Buckets buckets_;
  std::vector<GradientState> states_;        // by parameter
  std::vector<BucketState> bucket_states_;   // by bucket; empty where reductions_ is null
  std::unique_ptr<Reductions> reductions_;   // null until the layout's first window
  std::unique_ptr<DevicePack> device_pack_;  // null on the CPU
  GradientOrder order_;
  std::vector<std::unique_ptr<Hook>> hooks_;
  MicroBatch micro_batch_;
  std::optional<c10::Stream> stream_;       // of the micro-batch; empty on the CPU
  std::optional<c10::Stream> hook_stream_;  // that was current when the hooks were made
  std::exception_ptr error_;                // of a hook, for flush()
  Launches launched_;
  int first_non_finite_ = -1;
  bool active_ = false;     // between begin and flush
  bool abandoned_ = false;  // the micro-batch
  bool ignored_ = false;
  std::vector<bool> left_;  // while ignored, by parameter: another step takes its gradients; empty: of none
};

}  // namespace muster
