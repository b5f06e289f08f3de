#include "strategy/strategy_core.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "comm/peer_memory.h"
#include "comm/text_exchange.h"
#include "core/log.h"
#include "core/with_parameters.h"
#include "device/kernel_status.h"
#include "embedding/row_source.h"
#include "muster/error.h"
#include "server/shard/server.h"

namespace muster {

namespace {

void abort_groups(const Groups& groups, const std::string& reason) noexcept {
  for (const auto* of_replicas : {&groups.gradients, &groups.step, &groups.control}) {
    for (const auto& group : *of_replicas) group->abort(reason);
  }
}

// For replicas that an interrupt left behind: one may be waiting for a peer that does not come.
void abort_interrupted(const Groups& groups, int rank) noexcept {
  abort_groups(groups, "rank " + std::to_string(rank) + " was interrupted in a step and closed its strategy");
}

void check_outside_steps() {
  if (current_replica()) throw InvalidArgument("step(), run() and flush() cannot be called inside a step");
}

}  // namespace

StrategyCore::StrategyCore(Topology topology, Groups groups, StrategyOptions options, std::shared_ptr<ReplicaPool> pool,
                           uint64_t seed)
    : topology_(std::move(topology)),
      groups_(std::move(groups)),
      options_(options),
      pool_(std::move(pool)),
      divides_steps_(divides_steps(topology_, groups_, options_)),
      registry_(topology_.devices),
      streams_(topology_.devices, seed),
      skip_limit_(options_.max_skipped) {
  rows_.resize(topology_.devices.size());
  used_step_group_.resize(topology_.devices.size());
}

StrategyCore::~StrategyCore() {
  leave_ = nullptr;  // nobody is left to tell
  close();
}

void StrategyCore::balance_parts() {
  if (topology_.local_replicas() > 1) balancer_ = std::make_unique<Balancer>(topology_.local_replicas());
}

void StrategyCore::close(const std::function<void()>& poll) {
  if (current_local_replica() >= 0) {
    throw InvalidArgument("close() was called inside a step of the strategy; call stop() there, and close() after it");
  }
  const auto last = [&] {
    if (busy()) abort_interrupted(groups_, topology_.rank);
    pool_->stop(poll);
    let_go();
  };
  gate_.close(last, poll);
}

void StrategyCore::leave() noexcept {
  gate_.shut();
  if (busy()) abort_interrupted(groups_, topology_.rank);
  pool_->release();
}

// Nobody is in a call, and no replica in a step.
void StrategyCore::let_go() {
  sigterm_.end();
  if (leave_) {
    is_leaving_ = true;
    const auto end = c10::make_scope_exit([this] { is_leaving_ = false; });
    leave_();
  }
  const bool had_servers = has_servers();
  for (const auto& set : sets_) {
    if (set->servers() != nullptr) set->servers()->bring_rows_back();
  }
  leave_memory();
  sets_.clear();
  groups_.gradients.clear();
  groups_.step.clear();
  groups_.control.clear();
  groups_.workers.reset();
  groups_.prepare.reset();
  // After the groups: a worker that waits in one of them for this one would never leave the server.
  if (had_servers) wait_for_leavers();
  if (groups_.servers) groups_.servers->embedded.reset();
}

void StrategyCore::leave_memory() noexcept {
  try {
    for (const auto& set : sets_) set->leave_memory();
  } catch (const std::exception& error) {
    log(LogLevel::warning, std::string("parameters stay in memory that the host's other workers see: ") + error.what());
  }
}

// Where each element is stepped by one process for all, those that fail see whether somebody had begun. Elsewhere a
// process steps for itself, but others' shards come later, devices do what was enqueued before the failure was seen,
// and what servers sent may be of two steps.
bool StrategyCore::may_be_torn(bool in_apply) const {
  if (torn_ || is_streamed(topology_.devices.front()) || has_servers()) return true;
  if (in_apply && (applied_ > 0 || options_.shard_optimizer)) return true;
  return divides_steps_ && std::any_of(groups_.gradients.begin(), groups_.gradients.end(),
                                       [](const auto& group) { return group->peer_memory()->may_have_stores(); });
}

// In a handler.
void StrategyCore::fail_step(bool in_apply) {
  const auto error = std::current_exception();
  const auto has_ended = [&](const comm::CommunicatorPtr& group) {
    return divides_steps_ && group && group->peer_memory() != nullptr && group->peer_memory()->has_ended();
  };
  if (has_tail_ && has_ended(groups_.workers)) {
    // Those who are past what failed here would store into this process.
    for (const auto& group : groups_.gradients)
      group->abort("rank " + std::to_string(topology_.rank) + " failed in the exchange that follows a window");
  }
  const auto with_parameters = [&](const std::string& text) {
    torn_ = may_be_torn(in_apply);
    const auto step = std::to_string(in_apply ? steps_ : steps_ + 1);
    return text + (torn_ ? ". Parameters and optimizer state here may be partly those before step " + step +
                               " and partly those after it: go on from what was saved last"
                         : ". Parameters and optimizer state here are whole, those before step " + step);
  };
  if (!groups_.gradients.empty() && has_ended(groups_.gradients.front()) && !busy()) leave_memory();
  try {
    std::rethrow_exception(error);
  } catch (const KnowsParameters&) {
    std::rethrow_exception(error);
  } catch (const PeerLost& lost) {
    const auto text = with_parameters(lost.what());
    throw WithParameters<PeerLost>(torn_ ? Parameters::torn : Parameters::whole, lost.rank(), text);
  } catch (const Timeout& late) {
    const auto text = with_parameters(late.what());
    throw WithParameters<Timeout>(torn_ ? Parameters::torn : Parameters::whole, text);
  } catch (const CommError& failed) {
    const auto text = with_parameters(failed.what());
    throw WithParameters<CommError>(torn_ ? Parameters::torn : Parameters::whole, text);
  } catch (...) {
    std::rethrow_exception(error);
  }
}

// In a handler of what ended `apply`. Peers have what they step from, and wait for this rank's part in it.
void StrategyCore::fail_peers_in_apply() {
  if (begun_ >= awaited_) return;
  const auto failure = failures_.describe(std::current_exception());
  const auto reason = "rank " + std::to_string(topology_.rank) +
                      " failed before its part of the optimizer's step: " + failure.type + ": " + failure.text;
  abort_groups(groups_, reason);
  groups_.workers->abort(reason);
}

// Other workers may need the server that this process hosts.
void StrategyCore::wait_for_leavers() {
  const auto embedded = groups_.servers ? groups_.servers->embedded : nullptr;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(options_.timeout);
  while (embedded && !embedded->is_deserted() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

void StrategyCore::check_open() const {
  if (closed()) throw InvalidArgument("the strategy is closed; make a new one");
}

comm::Communicator& StrategyCore::workers() {
  check_open();
  return *groups_.workers;
}

comm::Communicator& StrategyCore::to_prepare() {
  check_open();
  return groups_.to_prepare();
}

CallGate::Pass StrategyCore::enter_alone(const char* what) {
  check_outside_steps();
  return gate_.enter_alone(what);
}

void StrategyCore::check_callable() const {
  check_open();
  check_outside_steps();
  if (busy()) throw CommError("a step that was interrupted is still running in a replica; wait for it, or exit");
}

void StrategyCore::find_outsiders() {
  outsiders_known_ = registry_.num_parameters();
  outsiders_.clear();
  std::vector<bool> inside(outsiders_known_, false);
  for (const auto& set : sets_) {
    for (int p : set->parameters()) inside[static_cast<size_t>(p)] = true;
  }
  for (size_t p = 0; p < outsiders_known_; ++p) {
    if (!inside[p]) outsiders_.push_back(p);
  }
}

int StrategyCore::add_module(ModuleTensors module) {
  const auto pass = enter();
  const bool is_first = registry_.num_parameters() == 0;
  const int number = registry_.add(std::move(module), groups_.to_prepare());
  if (is_first) choose_buckets();
  return number;
}

void StrategyCore::note_rows(const at::Tensor& weight, EmbeddingRows rows) {
  const auto pass = enter();
  const auto p = static_cast<size_t>(registry_.find(weight));
  if (!groups_.servers) {
    registry_.note_rows(p, rows);
    if (!is_row_stub(weight)) return;
    throw InvalidArgument("the rows of '" + registry_.name(p) +
                          "' were left to parameter servers (on_servers), which this strategy has not; use "
                          "ParameterServerStrategy, or leave on_servers out");
  }
  const auto seed = at::scalar_tensor(static_cast<int64_t>(rows.initialiser.seed), at::kLong);
  groups_.to_prepare().broadcast(seed, 0).wait();
  rows.initialiser.seed = static_cast<uint64_t>(seed.item<int64_t>());
  for (const auto& [name, agreed] : groups_.servers->facts.row_seeds) {
    if (name == registry_.name(p)) rows.initialiser.seed = agreed;
  }
  registry_.note_rows(p, rows);
}

void StrategyCore::compare_loader(int loader, const std::string& size) {
  const auto pass = enter();
  if (steps_ > 0 || has_servers()) return;  // workers may have died since
  const auto sizes = exchange_texts(groups_.to_prepare(), size);
  for (size_t r = 1; r < sizes.size(); ++r) {
    if (sizes[r] == sizes[0]) continue;
    throw LayoutMismatch("loader " + std::to_string(loader) + " of rank 0 has " + sizes[0] + ", that of rank " +
                         std::to_string(r) + " " + sizes[r] +
                         "; give all ranks the same data, or say that it is sharded where each has its own");
  }
}

// On a device the first reductions set up connections and their time says little.
void StrategyCore::choose_buckets() {
  if (options_.bucket_bytes) {
    groups_.buckets = buckets_of(*options_.bucket_bytes);
    return;
  }
  if (topology_.num_replicas == 1 || is_streamed(topology_.devices.front()) || groups_.servers) return;
  std::vector<LinkSpeed> links(topology_.devices.size());
  pool_->run([&](int local_replica) {
    const auto r = static_cast<size_t>(local_replica);
    links[r] = measure_link(*groups_.gradients[r]);
  });
  groups_.link = links.front();
  groups_.buckets = muster::choose_buckets(links.front(), groups_.gradients.front()->peer_memory() != nullptr);
}

int StrategyCore::set_of(std::vector<int> parameters) {
  const auto pass = enter();
  std::sort(parameters.begin(), parameters.end());
  parameters.erase(std::unique(parameters.begin(), parameters.end()), parameters.end());
  for (size_t s = 0; s < sets_.size(); ++s) {
    const auto& others = sets_[s]->parameters();
    if (others == parameters) return static_cast<int>(s);
    std::vector<int> shared;
    std::set_intersection(others.begin(), others.end(), parameters.begin(), parameters.end(),
                          std::back_inserter(shared));
    if (!shared.empty()) {
      throw InvalidArgument(
          "parameter '" + registry_.name(static_cast<size_t>(shared.front())) +
          "' is in two different sets of optimizers=; sets must be equal or disjoint: pass optimizers= "
          "in every step, with the same groups");
    }
  }
  sets_.push_back(std::make_unique<ParameterSet>(registry_, topology_, groups_, options_, this, std::move(parameters)));
  outsiders_known_ = 0;
  return static_cast<int>(sets_.size()) - 1;
}

void StrategyCore::change_set(int set, std::vector<int> parameters) {
  const auto pass = enter();
  std::sort(parameters.begin(), parameters.end());
  sets_.at(static_cast<size_t>(set))->set_parameters(std::move(parameters));
  outsiders_known_ = 0;
}

std::shared_ptr<ReplicaContext> StrategyCore::make_context(int local_replica, uint64_t t) {
  auto context = std::make_shared<ReplicaContext>();
  context->local_replica = local_replica;
  context->replica = topology_.first_replica + local_replica;
  context->strategy = this;
  streams_.give(*context, t);
  return context;
}

int StrategyCore::current_local_replica() const {
  const auto context = current_replica();
  return context && context->strategy == this ? context->local_replica : -1;
}

int64_t StrategyCore::current_rows() const {
  const int replica = current_local_replica();
  return replica < 0 ? -1 : rows_[static_cast<size_t>(replica)];
}

comm::Communicator& StrategyCore::step_group(const std::vector<at::Tensor>& values) {
  const int replica = current_local_replica();
  if (replica < 0) throw InvalidArgument("no step of this strategy is running on this thread");
  const auto device = topology_.devices[static_cast<size_t>(replica)];
  const bool needs_backward =
      at::GradMode::is_enabled() &&
      std::any_of(values.begin(), values.end(), [](const at::Tensor& value) { return value.requires_grad(); });
  if (needs_backward && !device.is_cpu() &&
      std::count(topology_.devices.begin(), topology_.devices.end(), device) > 1) {
    throw InvalidArgument(
        "several replicas share " + device.str() +
        ", whose gradients torch computes on one thread: collectives inside the step (and SyncBatchNorm) cannot be "
        "differentiated there; detach() the value, or use one replica a GPU");
  }
  used_step_group_[static_cast<size_t>(replica)] = 1;
  return *groups_.step[static_cast<size_t>(replica)];
}

void StrategyCore::check_need_no_flat(const std::vector<int>& parameters) const {
  for (const int index : parameters) {
    const auto* const rows = registry_.rows_of(static_cast<size_t>(index));
    if (rows == nullptr || !rows->row_wise_adagrad) continue;
    throw InvalidArgument("embedding '" + registry_.name(static_cast<size_t>(index)) +
                          "' has row_wise_adagrad, which needs a flat Adagrad; use that, or leave the option out");
  }
}

FlatOptimizer StrategyCore::make_flat(const std::vector<std::pair<int, uint32_t>>& parameters,
                                      const FlatGroups& groups) const {
  std::vector<FlatParameter> flat;
  for (const auto& [index, group] : parameters) {
    const auto p = static_cast<size_t>(index);
    const auto* const rows = registry_.rows_of(p);
    if (registry_.parameter(0, p).is_complex()) {
      throw InvalidArgument("parameter '" + registry_.name(p) +
                            "' is complex, and flat optimizers step real ones; use torch's own optimizer for it");
    }
    flat.push_back({registry_.name(p), registry_.parameter(0, p), group, rows != nullptr && rows->row_wise_adagrad});
  }
  const Shard shard = options_.shard_optimizer ? Shard{topology_.rank, topology_.num_workers} : Shard{};
  return FlatOptimizer(std::move(flat), groups, shard);
}

void StrategyCore::connect_servers(int set, const FlatOptimizer& optimizer, const std::vector<int>& parameters,
                                   const FlatGroups& groups) {
  check_callable();
  if (has_servers()) {
    throw InvalidArgument(
        "parameter servers hold one set of parameters, and this step trains another; pass the same optimizers= in "
        "every step, or use another strategy");
  }
  sets_.at(static_cast<size_t>(set))->connect_servers(optimizer, parameters, groups);
}

bool StrategyCore::has_servers() const {
  return std::any_of(sets_.begin(), sets_.end(), [](const auto& set) { return set->servers() != nullptr; });
}

ServerExchange& StrategyCore::servers() {
  for (const auto& set : sets_) {
    if (set->servers() != nullptr) return *set->servers();
  }
  check_open();
  throw InvalidArgument(
      "parameter servers deal batches once they know the model; prepare() the modules and the optimizer (AdamW, Adam, "
      "SGD or Adagrad) before a loader is iterated");
}

std::vector<at::Tensor> StrategyCore::state_on_servers(const std::vector<int>& parameters, server::Part part,
                                                       bool to_stay) {
  if (!is_leaving_) check_open();
  for (const auto& set : sets_) {
    if (set->servers() == nullptr) continue;
    const auto& trained = set->trainable();
    const auto whole = set->servers()->fetch(part, to_stay);
    std::vector<at::Tensor> values;
    for (const int index : parameters) {
      const auto found = std::find(trained.begin(), trained.end(), index);
      values.push_back(found == trained.end() ? at::Tensor() : whole[static_cast<size_t>(found - trained.begin())]);
    }
    return values;
  }
  return {};
}

}  // namespace muster
