#include "strategy/loaders.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "comm/text_exchange.h"
#include "core/log.h"
#include "muster/error.h"
#include "server/protocol/wire.h"
#include "strategy/saved_parts.h"
#include "strategy/saved_passes.h"

namespace muster {

namespace {

using List = SavedValue::List;
using Dict = SavedValue::Dict;

// Those of a strategy's servers.
class ServedMembers final : public detail::Members {
 public:
  explicit ServedMembers(std::shared_ptr<StrategyCore> core) : core_(std::move(core)) {}

  std::vector<uint32_t> expected() override {
    const auto pass = core_->session().enter();
    if (core_->sets().has_servers()) return core_->sets().servers().expected();
    std::vector<uint32_t> all(static_cast<size_t>(core_->session().topology().num_workers));
    std::iota(all.begin(), all.end(), 0U);
    return all;
  }
  server::Dealt deal(const server::PassId& id, uint64_t batches, std::vector<uint64_t> finished) override {
    const auto pass = core_->session().enter();
    return core_->sets().servers().deal(id.loader, id.epoch, batches, std::move(finished));
  }
  void end_pass(const server::PassId& id, uint64_t batches, std::vector<uint64_t> finished) override {
    const auto pass = core_->session().enter();
    if (core_->sets().has_servers())
      core_->sets().servers().end_pass(id.loader, id.epoch, batches, std::move(finished));
  }

