// Deaths of processes at moments of a request or of a snapshot, over real sockets: as kill_matrix_test.cpp, whose
// simulation has them all. The worker's end of a connection sends the signals, so that a request is in its server's
// socket and not read, or its answer in the worker's.
#include <poll.h>
#include <signal.h>
#include <sys/inotify.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "cpp/catch.h"
#include "muster/error.h"
#include "server/protocol/protocol.h"
#include "support/simulation.h"
#include "support/traced_job.h"
#include "support/watched_channel.h"

using namespace muster;
using namespace muster::server;
using namespace muster::testing;
using std::chrono::milliseconds;

namespace {

using Moment = Kill::Moment;
using Victim = Kill::Victim;

int64_t now_ms() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<milliseconds>(now).count();
}

void signal_to(pid_t process, int signal) {
  if (process > 0) ::kill(process, signal);
}

bool dies(const Kill& kill, uint32_t server) {
  return kill.victim == Victim::all || kill.victim == (server == 0 ? Victim::server_0 : Victim::server_1);
}

/// Of a kill, in whichever process it comes to pass.
class Killer {
 public:
  Killer(Board& board, Kill kill) : board_(board), kill_(kill) {}

  const Kill& kill() const { return kill_; }
  bool is_next(Moment moment, uint32_t server, uint32_t rank, uint16_t request) const {
    if (moment != kill_.moment || server != kill_.server || request != kill_.request) return false;
    if (kill_.is_own && kill_.victim == Victim::chief && rank != kChief) return false;
    if (kill_.is_own && kill_.victim == Victim::worker && rank == kChief) return false;
    return ++board_.occurrences == kill_.occurrence;
  }
  /// What is sent to the server stays unread.
  void stop_server() const { signal_to(board_.servers[kill_.server], SIGSTOP); }
  /// Does not return in a victim.
  void strike() const {
    board_.killed_at = now_ms();
    const pid_t own = ::getpid();
    bool is_victim = false;
    const auto strike = [&](pid_t process) {
      is_victim = is_victim || process == own;
      if (process != own) signal_to(process, SIGKILL);
    };
    for (uint32_t s = 0; s < kTracedServers; ++s) {
      if (dies(kill_, s)) strike(board_.servers[s]);
    }
    for (uint32_t rank = 0; rank < 2; ++rank) {
      const auto victim = rank == kChief ? Victim::chief : Victim::worker;
      if (kill_.victim == victim || kill_.victim == Victim::all) strike(board_.workers[rank]);
    }
    // Whoever lives reads what was sent, and finds its sender dead: the launcher lets it go on.
    if (is_victim) ::raise(SIGKILL);
    signal_to(board_.servers[kill_.server], SIGCONT);
  }

 private:
  Board& board_;
  const Kill kill_;
};

class KillingWatcher final : public ChannelWatcher {
 public:
  KillingWatcher(Killer killer, uint32_t server, uint32_t rank) : killer_(killer), server_(server), rank_(rank) {}

  void sends(uint16_t request) override {
    is_struck_ = killer_.is_next(Moment::sent, server_, rank_, request);
    if (is_struck_) killer_.stop_server();
  }
  void sent(uint16_t /*request*/) override {
    if (is_struck_) killer_.strike();
    is_struck_ = false;
  }
  void answered(uint16_t request) override {
    if (killer_.is_next(Moment::received, server_, rank_, request)) killer_.strike();
    if (!killer_.is_next(Moment::answered, server_, rank_, request)) return;
    killer_.strike();
    throw CommError("the answer was lost");
  }

 private:
  const Killer killer_;
  const uint32_t server_;
  const uint32_t rank_;
  bool is_struck_ = false;
};

// A snapshot begins as a folder that is then renamed.
void watch_folder(const std::filesystem::path& folder, const Killer& killer) {
  const int events = ::inotify_init1(IN_CLOEXEC);
  ::inotify_add_watch(events, folder.c_str(), IN_CREATE | IN_MOVED_TO);
  const uint32_t wanted = killer.kill().moment == Moment::begun ? IN_CREATE : IN_MOVED_TO;
  std::thread([=] {
    alignas(inotify_event) char buffer[4096];
    for (ssize_t got = 0; (got = ::read(events, buffer, sizeof(buffer))) > 0;) {
      for (const char* at = buffer; at < buffer + got;) {
        const auto& event = *reinterpret_cast<const inotify_event*>(at);
        at += sizeof(inotify_event) + event.len;
        const bool is_snapshot = std::string(event.name).find("snapshot-") != std::string::npos &&
                                 std::string(event.name).find("removed") == std::string::npos;
        if ((event.mask & wanted) == 0 || !is_snapshot) continue;
        if (killer.is_next(killer.kill().moment, killer.kill().server, kChief, 0)) killer.strike();
      }
    }
  }).detach();
}

