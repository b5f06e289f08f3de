// What a C++ Strategy holds: the core, and what was prepared with it.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <vector>

#include "core/write_trace.h"
#include "muster/strategy.h"
#include "optimizer/flat_state.h"
#include "strategy/forgotten_modules.h"
#include "strategy/loaders.h"
#include "strategy/optimizer_sets.h"
#include "strategy/saving.h"
#include "strategy/strategy_core.h"

namespace muster {

/// A collective outside a step, which close() waits for.
struct WorkersCall {
  CallGate::Pass pass;
  comm::Communicator& group;
};

namespace detail {

/// The local replicas of a module, for what replicas take over from replica 0 when a call begins. Owned by the thread
/// that prepares and steps.
class PreparedModule {
 public:
  using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

  /// Throws InvalidArgument where the replicas are not built alike.
  explicit PreparedModule(Modules replicas);

  const Modules& replicas() const noexcept { return replicas_; }

  /// Parameters and buffers of each replica by replica 0's names, shared ones once.
  ModuleTensors tensors() const;

  /// Training mode, and buffers of replica 0 that were written or given other memory, dtypes or sizes since
  /// note_buffers().
  void follow_first_replica();
  void note_buffers();
  /// Throws InvalidArgument naming what replica 0 alone has registered, replaced or unregistered since it was prepared:
  /// the others would compute something else. Modules that all replicas have registered alike are taken up.
  void check_submodules();

 private:
  Modules replicas_;
  std::vector<Modules> submodules_;               // [replica], in pre-order
  std::vector<std::vector<at::Tensor>> buffers_;  // [replica][buffer]
  std::vector<WriteTrace> noted_;                 // of replica 0's buffers
};

/// Collective over workers. Every worker's optimizer gets the chief's learning rates and per-parameter state. Throws
/// LayoutMismatch naming the first parameter that is another one on another worker, and
/// InvalidArgument on all workers if the chief has state of a kind that it cannot send.
void broadcast_optimizer(torch::optim::Optimizer& optimizer, const ParameterRegistry& registry,
                         comm::Communicator& workers);

/// Those of the groups, in words; empty for options of a kind that tells none.
std::vector<std::string> learning_rates_of(const torch::optim::Optimizer& optimizer);

}  // namespace detail

struct Strategy::State {
  State(std::shared_ptr<StrategyCore> core, std::string name);
  ~State();

  /// A prepared optimizer. Throws InvalidArgument for a flat one that is gone; of others nobody can tell.
  torch::optim::Optimizer& optimizer(size_t position) const;
  /// Of optimizers, by position; of whatever is prepared if none is given.
  OptimizerSets::Choice choice_of(std::vector<int> positions) const;
  /// The set of these optimizers; of whatever is prepared if none is given. Throws as ParameterSets::set_of, and
  /// InvalidArgument for a parameter of no prepared module.
  int set_of(const StepOptions& options);
  /// What OptimizerSets::set_of() resolves optimizers to.
  std::vector<OptimizerSets::Member> members_of(const std::vector<int>& positions) const;
  /// Gives a flat optimizer its place in the registry, once and when its parameters changed.
  void bind_flat(torch::optim::Optimizer& optimizer);
  void serve(torch::optim::Optimizer& optimizer);
  /// Before close(): the state that parameter servers hold becomes the optimizer's, if that still lives.
  void leave_servers() noexcept;
  /// The optimizers that the set was last used with.
  std::vector<torch::optim::Optimizer*> optimizers_of(int set) const;
  /// Gives a call what it is to update: the optimizers that its set was last used with. Throws InvalidArgument for
  /// state() that cannot be stepped from.
  void add_update(StepCall& call);
  /// After a call: new state of the flat optimizers that stepped in it stands in their state(). `before`: the core's
  /// Updates::count then.
  void publish(int set, uint64_t before);

  /// For a collective outside a step, in that call. Throws InvalidArgument where the strategy is closed.
  WorkersCall workers(const char* call);
  /// Gives up the claim on the parameters, so that another strategy can prepare them.
  void release() noexcept;

  /// Runs a step, run or flush of the core between what replicas take over from replica 0 and the note of it.
  template <class Function>
  auto call(const Function& function) {
    for (auto& module : modules) module.check_submodules();
    struct Note {
      ~Note() {
        for (auto& module : modules) module.note_buffers();
      }
      std::vector<detail::PreparedModule>& modules;
    } note{modules};
    for (auto& module : modules) module.follow_first_replica();
    return function();
  }

  std::shared_ptr<StrategyCore> core;
  std::string name;
  std::vector<detail::PreparedModule> modules;
  std::vector<torch::optim::Optimizer*> optimizers;
  std::vector<std::optional<std::weak_ptr<const void>>> lives;  ///< of flat ones among them
  OptimizerSets sets;
  detail::ForgottenModules forgotten;
  Loaders loaders;
  Saving saving;
  /// The optimizer whose state servers hold.
  std::pair<std::weak_ptr<detail::FlatState>, torch::optim::Optimizer*> served;
};

}  // namespace muster
