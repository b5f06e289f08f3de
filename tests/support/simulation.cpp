#include "support/simulation.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <semaphore>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "core/log.h"
#include "muster/error.h"
#include "server/shard/server_core.h"
#include "server/worker/client.h"
#include "server/worker/pulse.h"
#include "support/memory_channel.h"

namespace muster::testing {

using namespace server;
using std::chrono::milliseconds;

namespace {

using Time = Surroundings::Clock::time_point;

constexpr milliseconds kLook{50};  // between two looks of a server at its members
constexpr milliseconds kHeartbeat{1'000};
constexpr milliseconds kPatience{2'000};
constexpr milliseconds kEnd{150'000};  // of virtual time: longer is a hang
constexpr uint64_t kNobody = ~uint64_t{0};

// Thrown where a thread of a worker that is killed waits.
struct Killed {};
// Thrown where a request of a server waits: it is given again.
struct Parked {};

std::string text_of(const std::vector<uint32_t>& ranks) {
  std::string text;
  for (const uint32_t rank : ranks) text += (text.empty() ? "" : ",") + std::to_string(rank);
  return "{" + text + "}";
}

// --- disks -----------------------------------------------------------------------------------------------------------

struct Disk {
  struct Kept {
    std::string name;
    checkpoint::Metadata metadata;
    std::vector<checkpoint::NamedTensors> tensors;
    bool is_damaged = false;
  };
  std::vector<Kept> kept;
  uint64_t lives = 0;
  uint64_t names = 0;
};

class DiskStore final : public SnapshotStore {
 public:
  explicit DiskStore(Disk& disk) : disk_(disk), life_(++disk.lives) {}

  uint64_t life() const override { return life_; }
  std::vector<Entry> list() const override {
    std::vector<Entry> entries;
    for (const auto& kept : disk_.kept) entries.push_back({kept.name, kept.metadata});
    return entries;
  }
  void read(const std::string& name, const Give& give) const override {
    for (const auto& kept : disk_.kept) {
      if (kept.name != name) continue;
      for (const auto& tensors : kept.tensors) give(tensors, 0, 1);
      if (kept.is_damaged) throw CheckpointError("damaged");
      return;
    }
    throw CheckpointError("not there");
  }
  std::string write(const checkpoint::Metadata& metadata, const checkpoint::NextTensors& next,
                    const checkpoint::SnapshotOptions& /*options*/) override {
    Disk::Kept kept{std::to_string(++disk_.names), metadata, {}};
    for (auto tensors = next(); !tensors.empty(); tensors = next()) kept.tensors.push_back(std::move(tensors));
    disk_.kept.push_back(std::move(kept));
    return disk_.kept.back().name;
  }
  void remove(const std::string& name) override {
    std::erase_if(disk_.kept, [&](const auto& kept) { return kept.name == name; });
  }
  std::string where() const override { return "a disk"; }

 private:
  Disk& disk_;
  const uint64_t life_;
};

// --- the job ---------------------------------------------------------------------------------------------------------

Plan plan_of(uint32_t servers, uint32_t workers, uint32_t staleness) {
  Plan plan;
  for (int p = 0; p < 4; ++p) plan.parameters.push_back({"p" + std::to_string(p), {64}, {1}, at::kFloat});
  plan.group_of.resize(plan.parameters.size());
  plan.groups = std::vector<kernels::SgdGroup>{{1, 0, 0, 0, false, false}};
  plan.servers = servers;
  plan.workers = workers;
  plan.staleness = staleness;
  plan.chunk_bytes = kMinChunkBytes;
  plan.heartbeat_ms = static_cast<uint32_t>(kHeartbeat.count());
  plan.timeout_ms = 20'000;
  return plan;
}

class World;

// A life of a worker's process: a thread, of which the scheduler lets one run at a time.
struct Life {
  uint32_t rank = 0;
  uint64_t number = 0;
  uint64_t job = 0;
  std::binary_semaphore turn{0};
  std::thread thread;
  // While it waits:
  Time until{};
  std::function<bool()> is_ready;  // empty: for the time alone
  bool is_killed = false;
  bool is_over = false;
  std::string error;       // what it ended with
  bool is_allowed = true;  // that error is one which names what to do
  // What it did:
  uint64_t first = kNobody;  // the step before its first
  uint64_t begun = 0;
  uint64_t acked = 0;
  Durable durable;
  bool has_left = false;
};

struct SimulatedServer {
  struct Connection {
    explicit Connection(std::unique_ptr<net::Channel> channel) : session(std::move(channel)) {}
    Session session;
    std::optional<net::Frame> parked;
    uint64_t number = 0;
  };

  Disk disk;
  std::unique_ptr<ServerCore> core;
  std::list<std::unique_ptr<Connection>> connections;
  Time looked{};
  Time frozen_until{};
  Time starts_at{};  // where it is down
};

class World final : public Waiting, public Timekeeper, public std::enable_shared_from_this<World> {
 public:
  explicit World(const SimulationOptions& options) : options_(options), random_(options.seed * 2654435761U + 1) {}

  std::string run();

  // As the clock and the waits of all.
  net::Deadline now() override { return now_; }
  Time now() const override { return now_; }
  bool wait(std::unique_lock<std::mutex>& /*lock*/, std::condition_variable& /*changed*/, Time /*deadline*/) override {
    throw Parked();
  }
  bool wait(std::unique_lock<std::mutex>& lock, net::Deadline deadline, const std::function<bool()>& ready) override {
    if (running_ == nullptr) return ready();
    if (ready()) return true;
    auto* const mutex = lock.mutex();
    lock.unlock();
    block(*running_, deadline, [mutex, &ready] {
      const std::lock_guard own(*mutex);
      return ready();
    });
    lock.lock();
    return ready();
  }
  void notify() override {}

  // For a worker's thread.
  void block(Life& life, Time until, std::function<bool()> is_ready);
  std::unique_ptr<net::Channel> connect(const std::string& name);

  struct Ticking {
    Pulse* pulse;
    Life* life;
    Time due;
  };
  std::vector<Ticking> pulses;
  Life* running() const { return running_; }

 private:
  friend class WorkerSurroundings;

  uint64_t pick(uint64_t below) { return below == 0 ? 0 : random_() % below; }
  bool chance(int percent) { return pick(100) < static_cast<uint64_t>(percent); }
  void say(const std::string& what);
  void fail(const std::string& what);

  void start_server(size_t s);
  void kill_server(size_t s, milliseconds for_how_long);
  void start_life(uint32_t rank, uint64_t job, bool joins);
  void kill_life(Life& life);
  void resume(Life& life);
  void start_job();
  void run(Life& life, std::function<void()> program);
  ClientConfig config_of(Life& life, bool joins);
  void work(Life& life, bool joins);
  void make_step(Life& life, ServerClient& client, uint64_t step);
  std::vector<Life*> alive();
  void look_after_job();
  void fault();
  bool act();
  void serve(SimulatedServer& server, std::list<std::unique_ptr<SimulatedServer::Connection>>::iterator at);
  void check_values();
  std::vector<std::vector<float>> read_values();
  void note_members(uint64_t job, uint64_t step, const std::vector<uint32_t>& members);

  const SimulationOptions options_;
  std::minstd_rand random_;
  Time now_{std::chrono::hours(1)};
  Time begin_ = now_;
  Plan plan_;
  std::vector<std::unique_ptr<SimulatedServer>> servers_;
  std::vector<std::unique_ptr<Life>> lives_;
  Life* running_ = nullptr;  // null: the scheduler
  std::binary_semaphore scheduler_{0};
  uint64_t job_ = 0;
  uint64_t connections_ = 0;
  int faults_ = 0;
  Time next_fault_{};
  uint64_t target_ = 0;
  bool ends_ = false;
  bool is_quiet_ = false;                              // nothing dies any more
  bool replaces_ = false;                              // one worker that dies, else all are started again
  bool was_damaged_ = false;                           // a snapshot
  std::vector<Time> starts_;                           // by rank: when it is started again
  Time begins_again_{};                                // when all are
  std::map<uint64_t, std::vector<uint32_t>> members_;  // by step
  std::map<uint64_t, uint64_t> since_;                 // by job: the step that it went on after
  std::vector<std::string> schedule_;
  std::string failure_;
};

class WorkerSurroundings final : public Surroundings {
 public:
  WorkerSurroundings(World& world, Life& life) : world_(world), life_(life) {}

  Clock::time_point now() override { return world_.now_; }
  void sleep(milliseconds duration) override {
    if (world_.running() != nullptr) world_.block(life_, world_.now_ + duration, {});
  }
  std::unique_ptr<net::Channel> connect(const std::string& name, std::shared_ptr<net::Arena> /*memory*/,
                                        net::Deadline /*deadline*/) override {
    if (life_.is_killed && world_.running() != nullptr) throw Killed();
    return world_.connect(name);
  }
  void start(Pulse& pulse) override { world_.pulses.push_back({&pulse, &life_, world_.now_}); }
  void stop(Pulse& pulse) noexcept override {
    std::erase_if(world_.pulses, [&](const auto& ticking) { return ticking.pulse == &pulse; });
  }

 private:
  World& world_;
  Life& life_;
};

void World::say(const std::string& what) {
  const auto ms = std::chrono::duration_cast<milliseconds>(now_ - begin_).count();
  schedule_.push_back(std::to_string(ms) + " ms: " + what);
  if (options_.prints) std::fprintf(stderr, "%s\n", schedule_.back().c_str());
}

void World::fail(const std::string& what) {
  for (size_t s = 0; s < servers_.size(); ++s) {
    for (const auto& connection : servers_[s]->connections) {
      if (!connection->parked) continue;
      say("a request of type " + std::to_string(connection->parked->type) + " of worker " +
          std::to_string(connection->session.rank) + " waits at server " + std::to_string(s));
    }
  }
  say("WRONG: " + what);
  if (failure_.empty()) failure_ = what;
}

// --- threads ---------------------------------------------------------------------------------------------------------

void World::block(Life& life, Time until, std::function<bool()> is_ready) {
  if (life.is_killed) throw Killed();
  life.until = until;
  life.is_ready = std::move(is_ready);
  running_ = nullptr;
  scheduler_.release();
  life.turn.acquire();
  life.is_ready = {};
  if (life.is_killed) throw Killed();
}

void World::resume(Life& life) {
  running_ = &life;
  life.turn.release();
  scheduler_.acquire();
  if (life.is_over && life.thread.joinable()) life.thread.join();
}

void World::start_life(uint32_t rank, uint64_t job, bool joins) {
  auto& life = *lives_.emplace_back(std::make_unique<Life>());
  life.rank = rank;
  life.number = lives_.size() - 1;
  life.job = job;
  life.until = now_;
  say("worker " + std::to_string(rank) + " begins life " + std::to_string(life.number) + (joins ? " and joins" : "") +
      " job " + std::to_string(job));
  run(life, [this, &life, joins] { work(life, joins); });
}

void World::run(Life& life, std::function<void()> program) {
  life.thread = std::thread([this, &life, program = std::move(program)] {
    life.turn.acquire();
    try {
      program();
    } catch (const Killed&) {
      life.error = "killed";
    } catch (const std::exception& error) {
      life.error = error.what();
      life.is_allowed =
          dynamic_cast<const PeerLost*>(&error) != nullptr || dynamic_cast<const CheckpointError*>(&error) != nullptr ||
          dynamic_cast<const Fenced*>(&error) != nullptr || dynamic_cast<const Occupied*>(&error) != nullptr;
    }
    life.is_over = true;
    running_ = nullptr;
    scheduler_.release();
  });
}

void World::kill_life(Life& life) {
  if (life.is_over) return;
  say("worker " + std::to_string(life.rank) + " is killed");
  life.is_killed = true;
  resume(life);
}

// --- servers ---------------------------------------------------------------------------------------------------------

void World::start_server(size_t s) {
  auto& server = *servers_[s];
  say("server " + std::to_string(s) + " starts");
  server.starts_at = {};
  server.frozen_until = {};
  server.looked = now_;
  server.core = std::make_unique<ServerCore>(std::make_unique<DiskStore>(server.disk), milliseconds(300), *this);
  try {
    server.core->restore();
  } catch (const CheckpointError& error) {
    fail("server " + std::to_string(s) + " cannot start: " + error.what());
  }
}

void World::kill_server(size_t s, milliseconds for_how_long) {
  auto& server = *servers_[s];
  if (!server.core) return;
  say("server " + std::to_string(s) + " dies for " + std::to_string(for_how_long.count()) + " ms");
  server.core->stop();
  for (const auto& connection : server.connections) server.core->detach(connection->session);
  server.connections.clear();
  server.core.reset();
  server.starts_at = now_ + for_how_long;
}

std::unique_ptr<net::Channel> World::connect(const std::string& name) {
  auto& server = *servers_.at(std::stoul(name));
  if (!server.core) throw CommError("nobody listens there");
  auto ends = connect_in_memory(shared_from_this());
  auto& connection =
      *server.connections.emplace_back(std::make_unique<SimulatedServer::Connection>(std::move(ends.callee)));
  connection.number = ++connections_;
  server.core->attach(connection.session);
  return std::move(ends.caller);
}

void World::serve(SimulatedServer& server, std::list<std::unique_ptr<SimulatedServer::Connection>>::iterator at) {
  auto& connection = **at;
  bool ends = false;
  try {
    if (!connection.parked) {
      net::Frame frame;
      ends = !connection.session.channel->receive(frame, now_);
      if (!ends) connection.parked = std::move(frame);
      if (!ends && options_.prints && connection.parked->type != Beat::kType) {
        std::fprintf(stderr, "      worker %u asks for %u\n", connection.session.rank, connection.parked->type);
      }
    }
    if (!ends) {
      server.core->answer(connection.session, *connection.parked);
      connection.parked.reset();
      ends = connection.session.leaves;
    }
  } catch (const Parked&) {
    return;
  } catch (const std::exception&) {
    ends = true;
  }
  if (!ends) return;
  server.core->detach(connection.session);
  server.connections.erase(at);
}

// --- workers ---------------------------------------------------------------------------------------------------------

void World::note_members(uint64_t job, uint64_t step, const std::vector<uint32_t>& members) {
  if (job != job_) return;  // it is ending
  const auto [known, is_new] = members_.try_emplace(step, members);
  if (is_new || known->second == members) return;
  fail("step " + std::to_string(step) + " has members " + text_of(members) + " and " + text_of(known->second));
}

void World::make_step(Life& life, ServerClient& client, uint64_t step) {
  life.begun = step;
  const uint64_t element = plan_.is_synchronous() ? life.rank : life.number;
  for (uint32_t c = 0; c < client.chunks().size(); ++c) {
    const auto& chunk = client.chunks()[c];
    const auto gradient = std::make_shared<std::vector<float>>(static_cast<size_t>(chunk.numel));
    for (const auto& piece : chunk.pieces) (*gradient)[static_cast<size_t>(piece.offset) + element] = 1;
    const Bytes bytes = std::as_bytes(std::span(*gradient));
    client.push(step, c, {&bytes, 1}, gradient);
  }
  client.flush();
  Apply command;
  command.step = step;
  command.groups = plan_.groups;
  command.members = {life.rank};
  if (plan_.is_synchronous()) {
    command.members = client.commit(step, {1}).members;
    note_members(life.job, step, command.members);
    client.sum(step, command.members);
  }
  client.apply(command);
  life.acked = step;
  if (!plan_.is_synchronous()) client.commit(step, {});
  life.durable = client.durable();
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

void World::work(Life& life, bool joins) {
  auto config = config_of(life, joins);
  config.log_bytes = (2 + pick(8)) * 4 * 64 * sizeof(float);
  config.patience = kPatience;
  ServerClient client(config);
  if (life.rank == 0 && !client.is_started()) {
    for (uint32_t c = 0; c < client.chunks().size(); ++c) {
      const std::vector<std::byte> zeros(client.part_bytes(c, Part::parameter));
      client.write(c, Part::parameter, zeros);
    }
    client.start();
  }
  uint64_t step = client.join();
  life.first = life.begun = life.acked = step;
  say("life " + std::to_string(life.number) + " comes in after step " + std::to_string(step));
  if (plan_.is_synchronous() && !joins) {
    const auto [known, is_new] = since_.try_emplace(life.job, step);
    // Later steps did not happen.
    if (is_new) members_.erase(members_.upper_bound(step), members_.end());
  }
  while (!ends_ && (plan_.is_synchronous() ? step < target_ : step - life.first < target_)) {
    config.surroundings->sleep(milliseconds(pick(4) == 0 ? pick(200) : pick(20)));
    make_step(life, client, ++step);
  }
  client.leave();
  life.has_left = true;
  say("life " + std::to_string(life.number) + " leaves after step " + std::to_string(step));
}

std::vector<Life*> World::alive() {
  std::vector<Life*> alive;
  for (const auto& life : lives_) {
    if (!life->is_over) alive.push_back(life.get());
  }
  return alive;
}

// --- the launcher ----------------------------------------------------------------------------------------------------

void World::start_job() {
  ++job_;
  for (uint32_t rank = 0; rank < plan_.workers; ++rank) {
    starts_[rank] = {};
    start_life(rank, job_, false);
  }
}

void World::look_after_job() {
  if (begins_again_ != Time{}) {
    if (begins_again_ > now_) return;
    begins_again_ = {};
    say("all workers are started again");
    return start_job();
  }
  bool has_failed = false;
  bool has_left = false;
  for (const auto& life : lives_) {
    if (life->job != job_ || !life->is_over) continue;
    has_left = has_left || life->has_left;
    if (life->error.empty() || life->error == "killed") continue;
    say("life " + std::to_string(life->number) + " ends: " + life->error);
    if (!life->is_allowed) fail("life " + std::to_string(life->number) + " ends with " + life->error);
    has_failed = true;
  }
  const bool has_dead = std::any_of(starts_.begin(), starts_.end(), [](Time at) { return at != Time{}; });
  if (has_failed || (has_dead && !has_left && (!replaces_ || alive().empty()))) {
    for (auto* const life : alive()) kill_life(*life);
    for (auto& at : starts_) at = {};
    begins_again_ = now_ + milliseconds(300);
    return;
  }
  for (uint32_t rank = 0; rank < starts_.size(); ++rank) {
    if (starts_[rank] == Time{} || starts_[rank] > now_) continue;
    starts_[rank] = {};
    if (!has_left) start_life(rank, job_, true);
  }
}

void World::fault() {
  --faults_;
  next_fault_ = now_ + milliseconds(pick(3) == 0 ? pick(100) : pick(3'000));
  auto workers = alive();
  const auto kill_worker = [&](milliseconds for_how_long) {
    if (workers.empty()) return;
    auto& life = *workers[pick(workers.size())];
    const uint32_t rank = life.rank;
    kill_life(life);
    starts_[rank] = now_ + for_how_long + milliseconds(1);
  };
  const auto any_server = [&] { return pick(servers_.size()); };
  const auto while_away = [&] { return milliseconds(chance(80) ? pick(1'000) : pick(6'000)); };
  switch (pick(8)) {
    case 0:
    case 1:
      return kill_worker(milliseconds(pick(1'500)));
    case 2:
    case 3:
      return kill_server(any_server(), while_away());
    case 4: {  // both
      kill_server(any_server(), while_away());
      return kill_worker(milliseconds(pick(1'500)));
    }
    case 5: {  // everything at once
      say("everything is killed");
      for (auto* const life : workers) {
        kill_life(*life);
        starts_[life->rank] = now_ + milliseconds(1);
      }
      for (size_t s = 0; s < servers_.size(); ++s) kill_server(s, milliseconds(pick(300)));
      return;
    }
    case 6: {  // a snapshot is damaged while its server is down
      const size_t s = any_server();
      auto& kept = servers_[s]->disk.kept;
      kill_server(s, milliseconds(pick(500)));
      // Who has left cannot push again.
      const bool has_left = std::any_of(lives_.begin(), lives_.end(), [](const auto& life) { return life->has_left; });
      if (kept.size() < 2 || has_left) return;
      was_damaged_ = true;
      say("the newest snapshot of server " + std::to_string(s) + " is damaged");
      kept.back().is_damaged = true;
      return;
    }
    default: {
      const size_t s = any_server();
      const milliseconds duration(pick(20'000));
      say("server " + std::to_string(s) + " stands still for " + std::to_string(duration.count()) + " ms");
      servers_[s]->frozen_until = now_ + duration;
      return;
    }
  }
}

// --- the scheduler ---------------------------------------------------------------------------------------------------

// One thing that can happen now; false where there is none.
bool World::act() {
  std::vector<std::function<void()>> can;
  for (const auto& life : lives_) {
    if (life->is_over) continue;
    if (life->until <= now_ || (life->is_ready && life->is_ready())) can.emplace_back([&] { resume(*life); });
  }
  for (auto& server : servers_) {
    if (!server->core || server->frozen_until > now_) continue;
    for (auto at = server->connections.begin(); at != server->connections.end(); ++at) {
      if ((*at)->parked || (*at)->session.channel->wait_input(now_)) {
        // Those who wait look again after whatever happened.
        if ((*at)->parked) continue;
        can.emplace_back([this, &server, at] { serve(*server, at); });
      }
    }
    if (server->core->is_snapshot_due()) {
      can.emplace_back([this, &server] {
        if (!is_quiet_ && chance(3)) {
          kill_server(static_cast<size_t>(std::find(servers_.begin(), servers_.end(), server) - servers_.begin()),
                      milliseconds(pick(500)));
          return;
        }
        server->core->keep_snapshot();
      });
    }
  }
  for (size_t i = 0; i < pulses.size(); ++i) {
    if (pulses[i].due <= now_) {
      can.emplace_back([this, i] { pulses[i].due = pulses[i].pulse->tick(now_).due; });
    }
  }
  if (can.empty()) return false;
  can[pick(can.size())]();
  // Parked requests: at most one of them goes on by it.
  for (auto& server : servers_) {
    if (!server->core || server->frozen_until > now_) continue;
    for (auto at = server->connections.begin(); at != server->connections.end();) {
      const auto next = std::next(at);
      if ((*at)->parked) serve(*server, at);
      at = next;
      if (!server->core) break;
    }
  }
  return true;
}

std::vector<std::vector<float>> World::read_values() {
  std::vector<std::vector<float>> values;
  auto& life = *lives_.emplace_back(std::make_unique<Life>());
  life.rank = 63;
  life.number = lives_.size() - 1;
  life.job = job_;
  life.until = now_;
  run(life, [&] {
    ServerClient client(config_of(life, /*joins=*/true));
    client.join();
    std::vector<std::vector<std::byte>> memory;
    std::vector<std::byte*> to;
    for (uint32_t c = 0; c < client.chunks().size(); ++c) {
      memory.emplace_back(client.part_bytes(c, Part::parameter));
      to.push_back(memory.back().data());
    }
    client.read(Part::parameter, 0, to);
    for (uint32_t c = 0; c < client.chunks().size(); ++c) {
      for (const auto& piece : client.chunks()[c].pieces) {
        auto& of_piece = values.emplace_back(static_cast<size_t>(piece.run.count));
        std::memcpy(of_piece.data(), memory[c].data() + piece.offset * 4, of_piece.size() * 4);
      }
    }
    client.leave();
  });
  const auto limit = now_ + kEnd;
  while (!life.is_over && now_ < limit) {
    if (act()) continue;
    now_ += milliseconds(10);
    for (auto& server : servers_) {
      if (server->core) server->core->expire(now_ - std::exchange(server->looked, now_));
    }
  }
  if (!life.is_over) {
    kill_life(life);
    fail("who reads the values waits for ever");
  }
  if (!life.error.empty()) fail("the values cannot be read: " + life.error);
  return values;
}

void World::check_values() {
  const auto values = read_values();
  for (size_t element = 0; element < 64; ++element) {
    uint64_t expected = 0;
    std::optional<std::pair<uint64_t, uint64_t>> bounds;
    if (plan_.is_synchronous()) {
      for (const auto& [step, members] : members_) {
        expected += std::count(members.begin(), members.end(), static_cast<uint32_t>(element)) > 0 ? 1 : 0;
      }
      bounds = {expected, expected};
    } else if (element < lives_.size()) {
      const auto& life = *lives_[element];
      if (life.first == kNobody) {
        bounds = {0, 0};
      } else if (life.has_left) {
        bounds = {life.acked - life.first, life.acked - life.first};
      } else {
        const uint64_t durable = was_damaged_ ? life.durable.all : life.durable.newest;
        bounds = {std::max(durable, life.first) - life.first, life.begun - life.first};
      }
    }
    if (!bounds) continue;
    for (const auto& of_parameter : values) {
      const auto count = static_cast<uint64_t>(-of_parameter[element]);
      if (count >= bounds->first && count <= bounds->second) continue;
      for (const auto& [step, members] : members_) say("step " + std::to_string(step) + " has " + text_of(members));
      std::string all;
      for (const auto& each : values) all += " " + std::to_string(static_cast<int64_t>(-each[element]));
      say("parameters have" + all);
      return fail("element " + std::to_string(element) + " was counted " + std::to_string(count) + " times, not " +
                  std::to_string(bounds->first) + " to " + std::to_string(bounds->second));
    }
  }
}

std::string World::run() {
  const auto servers = static_cast<uint32_t>(1 + pick(3));
  const auto workers = static_cast<uint32_t>(1 + pick(3));
  const uint32_t staleness = chance(60) ? 0 : chance(50) ? kAnyStaleness : static_cast<uint32_t>(1 + pick(3));
  plan_ = plan_of(servers, workers, staleness);
  replaces_ = chance(60);
  faults_ = static_cast<int>(pick(5));
  next_fault_ = now_ + milliseconds(pick(1'500));
  target_ = 4 + pick(24);
  starts_.resize(workers);
  say(std::to_string(servers) + " servers, " + std::to_string(workers) + " workers, staleness " +
      std::to_string(staleness) + ", " + std::to_string(target_) + " steps");
  for (uint32_t s = 0; s < servers; ++s) servers_.push_back(std::make_unique<SimulatedServer>());
  for (uint32_t s = 0; s < servers; ++s) start_server(s);
  start_job();
  const auto limit = now_ + kEnd;
  const auto is_done = [&] {
    return begins_again_ == Time{} && alive().empty() &&
           std::any_of(lives_.begin(), lives_.end(),
                       [&](const auto& life) { return life->job == job_ && life->has_left; });
  };
  while (failure_.empty()) {
    while (failure_.empty() && act()) {
    }
    look_after_job();
    if (is_done()) break;
    Time next = now_ + kLook;
    for (const auto& life : lives_) {
      if (!life->is_over) next = std::min(next, std::max(life->until, now_ + milliseconds(1)));
    }
    for (const auto& ticking : pulses) next = std::min(next, std::max(ticking.due, now_ + milliseconds(1)));
    now_ = next;
    if (now_ > limit) {
      fail("the job does not end");
      break;
    }
    for (size_t s = 0; s < servers_.size(); ++s) {
      auto& server = *servers_[s];
      if (!server.core) {
        if (server.starts_at <= now_) start_server(s);
      } else if (server.frozen_until <= now_ && now_ - server.looked >= kLook) {
        server.core->expire(now_ - std::exchange(server.looked, now_));
      }
    }
    if (faults_ > 0 && now_ >= next_fault_) fault();
    look_after_job();
  }
  if (failure_.empty()) {
    is_quiet_ = true;
    for (size_t s = 0; s < servers_.size(); ++s) {
      servers_[s]->frozen_until = {};
      if (!servers_[s]->core) start_server(s);
    }
    check_values();
    if (failure_.empty()) {  // what workers left is on the disks
      say("all servers start again");
      for (size_t s = 0; s < servers_.size(); ++s) kill_server(s, milliseconds(0));
      for (size_t s = 0; s < servers_.size(); ++s) start_server(s);
      check_values();
    }
  }
  ends_ = true;
  for (auto* const life : alive()) kill_life(*life);
  for (size_t s = 0; s < servers_.size(); ++s) kill_server(s, milliseconds(0));
  if (failure_.empty()) return {};
  std::string text = "seed " + std::to_string(options_.seed) + ": " + failure_ + "\n";
  for (const auto& line : schedule_) text += "  " + line + "\n";
  return text;
}

}  // namespace

std::string simulate(const SimulationOptions& options) {
  set_log_sink([&](LogLevel, const std::string& message) {
    if (options.prints) std::fprintf(stderr, "      %s\n", message.c_str());
  });
  const auto world = std::make_shared<World>(options);
  auto failure = world->run();
  set_log_sink({});
  return failure;
}

}  // namespace muster::testing
