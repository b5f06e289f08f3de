// The language-neutral heart of a strategy: registration, steps, windows, errors and random streams. C++ and Python are
// thin layers over it.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/replica_context.h"
#include "data/balance.h"
#include "job/topology.h"
#include "muster/options.h"
#include "muster/step.h"
#include "strategy/call_gate.h"
#include "strategy/failures.h"
#include "strategy/random_streams.h"
#include "strategy/replica_pool.h"
#include "strategy/sigterm.h"
#include "window/parameter_registry.h"
#include "window/parameter_set.h"
#include "window/skip_limit.h"

namespace muster {

/// One call of step, run or flush, as the language layer sees it.
struct StepCall {
  /// Calls the user's function for a local replica, on its thread. Null for flush.
  std::function<Loss(int local_replica)> call;
  /// Samples of each local replica's part: 0 is an empty part, for which `call` is not called; negative: unknown, so
  /// that a loss averaged with others must carry its weight.
  std::vector<int64_t> rows;
  /// Samples that a part has on average where the loader that it comes from is not at its end; 0: unknown.
  double usual_rows = 0;
  /// The set that takes part, from StrategyCore::set_of.
  int set = 0;
  /// Dealt batches that the parts are of; see ServerExchange::note_batches.
  std::vector<server::BatchId> batches = {};
  /// True on steps made after a loader yielded its last batch.
  bool loader_ended = false;
  /// The set's optimizers as they were before the call, all flat or none; empty without any. Workers compare them
  /// before a window closes, and flat ones step where it was not skipped.
  std::vector<OptimizerStep> optimizers = {};
  /// Calls this rank's hooks, if there are any, before flat optimizers step, and returns the groups that they and the
  /// user's function left, by optimizer. Not null with flat ones. See StrategyCore::call_hooks.
  std::function<std::vector<FlatGroups>()> before_update = {};
  /// Steps optimizers that are not flat, from `.grad`, where a window closed and was not skipped. Null without any.
  /// These functions are called on the stepping thread.
  std::function<void()> update_from_grad = {};
  /// See ReplicaPool::run.
  std::function<void()> poll;
  std::function<void()> interrupt;

  /// Whether flat optimizers step, from the reduced sums.
  bool steps_flat() const noexcept { return !optimizers.empty() && optimizers.front().flat != nullptr; }
};

/// Externally synchronised: one thread prepares and steps. Functions marked "in a step" are called by replica threads;
/// close() and leave() by any. step, run and flush throw InvalidArgument where another thread is in one of them.
class StrategyCore {
 public:
  StrategyCore(Topology topology, Groups groups, StrategyOptions options, std::shared_ptr<ReplicaPool> pool,
               uint64_t seed);
  ~StrategyCore();
  StrategyCore(const StrategyCore&) = delete;
  StrategyCore& operator=(const StrategyCore&) = delete;

  const Topology& topology() const noexcept { return topology_; }
  const StrategyOptions& options() const noexcept { return options_; }
  ParameterRegistry& registry() noexcept { return registry_; }
  ReplicaPool& pool() noexcept { return *pool_; }
  comm::Communicator& workers();
  /// For what prepare agrees on with the other workers; of one where this worker joins a running job.
  comm::Communicator& to_prepare();
  bool joins() const noexcept { return groups_.joins(); }
  /// Who takes part, and what was chosen and why, in plain words; `name`: the strategy's.
  std::string explain(const std::string& name) const;
  uint64_t seed() const noexcept { return streams_.seed(); }
  int64_t steps() const noexcept { return steps_; }
  void set_error_handlers(ErrorDescriber describer, ErrorCapturer capturer) {
    failures_.set_handlers(std::move(describer), std::move(capturer));
  }

  /// Divides batches by the speed of the local replicas from the next one on. No-op for one replica.
  void balance_parts();
  /// The share of a batch that each local replica gets; empty where parts are equal. Thread-safe.
  std::vector<double> capacities() const { return balancer_ ? balancer_->capacities() : std::vector<double>{}; }

