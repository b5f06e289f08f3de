// What a simulated job is made of: see simulation.h, which alone uses it.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/shard/server_core.h"
#include "server/worker/client.h"
#include "server/worker/pulse.h"
#include "support/memory_channel.h"
#include "support/simulated_disk.h"
#include "support/simulation.h"
#include "support/turn.h"

namespace muster::testing {

using server::Apply;
using server::ServerClient;
using server::ServerCore;
using std::chrono::milliseconds;

/// Thrown where a thread of a worker that is killed waits.
struct Killed {};
/// Thrown where a request of a server waits: it is given again.
struct Parked {};
/// Thrown where a server dies in the middle of a call.
struct Died {};

/// A life of a worker's process: a thread, of which the scheduler lets one run at a time.
struct Life {
  using Time = server::Surroundings::Clock::time_point;
  static constexpr uint64_t kNobody = ~uint64_t{0};

  uint32_t rank = 0;
  uint64_t number = 0;
  uint64_t job = 0;
  Turn turn;
  std::thread thread;
  // While it waits:
  Time until{};
  std::function<bool()> is_ready;  ///< empty: for the time alone
  bool is_killed = false;
  bool is_over = false;
  Time ended{};
  std::string error;       ///< what it ended with
  bool is_allowed = true;  ///< that error is one which names what to do
  // What it did:
  uint64_t first = kNobody;  ///< the step before its first
  uint64_t begun = 0;
  uint64_t decided = 0;  ///< the last step whose decision it knows
  uint64_t acked = 0;
  server::Durable durable;
  bool leaves = false;  ///< it began to
  bool has_left = false;
  bool joins = false;
  std::map<uint64_t, uint64_t> batches;  ///< by step
};

struct SimulatedServer {
  struct Connection {
    explicit Connection(std::unique_ptr<net::Channel> channel) : session(std::move(channel)) {}
    server::Session session;
    std::optional<net::Frame> parked;
    uint32_t rank = 0;
    uint64_t number = 0;
  };
  using Connections = std::list<std::unique_ptr<Connection>>;

  SimulatedDisk disk;
  std::unique_ptr<ServerCore> core;
  Connections connections;
  Life::Time looked{};
  Life::Time frozen_until{};
  Life::Time starts_at{};  ///< where it is down
};

/// What the job does, and what is looked at.
struct JobSetup {
  uint32_t servers = 1;
  uint32_t workers = 1;
  uint32_t staleness = 0;
  uint64_t steps = 0;
  bool is_spread = false;    ///< see SimulationOptions
  bool begins_anew = false;  ///< likewise
  bool replaces = false;     ///< the launcher replaces one worker that dies, else all are started again
  /// Momentum, a table, and reads in every step, whose values are looked at; else updates are counted at the end.
  bool is_thorough = false;
  bool deals = false;              ///< with staleness: `steps` batches of a pass, each of a step
  bool joins_with_others = false;  ///< workers that join have other hyperparameters
};

inline constexpr int64_t kElements = 64;  ///< of each parameter, those that are looked at
inline constexpr int64_t kDim = 2;        ///< of the table
inline constexpr int64_t kRows = 4'096;   ///< likewise; the first ones are for workers and steps, then batches

server::Plan plan_of(const JobSetup& setup);
/// Of a synchronous job that is looked at thoroughly; the row is that which all members of a step push.
double gradient_of(uint32_t rank, uint64_t step, int parameter, int64_t element);
int64_t row_of_step(uint64_t step);
int64_t row_of_batch(uint64_t job, uint64_t batch);
/// The optimizer's of a worker that is there from the beginning, or of one that joins after steps were made.
FlatGroups groups_of(const JobSetup& setup, bool is_late);
/// Where all parameters are read to, in `memory`.
std::vector<std::byte*> landing_of(const ServerClient& client, std::vector<std::vector<std::byte>>& memory);

class World final : public Waiting, public server::Timekeeper, public std::enable_shared_from_this<World> {
 public:
  using Time = Life::Time;

  World(uint64_t seed, bool prints) : random_(seed * 2654435761U + 1), prints_(prints) {}

  uint64_t pick(uint64_t below) { return below == 0 ? 0 : random_() % below; }
  bool chance(int percent) { return pick(100) < static_cast<uint64_t>(percent); }

  /// Until the job has ended. `faults` is called whenever time has passed.
  void run(const JobSetup& setup, const std::function<void()>& faults);
  /// What is wrong, and the schedule; empty where all is well.
  std::string failure() const;

  void say(const std::string& what);
  void fail(const std::string& what);
  Time begin() const { return begin_; }
  Time time() const { return now_; }

  // Faults.
  std::vector<Life*> alive();
  std::vector<std::unique_ptr<SimulatedServer>>& servers() { return servers_; }
  void kill_server(size_t s, milliseconds for_how_long);
  void kill_worker(Life& life, milliseconds for_how_long);
  void stand_still(size_t s, milliseconds for_how_long);
  /// A worker cannot reach a server, or any. `cuts`: connections end; else what is sent waits.
  void cut_off(uint32_t rank, std::optional<size_t> server, milliseconds for_how_long, bool cuts);
  /// False, and nothing is damaged, where it has no other one, or a worker leaves.
  bool damage_newest(size_t s);
  /// Dies of it when it comes.
  void expect(const Kill& kill) { kill_ = kill; }
  bool was_killed() const { return killed_at_ != Time{}; }
  bool began_again() const { return job_ > 1; }

