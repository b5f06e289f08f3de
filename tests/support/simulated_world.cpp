// Who runs when: threads that take turns, servers without threads, and deaths that were asked for.
#include "support/simulated_world.h"

#include <cstdio>
#include <exception>

#include "muster/error.h"
#include "support/message_names.h"
#include "support/watched_channel.h"

namespace muster::testing {

using namespace server;

namespace {

constexpr milliseconds kLook{50};      // between two looks of a server at its members
constexpr milliseconds kEnd{150'000};  // of virtual time: longer is a hang
constexpr milliseconds kSnapshots{300};
// How long the victims of a death that was asked for stay away.
constexpr milliseconds kServerAway{100};
constexpr milliseconds kWorkerAway{200};

std::string text_of(milliseconds duration) { return std::to_string(duration.count()) + " ms"; }

}  // namespace

void World::say(const std::string& what) {
  schedule_.push_back(text_of(std::chrono::duration_cast<milliseconds>(now_ - begin_)) + ": " + what);
  if (prints_) std::fprintf(stderr, "%s\n", schedule_.back().c_str());
}

void World::fail(const std::string& what) {
  for (size_t s = 0; s < servers_.size(); ++s) {
    for (const auto& connection : servers_[s]->connections) {
      if (!connection->parked) continue;
      say(in_words(*connection->parked) + " of worker " + std::to_string(connection->session.rank) +
          " waits at server " + std::to_string(s));
    }
  }
  say("WRONG: " + what);
  if (failure_.empty()) failure_ = what;
}

std::string World::failure() const {
  if (failure_.empty()) return {};
  std::string text = failure_ + "\n";
  for (const auto& line : schedule_) text += "  " + line + "\n";
  return text;
}

// --- threads ---------------------------------------------------------------------------------------------------------

bool World::wait(std::unique_lock<std::mutex>& lock, net::Deadline deadline, const std::function<bool()>& ready) {
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

void World::start_thread(Life& life, std::function<void()> program) {
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
    life.ended = now_;
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

void World::kill_worker(Life& life, milliseconds for_how_long) {
  if (life.is_over) return;
  kill_life(life);
  starts_[life.rank] = now_ + for_how_long + milliseconds(1);
}

std::vector<Life*> World::alive() {
  std::vector<Life*> alive;
  for (const auto& life : lives_) {
    if (!life->is_over) alive.push_back(life.get());
  }
  return alive;
}

// --- servers ---------------------------------------------------------------------------------------------------------

void World::start_server(size_t s) {
  auto& server = *servers_[s];
  say("server " + std::to_string(s) + " starts");
  server.starts_at = {};
  server.frozen_until = {};
  server.looked = now_;
  const auto on_write = [this, s](bool is_there) {
    const auto moment = is_there ? Kill::Moment::renamed : Kill::Moment::begun;
    if (is_due(moment, static_cast<uint32_t>(s), nullptr, 0) && dies(static_cast<uint32_t>(s))) throw Died();
  };
  server.core = std::make_unique<ServerCore>(std::make_unique<DiskStore>(server.disk, on_write), kSnapshots, *this);
  try {
    server.core->restore();
  } catch (const CheckpointError& error) {
    fail("server " + std::to_string(s) + " cannot start: " + error.what());
  }
}

void World::kill_server(size_t s, milliseconds for_how_long) {
  auto& server = *servers_[s];
  if (!server.core) return;
  have_servers_died_ = true;
  say("server " + std::to_string(s) + " dies for " + text_of(for_how_long));
  server.core->stop();
  for (const auto& connection : server.connections) server.core->detach(connection->session);
  server.connections.clear();
  server.core.reset();
  server.starts_at = now_ + for_how_long;
}

void World::stand_still(size_t s, milliseconds for_how_long) {
  say("server " + std::to_string(s) + " stands still for " + text_of(for_how_long));
  servers_[s]->frozen_until = now_ + for_how_long;
}

void World::cut_off(uint32_t rank, std::optional<size_t> server, milliseconds for_how_long, bool cuts) {
  say("worker " + std::to_string(rank) + " cannot reach " +
      (server ? "server " + std::to_string(*server) : "any server") + " for " + text_of(for_how_long) +
      (cuts ? ", connections are cut" : ""));
  const auto& cut = partitions_.emplace_back(Partition{rank, server, now_ + for_how_long, cuts});
  for (size_t s = 0; cuts && s < servers_.size(); ++s) {
    for (const auto& connection : servers_[s]->connections) {
      if (cut.is_between(connection->rank, s)) connection->session.channel->close();
    }
  }
}

const World::Partition* World::partition(uint32_t rank, size_t server) const {
  const auto found = std::find_if(partitions_.begin(), partitions_.end(), [&](const Partition& each) {
    return !is_quiet_ && each.until > now_ && each.is_between(rank, server);
  });
  return found == partitions_.end() ? nullptr : &*found;
}

bool World::damage_newest(size_t s) {
  auto& kept = servers_[s]->disk.kept;
  // Who has left a server, perhaps before it has left all, cannot push again what is in the newest snapshot alone.
  const bool leaves = std::any_of(lives_.begin(), lives_.end(), [](const auto& life) { return life->leaves; });
  if (kept.size() < 2 || leaves) return false;
  ++damages_;
  say("the newest snapshot of server " + std::to_string(s) + " is damaged");
  kept.back().is_damaged = true;
  return true;
}

void World::serve(size_t s, SimulatedServer::Connections::iterator at) {
  auto& server = *servers_[s];
  auto& connection = **at;
  auto& session = connection.session;
  bool ends = false;
  bool is_new = false;
  try {
    if (!connection.parked) {
      net::Frame frame;
      ends = !session.channel->receive(frame, now_);
      if (!ends) connection.parked = std::move(frame);
      is_new = !ends;
    }
    if (is_new && prints_ && connection.parked->type != Beat::kType && connection.parked->type != Hello::kType) {
      std::fprintf(stderr, "      worker %u asks server %zu for %s\n", session.rank, s,
                   in_words(*connection.parked).c_str());
    }
    if (!ends) {
      server.core->answer(session, *connection.parked);
      connection.parked.reset();
      ends = session.leaves;
    }
  } catch (const Parked&) {
    if (is_new) is_due(Kill::Moment::held, static_cast<uint32_t>(s), &session.rank, connection.parked->type);
    return;
  } catch (const Died&) {
    return;
  } catch (const std::exception&) {
    ends = true;
  }
  if (!ends) return;
  server.core->detach(session);
  server.connections.erase(at);
}

void World::serve_parked() {
  for (size_t s = 0; s < servers_.size(); ++s) {
    auto& server = *servers_[s];
    if (!server.core || server.frozen_until > now_) continue;
    for (auto at = server.connections.begin(); at != server.connections.end();) {
      const auto next = std::next(at);
      if ((*at)->parked) serve(s, at);
      at = next;
    }
  }
}

// --- deaths that were asked for --------------------------------------------------------------------------------------

/// Of a worker's connection to one server.
class KillWatcher final : public ChannelWatcher {
 public:
  KillWatcher(World& world, Life& life, uint32_t server) : world_(world), life_(life), server_(server) {}

  void sends(uint16_t /*request*/) override {
    if (life_.is_killed) throw Killed();  // what handles the first one may have something to say
  }
  void sent(uint16_t request) override { look(Kill::Moment::sent, request); }
  void answered(uint16_t request) override {
    if (look(Kill::Moment::answered, request)) throw CommError("the answer was lost");
    look(Kill::Moment::received, request);
  }

 private:
  // Lets the scheduler kill before anything else happens.
  bool look(Kill::Moment moment, uint16_t request) {
    if (world_.running_ != &life_ || !world_.is_due(moment, server_, &life_.rank, request)) return false;
    world_.block(life_, world_.now_, {});
    return true;
  }

  World& world_;
  Life& life_;
  const uint32_t server_;
};

bool World::is_due(Kill::Moment moment, uint32_t server, const uint32_t* rank, uint16_t request) {
  if (!kill_ || killed_at_ != Time{} || is_quiet_) return false;
  const auto& kill = *kill_;
  if (kill.moment != moment || kill.server != server) return false;
  if (rank != nullptr) {
    if (kill.request != request) return false;
    if (kill.is_own && kill.victim == Kill::Victim::chief && *rank != kChief) return false;
    if (kill.is_own && kill.victim == Kill::Victim::worker && *rank == kChief) return false;
  }
  if (++occurrences_ != kill.occurrence) return false;
  say(in_words(kill));
  killed_at_ = now_;
  has_victims_ = true;
  return true;
}

bool World::dies(uint32_t server) const {
  const auto victim = kill_->victim;
  return victim == Kill::Victim::all || victim == (server == 0 ? Kill::Victim::server_0 : Kill::Victim::server_1);
}

void World::kill_victims() {
  has_victims_ = false;
  const auto victim = kill_->victim;
  for (uint32_t s = 0; s < servers_.size(); ++s) {
    if (dies(s)) kill_server(s, kServerAway);
  }
  for (auto* const life : alive()) {
    const auto own = life->rank == kChief ? Kill::Victim::chief : Kill::Victim::worker;
    if (victim == Kill::Victim::all || victim == own) kill_worker(*life, kWorkerAway);
  }
}

std::unique_ptr<net::Channel> World::connect(Life& life, const std::string& name) {
  const size_t s = std::stoul(name);
  auto& server = *servers_.at(s);
  const auto* const cut = partition(life.rank, s);
  if (!server.core || (cut != nullptr && cut->cuts)) throw CommError("nobody listens there");
  auto ends = connect_in_memory(shared_from_this());
  auto& connection =
      *server.connections.emplace_back(std::make_unique<SimulatedServer::Connection>(std::move(ends.callee)));
  connection.rank = life.rank;
  connection.number = ++connections_;
  server.core->attach(connection.session);
  return std::make_unique<WatchedChannel>(std::move(ends.caller),
                                          std::make_shared<KillWatcher>(*this, life, static_cast<uint32_t>(s)));
}

// --- the scheduler ---------------------------------------------------------------------------------------------------

bool World::act() {
  if (has_victims_) {
    kill_victims();
    return true;
  }
  std::vector<std::function<void()>> can;
  for (const auto& life : lives_) {
    if (life->is_over) continue;
    if (life->until <= now_ || (life->is_ready && life->is_ready())) can.emplace_back([&] { resume(*life); });
  }
  for (size_t s = 0; s < servers_.size(); ++s) {
    auto& server = *servers_[s];
    if (!server.core || server.frozen_until > now_) continue;
    for (auto at = server.connections.begin(); at != server.connections.end(); ++at) {
      // Those who wait look again after whatever happened.
      if ((*at)->parked || !(*at)->session.channel->wait_input(now_)) continue;
      const auto* const cut = partition((*at)->rank, s);
      if (cut != nullptr && !cut->cuts) continue;
      can.emplace_back([this, s, at] { serve(s, at); });
    }
    if (server.core->is_snapshot_due()) {
      can.emplace_back([this, s] {
        if (!kill_ && !is_quiet_ && chance(3)) return kill_server(s, milliseconds(pick(500)));
        servers_[s]->core->keep_snapshot();
      });
    }
  }
  for (size_t i = 0; i < pulses_.size(); ++i) {
    if (pulses_[i].due <= now_) {
      can.emplace_back([this, i] { pulses_[i].due = pulses_[i].pulse->tick(now_).due; });
    }
  }
  if (can.empty()) return false;
  can[pick(can.size())]();
  if (!has_victims_) serve_parked();  // at most one of them goes on by it
  return true;
}

void World::run(const JobSetup& setup, const std::function<void()>& faults) {
  setup_ = setup;
  plan_ = plan_of(setup);
  starts_.resize(setup.workers);
  say(std::to_string(setup.servers) + " servers, " + std::to_string(setup.workers) + " workers, staleness " +
      std::to_string(setup.staleness) + ", " + std::to_string(setup.steps) + " steps");
  for (uint32_t s = 0; s < setup.servers; ++s) servers_.push_back(std::make_unique<SimulatedServer>());
  for (uint32_t s = 0; s < setup.servers; ++s) start_server(s);
  start_job();
  const auto limit = now_ + kEnd;
  while (failure_.empty()) {
    while (failure_.empty() && act()) {
    }
    look_after_job();
    if (is_done()) break;
    Time next = now_ + kLook;
    for (const auto& life : lives_) {
      if (!life->is_over) next = std::min(next, std::max(life->until, now_ + milliseconds(1)));
    }
    for (const auto& ticking : pulses_) next = std::min(next, std::max(ticking.due, now_ + milliseconds(1)));
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
    faults();
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
}

}  // namespace muster::testing
