#include "muster/strategy.h"

#include <ATen/Context.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/modules/embedding.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "core/plain_text.h"
#include "muster/error.h"
#include "muster/sharded_embedding.h"
#include "optimizer/flat_state.h"
#include "strategy/collectives.h"
#include "strategy/explain.h"
#include "strategy/registration.h"
#include "strategy/strategy_state.h"

namespace muster {

namespace {

// Which strategy holds a parameter, over all strategies of the process.
struct Claims {
  std::mutex mutex;
  std::unordered_map<const c10::TensorImpl*, const void*> owners;  // guarded by mutex
};

Claims& claims() {
  static Claims instance;
  return instance;
}

// Returns those that the owner had not claimed before.
std::vector<const c10::TensorImpl*> claim(const ModuleTensors& module, const void* owner) {
  const std::lock_guard lock(claims().mutex);
  for (const auto& [name, parameter] : module.parameters.front()) {
    const auto found = claims().owners.find(parameter.unsafeGetTensorImpl());
    if (found != claims().owners.end() && found->second != owner) {
      throw InvalidArgument("parameter '" + name + "' is prepared by another open strategy; close() that one first");
    }
  }
  std::vector<const c10::TensorImpl*> claimed;
  for (const auto& [name, parameter] : module.parameters.front()) {
    const auto* const impl = parameter.unsafeGetTensorImpl();
    if (claims().owners.try_emplace(impl, owner).second) claimed.push_back(impl);
  }
  return claimed;
}

void give_up(const std::vector<const c10::TensorImpl*>& claimed) noexcept {
  const std::lock_guard lock(claims().mutex);
  for (const auto* const parameter : claimed) claims().owners.erase(parameter);
}

int local_or_first(const StrategyCore& core) { return std::max(core.session().current_local_replica(), 0); }

bool in_step(const StrategyCore& core) { return core.session().current_local_replica() >= 0; }

void check_outside_step(const StrategyCore& core, const char* function) {
  if (in_step(core)) throw InvalidArgument(std::string(function) + "() cannot be called inside a step");
}

const at::Tensor& only(const Leaves& leaves) { return leaves.front(); }

std::vector<Contribution> contributions_of(const std::vector<Leaves>& values, const std::vector<int64_t>& rows,
                                           bool weighted) {
  std::vector<Contribution> contributions;
  for (size_t r = 0; r < values.size(); ++r) {
    const auto& leaves = values[r];
    const bool absent = leaves.empty() || std::any_of(leaves.begin(), leaves.end(),
                                                      [](const at::Tensor& leaf) { return !leaf.defined(); });
    if (absent || (r < rows.size() && rows[r] == 0)) continue;
    Contribution contribution{leaves, 1};
    if (weighted && r < rows.size()) {
      if (rows[r] < 0) {
        throw InvalidArgument(
            "the number of samples behind this value is unknown, so that it cannot be averaged; "
            "reduce sums of values and of counts, and divide");
      }
      contribution.weight = static_cast<double>(rows[r]);
    }
    contributions.push_back(std::move(contribution));
  }
  return contributions;
}

PerReplica<Leaves> with_leaves(const PerReplica<at::Tensor>& value) {
  std::vector<Leaves> leaves;
  for (const auto& part : value) leaves.push_back({part});
  if (value.rows().empty()) return PerReplica<Leaves>(std::move(leaves));
  return {std::move(leaves), value.rows()};
}

// The weight that an embedding with max_norm writes in forward; undefined for every other module.
at::Tensor renormalised_weight(const torch::nn::Module& module) {
  const auto* const embedding = module.as<torch::nn::EmbeddingImpl>();
  if (embedding != nullptr && embedding->options.max_norm()) return embedding->weight;
  const auto* const bag = module.as<torch::nn::EmbeddingBagImpl>();
  return bag != nullptr && bag->options.max_norm() ? bag->weight : at::Tensor();
}

}  // namespace

namespace detail {

size_t current_or_first(const StrategyCore& core) { return static_cast<size_t>(local_or_first(core)); }

KeepRandomState::KeepRandomState() {
  auto generator = at::globalContext().defaultGenerator(c10::Device(c10::kCPU));
  const std::lock_guard lock(generator.mutex());
  state_ = generator.get_state();
}

KeepRandomState::~KeepRandomState() {
  auto generator = at::globalContext().defaultGenerator(c10::Device(c10::kCPU));
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state_);
}

}  // namespace detail

