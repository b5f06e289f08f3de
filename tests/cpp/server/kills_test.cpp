// Workers and servers that are killed, and connections that are cut, while every update leaves a trace: incarnation i
// of a worker takes 1 from element i of each parameter, and from row i of a table, with every step.
#include <signal.h>
#include <sys/wait.h>

#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpp/catch.h"
#include "server/worker/client_config.h"
#include "support/traced_job.h"

using namespace muster;
using namespace muster::server;
using namespace muster::testing;
using std::chrono::milliseconds;

namespace {

constexpr uint32_t kWorkers = 3;

struct Kills {
  bool workers = false;
  bool servers = false;
  bool connections = false;
  int count = 0;
};

void run(uint32_t staleness, const Kills& kills, unsigned seed) {
  std::minstd_rand random(seed);
  TracedJob job(kWorkers, staleness);
  job.cuts = kills.connections;

  std::vector<pid_t> servers;
  for (uint32_t s = 0; s < kTracedServers; ++s) servers.push_back(job.fork_server(s));
  std::vector<pid_t> workers;
  std::vector<int> life_of;
  int lives = 0;
  for (uint32_t w = 0; w < kWorkers; ++w) {
    life_of.push_back(lives);
    workers.push_back(job.fork_worker(w, lives++));
  }
  std::vector<int> killed(kMaxLives);
  // Before the initial values are durable, the end of a server is the end of the job.
  for (int life = 0; life < lives; ++life) {
    for (int i = 0; job.board->lives[life].acked == 0 && i < 3000; ++i) std::this_thread::sleep_for(milliseconds(10));
  }
  bool is_early = false;
  for (int i = 0; i < kills.count; ++i) {
    std::this_thread::sleep_for(milliseconds(30 + random() % 250));
    for (const pid_t pid : workers) is_early = is_early || ::waitpid(pid, nullptr, WNOHANG) == pid;
    if (is_early) break;
    const bool takes_server = kills.servers && (!kills.workers || random() % 2 == 0);
    if (takes_server) {
      const uint32_t s = random() % kTracedServers;
      ::kill(servers[s], SIGKILL);
      end_of(servers[s]);
      std::this_thread::sleep_for(milliseconds(random() % 100));
      servers[s] = job.fork_server(s);
    } else if (kills.workers) {
      const uint32_t w = random() % kWorkers;
      ::kill(workers[w], SIGKILL);
      end_of(workers[w]);
      killed[static_cast<size_t>(life_of[w])] = 1;
      life_of[w] = lives;
      workers[w] = job.fork_worker(w, lives++);
    }
  }
  CHECK_FALSE(is_early);
  std::this_thread::sleep_for(milliseconds(300));
  job.board->stop = 1;
  for (const pid_t pid : workers) CHECK(end_of(pid) == 0);

  const auto counts = job.read_counts();
  uint64_t total = 0;
  for (int life = 0; life < lives; ++life) {
    const auto& own = job.board->lives[life];
    const uint64_t acked = own.acked - own.first;
    const uint64_t begun = own.begun - own.first;
    const uint64_t durable = own.durable > own.first ? own.durable - own.first : 0;
    for (const float count : counts[static_cast<size_t>(life)]) {
      CAPTURE(staleness, seed, life, killed[static_cast<size_t>(life)], acked, begun, durable, count);
      if (killed[static_cast<size_t>(life)] == 0) {
        CHECK(count == static_cast<float>(acked));
      } else {
        CHECK(count <= static_cast<float>(begun));
        CHECK(count >= static_cast<float>(kills.servers ? durable : acked));
      }
    }
    total += acked;
  }
  CHECK(total > 0);
  job.board->servers_down = 1;
  for (const pid_t pid : servers) end_of(pid);
}

}  // namespace

TEST_CASE("no update is lost or doubled while workers are killed", "[server]") {
  run(kAnyStaleness, {.workers = true, .count = 5}, 1);
}

TEST_CASE("no update is lost or doubled while servers are killed and started again", "[server]") {
  run(kAnyStaleness, {.servers = true, .count = 5}, 2);
}

TEST_CASE("no update is lost or doubled while connections are cut", "[server]") {
  run(kAnyStaleness, {.connections = true, .count = 5}, 3);
}

TEST_CASE("no update of a synchronous job is lost or doubled", "[server]") {
  run(0, {.workers = true, .count = 4}, 4);
  run(0, {.servers = true, .count = 4}, 5);
  run(0, {.connections = true, .count = 4}, 6);
}