 private:
  const std::shared_ptr<StrategyCore> core_;
};

void check_place(const Dict& saved, const detail::LoaderPlace& place, size_t loader) {
  const auto name = "loader " + std::to_string(loader);
  detail::check_extent(saved, place.extent, name);
  const auto& generators = detail::member(saved, "generators").get<List>();
  if (generators.empty()) return;
  throw LayoutMismatch(name + " was saved with the states of " + std::to_string(generators.size()) +
                       " generators of its own, which a loader has not in C++; go on in Python");
}

server::PassId pass_id(int loader, int64_t epoch) {
  return {static_cast<uint32_t>(loader), static_cast<uint64_t>(epoch)};
}

}  // namespace

Loaders::Loaders(std::shared_ptr<StrategyCore> core, std::function<void()> connect)
    : core_(std::move(core)), connect_(std::move(connect)), members_(std::make_shared<ServedMembers>(core_)) {
  core_->stepper().describe_passes([this] { return standings(); });
}

Loaders::~Loaders() { core_->stepper().describe_passes({}); }

detail::LoaderJob Loaders::job() const {
  auto division = detail::Division::all_workers;
  auto& session = core_->session();
  if (session.groups().shares_batches()) division = detail::Division::live_workers;
  if (session.groups().deals_batches()) division = detail::Division::none;
  return {session.topology(), division, session.groups().joins()};
}

int Loaders::add(const std::shared_ptr<detail::LoaderProgress>& loader, std::shared_ptr<detail::LoaderPlace> place,
                 const std::string& size) {
  if (place) {
    const size_t number = places_.size();
    const auto awaited = awaited_.find(number);
    if (awaited != awaited_.end()) check_place(awaited->second, *place, number);
    places_.push_back(std::move(place));
    if (awaited != awaited_.end()) {
      take(number, awaited->second);
      awaited_.erase(awaited);
    }
  }
  std::erase_if(loaders_, [](const auto& known) { return known.expired(); });
  loaders_.push_back(loader);
  const int number = num_loaders_++;
  if (!size.empty()) compare(number, size);
  return number;
}

void Loaders::compare(int loader, const std::string& size) {
  const auto pass = core_->session().enter();
  if (core_->stepper().steps() > 0 || core_->sets().has_servers()) return;  // workers may have died since
  const auto sizes = exchange_texts(core_->session().to_prepare(), size);
  for (size_t r = 1; r < sizes.size(); ++r) {
    if (sizes[r] == sizes[0]) continue;
    throw LayoutMismatch("loader " + std::to_string(loader) + " of rank 0 has " + sizes[0] + ", that of rank " +
                         std::to_string(r) + " " + sizes[r] +
                         "; give all ranks the same data, or say that it is sharded where each has its own");
  }
}

bool Loaders::any_has_more(bool has_more) {
  if (core_->session().groups().deals_batches()) return has_more;
  // Shapes alone travel, with the requests, which are compared with what other ranks ask for.
  const auto rows_of_nothing = at::empty({has_more ? 1 : 0, 0}, at::kByte);
  auto work = core_->session().workers("a pass over a loader").all_gather(rows_of_nothing);
  work.wait();
  const auto gathered = work.outputs();
  return std::any_of(gathered.begin(), gathered.end(), [](const at::Tensor& rows) { return rows.size(0) > 0; });
}

// Refuses before the pass counts as begun.
void Loaders::connect() const {
  if (!core_->sets().has_servers()) connect_();
  core_->sets().servers();
}

std::shared_ptr<detail::DealtPass> Loaders::deal(int loader, int64_t epoch, int64_t batches) {
  connect();
  dealt_.push_back(std::make_shared<detail::DealtPass>(members_, pass_id(loader, epoch), batches,
                                                       core_->session().options().timeout));
  return dealt_.back();
}

std::shared_ptr<detail::SharedPass> Loaders::share(int loader, int64_t epoch,
                                                   detail::SharedPass::NextBatch next_batch) {
  const auto id = pass_id(loader, epoch);
  const auto& topology = core_->session().topology();
  auto pass = std::make_shared<detail::SharedPass>(members_, static_cast<uint32_t>(topology.rank), id,
                                                   std::move(next_batch), topology.replicas_of_worker);
  shared_[id.loader] = pass;
  if (!core_->session().groups().joins()) return pass;
  connect();
  const auto others = others_.find(id.loader);
  if (others == others_.end() || others->second.epoch < id.epoch) return pass;
  if (others->second.epoch > id.epoch) {
    pass->go_on({.is_left = true}, {});
    return pass;
  }
  if (core_->stepper().steps() > told_at_) {
    throw InvalidArgument(
        "this worker joined others in a pass over this loader, and stepped before it began that pass; iterate over "
        "loaders in the order of the other workers");
  }
  pass->go_on(others->second, core_->sets().servers().members());
  others_.erase(others);
  return pass;
}

void Loaders::leave_passes() {
  for (const auto& pass : dealt_) {
    if (pass->is_left()) pass->leave();
  }
  std::erase_if(dealt_, [](const auto& pass) { return pass->has_ended(); });
}

void Loaders::joined(const std::string& standings) {
  told_at_ = core_->stepper().steps();
  if (standings.empty()) return;
  for (auto& pass : server::decode<detail::PassStandings>(standings).passes) others_[pass.loader] = std::move(pass);
}

std::string Loaders::standings() const {
  detail::PassStandings standings;
  for (const auto& [loader, last] : shared_) {
    if (const auto pass = last.lock()) standings.passes.push_back(pass->standing());
  }
  return server::encode(standings);
}

std::vector<server::PassProgress> Loaders::passes_of(int loader, int64_t epoch) {
  const auto pass = core_->session().enter();
  auto passes = core_->sets().has_servers() ? core_->sets().servers().passes() : served().passes;
  const auto [id, first] = pass_id(loader, epoch);
  std::erase_if(passes, [id = id, first = first](const auto& each) { return each.loader != id || each.epoch < first; });
  return passes;
}

void Loaders::go_on(int loader, const std::vector<server::PassProgress>& passes) {
  const auto id = static_cast<uint32_t>(loader);
  auto& all = served().passes;
  std::erase_if(all, [&](const auto& each) { return each.loader == id; });
  all.insert(all.end(), passes.begin(), passes.end());
}

List Loaders::saved() {
  List saved;
  size_t end = 0;
  for (size_t i = 0; i < places_.size(); ++i) {
    const auto& place = *places_[i];
    Dict loader;
    if (place.is_known) {
      const auto state = state_of(place, steps());
      loader = {{"epoch", state.epoch}, {"batches", state.batches}, {"generators", List()}};
    } else {
      loader = detail::saved_loader(place.epoch, passes_of(static_cast<int>(i), place.epoch));
    }
    detail::add_extent(loader, place.extent);
    saved.emplace_back(std::move(loader));
    if (!place.is_over) end = saved.size();
  }
  if (awaited_.empty()) saved.erase(saved.begin() + static_cast<std::ptrdiff_t>(end), saved.end());
  for (const auto& [number, place] : awaited_) saved.emplace_back(place);
  return saved;
}

void Loaders::check(const List& saved) const {
  for (size_t i = 0; i < std::min(saved.size(), places_.size()); ++i) check_place(saved[i].get<Dict>(), *places_[i], i);
}

void Loaders::take(const List& saved) {
  if (!saved.empty() && saved.size() < places_.size() && steps() == 0) {
    log(LogLevel::warning, "the checkpoint has the places of " + std::to_string(saved.size()) + " loaders, and " +
                               std::to_string(places_.size()) + " are prepared: those behind them begin anew");
  }
  awaited_.clear();
  for (size_t i = 0; i < saved.size(); ++i) {
    const auto& theirs = saved[i].get<Dict>();
    const bool is_prepared = i < places_.size();
    if (is_prepared) {
      take(i, theirs);
    } else {
      awaited_.emplace(i, theirs);
    }
    // Before servers are connected, which a loader that is prepared later may be too late for.
    const bool is_dealt = is_prepared ? !places_[i]->is_known : job().division == detail::Division::none;
    if (is_dealt) go_on(static_cast<int>(i), detail::passes_in(theirs, static_cast<uint32_t>(i)));
  }
}

void Loaders::take(size_t loader, const Dict& saved) {
  auto& place = *places_[loader];
  take_state(place, place.is_known ? detail::place_in(saved) : LoaderState{.epoch = detail::integer(saved, "epoch")});
}

ServerJob& Loaders::served() {
  auto& servers = core_->session().groups().servers;
  if (!servers) throw InvalidArgument("no parameter servers deal the batches of this job");
  return *servers;
}

bool Loaders::stays_open(int set) {
  const auto pass = core_->session().enter();
  return core_->sets().at(set).micro_batches() + 1 < core_->session().options().accumulate;
}

bool Loaders::has_ended(int set, const std::vector<Stepped>& stepped) {
  const auto pass = core_->session().enter();
  const auto find_end = [is_needed = stays_open(set)](const detail::LoaderProgress& loader) {
    if (is_needed && loader.find_end) loader.find_end();
  };
  in_step_ = stepped;
  for (auto& [loader, batch, is_last] : in_step_) {
    find_end(*loader);
    is_last = is_last || loader->last_batch == batch;
  }
  if (stepped.empty()) {
    for (const auto& known : loaders_) {
      const auto loader = known.lock();
      if (!loader || loader->left == loader->passes || loader->yielded == 0) continue;
      find_end(*loader);
      const bool stands_at_end = loader->may_stand_at_end(loaders_) && (loader->in_step || !loader->in_run);
      in_step_.push_back({loader, loader->yielded, stands_at_end});
    }
  }
  bool has_ended = false;
  for (const auto& [loader, batch, is_last] : in_step_) {
    const auto& calls = loader->calls[set];
    if (calls.fell_short(batch) && core_->sets().at(set).window_open()) warn_of_short_end();
    has_ended = has_ended || (is_last && calls.ends(batch, is_last));
  }
  return has_ended;
}

void Loaders::warn_of_short_end() {
  if (std::exchange(has_warned_of_short_end_, true)) return;
  log(LogLevel::warning,
      "the last batch of a loader's pass went into fewer steps than was expected (as many as the last batch of the "
      "pass "
      "before, or the batch before it), so that its window is open still, and goes on with the next pass; call flush() "
      "behind the loop");
}

void Loaders::note_step(int set, bool stepped) {
  for (const auto& [loader, batch, is_last] : in_step_) loader->calls[set].note(batch, is_last);
  auto window = stepped ? detail::WindowEnd::closed : detail::WindowEnd::still_open;
  if (!stepped) {
    try {
      const auto pass = core_->session().enter();
      if (!core_->sets().at(set).window_open()) window = detail::WindowEnd::dropped;
    } catch (const InvalidArgument&) {
      return;
    }
  }
  end_step(window);
}

void Loaders::end_step(detail::WindowEnd window) {
  in_step_.clear();
  std::vector<uint32_t> members;
  if (window == detail::WindowEnd::closed && core_->session().groups().shares_batches()) {
    try {
      const auto pass = core_->session().enter();
      members = core_->sets().servers().members();
    } catch (const InvalidArgument&) {
      return;
    }
  }
  for (const auto& loader : loaders_) {
    const auto progress = loader.lock();
    if (progress && progress->pass) progress->pass->end_step(window, members);
  }
}

}  // namespace muster