Strategy::State::State(std::shared_ptr<StrategyCore> strategy_core, std::string strategy_name)
    : core(std::move(strategy_core)),
      name(std::move(strategy_name)),
      sets(core),
      loaders(core, [this] { set_of({}); }),
      saving(*this) {
  core->on_leaving([this] {
    if (core->sets().has_servers()) saving.wait();  // servers that write may end with the job
    leave_servers();
  });
}

Strategy::State::~State() {
  core->on_leaving({});
  release();
}

void Strategy::State::release() noexcept {
  const std::lock_guard lock(claims().mutex);
  std::erase_if(claims().owners, [this](const auto& claimed) { return claimed.second == this; });
}

WorkersCall Strategy::State::workers(const char* call) {
  auto pass = core->session().enter();
  loaders.leave_passes();
  return {std::move(pass), core->session().workers(call)};
}

std::shared_ptr<detail::LoaderHost> detail::host_of(Strategy& strategy) {
  return {strategy.state_, &strategy.state_->loaders};
}

Strategy::Strategy(std::shared_ptr<StrategyCore> core, std::string name)
    : state_(std::make_shared<State>(std::move(core), std::move(name))) {}

Strategy::~Strategy() {
  state_->core->close();
  state_->release();
  state_->saving.leave();
}

void Strategy::close() {
  state_->core->close([] {});  // a program that is interrupted ends
  state_->release();
  state_->saving.end();
}

void Strategy::save(const std::filesystem::path& folder, const SavedState& state, const SaveOptions& options) {
  check_outside_step(*state_->core, "save");
  const auto pass = state_->core->session().enter_alone("save");
  state_->saving.save(folder, state, options);
}

std::optional<SavedState> Strategy::load(const std::filesystem::path& folder) {
  check_outside_step(*state_->core, "load");
  const auto pass = state_->core->session().enter_alone("load");
  return state_->saving.load(folder);
}

std::shared_ptr<const StrategyCore> Strategy::core() const { return state_->core; }
std::vector<double> Strategy::capacities() const { return state_->core->session().capacities(); }

int Strategy::num_replicas() const { return state_->core->session().topology().num_replicas; }
int Strategy::num_workers() const { return state_->core->session().topology().num_workers; }
int Strategy::rank() const { return state_->core->session().topology().rank; }
int Strategy::local_rank() const { return state_->core->session().topology().local_rank; }
int Strategy::num_local_replicas() const { return state_->core->session().topology().local_replicas(); }
int64_t Strategy::steps() const { return state_->core->stepper().steps(); }
void Strategy::stop() noexcept { state_->core->stepper().stop(); }
bool Strategy::stopping() const { return state_->core->stepper().stopping(); }

c10::Device Strategy::device() const {
  return state_->core->session().topology().devices[static_cast<size_t>(local_or_first(*state_->core))];
}

int Strategy::replica() const {
  return state_->core->session().topology().first_replica + local_or_first(*state_->core);
}

std::shared_ptr<torch::nn::Module> Strategy::clone(const torch::nn::Module& module) {
  const c10::InferenceMode normal(false);  // whatever the caller's
  std::shared_ptr<torch::nn::Module> copy;
  try {
    copy = module.clone();
  } catch (const c10::Error& error) {
    throw InvalidArgument("module '" + module.name() + "' cannot be cloned (" + error.what_without_backtrace() +
                          "); prepare a factory instead: prepare([] { return Net(); })");
  }
  return copy;
}

const Strategy::Modules* Strategy::find_module(const torch::nn::Module& module) const {
  for (const auto& prepared : state_->modules) {
    if (prepared.replicas().front().get() == &module) return &prepared.replicas();
  }
  return nullptr;
}

void Strategy::add_module(Modules replicas) {
  check_outside_step(*state_->core, "prepare");
  const auto pass = state_->core->session().enter_alone("prepare");
  state_->loaders.leave_passes();
  if (std::find(replicas.begin(), replicas.end(), nullptr) != replicas.end()) {
    throw InvalidArgument("a factory or clone() gave an empty module, or one of another type");
  }
  const auto& devices = state_->core->session().topology().devices;
  for (size_t r = 0; r < replicas.size(); ++r) {
    if (!devices[r].is_cpu()) replicas[r]->to(devices[r]);
  }
  detail::PreparedModule module(std::move(replicas));
  const auto tensors = module.tensors();
  const auto claimed = claim(tensors, state_.get());
  try {
    muster::add_module(state_->core->session(), tensors);
  } catch (...) {
    give_up(claimed);
    throw;
  }
  for (const auto& submodule : module.replicas().front()->modules()) {
    const auto* const embedding = submodule->as<ShardedEmbeddingImpl>();
    if (embedding != nullptr) note_rows(state_->core->session(), embedding->weight, rows_of(embedding->options()));
    const auto renormalised = renormalised_weight(*submodule);
    if (renormalised.defined()) expect_writes(state_->core->session(), renormalised);
  }
  module.note_buffers();
  state_->modules.push_back(std::move(module));
}