  /// Whether replicas still run a step that was interrupted; until they end, step, run and flush throw CommError.
  bool busy() const { return pool_->busy(); }

  /// As ParameterRegistry::add. Before the first one the speed of the link is measured, unless options say how large
  /// buckets are.
  int add_module(ModuleTensors module);

  /// After add_module; collective over workers where there are servers, which will hold the rows: all workers get the
  /// chief's seed, or the job's. See ParameterRegistry::note_rows. Throws InvalidArgument for rows that are not here
  /// where there are no servers.
  void note_rows(const at::Tensor& weight, EmbeddingRows rows);

  /// Collective over workers until their first step, none later. `size`, in words, is that of the `loader`-th loader.
  /// Throws LayoutMismatch where another worker has another.
  void compare_loader(int loader, const std::string& size);

  /// The set of exactly these parameters (registry indices, any order). Throws InvalidArgument if it shares parameters
  /// with another set without being equal to it.
  int set_of(std::vector<int> parameters);
  /// The parameters of a set changed (add_param_group): takes effect at its next window.
  void change_set(int set, std::vector<int> parameters);

  /// Collective over workers at a window's end, local otherwise. Errors of the step itself leave the core usable. After
  /// others of the group that steps, parameters and optimizer state are in memory of this process alone, and what is a
  /// CommError is known to parameters_after().
  StepResult step(const StepCall& call);
  /// Closes the open window of every set; empty when none is open. `updates`: for each of open_sets() a call that has
  /// its optimizers and functions.
  std::optional<StepResult> flush(const std::vector<StepCall>& updates, bool drop_incomplete);
  /// The sets whose window is open.
  std::vector<int> open_sets();
  /// How many flat optimizers stepped in a set's windows so far, each time one did: after a call that throws, too, it
  /// tells whose state there is more of.
  uint64_t num_updates(int set) const {
    const auto found = num_updates_.find(set);
    return found == num_updates_.end() ? 0 : found->second;
  }

  /// A flat optimizer over parameters of the registry, (index, group) by parameter; sharded as the options say.
  /// Throws InvalidArgument for parameters that only a flat optimizer steps as they ask: row-wise Adagrad.
  void check_need_no_flat(const std::vector<int>& parameters) const;
  FlatOptimizer make_flat(const std::vector<std::pair<int, uint32_t>>& parameters, const FlatGroups& groups) const;

  /// Whether the set's parameters live on servers that connect_servers() is to connect. See ParameterSet; it throws
  /// InvalidArgument for a second set: servers hold one.
  bool awaits_servers(int set) {
    const auto pass = enter();
    auto& of_set = *sets_.at(static_cast<size_t>(set));
    return of_set.server_window() != nullptr && of_set.servers() == nullptr;
  }
  void connect_servers(int set, const FlatOptimizer& optimizer, const std::vector<int>& parameters,
                       const FlatGroups& groups);

  /// After connect_servers, in a worker that joined a synchronous job: takes part in the others' windows with nothing
  /// of its own until it knows what they do, and goes on with their count of steps. Returns what describe_passes gave
  /// there. No-op elsewhere. `update`: a call that has the set's optimizers and functions.
  std::string watch(const StepCall& update);

  /// `describe` tells of the passes over loaders, for a worker that joined; called in step and flush.
  void describe_passes(std::function<std::string()> describe) { describe_passes_ = std::move(describe); }

  /// `leave` is called by close() when nobody is in a call any more, and while servers are still there. What it throws
  /// ends that close(), and the next one goes on.
  void on_leaving(std::function<void()> leave) { leave_ = std::move(leave); }
  /// Whether the calling code is called by that.
  bool is_leaving() const noexcept { return is_leaving_; }

  /// Whether servers hold parameters and their state.
  bool has_servers() const;

