// Strategy: how a training step is spread over replicas. What it is spread over is chosen by the derived class; the
// training loop is the same for all.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/batch.h"
#include "muster/loader.h"
#include "muster/options.h"
#include "muster/per_replica.h"
#include "muster/reduce_op.h"
#include "muster/replicated.h"
#include "muster/saved_value.h"
#include "muster/step.h"

namespace muster {

class StrategyCore;

/// A value.
struct StepOptions {
  /// Whose parameters take part and are updated; other gradients of the step are dropped. Empty: all prepared
  /// optimizers, as one set. Sets of different steps are equal or disjoint.
  std::vector<std::reference_wrapper<torch::optim::Optimizer>> optimizers = {};
};

namespace detail {

template <class T>
struct ModuleOf {
  using type = T;
};
template <class M>
struct ModuleOf<std::shared_ptr<M>> {
  using type = M;
};
template <class H>
  requires std::derived_from<H, torch::nn::ModuleHolder<typename H::ContainedType>>
struct ModuleOf<H> {
  using type = typename H::ContainedType;
};

template <class H>
concept ModuleHolder =
    requires { typename H::ContainedType; } && std::derived_from<H, torch::nn::ModuleHolder<typename H::ContainedType>>;

template <class B>
struct IsPerReplica : std::false_type {};
template <class B>
struct IsPerReplica<PerReplica<B>> : std::true_type {};

/// While it lives, torch's default CPU generator may be drawn from; afterwards it is as before.
class KeepRandomState {
 public:
  KeepRandomState();
  ~KeepRandomState();
  KeepRandomState(const KeepRandomState&) = delete;
  KeepRandomState& operator=(const KeepRandomState&) = delete;

 private:
  at::Tensor state_;
};

/// What a call knows of its parts without knowing their type.
struct PartsInfo {
  std::vector<int64_t> rows;
  std::shared_ptr<LoaderProgress> loader;
  int64_t batch;                           ///< PerReplica::number
  std::vector<int64_t> samples_left = {};  ///< of a loader's parts
};

template <class B>
PartsInfo info_of(const PerReplica<B>& parts) {
  PartsInfo info{parts.rows(), parts.loader(), parts.number()};
  if (info.rows.empty()) {
    for (const auto& part : parts) info.rows.push_back(rows_of(part));
  } else if (info.loader) {
    for (size_t p = 0; p < parts.size(); ++p) info.samples_left.push_back(samples_left(parts[p], info.rows[p]));
  }
  return info;
}

}  // namespace detail

/// What `prepare` builds a replica's module from: called once for each local replica, it returns the module itself, a
/// std::shared_ptr of one, or a ModuleHolder.
template <class F>
concept ModuleFactory = !detail::ModuleHolder<std::remove_cvref_t<F>> && std::invocable<F&> &&
                        std::derived_from<typename detail::ModuleOf<std::invoke_result_t<F&>>::type, torch::nn::Module>;

/// Externally synchronised: one thread prepares and steps. Inside a step, by the replicas' threads, `device`,
/// `replica`, `reduce`, `gather`, `broadcast`, `stop` and what only tells something (`stopping`, `steps`, `rank`, the
/// counts) may be called, and nothing else. "Collective" means that all workers call it.
class Strategy {
 public:
  struct State;

  virtual ~Strategy();
  Strategy(const Strategy&) = delete;
  Strategy& operator=(const Strategy&) = delete;

  /// Replicas of the whole job.
  int num_replicas() const;
  /// Processes of the job.
  int num_workers() const;
  /// This process's index among the workers.
  int rank() const;
  /// This process's index among the workers of its host.
  int local_rank() const;
  /// Whether this is rank 0.
  bool is_chief() const { return rank() == 0; }
  /// Replicas of this process.
  int num_local_replicas() const;

  /// The current replica's; outside a step, local replica 0's.
  c10::Device device() const;
  /// Job-wide index of the current replica; outside a step, of local replica 0.
  int replica() const;

  /// Windows closed so far.
  int64_t steps() const;