void Strategy::add_optimizer(torch::optim::Optimizer& optimizer) {
  check_outside_step(*state_->core, "prepare");
  const auto pass = state_->core->session().enter_alone("prepare");
  auto& known = state_->optimizers;
  const auto found = static_cast<size_t>(std::find(known.begin(), known.end(), &optimizer) - known.begin());
  const auto life = detail::life_of(optimizer);
  const bool is_known = found < known.size();
  const auto is_same = [&](const auto& noted) { return noted ? life && noted->lock() == life : !life; };
  if (is_known && is_same(state_->lives[found])) return;
  // Else it takes the place of the first one that is gone, which is so on all workers, or of one that was where it is.
  const auto is_gone = [](const auto& noted) { return noted && noted->expired(); };
  const auto gone = static_cast<size_t>(std::ranges::find_if(state_->lives, is_gone) - state_->lives.begin());
  const size_t place = gone < known.size() ? gone : found;
  if (dynamic_cast<torch::optim::LBFGS*>(&optimizer) != nullptr) {
    throw InvalidArgument(
        "LBFGS evaluates the loss several times in a step, and a strategy has one gradient for it; use another "
        "optimizer, "
        "or step LBFGS without a strategy");
  }
  const auto& groups = optimizer.param_groups();
  if (std::all_of(groups.begin(), groups.end(), [](const auto& group) { return group.params().empty(); })) {
    throw InvalidArgument("the optimizer has no parameters; build it from the prepared module's parameters()");
  }
  state_->loaders.leave_passes();
  detail::broadcast_optimizer(optimizer, state_->core->session().registry(), state_->core->session().to_prepare());
  known.resize(std::max(known.size(), place + 1));
  known[place] = &optimizer;
  state_->lives.resize(known.size());
  state_->lives[place] = life ? std::optional<std::weak_ptr<const void>>(life) : std::nullopt;
  state_->forgotten.note(optimizer);
}

void Strategy::check_parts(size_t parts) const {
  if (static_cast<int>(parts) == num_local_replicas()) return;
  throw InvalidArgument("a PerReplica of " + std::to_string(parts) + " parts, but this worker has " +
                        std::to_string(num_local_replicas()) + " local replicas; pass one part for each");
}

StepResult Strategy::step_parts(const std::function<Loss(int local_replica)>& fn, const detail::PartsInfo& parts,
                                const StepOptions& options) {
  check_outside_step(*state_->core, "step");
  const auto pass = state_->core->session().enter_alone("step");
  state_->loaders.leave_passes();
  if (parts.loader) parts.loader->in_step = true;
  StepCall call;
  call.set = state_->set_of(options);
  call.call = state_->forgotten.watching(fn, call.set, *state_);
  call.rows = parts.rows;
  call.samples_left = parts.samples_left;
  if (parts.loader) call.usual_rows = parts.loader->usual_rows;
  std::vector<Loaders::Stepped> stepped;
  if (parts.loader) stepped.push_back({parts.loader, parts.batch});
  call.loader_ended = state_->loaders.has_ended(call.set, stepped);
  state_->add_update(call);
  if (parts.loader && parts.loader->pass) {
    if (const auto batch = parts.loader->pass->begin_step()) call.batches.push_back(*batch);
  }
  const auto updates = state_->core->stepper().updates().count(call.set);
  StepResult result;
  try {
    result = state_->call([&] { return state_->core->stepper().step(call); });
  } catch (...) {
    state_->publish(call.set, updates);
    state_->loaders.end_step(detail::WindowEnd::dropped);
    throw;
  }
  state_->publish(call.set, updates);
  state_->loaders.note_step(call.set, result.stepped);
  return result;
}

std::optional<StepResult> Strategy::flush() {
  check_outside_step(*state_->core, "flush");
  const auto pass = state_->core->session().enter_alone("flush");
  state_->loaders.leave_passes();
  const bool drops = state_->core->session().options().drop_incomplete;
  std::vector<StepCall> calls;
  std::vector<uint64_t> updates;
  for (const int set : state_->core->sets().open()) {
    updates.push_back(state_->core->stepper().updates().count(set));
    calls.emplace_back().set = set;
    if (!drops) state_->add_update(calls.back());
  }
  const auto publish = [&] {
    for (size_t i = 0; i < calls.size(); ++i) state_->publish(calls[i].set, updates[i]);
  };
  std::optional<StepResult> result;
  try {
    result = state_->call([&] { return state_->core->stepper().flush(calls, drops); });
  } catch (...) {
    publish();
    state_->loaders.end_step(detail::WindowEnd::dropped);
    throw;
  }
  publish();
  state_->loaders.end_step(result ? detail::WindowEnd::closed : detail::WindowEnd::dropped);
  return result;
}