  /// Throws InvalidArgument without has_servers().
  ServerExchange& servers();

  /// Whether workers step on their own, so that servers deal whole batches.
  bool deals_batches() const noexcept { return groups_.servers && groups_.servers->staleness != 0; }

  /// Whether workers of parameter servers step together, so that those which are live divide each batch.
  bool shares_batches() const noexcept { return groups_.servers && groups_.servers->staleness == 0; }

  /// A part of the state of the parameters of the registry, from the servers that hold it; undefined where there is
  /// none. Empty without has_servers(). `to_stay`: not of rows that workers have no memory for.
  std::vector<at::Tensor> state_on_servers(const std::vector<int>& parameters, server::Part part, bool to_stay = false);

  /// Whether the optimizers of the set have hooks to call before their step, for windows that end from here on.
  void set_has_hooks(int set, bool has_hooks) { sets_.at(static_cast<size_t>(set))->told().has_hooks = has_hooks; }
  /// Within StepCall::update_from_grad: whether those of any rank have.
  bool hooked(int set) const { return sets_.at(static_cast<size_t>(set))->told().hooked; }

  /// Within the update of a set that is hooked, before the optimizers' steps; collective over workers. Calls this
  /// rank's `hooks`, which see and may edit the means (Window::leave_means) where the set is `fused` and keeps
  /// gradients, and waits for the other ranks' before anybody writes parameters. Where the hooks of a rank raised no
  /// rank steps: there the error is rethrown, elsewhere it is RemoteError, and the window counts as dropped, unless
  /// optimizers have stepped before these hooks' (not `is_first`). On parameter servers the step is made, and the error
  /// rethrown after it.
  void call_hooks(int set, bool fused, bool is_first, const std::function<void()>& hooks);

  /// Whether the last gradients came from a step, which has applied them, and not from a backward by hand.
  bool gradients_are_applied() const noexcept { return gradients_are_applied_; }

  /// The loss scale of a set, to save and restore it. Waits for the device.
  kernels::LossScaleState loss_scale(int set) const {
    return sets_.at(static_cast<size_t>(set))->window().loss_scale().get();
  }
  void set_loss_scale(int set, const kernels::LossScaleState& state) {
    sets_.at(static_cast<size_t>(set))->window().loss_scale().set(state);
  }

  /// Calls `call` on every local replica with a non-empty part, without gradients and with the call's random stream.
  void run(const StepCall& call);

  /// In a step: the calling replica's local index, or -1 outside this strategy's step.
  int current_local_replica() const;
  /// In a step: samples of the calling replica's part; negative if unknown.
  int64_t current_rows() const;
  /// In a step: the group for collectives that user code issues, on these values. Throws InvalidArgument where they
  /// could not be differentiated.
  comm::Communicator& step_group(const std::vector<at::Tensor>& values = {});

  /// Requests the end of training: `stopping()` turns true on all ranks at the same window's end.
  void stop() noexcept { stop_requested_ = true; }
  /// Tells SIGTERM that somebody looks; see sigterm.h.
  bool stopping() const noexcept {
    SigtermWatch::note_look();
    return stopping_;
  }

  /// Collective over workers (one replica a worker): replaces `.grad` of a module's trainable parameters by its mean
  /// over workers; a parameter without a gradient anywhere keeps none. For backward by hand.
  void average_gradients(int module);

  /// While it lives, close() waits. For calls of other threads, and for what those return by reference. Throws
  /// InvalidArgument after close().
  [[nodiscard]] CallGate::Pass enter() { return gate_.enter(); }

  /// Likewise, for step, run and flush. Throws InvalidArgument inside a step, and where another thread is in one of
  /// them.
  [[nodiscard]] CallGate::Pass enter_alone(const char* what);