  /// Asks all ranks to end training, as SIGTERM does.
  void stop() noexcept;
  /// True on all ranks from the same window's end on, after stop() or SIGTERM anywhere.
  bool stopping() const;

  /// Prepares a module: `factory` is called once for each local replica, in this thread. Further replicas' draws from
  /// torch's default generator are undone, so that programs draw alike whatever the number of local replicas.
  /// Collective: every worker gets the chief's parameters and buffers. Throws LayoutMismatch naming the first
  /// difference between the ranks' modules, InvalidArgument for a module that another open strategy holds.
  template <ModuleFactory F>
  auto prepare(F&& factory) -> Replicated<typename detail::ModuleOf<std::invoke_result_t<F&>>::type> {
    using M = typename detail::ModuleOf<std::invoke_result_t<F&>>::type;
    return adopt<M>(build<M>(factory), [&](M&) { return build<M>(factory); });
  }

  /// Prepares an existing module, which becomes replica 0's, on that one's device; the others are its clones. Returns
  /// the same replicas if it is prepared already. Throws as above, and InvalidArgument for a module without `clone()`
  /// where there is more than one local replica.
  template <std::derived_from<torch::nn::Module> M>
  Replicated<M> prepare(std::shared_ptr<M> module) {
    if (!module) throw InvalidArgument("prepare() was given an empty module");
    if (const auto* found = find_module(*module)) return Replicated<M>(cast<M>(*found), core());
    return adopt<M>(std::move(module), [](M& first) { return std::dynamic_pointer_cast<M>(clone(first)); });
  }

  /// The module that a ModuleHolder holds (`Net model;` of TORCH_MODULE), as above.
  template <detail::ModuleHolder H>
  auto prepare(const H& holder) {
    return prepare(std::shared_ptr<typename H::ContainedType>(holder.ptr()));
  }

  /// Prepares an optimizer over parameters of prepared modules (of replica 0, as `model->parameters()` gives them
  /// outside a step) and returns it. It must outlive the strategy's last step, save and load. Collective: every worker
  /// gets the chief's state and learning rates. No-op for one that is prepared. Throws InvalidArgument if it has no
  /// parameters, or state of a kind that cannot be sent to other workers; a parameter of no prepared module is an error
  /// at the first step.
  template <std::derived_from<torch::optim::Optimizer> O>
  O& prepare(O& optimizer) {
    add_optimizer(optimizer);
    return optimizer;
  }

  /// See Loader. Collective until the first step: all ranks prepare their loaders in the same order. Throws
  /// LayoutMismatch where they differ in size.
  template <class Dataset>
  auto prepare_loader(Dataset dataset, const LoaderOptions& options = {}) {
    return Loader<Dataset>(*this, std::move(dataset), options);
  }

  /// One micro-batch: calls fn(part) on every local replica at once, each on its own thread and with its own random
  /// stream, differentiates the loss it returns (a Tensor or a Loss) and adds the gradients, weighted. Not called for
  /// an empty part. On CUDA the part's tensors are moved to the replica's device first. When the window closes, after
  /// `accumulate` steps or the last step of a loader's last batch (expected to go into as many as that of the pass
  /// before, or the batch before it), all replicas' gradients are averaged and the optimizers step; without
  /// prepared optimizers `.grad` of the modules' parameters holds the mean. Collective at a window's end. Throws what
  /// fn threw on a replica of this worker, RemoteError for one of another; the window is then dropped on all ranks and
  /// the strategy stays usable. Throws InvalidArgument for a loss that cannot be differentiated and for a backward()
  /// inside fn.
  template <class F, class B>
  StepResult step(F&& fn, const PerReplica<B>& batch, const StepOptions& options = {}) {
    static_assert(std::is_invocable_v<F&, const B&>, "the step function must be callable with a part of the batch");
    static_assert(std::is_convertible_v<std::invoke_result_t<F&, const B&>, Loss>,
                  "the step function must return the loss as a Tensor, or a muster::Loss");
    check_parts(batch.size());
    return step_parts([&](int r) -> Loss { return on_device(fn, batch[static_cast<size_t>(r)]); },
                      detail::info_of(batch), options);
  }