  // As the clock and the waits of all.
  net::Deadline now() override { return now_; }
  Time now() const override { return now_; }
  bool wait(std::unique_lock<std::mutex>& /*lock*/, std::condition_variable& /*changed*/, Time /*deadline*/) override {
    throw Parked();
  }
  bool wait(std::unique_lock<std::mutex>& lock, net::Deadline deadline, const std::function<bool()>& ready) override;
  void notify() override {}

 private:
  friend class WorkerSurroundings;
  friend class KillWatcher;

  struct Ticking {
    server::Pulse* pulse;
    Life* life;
    Time due;
  };

  // Threads.
  void block(Life& life, Time until, std::function<bool()> is_ready);
  void resume(Life& life);
  void start_thread(Life& life, std::function<void()> program);
  void kill_life(Life& life);
  /// One thing that can happen now; false where there is none.
  bool act();

  // Servers.
  void start_server(size_t s);
  std::unique_ptr<net::Channel> connect(Life& life, const std::string& name);
  void serve(size_t s, SimulatedServer::Connections::iterator at);
  void serve_parked();

  // Deaths that were asked for. A request of a worker, or a snapshot, is at such a moment.
  bool is_due(Kill::Moment moment, uint32_t server, const uint32_t* rank, uint16_t request);
  void kill_victims();
  bool dies(uint32_t server) const;

  struct Partition {
    uint32_t rank = 0;
    std::optional<size_t> server;
    Time until{};
    bool cuts = false;

    bool is_between(uint32_t other, size_t s) const { return rank == other && (!server || *server == s); }
  };
  /// The one that is between them now, or null.
  const Partition* partition(uint32_t rank, size_t server) const;

  // Workers.
  void start_life(uint32_t rank, bool joins);
  server::ClientConfig config_of(Life& life, bool joins);
  void work(Life& life, bool joins);
  void begin_values(ServerClient& client);
  /// It goes on after `step`.
  void note_start(const Life& life, uint64_t step);
  bool is_late(const Life& life) const;
  void rest(Life& life);
  void train(Life& life, ServerClient& client);
  void train_on_batches(Life& life, ServerClient& client);
  void make_step(Life& life, ServerClient& client, uint64_t step, std::optional<uint64_t> batch = {});
  void push(const Life& life, ServerClient& client, uint64_t step, std::optional<uint64_t> batch);
  void note_members(const Life& life, uint64_t step, const std::vector<uint32_t>& members);
  void note_values(const Life& life, ServerClient& client, uint64_t step, const std::vector<std::byte*>& landing);

  // The launcher.
  void start_job();
  void look_after_job();
  bool is_done();
  void look_at_error(const Life& life);

  // What must have come of it.
  struct Values {
    std::vector<std::vector<double>> parameters;
    std::vector<double> rows;

    bool operator==(const Values&) const = default;
  };
  /// Of parameters that were read, and of the table's rows.
  Values values_in(ServerClient& client, const std::vector<std::byte*>& landing, uint64_t at_least);
  Values read_values();
  void check_values();
  void check_counts(const Values& values);
  void check_batches(const Values& values);
  void check_trained(const Values& values);
  /// By step from 1 on, a parameter's values, where the steps that `by_joiner` names have a joiner's hyperparameters.
  std::vector<std::vector<double>> trained(size_t parameter, const std::set<uint64_t>& by_joiner) const;
  bool is_trained(size_t parameter, const Values& values, const std::set<uint64_t>& by_joiner) const;
  /// Which members' hyperparameters a step may have.
  struct Hyperparameters {
    bool firsts = false;
    bool joiners = false;
  };
  Hyperparameters hyperparameters_in(uint64_t step, const std::vector<uint32_t>& members) const;
  std::optional<std::pair<uint64_t, uint64_t>> counts_of(size_t element) const;

  std::minstd_rand random_;
  const bool prints_;
  JobSetup setup_;
  server::Plan plan_;
  Time now_{std::chrono::hours(1)};
  const Time begin_ = now_;
  std::vector<std::unique_ptr<SimulatedServer>> servers_;
  std::vector<std::unique_ptr<Life>> lives_;
  std::vector<Ticking> pulses_;
  Life* running_ = nullptr;  // null: the scheduler
  Turn scheduler_;
  uint64_t job_ = 0;
  uint64_t reads_ = 0;  // of the values at the end
  uint64_t connections_ = 0;
  bool ends_ = false;
  bool is_quiet_ = false;  // nothing dies any more
  uint64_t damages_ = 0;   // of snapshots
  bool have_servers_died_ = false;
  std::vector<Time> starts_;                           // by rank: when it is started again
  Time begins_again_{};                                // when all are
  std::map<uint64_t, std::vector<uint32_t>> members_;  // by step
  std::map<uint64_t, uint64_t> begun_;                 // by job: the step after which somebody came into it first
  std::map<uint64_t, Values> values_;                  // by step, as workers read them
  std::vector<Partition> partitions_;
  std::optional<Kill> kill_;
  uint64_t occurrences_ = 0;
  bool has_victims_ = false;  // who die next
  Time killed_at_{};
  std::vector<std::string> schedule_;
  std::string failure_;
};

}  // namespace muster::testing
