// Workers and servers that are killed, and connections that are cut, while every update leaves a trace: incarnation i
// of a worker takes 1 from element i of each parameter, and from row i of a table, with every step.
#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpp/catch.h"
#include "muster/error.h"
#include "server/shard/server.h"
#include "server/worker/client.h"
#include "support/run_ranks.h"
#include "support/servers.h"

using namespace muster;
using namespace muster::server;
using std::chrono::milliseconds;

namespace {

constexpr uint32_t kServers = 2;
constexpr uint32_t kWorkers = 3;
constexpr int kMaxLives = 400;  // of all workers
constexpr int64_t kWidth = 512;
constexpr int64_t kDim = 3;

// What processes tell one another, in memory that they share.
struct Board {
  struct Life {
    std::atomic<uint64_t> begun;  // the last step that was pushed
    std::atomic<uint64_t> acked;  // that was applied
    std::atomic<uint64_t> durable;
    std::atomic<uint64_t> first;  // the step before the first
    std::atomic<int> finished;
  };
  std::atomic<int> stop;
  std::atomic<int> servers_down;
  Life lives[kMaxLives];
};

Plan traced_plan(uint32_t staleness) {
  Plan plan;
  for (int p = 0; p < 6; ++p) {
    plan.parameters.push_back({"counts" + std::to_string(p), {12'000 + p * 4096}, {1}, at::kFloat});
  }
  plan.group_of.resize(plan.parameters.size());
  plan.tables = {{"rows", kWidth, kDim, RowPlacement::modulo, {RowInitialiser::Kind::normal, 0, 0}, 0}};
  plan.groups = std::vector<kernels::SgdGroup>{{1, 0, 0, 0, false, false}};
  plan.servers = kServers;
  plan.workers = kWorkers;
  plan.staleness = staleness;
  plan.chunk_bytes = kMinChunkBytes;
  plan.heartbeat_ms = 3'000;
  plan.timeout_ms = 30'000;
  return plan;
}

// Cuts a connection now and then, in whatever it is doing.
void cut_connections(unsigned seed, const std::atomic<bool>& ends) {
  std::minstd_rand random(seed);
  while (!ends) {
    std::this_thread::sleep_for(milliseconds(20 + random() % 200));
    std::vector<int> sockets;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      const int fd = std::atoi(entry.path().filename().c_str());
      struct stat status{};
      if (::fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode)) sockets.push_back(fd);
    }
    if (!sockets.empty()) ::shutdown(sockets[random() % sockets.size()], SHUT_RDWR);
  }
}

struct Job {
  Plan plan;
  std::vector<std::string> names;
  std::filesystem::path folder;
  Board* board;
  bool cuts = false;
};

[[noreturn]] void run_server(const Job& job, uint32_t index) {
  const ServerConfig config{job.names[index], job.folder / std::to_string(index), milliseconds(60)};
  const ParameterServer server(config);
  while (job.board->servers_down == 0) std::this_thread::sleep_for(milliseconds(5));
  ::_exit(0);
}

void work(const Job& job, uint32_t rank, int life) {
  ClientConfig config;
  config.servers = job.names;
  config.rank = rank;
  config.plan = job.plan;
  config.shares_memory = rank % 2 == 0;
  config.log_bytes = 1 << 20;
  config.patience = milliseconds(20'000);
  ServerClient client(config);
  if (rank == 0 && !client.is_started()) {
    for (uint32_t c = 0; c < client.chunks().size(); ++c) {
      const std::vector<std::byte> zeros(client.part_bytes(c, Part::parameter));
      client.write(c, Part::parameter, zeros);
    }
    client.start();
  }
  std::vector<std::byte*> landing;
  for (uint32_t c = 0; c < client.chunks().size(); ++c) {
    landing.push_back(client.allocate(client.part_bytes(c, Part::parameter)));
  }
  uint64_t step = client.join();
  auto& mine = job.board->lives[life];
  mine.first = mine.begun = mine.acked = step;
  while (job.board->stop == 0) {
    ++step;
    mine.begun = step;
    for (uint32_t c = 0; c < client.chunks().size(); ++c) {
      const auto& chunk = client.chunks()[c];
      const auto gradient = std::make_shared<std::vector<float>>(static_cast<size_t>(chunk.numel));
      for (const auto& piece : chunk.pieces) {
        if (piece.run.begin == 0) (*gradient)[static_cast<size_t>(piece.offset + life)] = 1;
      }
      const Bytes bytes = std::as_bytes(std::span(*gradient));
      client.push(step, c, {&bytes, 1}, gradient);
    }
    const int64_t row = life;
    client.rows().push(step, 0, {&row, 1}, std::vector<float>(kDim, 1));
    client.flush();
    Apply command;
    command.step = step;
    command.groups = job.plan.groups;
    command.members = {rank};
    if (job.plan.is_synchronous()) {
      command.members = client.commit(step, {1}).members;
      client.sum(step, command.members);
    }
    if (job.plan.is_synchronous() && step % 2 == 0) {
      client.apply_and_read(command, landing);
    } else {
      client.apply(command);
    }
    mine.acked = step;
    if (!job.plan.is_synchronous()) client.commit(step, {});
    mine.durable = client.durable().newest;
  }
  client.leave();  // what is applied is not lost with the servers any more
  mine.finished = 1;
}

pid_t fork_server(const Job& job, uint32_t index) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    at::set_num_threads(1);  // the pool's threads did not follow the fork
    try {
      run_server(job, index);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "server %u: %s\n", index, error.what());
    }
    ::_exit(1);
  }
  return pid;
}

