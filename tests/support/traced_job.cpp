#include "support/traced_job.h"

#include <ATen/Parallel.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include "muster/error.h"
#include "server/shard/server.h"
#include "server/worker/client.h"
#include "support/connections.h"
#include "support/servers.h"

namespace muster::testing {

using namespace server;
using std::chrono::milliseconds;

namespace {

constexpr int64_t kTracedDim = 3;

Plan traced_plan(uint32_t workers, uint32_t staleness) {
  Plan plan;
  for (int p = 0; p < 6; ++p) {
    plan.parameters.push_back({"counts" + std::to_string(p), {12'000 + p * 4096}, {1}, at::kFloat});
  }
  plan.group_of.resize(plan.parameters.size());
  plan.tables = {{"rows", kTracedWidth, kTracedDim, RowPlacement::modulo, {RowInitialiser::Kind::normal, 0, 0}, 0}};
  plan.groups = std::vector<kernels::SgdGroup>{{1, 0, 0, 0, false, false}};
  plan.servers = kTracedServers;
  plan.workers = workers;
  plan.staleness = staleness;
  plan.chunk_bytes = kMinChunkBytes;
  plan.heartbeat_ms = 3'000;
  plan.timeout_ms = 30'000;
  return plan;
}

Board* new_board() {
  void* const memory = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw Error("no memory can be shared");
  return new (memory) Board();
}

// Cuts a connection now and then, in whatever it is doing; not one of `inherited`, which another process uses too.
void cut_connections(unsigned seed, const std::set<int>& inherited, const std::atomic<bool>& ends) {
  std::minstd_rand random(seed);
  while (!ends) {
    std::this_thread::sleep_for(milliseconds(20 + random() % 200));
    std::vector<int> own;
    for (const int connection : connections()) {
      if (!inherited.contains(connection)) own.push_back(connection);
    }
    if (!own.empty()) cut(own[random() % own.size()]);
  }
}

// Forks; the child does not return.
template <class F>
pid_t fork_process(const F& run) {
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  at::set_num_threads(1);  // the pool's threads did not follow the fork
  ::_exit(run());
}

bool says_what_to_do(const std::exception& error) {
  return dynamic_cast<const PeerLost*>(&error) != nullptr || dynamic_cast<const CheckpointError*>(&error) != nullptr ||
         dynamic_cast<const Fenced*>(&error) != nullptr || dynamic_cast<const Occupied*>(&error) != nullptr;
}

}  // namespace

int end_of(pid_t process) {
  int status = 0;
  ::waitpid(process, &status, 0);
  return status;
}

TracedJob::TracedJob(uint32_t workers, uint32_t staleness)
    : plan(traced_plan(workers, staleness)), names(server_names(kTracedServers)), board(new_board()) {
  for (uint32_t s = 0; s < kTracedServers; ++s) std::filesystem::create_directory(folder.path / std::to_string(s));
}

TracedJob::~TracedJob() { ::munmap(board, sizeof(Board)); }

pid_t TracedJob::fork_server(uint32_t index) const {
  return fork_process([&] {
    try {
      if (at_server) at_server(index);
      const ServerConfig config{names[index], folder.path / std::to_string(index), milliseconds(60)};
      const ParameterServer server(config);
      while (board->servers_down == 0) std::this_thread::sleep_for(milliseconds(5));
      ::_exit(0);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "server %u: %s\n", index, error.what());
    }
    return 1;
  });
}

void TracedJob::work(uint32_t rank, int life) const {
  ClientConfig config;
  config.servers = names;
  config.rank = rank;
  config.plan = plan;
  config.job = number;
  config.shares_memory = rank % 2 == 0;
  config.log_bytes = 1 << 20;
  config.patience = patience;
  if (surroundings) config.surroundings = surroundings(rank);
  ServerClient client(config);
  if (rank == 0 && !client.is_started()) {
    client.start([&] {
      for (uint32_t c = 0; c < client.chunks().size(); ++c) {
        const std::vector<std::byte> zeros(client.part_bytes(c, Part::parameter));
        client.write(c, Part::parameter, zeros);
      }
    });
  }
  std::vector<std::byte*> landing;
  for (uint32_t c = 0; c < client.chunks().size(); ++c) {
    landing.push_back(client.allocate(client.part_bytes(c, Part::parameter)));
  }
  uint64_t step = client.join();
  auto& mine = board->lives[life];
  mine.first = mine.begun = mine.acked = step;
  const auto goes_on = [&] {
    if (steps == 0) return board->stop == 0;
    return (plan.is_synchronous() ? step : step - mine.first) < steps;
  };
  while (goes_on()) {
    ++step;
    mine.begun = step;
    std::vector<int64_t> traces{traces_ranks ? static_cast<int64_t>(rank) : life};
    if (traces_ranks) traces.push_back(kTracesOfSteps + static_cast<int64_t>(step) % kTracesOfSteps);
    for (uint32_t c = 0; c < client.chunks().size(); ++c) {
      const auto& chunk = client.chunks()[c];
      const auto gradient = std::make_shared<std::vector<float>>(static_cast<size_t>(chunk.numel));
      for (const auto& piece : chunk.pieces) {
        for (const int64_t at : traces) {
          if (piece.run.begin == 0) (*gradient)[static_cast<size_t>(piece.offset + at)] = 1;
        }
      }
      const Bytes bytes = std::as_bytes(std::span(*gradient));
      client.push(step, c, {&bytes, 1}, gradient);
    }
    client.rows().push(step, 0, traces, std::vector<float>(traces.size() * kTracedDim, 1));
    client.flush();
    Apply command;
    command.step = step;
    command.groups = plan.groups;
    command.members = {rank};
    if (plan.is_synchronous()) {
      command.members = client.commit(step, {1}).members;
      client.sum(step, command.members);
    }
    if (plan.is_synchronous() && step % 2 == 0) {
      client.apply_and_read(command, landing);
    } else {
      client.apply(command);
    }
    mine.acked = step;
    if (!plan.is_synchronous()) client.commit(step, {});
    mine.durable = client.durable().newest;
    if (!plan.is_synchronous() && step % 2 == 0) client.read(Part::parameter, 0, landing);
  }
  client.leave();  // what is applied is not lost with the servers any more
  mine.finished = 1;
}

pid_t TracedJob::fork_worker(uint32_t rank, int life) const {
  return fork_process([&] {
    int status = 0;
    std::atomic<bool> ends{false};
    std::thread cutter([&, inherited = connections()] {
      if (cuts) cut_connections(static_cast<unsigned>(life + 1), inherited, ends);
    });
    try {
      work(rank, life);
    } catch (const std::exception& error) {
      status = says_what_to_do(error) ? 1 : 2;
      const bool is_expected = status == 1 && board->killed_at != 0;
      if (!is_expected) std::fprintf(stderr, "worker %u, life %d: %s\n", rank, life, error.what());
    }
    ends = true;
    cutter.join();
    return status;
  });
}

std::vector<std::vector<float>> TracedJob::read_counts() const {
  ClientConfig config;
  config.servers = names;
  config.rank = number == 0 ? 77 : 0;
  config.job = number == 0 ? 0 : number + 1;
  config.plan = plan;
  ServerClient client(config);
  client.join();
  std::vector<std::byte*> to;
  for (uint32_t c = 0; c < client.chunks().size(); ++c)
    to.push_back(client.allocate(client.part_bytes(c, Part::parameter)));
  client.read(Part::parameter, 0, to);
  std::vector<std::vector<float>> counts(kTracedWidth);
  for (uint32_t c = 0; c < client.chunks().size(); ++c) {
    for (const auto& piece : client.chunks()[c].pieces) {
      if (piece.run.begin != 0) continue;
      for (int64_t at = 0; at < kTracedWidth; ++at) {
        float value = 0;
        std::memcpy(&value, to[c] + (piece.offset + at) * 4, 4);
        counts[static_cast<size_t>(at)].push_back(-value);
      }
    }
  }
  std::vector<int64_t> rows(kTracedWidth);
  std::iota(rows.begin(), rows.end(), 0);
  std::vector<float> values(rows.size() * kTracedDim);
  client.rows().pull(0, 0, rows, values);
  for (size_t i = 0; i < values.size(); ++i) counts[i / kTracedDim].push_back(-values[i]);
  return counts;
}

}  // namespace muster::testing