namespace {

// The servers and two workers of a job, which have made some steps.
struct TrainingProcesses {
  explicit TrainingProcesses(TracedJob& the_job) : job(the_job) {
    for (uint32_t s = 0; s < kTracedServers; ++s) servers.push_back(job.fork_server(s));
    for (uint32_t w = 0; w < 2; ++w) workers.push_back(job.fork_worker(w, static_cast<int>(w)));
    for (int i = 0; job.board->lives[0].acked < 20 && i < 3000; ++i) std::this_thread::sleep_for(milliseconds(10));
  }
  void end_servers() const {
    job.board->servers_down = 1;
    for (const pid_t server : servers) end_of(server);
  }

  TracedJob& job;
  std::vector<pid_t> servers;
  std::vector<pid_t> workers;
};

// Workers with this heartbeat and patience train, while a server stands still for so long.
void stop_one(uint32_t staleness, size_t stopped, milliseconds heartbeat, milliseconds patience, milliseconds pause) {
  CAPTURE(staleness, stopped);
  TracedJob job(2, staleness);
  job.plan.heartbeat_ms = static_cast<uint32_t>(heartbeat.count());
  job.patience = patience;
  job.steps = 300;
  const TrainingProcesses processes(job);
  ::kill(processes.servers[stopped], SIGSTOP);
  const uint64_t before = job.board->lives[0].acked;
  std::this_thread::sleep_for(pause);
  CHECK(job.board->lives[0].acked <= before + 2);  // it was needed
  ::kill(processes.servers[stopped], SIGCONT);
  for (const pid_t worker : processes.workers) CHECK(end_of(worker) == 0);
  const auto counts = job.read_counts();
  for (size_t life = 0; life < 2; ++life) {
    for (const float count : counts[life]) CHECK(count == static_cast<float>(job.steps));
  }
  processes.end_servers();
}

}  // namespace

TEST_CASE("a server process that stands still for longer than the patience costs no worker", "[server]") {
  stop_one(0, GENERATE(0U, 1U), milliseconds(400), milliseconds(100), milliseconds(2'000));
}

TEST_CASE("a server process that is killed while it stands still is missed after the patience", "[server]") {
  TracedJob job(2, 0);
  job.plan.heartbeat_ms = 400;
  job.patience = milliseconds(100);
  job.steps = 3'000;
  const TrainingProcesses processes(job);
  ::kill(processes.servers[1], SIGSTOP);
  std::this_thread::sleep_for(milliseconds(1'500));
  ::kill(processes.servers[1], SIGKILL);
  const auto killed = std::chrono::steady_clock::now();
  for (const pid_t worker : processes.workers) CHECK(end_of(worker) != 0);
  CHECK(std::chrono::steady_clock::now() - killed < milliseconds(10'000));
  processes.end_servers();
}

TEST_CASE("a server process that stands still for 20 s costs no worker", "[server][.][long]") {
  const uint32_t staleness = GENERATE(0U, kAnyStaleness);
  stop_one(staleness, GENERATE(0U, 1U), milliseconds(5'000), server::kPatience, milliseconds(20'000));
}

TEST_CASE("servers need no more memory however often a worker is started again", "[server][.][long]") {
  TracedJob job(2, kAnyStaleness);
  std::vector<pid_t> servers;
  for (uint32_t s = 0; s < kTracedServers; ++s) servers.push_back(job.fork_server(s));
  int lives = 0;
  const pid_t chief = job.fork_worker(0, lives++);
  const auto pages = [&] {
    uint64_t all = 0;
    for (const pid_t server : servers) {
      uint64_t size = 0, resident = 0;
      std::ifstream("/proc/" + std::to_string(server) + "/statm") >> size >> resident;
      all += resident;
    }
    return all;
  };
  constexpr int kRestarts = 390;
  uint64_t early = 0;
  for (int restart = 0; restart < kRestarts; ++restart) {
    const int life = lives++;
    const pid_t worker = job.fork_worker(1, life);
    for (int i = 0; job.board->lives[life].acked == 0 && i < 3000; ++i) std::this_thread::sleep_for(milliseconds(1));
    REQUIRE(job.board->lives[life].acked > 0);
    ::kill(worker, SIGKILL);
    end_of(worker);
    if (restart == kRestarts / 4) early = pages();
  }
  CHECK(static_cast<double>(pages()) < static_cast<double>(early) * 1.05);
  job.board->stop = 1;
  CHECK(end_of(chief) == 0);
  job.board->servers_down = 1;
  for (const pid_t server : servers) end_of(server);
}

TEST_CASE("two hundred kills of workers and servers, and cut connections", "[server][.][long]") {
  for (unsigned seed = 0; seed < 5; ++seed) {
    run(seed % 2 == 0 ? kAnyStaleness : 0, {.workers = true, .servers = true, .connections = true, .count = 40}, seed);
  }
}