void Strategy::run_parts(const std::function<void(int local_replica)>& fn, const detail::PartsInfo& parts) {
  check_outside_step(*state_->core, "run");
  const auto pass = state_->core->session().enter_alone("run");
  state_->loaders.leave_passes();
  if (parts.loader) parts.loader->in_run = true;
  StepCall call;
  call.call = [&fn](int local_replica) {
    fn(local_replica);
    return Loss();
  };
  call.rows = parts.rows;
  state_->call([&] { state_->core->stepper().run(call); });
}

std::vector<at::Tensor> Strategy::reduce(const std::vector<at::Tensor>& values, ReduceOp op,
                                         const std::optional<at::Tensor>& its_weight) {
  const auto weight = its_weight && its_weight->defined() ? its_weight : std::nullopt;
  auto& core = *state_->core;
  auto& replicas = core.stepper().replicas();
  if (!in_step(core)) {
    const double given = weight ? weight->item<double>() : 1.0;
    return reduce_over_workers(state_->workers("reduce()").group, {{values, given}}, op);
  }
  if (op != ReduceOp::mean) return reduce_in_step(replicas.step_group(values), values, op, {});
  if (!weight && replicas.current_rows() < 0) {
    throw InvalidArgument("the number of samples in this part is unknown; give reduce() a weight");
  }
  return reduce_in_step(replicas.step_group(values), values, op,
                        weight ? *weight : at::scalar_tensor(replicas.current_rows(), at::kDouble));
}

at::Tensor Strategy::reduce(const at::Tensor& value, ReduceOp op, const std::optional<at::Tensor>& weight) {
  return only(reduce(std::vector<at::Tensor>{value}, op, weight));
}

std::vector<at::Tensor> Strategy::reduce(const PerReplica<std::vector<at::Tensor>>& values, ReduceOp op) {
  check_outside_step(*state_->core, "reduce of a PerReplica");
  const auto mine = contributions_of(values.parts(), values.rows(), op == ReduceOp::mean);
  return reduce_over_workers(state_->workers("reduce()").group, mine, op);
}

at::Tensor Strategy::reduce(const PerReplica<at::Tensor>& value, ReduceOp op) {
  return only(reduce(with_leaves(value), op));
}

std::vector<at::Tensor> Strategy::gather(const std::vector<at::Tensor>& values) {
  auto& core = *state_->core;
  auto& replicas = core.stepper().replicas();
  return in_step(core) ? gather_in_step(replicas.step_group(values), values)
                       : gather_over_workers(state_->workers("gather()").group, {{values, 1}});
}

at::Tensor Strategy::gather(const at::Tensor& value) { return only(gather(std::vector<at::Tensor>{value})); }

std::vector<at::Tensor> Strategy::gather(const PerReplica<std::vector<at::Tensor>>& values) {
  check_outside_step(*state_->core, "gather of a PerReplica");
  return gather_over_workers(state_->workers("gather()").group, contributions_of(values.parts(), values.rows(), false));
}

at::Tensor Strategy::gather(const PerReplica<at::Tensor>& value) { return only(gather(with_leaves(value))); }

std::vector<at::Tensor> Strategy::broadcast(const std::vector<at::Tensor>& values, int source) {
  auto& core = *state_->core;
  auto& replicas = core.stepper().replicas();
  return in_step(core) ? broadcast_in_step(replicas.step_group(values), values, source)
                       : broadcast_over_workers(state_->workers("broadcast()").group, values, source);
}

at::Tensor Strategy::broadcast(const at::Tensor& value, int source) {
  return only(broadcast(std::vector<at::Tensor>{value}, source));
}

void Strategy::barrier() {
  check_outside_step(*state_->core, "barrier");
  state_->workers("barrier()").group.barrier().wait();
}

std::string Strategy::explain() const {
  TextWriter out;
  out << muster::explain(state_->core->session(), state_->name) << "prepared: " << state_->modules.size()
      << " module(s) with " << state_->core->session().registry().num_parameters() << " parameter tensor(s), "
      << state_->optimizers.size() << " optimizer(s)\n";
  return out.str();
}

}  // namespace muster