  /// A batch from elsewhere is this worker's part, divided over its local replicas as batch.h says. With one local
  /// replica it may be anything. Throws InvalidArgument for a batch that cannot be divided.
  template <class F, class B>
    requires(!detail::IsPerReplica<B>::value)
  StepResult step(F&& fn, const B& batch, const StepOptions& options = {}) {
    return step(fn, PerReplica<B>(detail::split(batch, num_local_replicas(), capacities())), options);
  }

  /// Closes the open window; empty when none is open, or where it was dropped (`drop_incomplete`). Collective.
  std::optional<StepResult> flush();

  /// Calls fn(part) on every local replica at once, without gradients. An empty part's result is a default-constructed
  /// one, which `reduce` and `gather` leave out. Local. Throws what fn threw.
  template <class F, class B>
  auto run(F&& fn, const PerReplica<B>& batch) {
    using R = std::remove_cvref_t<std::invoke_result_t<F&, const B&>>;
    check_parts(batch.size());
    auto info = detail::info_of(batch);
    if constexpr (std::is_void_v<R>) {
      run_parts([&](int r) { on_device(fn, batch[static_cast<size_t>(r)]); }, info);
    } else {
      std::vector<R> results(batch.size());
      run_parts([&](int r) { results[static_cast<size_t>(r)] = on_device(fn, batch[static_cast<size_t>(r)]); }, info);
      return PerReplica<R>(std::move(results), std::move(info.rows));
    }
  }

  /// A batch from elsewhere, divided as by `step`.
  template <class F, class B>
    requires(!detail::IsPerReplica<B>::value)
  auto run(F&& fn, const B& batch) {
    return run(fn, PerReplica<B>(detail::split(batch, num_local_replicas(), capacities())));
  }

  /// Inside a step: over the replicas with non-empty parts, differentiable; `mean` weighs each by its part's samples,
  /// or by `weight` (0-dim). Outside: collective over workers, of PerReplica over all replicas with a value; `mean`
  /// weighs a PerReplica by its rows, else each worker by `weight` or equally. Tensors agree in shape and dtype; a mean
  /// of integers is fp64. Throws LayoutMismatch if they differ, InvalidArgument if nobody has a value.
  at::Tensor reduce(const at::Tensor& value, ReduceOp op = ReduceOp::mean,
                    const std::optional<at::Tensor>& weight = std::nullopt);
  /// The same of each tensor, in one exchange.
  std::vector<at::Tensor> reduce(const std::vector<at::Tensor>& values, ReduceOp op = ReduceOp::mean,
                                 const std::optional<at::Tensor>& weight = std::nullopt);
  /// The same of all replicas' parts, outside a step.
  at::Tensor reduce(const PerReplica<at::Tensor>& value, ReduceOp op = ReduceOp::mean);
  /// The same of each tensor of all replicas' parts.
  std::vector<at::Tensor> reduce(const PerReplica<std::vector<at::Tensor>>& values, ReduceOp op = ReduceOp::mean);

  /// Like reduce: concatenated along dimension 0 in replica order (0-dim tensors are stacked); size(0) may differ.
  at::Tensor gather(const at::Tensor& value);
  /// The same of each tensor, in one exchange.
  std::vector<at::Tensor> gather(const std::vector<at::Tensor>& values);
  /// The same of all replicas' parts, outside a step.
  at::Tensor gather(const PerReplica<at::Tensor>& value);
  /// The same of each tensor of all replicas' parts.
  std::vector<at::Tensor> gather(const PerReplica<std::vector<at::Tensor>>& values);

  /// The value of `source`: a replica inside a step (gradients flow back to it), a rank outside, where only the
  /// source's argument counts.
  at::Tensor broadcast(const at::Tensor& value, int source = 0);
  /// The same of each tensor, in one exchange.
  std::vector<at::Tensor> broadcast(const std::vector<at::Tensor>& values, int source = 0);

  /// Collective. Waits for all workers.
  void barrier();

