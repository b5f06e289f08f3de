// What workers of a simulated job do, and the launcher that looks after them.
#include <cstring>
#include <set>
#include <utility>

#include "muster/error.h"
#include "support/simulated_world.h"

namespace muster::testing {

using namespace server;

namespace {

constexpr milliseconds kHeartbeat{1'000};
constexpr milliseconds kPatience{2'000};
constexpr milliseconds kLauncher{300};    // until it starts all again
constexpr milliseconds kErrorsBy{5'000};  // after a death

// Of a parameter that fills half a chunk of fp32, at whose edges servers' shares are cut.
constexpr int64_t kSpreadTile = 4'096;

std::string text_of(const std::vector<uint32_t>& ranks) {
  std::string text;
  for (const uint32_t rank : ranks) text += (text.empty() ? "" : ",") + std::to_string(rank);
  return "{" + text + "}";
}

}  // namespace

FlatGroups groups_of(const JobSetup& setup, bool is_late) {
  std::vector<kernels::SgdGroup> groups(setup.is_thorough ? 2 : 1, {1, 0, 0, 0, false, false});
  if (setup.is_thorough && setup.staleness == 0) {
    groups.front() = {0.5, 0.875, 0, 0.25, false, false};
    if (is_late && setup.joins_with_others) groups.front().lr = 0.25;
  }
  return groups;
}

Plan plan_of(const JobSetup& setup) {
  Plan plan;
  for (int p = 0; p < 4; ++p) {
    const auto dtype = setup.is_thorough && p % 2 == 1 ? at::kDouble : at::kFloat;
    plan.parameters.push_back({"p" + std::to_string(p), {setup.is_spread ? kSpreadTile : kElements}, {1}, dtype});
  }
  plan.group_of.resize(plan.parameters.size());
  if (setup.is_thorough) {
    plan.tables = {{"rows", kRows, kDim, RowPlacement::modulo, {RowInitialiser::Kind::normal, 0, 0}, 1}};
  }
  plan.groups = groups_of(setup, /*is_late=*/false);
  plan.servers = setup.servers;
  plan.workers = setup.workers;
  plan.staleness = setup.staleness;
  plan.chunk_bytes = kMinChunkBytes;
  plan.heartbeat_ms = static_cast<uint32_t>(kHeartbeat.count());
  plan.timeout_ms = 20'000;
  return plan;
}

class WorkerSurroundings final : public Surroundings {
 public:
  WorkerSurroundings(World& world, Life& life) : world_(world), life_(life) {}

  Clock::time_point now() override { return world_.now_; }
  void sleep(milliseconds duration) override {
    if (world_.running_ != nullptr) world_.block(life_, world_.now_ + duration, {});
  }
  std::unique_ptr<net::Channel> connect(const std::string& name, std::shared_ptr<net::Arena> /*memory*/,
                                        net::Deadline /*deadline*/) override {
    if (life_.is_killed && world_.running_ != nullptr) throw Killed();
    return world_.connect(life_, name);
  }
  void start(Pulse& pulse) override { world_.pulses_.push_back({&pulse, &life_, world_.now_}); }
  void stop(Pulse& pulse) noexcept override {
    std::erase_if(world_.pulses_, [&](const auto& ticking) { return ticking.pulse == &pulse; });
  }

 private:
  World& world_;
  Life& life_;
};

// --- workers ---------------------------------------------------------------------------------------------------------

void World::start_life(uint32_t rank, bool joins) {
  auto& life = *lives_.emplace_back(std::make_unique<Life>());
  life.rank = rank;
  life.number = lives_.size() - 1;
  life.job = job_;
  life.until = now_;
  life.joins = joins;
  say("worker " + std::to_string(rank) + " begins life " + std::to_string(life.number) + (joins ? " and joins" : "") +
      " job " + std::to_string(job_));
  start_thread(life, [this, &life, joins] { work(life, joins); });
}

ClientConfig World::config_of(Life& life, bool joins) {
  ClientConfig config;
  for (size_t s = 0; s < servers_.size(); ++s) config.servers.push_back(std::to_string(s));
  config.rank = life.rank;
  config.plan = plan_;
  config.job = life.job;
  config.token = "simulated";
  config.joins = joins;
  config.lanes = 1;
  config.shares_memory = false;
  config.surroundings = std::make_shared<WorkerSurroundings>(*this, life);
  return config;
}

void World::begin_values(ServerClient& client) {
  client.start([&] {
    for (uint32_t c = 0; c < client.chunks().size(); ++c) {
      const std::vector<std::byte> zeros(client.part_bytes(c, Part::parameter));
      client.write(c, Part::parameter, zeros);
    }
  });
}

void World::work(Life& life, bool joins) {
  auto config = config_of(life, joins);
  uint64_t step_bytes = 0;
  for (const auto& chunk : cut_chunks(plan_)) step_bytes += static_cast<uint64_t>(chunk.gradient_bytes());
  config.log_bytes = (2 + pick(8)) * step_bytes;
  config.patience = kPatience;
  config.begins_anew = setup_.begins_anew && life.job > 1;
  ServerClient client(config);
  if (life.rank == 0 && !client.is_started()) begin_values(client);
  const uint64_t step = client.join();
  life.first = life.begun = life.acked = step;
  say("life " + std::to_string(life.number) + " comes in after step " + std::to_string(step));
  if (plan_.is_synchronous()) {
    note_start(life, step);
    std::vector<std::vector<std::byte>> memory;
    client.read(Part::parameter, joins ? step : 0, landing_of(client, memory));
  }
  setup_.deals && !plan_.is_synchronous() ? train_on_batches(life, client) : train(life, client);
  life.leaves = true;
  client.leave();
  life.has_left = true;
  say("life " + std::to_string(life.number) + " leaves after step " + std::to_string(life.acked));
}

// Later steps did not happen: where a job begins, and where all who knew of them are gone, or cut off from server 0,
// when somebody joins it, the servers' snapshots say where it goes on. That may be before steps that workers have made,
// and not before those that one of them was told are durable: in the newest snapshots of all servers or, where one of
// these was damaged, in all. Another damage may be to the snapshot that a server went back to.
void World::note_start(const Life& life, uint64_t step) {
  if (life.job != job_) return;  // it is ending
  const auto knows_later = [&](const auto& other) {
    return !other->is_over && other->job == life.job && other->decided > step && partition(other->rank, 0) == nullptr;
  };
  const bool is_first = begun_.emplace(life.job, step).second;
  if (!is_first && (!life.joins || std::any_of(lives_.begin(), lives_.end(), knows_later))) return;
  if (is_first && setup_.begins_anew && step > 0) fail("the job goes on from what an earlier one trained");
  for (const auto& other : lives_) {
    if (setup_.begins_anew && other->job != life.job) continue;
    const uint64_t durable = damages_ == 0 ? other->durable.newest : damages_ == 1 ? other->durable.all : 0;
    if (durable > step) fail("the job goes on before step " + std::to_string(durable) + ", which was durable");
  }
  members_.erase(members_.upper_bound(step), members_.end());
  values_.erase(values_.upper_bound(step), values_.end());
}

// Schedules of one that joins before the job's first step are where those of the others are.
bool World::is_late(const Life& life) const {
  const auto begun = begun_.find(life.job);
  return life.joins && begun != begun_.end() && life.first > begun->second;
}

void World::train(Life& life, ServerClient& client) {
  uint64_t step = life.first;
  while (!ends_ && (plan_.is_synchronous() ? step < setup_.steps : step - life.first < setup_.steps)) {
    rest(life);
    make_step(life, client, ++step);
  }
}

void World::train_on_batches(Life& life, ServerClient& client) {
  uint64_t step = life.first;
  std::vector<uint64_t> without_step;
  while (!ends_) {
    rest(life);
    const auto dealt = client.deal(0, 0, setup_.steps, std::exchange(without_step, {}));
    if (dealt.state == Dealt::State::ended) return;
    if (dealt.state == Dealt::State::none) continue;
    life.batches[++step] = dealt.batch;
    make_step(life, client, step, dealt.batch);
  }
}

// As long as a step's forward and backward take.
void World::rest(Life& life) { block(life, now_ + milliseconds(pick(4) == 0 ? pick(200) : pick(20)), {}); }

void World::push(const Life& life, ServerClient& client, uint64_t step, std::optional<uint64_t> batch) {
  const bool is_trained = setup_.is_thorough && plan_.is_synchronous();
  const uint64_t element = plan_.is_synchronous() ? life.rank : life.number;
  for (uint32_t c = 0; c < client.chunks().size(); ++c) {
    const auto& chunk = client.chunks()[c];
    const auto gradient = std::make_shared<std::vector<std::byte>>(static_cast<size_t>(chunk.gradient_bytes()));
    const auto write = [&](int64_t at, double value) {
      const auto single = static_cast<float>(value);
      if (chunk.gradient == at::kDouble) {
        std::memcpy(gradient->data() + at * 8, &value, 8);
      } else {
        std::memcpy(gradient->data() + at * 4, &single, 4);
      }
    };
    for (const auto& piece : chunk.pieces) {
      if (!is_trained) write(piece.offset + static_cast<int64_t>(element), 1);
      for (int64_t e = 0; is_trained && e < kElements; ++e) {
        write(piece.offset + e, gradient_of(life.rank, step, piece.parameter, e));
      }
    }
    const Bytes bytes(*gradient);
    client.push(step, c, {&bytes, 1}, gradient);
  }
  if (plan_.tables.empty()) return;
  std::vector<int64_t> rows{static_cast<int64_t>(element)};
  if (is_trained) rows.push_back(row_of_step(step));
  if (batch) rows.push_back(row_of_batch(life.job, *batch));
  client.rows().push(step, 0, rows, std::vector<float>(rows.size() * kDim, 1));
}

void World::make_step(Life& life, ServerClient& client, uint64_t step, std::optional<uint64_t> batch) {
  life.begun = step;
  push(life, client, step, batch);
  client.flush();
  Apply command;
  command.step = step;
  command.groups = groups_of(setup_, is_late(life));
  if (batch) command.batches = {{0, 0, *batch}};
  command.members = {life.rank};
  if (plan_.is_synchronous()) {
    command.members = client.commit(step, {1}).members;
    life.decided = step;
    note_members(life, step, command.members);
    client.sum(step, command.members);
  }
  std::vector<std::vector<std::byte>> memory;
  std::vector<std::byte*> landing;
  if (setup_.is_thorough) landing = landing_of(client, memory);
  if (setup_.is_thorough && plan_.is_synchronous() && step % 2 == 1) {
    client.apply_and_read(command, landing);
  } else {
    client.apply(command);
  }
  life.acked = step;
  if (!plan_.is_synchronous()) client.commit(step, {});
  life.durable = client.durable();
  if (setup_.is_thorough) note_values(life, client, step, landing);
}

// Other values than those of the others who read them after the same step are wrong, as are those without own steps.
void World::note_values(const Life& life, ServerClient& client, uint64_t step, const std::vector<std::byte*>& landing) {
  const bool was_read = plan_.is_synchronous() && step % 2 == 1;
  if (!was_read) client.read(Part::parameter, plan_.is_synchronous() ? step : 0, landing);
  auto values = values_in(client, landing, plan_.is_synchronous() ? step : 0);
  if (life.job != job_) return;  // it is ending
  const std::string who = "life " + std::to_string(life.number) + " after step " + std::to_string(step);
  if (plan_.is_synchronous()) {
    const auto [known, is_new] = values_.try_emplace(step, values);
    if (!is_new && known->second != values) fail(who + " reads other values than another worker");
    return;
  }
  const auto own = static_cast<double>(step - life.first);
  for (const auto& of_parameter : values.parameters) {
    if (-of_parameter[life.number] != own) fail(who + " reads values without its own steps");
  }
  if (-values.rows[life.number] != static_cast<float>(own)) fail(who + " reads rows without its own steps");
}

void World::note_members(const Life& life, uint64_t step, const std::vector<uint32_t>& members) {
  if (life.job != job_) return;  // it is ending
  const auto [known, is_new] = members_.try_emplace(step, members);
  if (is_new || known->second == members) return;
  fail("step " + std::to_string(step) + " has members " + text_of(members) + " and " + text_of(known->second));
}

// --- the launcher ----------------------------------------------------------------------------------------------------

void World::start_job() {
  ++job_;
  for (uint32_t rank = 0; rank < plan_.workers; ++rank) {
    starts_[rank] = {};
    start_life(rank, false);
  }
}

bool World::is_done() {
  return begins_again_ == Time{} && alive().empty() && std::any_of(lives_.begin(), lives_.end(), [&](const auto& life) {
           return life->job == job_ && life->has_left;
         });
}

void World::look_at_error(const Life& life) {
  const std::string who = "life " + std::to_string(life.number);
  say(who + " ends: " + life.error);
  if (!life.is_allowed) fail(who + " ends with " + life.error);
  if (!kill_) return;
  if (killed_at_ == Time{} || life.ended - killed_at_ > kErrorsBy) fail(who + " ends so late, or without a death");
  const bool names =
      life.error.find("worker ") != std::string::npos || life.error.find("parameter server ") != std::string::npos;
  if (!names) fail(who + " ends and names nobody: " + life.error);
}

void World::look_after_job() {
  if (begins_again_ != Time{}) {
    if (begins_again_ > now_) return;
    begins_again_ = {};
    say("all workers are started again");
    return start_job();
  }
  bool has_failed = false;
  bool has_left = false;  // once its last step was durable: the job needs nobody any more
  for (const auto& life : lives_) {
    if (life->job != job_ || !life->is_over) continue;
    // Who joined after the last step waits for nothing: it cannot push again what a server lacks.
    has_left = has_left || (life->has_left && (!life->joins || life->acked > life->first));
    if (life->error.empty() || life->error == "killed") continue;
    look_at_error(*life);
    has_failed = true;
  }
  const bool has_dead = std::any_of(starts_.begin(), starts_.end(), [](Time at) { return at != Time{}; });
  if (has_failed || (has_dead && !has_left && (!setup_.replaces || alive().empty()))) {
    for (auto* const life : alive()) kill_life(*life);
    for (auto& at : starts_) at = {};
    begins_again_ = now_ + kLauncher;
    return;
  }
  for (uint32_t rank = 0; rank < starts_.size(); ++rank) {
    if (starts_[rank] == Time{} || starts_[rank] > now_) continue;
    starts_[rank] = {};
    if (!has_left) start_life(rank, true);
  }
}

}  // namespace muster::testing
