// The gradient engines of a set of parameters, and the sums that they hold after a window.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "core/ownership.h"
#include "gradient/gradient_engine.h"
#include "job/topology.h"
#include "muster/options.h"
#include "optimizer/flat_optimizer.h"
#include "window/parameter_registry.h"
#include "window/server_push.h"
#include "window/tail.h"

namespace muster {

/// One engine a local replica, over the parameters that are trained: trainable parameter p has registry index
/// `trainable()[p]`. A sum is dense, or the coalesced rows of sparse gradients; its values are in the accumulation
/// dtype. Engines are used by their replicas' threads in a step, everything else by the stepping thread.
class GradientSums {
 public:
  GradientSums(ParameterRegistry& registry, const Topology& topology, const Groups& groups,
               const StrategyOptions& options, const void* strategy);

  const std::vector<int>& trainable() const noexcept { return trainable_; }
  /// 0 before build().
  size_t num_engines() const noexcept { return engines_.size(); }
  GradientEngine& engine(size_t local_replica) const noexcept { return *engines_[local_replica]; }

  /// A window begins for `parameters` (registry indices, ascending). Returns whether the engines are not those of
  /// them as they are: then build() comes first.
  bool begin_window(const std::vector<int>& parameters);

  /// The first of the window's parameters that requires gradients, and did not when it began; -1 where there is none.
  int first_untrained() const;

  /// Null: gradients are reduced here.
  using Deliver = ServerPush::Take;
  /// Makes engines for those of `parameters` that require gradients. Throws InvalidArgument if none does.
  void build(const std::vector<int>& parameters, const Deliver& deliver);

  /// Whether the open window's sums go to their owners alone; see GradientEngine::MicroBatch::to_owners.
  void set_to_owners(bool to_owners) noexcept { to_owners_ = to_owners; }
  bool go_to_owners() const noexcept { return to_owners_; }

  /// Who steps which elements of a window's sums.
  struct Division {
    /// Not null: sums go to those alone that step from them; by replica of the job. See ShardReduction.
    std::shared_ptr<const Shards> receivers = nullptr;
    /// Not null: this process's devices divide steps; by local replica, each of which has the sums of its own.
    std::shared_ptr<const Shards> devices = nullptr;
  };
  void set_division(Division division) noexcept { division_ = std::move(division); }
  const Division& division() const noexcept { return division_; }
  /// What counts of each of dense(tail) for whom has `shard`, so that every element counts for one. Rows are the same
  /// for all, and count where `has_rows`.
  std::vector<Run> runs_in(const std::vector<Run>& shard, const Tail& tail, bool has_rows) const;
  /// Collective over replicas, of several workers. The window's sums go from who has them to all, and nothing is
  /// divided any more.
  void make_whole();

  /// The sum of a parameter; undefined where no replica had a gradient.
  const at::Tensor& sum_of(const Tail& tail, size_t parameter) const;
  /// The sums that there are, in order.
  std::vector<at::Tensor> used(const Tail& tail) const;
  /// The same, with the values of rows for sparse ones, and the parts of complex ones. All but rows are as the engine
  /// of `local_replica` has them.
  std::vector<at::Tensor> dense(const Tail& tail, size_t local_replica = 0) const;
  bool has_sparse(const Tail& tail) const;
  bool are_finite(const Tail& tail) const;

  /// Where replicas divide steps: the run of a parameter that a local replica steps; and whether what the local
  /// replicas own of the sums is finite.
  const Run& owned_run(size_t parameter, size_t local_replica) const;
  bool owned_are_finite(const Tail& tail) const;

  /// Index of a parameter among the trainable ones, or -1; by registry index, which may have come since build().
  int index_of(int parameter) const noexcept {
    const auto at = static_cast<size_t>(parameter);
    return at < trainable_index_.size() ? trainable_index_[at] : -1;
  }
  /// The sums of `parameters` (registry indices), dense ones as the engine of `local_replica` has them.
  std::vector<FlatGradient> gradients_of(const Tail& tail, const std::vector<int>& parameters,
                                         size_t local_replica) const;

  /// Puts the sums into `.grad` of replica 0's parameters, in the parameters' dtype, calls `edit`, and takes over what
  /// it put there. Throws InvalidArgument where that has another layout.
  void edit(const Tail& tail, const std::function<void()>& edit) const;
  /// Puts `gradients` of `parameters` into `.grad`.
  void show(const std::vector<FlatGradient>& gradients, const std::vector<int>& parameters) const;

  /// While true, gradients that arrive are dropped, but for those of `shared` (registry indices), which are left for
  /// somebody else.
  void set_ignored(bool ignored, const std::vector<int>& shared);
  /// Makes `.grad` of every parameter undefined.
  void clear() noexcept;

 private:
  struct Shape {
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
  };

  ParameterRegistry& registry_;
  const Topology& topology_;
  const Groups& groups_;
  const StrategyOptions& options_;
  const void* strategy_;
  std::vector<int> of_window_;
  std::vector<int> trainable_;
  std::vector<Shape> shapes_;         // of those, in replica 0
  std::vector<int> trainable_index_;  // by registry index
  std::vector<std::unique_ptr<GradientEngine>> engines_;
  bool to_owners_ = false;
  Division division_;
};

}  // namespace muster