  /// Writes a checkpoint of everything prepared, of where training is and of `state` into `folder`: each rank copies
  /// a part and returns; a thread writes. What fails there is thrown, once, by the next save, load or close, which
  /// wait for it. A checkpoint is there whole or not at all. Collective, between steps with no window open; with
  /// parameter servers the chief alone saves. Throws InvalidArgument for what cannot be saved and with a window open,
  /// CheckpointError for a folder that cannot be used; on all workers.
  void save(const std::filesystem::path& folder, const SavedState& state = {}, const SaveOptions& options = {});

  /// Goes on from the newest good checkpoint in `folder`, or from one that is named ("FOLDER/snapshot-0000000007"),
  /// of any strategy, in C++ or Python; returns the `state` that was saved, empty where a folder has none. Hosts need
  /// what they alone wrote. Prepare what was prepared then, in the same order, before; with parameter servers load
  /// before the first step. Collective, but in a worker that joins a running job, whose state the servers have.
  /// Throws LayoutMismatch naming the first difference, before anything is loaded, and CheckpointError where no
  /// checkpoint is good, and where the one that is named is not, or is not there; what one worker finds wrong is thrown
  /// on all.
  std::optional<SavedState> load(const std::filesystem::path& folder);

  /// Who takes part and how, in plain words.
  std::string explain() const;

  /// Orderly end; later calls that need replicas throw InvalidArgument. Idempotent. Where this process hosts a
  /// parameter server, it waits until all workers have left that; the destructor does for the timeout at most. Throws
  /// CheckpointError where the last checkpoint could not be written.
  void close();

 protected:
  /// `name` is for explain().
  Strategy(std::shared_ptr<StrategyCore> core, std::string name);

 private:
  friend std::shared_ptr<detail::LoaderHost> detail::host_of(Strategy& strategy);
  friend class Checkpoints;

  using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

  // In a replica's thread: its part is moved to its device.
  template <class F, class B>
  decltype(auto) on_device(F& fn, const B& part) const {
    const auto here = device();
    if (here.is_cpu()) return std::invoke(fn, part);
    const B moved = detail::placed(part, here);
    return std::invoke(fn, moved);
  }

  template <class M, class F>
  static std::shared_ptr<M> build(F& factory) {
    using R = std::invoke_result_t<F&>;
    if constexpr (std::same_as<R, M>) {
      return std::shared_ptr<M>(new M(factory()));  // elided: a module need not be movable
    } else if constexpr (detail::ModuleHolder<R>) {
      return factory().ptr();
    } else {
      return factory();
    }
  }

  template <class M, class Next>
  Replicated<M> adopt(std::shared_ptr<M> first, Next&& next) {
    std::vector<std::shared_ptr<M>> replicas{std::move(first)};
    {
      const detail::KeepRandomState guard;
      while (static_cast<int>(replicas.size()) < num_local_replicas()) replicas.push_back(next(*replicas.front()));
    }
    add_module(Modules(replicas.begin(), replicas.end()));
    return Replicated<M>(std::move(replicas), core());
  }

  template <class M>
  static std::vector<std::shared_ptr<M>> cast(const Modules& modules) {
    std::vector<std::shared_ptr<M>> replicas;
    for (const auto& module : modules) replicas.push_back(std::dynamic_pointer_cast<M>(module));
    return replicas;
  }

  std::shared_ptr<const StrategyCore> core() const;
  std::vector<double> capacities() const;
  static std::shared_ptr<torch::nn::Module> clone(const torch::nn::Module& module);
  const Modules* find_module(const torch::nn::Module& module) const;
  void add_module(Modules replicas);
  void add_optimizer(torch::optim::Optimizer& optimizer);
  void check_parts(size_t parts) const;
  StepResult step_parts(const std::function<Loss(int local_replica)>& fn, const detail::PartsInfo& parts,
                        const StepOptions& options);
  void run_parts(const std::function<void(int local_replica)>& fn, const detail::PartsInfo& parts);

  std::shared_ptr<State> state_;
};

}  // namespace muster