  /// Orderly end; later calls throw InvalidArgument. Idempotent and thread-safe. Waits for calls of other threads, and
  /// for replicas that an interrupted call left behind: nothing that they use is freed. `poll` is called about ten
  /// times a second while it waits; if it throws, the strategy stays closed to calls, and the next close() goes on.
  /// Throws InvalidArgument inside a call of this strategy: in a step function, a hook, a signal handler.
  void close(const std::function<void()>& poll = {});
  bool closed() const noexcept { return gate_.is_shut(); }

  /// As close(), without waiting: what replicas use lives until they and the last owner of this object have let go.
  void leave() noexcept;

 private:
  class CallCasts;

  void check_open() const;
  void let_go();
  void wait_for_leavers();
  void leave_memory() noexcept;
  bool may_be_torn(bool in_apply) const;
  [[noreturn]] void fail_step(bool in_apply);
  void fail_peers_in_apply();
  void choose_buckets();
  void check_callable() const;
  void find_outsiders();
  ParameterSet& begin_call(int set);
  bool shares_casts() const;
  Loss call_in_precision(const StepCall& call, int local_replica) const;
  void run_replica(ParameterSet& set, const StepCall& call, uint64_t t, bool closing, int local_replica,
                   ReplicaRun& outcome);
  void give_up(int local_replica, ReplicaRun& outcome);
  StepCall empty_call(const StepCall& update) const;
  void leave_step_group(ParameterSet& set);
  void note_times(const StepCall& call, const std::vector<ReplicaRun>& outcomes);
  StepResult step_set(ParameterSet& set, const StepCall& call);
  StepResult end_window(ParameterSet& set, const StepCall& call);
  void update(ParameterSet& set, const StepCall& call);
  void step_flat(ParameterSet& set, const StepCall& call);
  /// Warns once where no parameter was written between two windows of a set without optimizers, so that the first one's
  /// gradients were replaced unused.
  void note_no_optimizer(int set);
  StepResult open_result(ParameterSet& set) const;
  std::shared_ptr<ReplicaContext> make_context(int local_replica, uint64_t t);

  Topology topology_;
  Groups groups_;
  StrategyOptions options_;
  std::shared_ptr<ReplicaPool> pool_;
  const bool divides_steps_;  // of flat optimizers
  ParameterRegistry registry_;
  std::vector<std::unique_ptr<ParameterSet>> sets_;
  std::vector<int64_t> rows_;          // of the running call, by local replica
  std::vector<char> used_step_group_;  // by local replica: in the running call
  bool has_left_step_group_ = false;
  bool has_casts_ = false;  // a call left casts of parameters in torch's cache
  /// Registry indices of the parameters in no set, among the first `registry_.num_parameters()` when last looked at.
  std::vector<size_t> outsiders_;
  size_t outsiders_known_ = 0;
  std::unique_ptr<Balancer> balancer_;  // null: parts are equal
  std::function<std::string()> describe_passes_;
  Failures failures_;
  RandomStreams streams_;
  SkipLimit skip_limit_;
  int64_t steps_ = 0;
  bool gradients_are_applied_ = false;
  bool warned_of_no_optimizer_ = false;
  std::unordered_map<int, uint64_t> versions_without_optimizer_;  // by set, at its last window's end
  std::exception_ptr hook_error_;                                 // to be rethrown after the step
  std::function<void()> leave_;
  std::atomic<bool> is_leaving_{false};
  std::atomic<bool> stop_requested_{false};
  std::atomic<bool> stopping_{false};
  bool has_tail_ = false;  // of the running step: others may go on to store
  // Flat optimizers of the window that is being applied: those that peers wait for this one to step, too; those whose
  // step began here; and those that were stepped.
  size_t awaited_ = 0;
  size_t begun_ = 0;
  size_t applied_ = 0;
  std::unordered_map<int, uint64_t> num_updates_;  // by set
  bool torn_ = false;                              // the parameters, by an error
  SigtermWatch sigterm_;
  CallGate gate_;
};

}  // namespace muster