pid_t fork_worker(const Job& job, uint32_t rank, int life) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    at::set_num_threads(1);  // the pool's threads did not follow the fork
    int status = 0;
    std::atomic<bool> ends{false};
    std::thread cutter([&] {
      if (job.cuts) cut_connections(static_cast<unsigned>(life + 1), ends);
    });
    try {
      work(job, rank, life);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "worker %u, life %d: %s\n", rank, life, error.what());
      status = 1;
    }
    ends = true;
    cutter.join();
    ::_exit(status);
  }
  return pid;
}

// Every element that somebody may have moved, by life; equal in all parameters and in the table.
std::vector<std::vector<float>> read_counts(const Job& job) {
  ClientConfig config;
  config.servers = job.names;
  config.rank = 77;
  config.plan = job.plan;
  ServerClient client(config);
  client.join();
  std::vector<std::byte*> to;
  for (uint32_t c = 0; c < client.chunks().size(); ++c)
    to.push_back(client.allocate(client.part_bytes(c, Part::parameter)));
  client.read(Part::parameter, 0, to);
  std::vector<std::vector<float>> counts(kWidth);
  for (uint32_t c = 0; c < client.chunks().size(); ++c) {
    for (const auto& piece : client.chunks()[c].pieces) {
      if (piece.run.begin != 0) continue;
      for (int64_t life = 0; life < kWidth; ++life) {
        float value = 0;
        std::memcpy(&value, to[c] + (piece.offset + life) * 4, 4);
        counts[static_cast<size_t>(life)].push_back(-value);
      }
    }
  }
  std::vector<int64_t> rows(kWidth);
  std::iota(rows.begin(), rows.end(), 0);
  std::vector<float> values(rows.size() * kDim);
  client.rows().pull(0, 0, rows, values);
  for (size_t i = 0; i < values.size(); ++i) counts[i / kDim].push_back(-values[i]);
  return counts;
}

struct Kills {
  bool workers = false;
  bool servers = false;
  bool connections = false;
  int count = 0;
};

void run(uint32_t staleness, const Kills& kills, unsigned seed) {
  std::minstd_rand random(seed);
  Job job;
  job.plan = traced_plan(staleness);
  job.names = testing::server_names(kServers);
  job.folder = std::filesystem::temp_directory_path() / ("muster-kills-" + net::random_name());
  job.cuts = kills.connections;
  void* memory = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  job.board = new (memory) Board();

  std::vector<pid_t> servers;
  for (uint32_t s = 0; s < kServers; ++s) servers.push_back(fork_server(job, s));
  std::vector<pid_t> workers;
  std::vector<int> life_of;
  int lives = 0;
  for (uint32_t w = 0; w < kWorkers; ++w) {
    life_of.push_back(lives);
    workers.push_back(fork_worker(job, w, lives++));
  }
  const auto end_of = [](pid_t pid) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    return status;
  };
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
      const uint32_t s = random() % kServers;
      ::kill(servers[s], SIGKILL);
      end_of(servers[s]);
      std::this_thread::sleep_for(milliseconds(random() % 100));
      servers[s] = fork_server(job, s);
    } else if (kills.workers) {
      const uint32_t w = random() % kWorkers;
      ::kill(workers[w], SIGKILL);
      end_of(workers[w]);
      killed[static_cast<size_t>(life_of[w])] = 1;
      life_of[w] = lives;
      workers[w] = fork_worker(job, w, lives++);
    }
  }
  CHECK_FALSE(is_early);
  std::this_thread::sleep_for(milliseconds(300));
  job.board->stop = 1;
  for (const pid_t pid : workers) CHECK(end_of(pid) == 0);

  const auto counts = read_counts(job);
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
  std::filesystem::remove_all(job.folder);
  ::munmap(memory, sizeof(Board));
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

TEST_CASE("two hundred kills of workers and servers, and cut connections", "[server][.][long]") {
  for (unsigned seed = 0; seed < 5; ++seed) {
    run(seed % 2 == 0 ? kAnyStaleness : 0, {.workers = true, .servers = true, .connections = true, .count = 40}, seed);
  }
}