struct ProcessKill {
  Kill kill;
  bool is_synchronous = true;
};

constexpr uint64_t kSteps = 8;
constexpr milliseconds kLimit{40'000};
constexpr int64_t kErrorsBy = 5'000 + 1'000;  // in ms, and what a loaded machine takes

// Starts what died again: servers by themselves, workers all together, or with staleness alone.
class Launcher {
 public:
  explicit Launcher(const ProcessKill& what) : what_(what), job_(2, what.is_synchronous ? 0 : kAnyStaleness) {
    job_.plan.heartbeat_ms = 2'000;  // a busy machine lets a live worker wait for a second
    job_.patience = milliseconds(2'000);
    job_.steps = kSteps;
    job_.number = 1;
    job_.traces_ranks = what.is_synchronous;
    Kill kill = what.kill;
    kill.is_own = kill.is_own && kill.moment != Moment::begun && kill.moment != Moment::renamed;
    const Killer killer(*job_.board, kill);
    job_.surroundings = [this, killer](uint32_t rank) {
      return std::make_shared<WatchedSurroundings>([killer, names = job_.names, rank](const std::string& name) {
        const auto server = static_cast<uint32_t>(std::find(names.begin(), names.end(), name) - names.begin());
        return std::make_shared<KillingWatcher>(killer, server, rank);
      });
    };
    job_.at_server = [this, killer](uint32_t server) {
      const auto moment = killer.kill().moment;
      if (server != killer.kill().server || (moment != Moment::begun && moment != Moment::renamed)) return;
      watch_folder(job_.folder.path / std::to_string(server), killer);
    };
  }

  /// What went wrong; empty where all went well.
  std::string run() {
    for (uint32_t s = 0; s < kTracedServers; ++s) start_server(s);
    start_workers();
    const auto end = now_ms() + kLimit.count();
    while (failure_.empty() && !is_done()) {
      std::this_thread::sleep_for(milliseconds(5));
      look();
      if (now_ms() > end) failure_ = "the job does not end";
    }
    if (failure_.empty()) check();
    for (uint32_t s = 0; s < kTracedServers; ++s) stop(job_.board->servers[s]);
    for (uint32_t rank = 0; rank < 2; ++rank) stop(job_.board->workers[rank]);
    if (!failure_.empty()) failure_ = in_words(what_.kill) + ": " + failure_ + "\n";
    return failure_;
  }

 private:
  void start_server(uint32_t s) { job_.board->servers[s] = job_.fork_server(s); }
  void restart_server(uint32_t s) {
    has_died_[s] = true;
    std::this_thread::sleep_for(milliseconds(50));
    start_server(s);
  }
  void start_worker(uint32_t rank) { job_.board->workers[rank] = job_.fork_worker(rank, lives_++); }
  void start_workers() {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      finished_[rank] = false;
      start_worker(rank);
    }
  }
  bool is_done() const { return finished_[0] && finished_[1]; }

  static void stop(std::atomic<pid_t>& process) {
    if (process <= 0) return;
    signal_to(process, SIGKILL);
    end_of(process);
    process = 0;
  }

  // Its status, where it has ended.
  static std::optional<int> ended(std::atomic<pid_t>& process) {
    int status = 0;
    if (process <= 0 || ::waitpid(process, &status, WNOHANG) != process) return std::nullopt;
    process = 0;
    return status;
  }

  void look() {
    auto& board = *job_.board;
    bool begins_again = false;
    for (uint32_t rank = 0; rank < 2; ++rank) {
      const auto status = ended(board.workers[rank]);
      if (!status) continue;
      for (auto& server : board.servers) signal_to(server, SIGCONT);  // that was stopped for the request
      finished_[rank] = *status == 0;
      if (*status == 0) continue;
      begins_again = true;
      if (WIFEXITED(*status)) look_at_error(WEXITSTATUS(*status));
    }
    for (uint32_t s = 0; s < kTracedServers; ++s) {
      if (!ended(board.servers[s])) continue;
      restart_server(s);
    }
    if (!begins_again) return;
    for (uint32_t rank = 0; rank < 2; ++rank) stop(board.workers[rank]);
    if (board.killed_at == 0) failure_ = "a worker ended without a death";
    ++job_.number;
    start_workers();
  }

  void look_at_error(int status) {
    if (status != 1) failure_ = "a worker ended with an error that does not say what to do";
    const int64_t killed_at = job_.board->killed_at;
    if (now_ms() - killed_at > kErrorsBy) failure_ = "a worker ended later than 5 s after the death";
  }

  void check() {
    if (job_.board->killed_at == 0) {
      failure_ = "nobody died";
      return;
    }
    for (uint32_t s = 0; s < kTracedServers; ++s) {
      if (has_died_[s] || !dies(what_.kill, s)) continue;
      end_of(job_.board->servers[s]);  // with the last worker's leaving
      restart_server(s);
    }
    const auto counts = job_.read_counts();
    const auto expect = [&](size_t at, uint64_t least, uint64_t most) {
      for (const float count : counts[at]) {
        if (count >= static_cast<float>(least) && count <= static_cast<float>(most)) continue;
        failure_ = "element " + std::to_string(at) + " was counted " + std::to_string(count) + " times, not " +
                   std::to_string(least) + " to " + std::to_string(most);
      }
    };
    if (what_.is_synchronous) {  // as if nobody had died
      for (const uint32_t rank : {0, 1}) expect(rank, kSteps, kSteps);
      for (uint64_t step = 1; step <= kSteps; ++step) expect(kTracesOfSteps + step, 2, 2);
      return;
    }
    for (int life = 0; life < lives_; ++life) {
      const auto& own = job_.board->lives[life];
      const uint64_t acked = own.acked - own.first;
      const uint64_t durable = std::max<uint64_t>(own.durable, own.first) - own.first;
      if (own.finished == 1) {
        expect(static_cast<size_t>(life), acked, acked);
      } else {
        expect(static_cast<size_t>(life), has_died_[0] || has_died_[1] ? durable : acked, own.begun - own.first);
      }
    }
  }

  const ProcessKill what_;
  TracedJob job_;
  int lives_ = 0;
  bool finished_[2] = {};
  bool has_died_[kTracedServers] = {};
  std::string failure_;
};

struct ProcessRow {
  uint16_t request;
  Moment moment;
  uint64_t occurrence;
  std::vector<uint32_t> servers = {0, 1};
  bool is_of_synchronous_jobs = false;
  bool is_of_chief = false;
};

std::vector<ProcessRow> process_rows() {
  std::vector<ProcessRow> rows;
  for (const Moment moment : {Moment::sent, Moment::answered}) {
    rows.push_back({Configure::kType, moment, 1});
    rows.push_back({Write::kType, moment, 2, {0, 1}, false, true});
    rows.push_back({Start::kType, moment, 1, {0, 1}, false, true});
    rows.push_back({Join::kType, moment, 1});
    rows.push_back({Push::kType, moment, 12});
    rows.push_back({PushRows::kType, moment, 4});
    rows.push_back({Commit::kType, moment, 4, {0}});
    rows.push_back({Sum::kType, moment, 4, {0, 1}, true});
    rows.push_back({Apply::kType, moment, 4});
    rows.push_back({Read::kType, moment, 4});
    rows.push_back({Leave::kType, moment, 1});
  }
  rows.push_back({Commit::kType, Moment::received, 4, {0}});
  rows.push_back({0, Moment::begun, 2});
  rows.push_back({0, Moment::renamed, 2});
  return rows;
}

std::vector<ProcessKill> cases_of(bool has_all) {
  constexpr Victim kVictims[] = {Victim::worker, Victim::chief, Victim::server_0, Victim::server_1, Victim::all};
  std::vector<ProcessKill> cases;
  for (const auto& row : process_rows()) {
    for (const Victim victim : kVictims) {
      for (const uint32_t server : row.servers) {
        for (const bool is_synchronous : {true, false}) {
          if (!is_synchronous && row.is_of_synchronous_jobs) continue;
          cases.push_back(
              {{row.moment, victim, row.request, server, row.occurrence, !row.is_of_chief}, is_synchronous});
        }
      }
    }
  }
  if (has_all) return cases;
  std::vector<ProcessKill> some;  // a diagonal: each row and each victim comes
  for (size_t i = 0; i < cases.size(); i += 7) some.push_back(cases[i]);
  return some;
}

// Most of a case is waiting: several run at once, each launched by a process of its own.
void run(const std::vector<ProcessKill>& cases) {
  constexpr size_t kAtOnce = 4;
  for (size_t begin = 0; begin < cases.size(); begin += kAtOnce) {
    std::vector<std::pair<pid_t, size_t>> launchers;
    for (size_t i = begin; i < std::min(cases.size(), begin + kAtOnce); ++i) {
      const pid_t launcher = ::fork();
      REQUIRE(launcher >= 0);
      if (launcher == 0) {
        std::string failure;
        try {
          failure = Launcher(cases[i]).run();
        } catch (const std::exception& error) {
          failure = std::string(error.what()) + "\n";
        }
        std::fputs(failure.c_str(), stderr);
        ::_exit(failure.empty() ? 0 : 1);
      }
      launchers.emplace_back(launcher, i);
    }
    for (const auto& [launcher, i] : launchers) {
      CAPTURE(in_words(cases[i].kill), cases[i].is_synchronous);
      CHECK(end_of(launcher) == 0);
    }
  }
}

}  // namespace

TEST_CASE("processes die at a request, and the job ends as if nobody had", "[server][kills]") { run(cases_of(false)); }

TEST_CASE("processes die at every request", "[server][kills][.][long]") { run(cases_of(true)); }
