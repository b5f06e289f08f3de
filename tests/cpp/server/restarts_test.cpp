// Servers and whole jobs that come back: what a server does not know any more is pushed again, or said; nothing is lost
// or counted twice without a word.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/snapshot.h"
#include "core/wait_hook.h"
#include "cpp/catch.h"
#include "muster/error.h"
#include "server/shard/server.h"
#include "server/worker/client.h"
#include "server/worker/link.h"
#include "support/folder.h"
#include "support/run_ranks.h"
#include "support/servers.h"
#include "support/watched_channel.h"

using namespace muster;
using namespace muster::server;
using std::chrono::milliseconds;
using testing::bit_equal;
using testing::reference;
using testing::Worker;

namespace {

constexpr uint64_t kBigLog = uint64_t{64} << 20;

std::vector<kernels::AdamGroup> adam() {
  const kernels::AdamGroup group{.lr = 0.01,
                                 .beta1 = 0.9,
                                 .beta2 = 0.999,
                                 .eps = 1e-8,
                                 .weight_decay = 0.01,
                                 .decoupled = true,
                                 .amsgrad = false,
                                 .maximize = false};
  return {group, group};
}

Plan plan_for(uint32_t servers, uint32_t workers, uint32_t staleness = 0) {
  Plan plan = testing::small_plan(servers, workers, adam());
  plan.staleness = staleness;
  plan.heartbeat_ms = 2'000;
  plan.timeout_ms = 20'000;
  return plan;
}

// Servers with folders. Their end is that of a process that is killed: nothing is written.
struct Cluster {
  explicit Cluster(uint32_t servers, milliseconds every = milliseconds(1'000'000))
      : names(testing::server_names(servers)), every(every), running(servers) {
    for (uint32_t s = 0; s < servers; ++s) start(s);
  }

  std::filesystem::path path(uint32_t s) const { return folder.path / std::to_string(s); }
  void start(uint32_t s) { running[s] = std::make_unique<ParameterServer>(ServerConfig{names[s], path(s), every}); }
  void kill(uint32_t s) { running[s].reset(); }
  void restart(uint32_t s) {
    kill(s);
    start(s);
  }
  ClientConfig config(uint32_t rank, const Plan& plan, uint64_t job = 1, bool begins_anew = false) const {
    auto config = testing::config_of(names, rank, plan);
    config.log_bytes = kBigLog;
    config.job = job;
    config.begins_anew = begins_anew;
    return config;
  }
  std::vector<std::filesystem::path> snapshots(uint32_t s) const {
    std::vector<std::filesystem::path> found;
    for (const auto& entry : std::filesystem::directory_iterator(path(s))) {
      if (entry.path().filename().string().starts_with("snapshot-")) found.push_back(entry.path());
    }
    std::sort(found.begin(), found.end());
    return found;
  }

  testing::Folder folder;
  std::vector<std::string> names;
  milliseconds every;
  std::vector<std::unique_ptr<ParameterServer>> running;
};

void damage(const std::filesystem::path& snapshot) {
  const auto shard = snapshot / "shard-00000.safetensors";
  std::fstream file(shard, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(-1, std::ios::end);
  const char last = static_cast<char>(file.get() ^ 1);
  file.seekp(-1, std::ios::end);
  file.put(last);
}

// Threads that wait for one another.
class Meeting {
 public:
  explicit Meeting(int threads) : threads_(threads) {}
  void wait() {
    const int round = arrived_++ / threads_;
    while (arrived_ < (round + 1) * threads_) std::this_thread::sleep_for(milliseconds(1));
  }

 private:
  const int threads_;
  std::atomic<int> arrived_{0};
};

// A worker of a job of two, of whose fifth step server 0 has taken a snapshot.
std::unique_ptr<Worker> after_a_snapshot(Cluster& cluster, const Plan& plan, uint32_t rank, Meeting& meeting) {
  auto worker = std::make_unique<Worker>(cluster.config(rank, plan));
  worker->join();
  for (uint64_t step = 1; step <= 5; ++step) worker->step(step);
  meeting.wait();
  if (rank == 0) cluster.running[0]->snapshot();
  meeting.wait();
  return worker;
}

}  // namespace

TEST_CASE("a server that comes back awaits workers that its snapshot does not know", "[server]") {
  const int late_ms = GENERATE(0, 1'000);
  CAPTURE(late_ms);
  Cluster cluster(2);
  const auto plan = plan_for(2, 2);
  Meeting meeting(2);
  const auto failures = testing::run_threads(2, [&](int rank) {
    Worker worker(cluster.config(static_cast<uint32_t>(rank), plan));
    worker.join();
    for (uint64_t step = 1; step <= 5; ++step) worker.step(step);
    for (const uint32_t s : {0U, 1U}) {
      meeting.wait();
      if (rank == 0) cluster.restart(s);
      meeting.wait();
      if (rank == 1) std::this_thread::sleep_for(milliseconds(late_ms));
      for (uint64_t step = 6 + 5 * s; step <= 10 + 5 * s; ++step) worker.step(step);
    }
    MUSTER_CHECK(bit_equal(worker.parameters(15), reference(plan, 2, 15)));
    worker.client.leave();
  });
  CHECK(failures == "");
}

TEST_CASE("a server that comes back awaits a worker that was replaced since its snapshot", "[server]") {
  Cluster cluster(1);
  const auto plan = plan_for(1, 2);
  Meeting meeting(2);
  const auto failures = testing::run_threads(2, [&](int rank) {
    auto worker = after_a_snapshot(cluster, plan, static_cast<uint32_t>(rank), meeting);
    if (rank == 1) {
      worker = std::make_unique<Worker>(cluster.config(1, plan));
      MUSTER_CHECK(worker->join() == 5);
    }
    meeting.wait();
    for (uint64_t step = 6; step <= 11; ++step) worker->step(step);
    meeting.wait();
    if (rank == 0) cluster.restart(0);
    meeting.wait();
    if (rank == 1) std::this_thread::sleep_for(milliseconds(1'500));
    for (uint64_t step = 12; step <= 15; ++step) worker->step(step);
    MUSTER_CHECK(bit_equal(worker->parameters(15), reference(plan, 2, 15)));
    worker->client.leave();
  });
  CHECK(failures == "");
}

TEST_CASE("who joins once server 0 started again waits for those who know what it forgot", "[server]") {
  Cluster cluster(2);
  const auto plan = plan_for(2, 2);
  Meeting meeting(2);
  const auto failures = testing::run_threads(2, [&](int rank) {
    auto worker = after_a_snapshot(cluster, plan, static_cast<uint32_t>(rank), meeting);
    if (rank == 1) worker.reset();
    if (rank == 0) {
      for (uint64_t step = 6; step <= 8; ++step) worker->step(step);
      cluster.restart(0);
    }
    meeting.wait();
    uint64_t step = 8;
    if (rank == 0) {  // computes for longer than the heartbeat's time
      std::this_thread::sleep_for(milliseconds(plan.heartbeat_ms) * 3 / 2);
    } else {
      auto config = cluster.config(1, plan);
      config.joins = true;
      worker = std::make_unique<Worker>(std::move(config));
      step = worker->join();
      MUSTER_CHECK(step == 8 || step == 9);  // the other makes one alone, if it is the first
    }
    while (step < 12) worker->step(++step);
    worker->client.leave();
  });
  CHECK(failures == "");
}

TEST_CASE("a server that starts again while the chief writes is written again", "[server]") {
  const uint32_t victim = GENERATE(0U, 1U);
  const bool has_begun_before = GENERATE(false, true);
  CAPTURE(victim, has_begun_before);
  Cluster cluster(2);
  const auto plan = plan_for(2, 2);
  if (has_begun_before) {
    Worker chief(cluster.config(0, plan));
    chief.client.start([&] { chief.write(); });
  }
  Meeting meeting(2);
  int writes = 0;
  const auto failures = testing::run_threads(2, [&](int rank) {
    Worker worker(cluster.config(static_cast<uint32_t>(rank), plan, 2));
    meeting.wait();
    if (rank == 0) {
      worker.client.start([&] {
        worker.write();
        if (writes++ == 0) cluster.restart(victim);
      });
    }
    MUSTER_CHECK(worker.join() == 0);
    for (uint64_t step = 1; step <= 3; ++step) worker.step(step);
    MUSTER_CHECK(bit_equal(worker.parameters(3), reference(plan, 2, 3)));
    worker.client.leave();
  });
  CHECK(failures == "");
  CHECK(writes == 2);
}

TEST_CASE("a server that starts again while a job begins is told again where it goes on", "[server]") {
  const uint32_t victim = GENERATE(0U, 1U);
  const uint32_t staleness = GENERATE(0U, kAnyStaleness);
  CAPTURE(victim, staleness);
  Cluster cluster(2);
  const auto plan = plan_for(2, 2, staleness);
  Meeting meeting(2);
  const auto failures = testing::run_threads(2, [&](int rank) {
    const auto run = [&](uint64_t job, bool restarts) {
      Worker worker(cluster.config(static_cast<uint32_t>(rank), plan, job));
      meeting.wait();
      if (restarts && rank == 0) cluster.restart(victim);
      const uint64_t since = worker.join();
      if (staleness == 0) MUSTER_CHECK(since == (job - 1) * 5);
      for (uint64_t step = since + 1; step <= since + 5; ++step) {
        staleness == 0 ? worker.step(step) : worker.step_alone(step);
      }
      if (staleness == 0) MUSTER_CHECK(bit_equal(worker.parameters(5 * job), reference(plan, 2, 5 * job)));
      worker.client.leave();
      meeting.wait();
    };
    run(1, false);
    run(2, true);
  });
  CHECK(failures == "");
}

TEST_CASE("one server without its folder is named, and nothing is written over", "[server]") {
  Cluster cluster(2);
  const auto plan = plan_for(2, 1);
  {
    Worker worker(cluster.config(0, plan));
    worker.join();
    for (uint64_t step = 1; step <= 5; ++step) worker.step(step);
    worker.client.leave();
  }
  cluster.kill(1);
  const auto moved = cluster.folder.path / "moved";
  std::filesystem::rename(cluster.path(1), moved);
  cluster.restart(0);
  cluster.start(1);
  const auto before = cluster.snapshots(0);
  CHECK_THROWS_WITH(Worker(cluster.config(0, plan, 2)), ContainsSubstring("parameter server 1") &&
                                                            ContainsSubstring("holds nothing") &&
                                                            ContainsSubstring("goes on after step 5"));
  Link link({cluster.names[0], 3});
  link.connect(1, nullptr, WaitHook::call);
  const std::vector<std::byte> zeros(16);
  const Bytes payload(zeros);
  link.send(Write{0, Part::parameter}, {&payload, 1});
  CHECK_THROWS_WITH(link.receive<Done>([] {}), ContainsSubstring("holds trained values"));
  CHECK(cluster.snapshots(0) == before);

  cluster.kill(1);
  std::filesystem::remove_all(cluster.path(1));
  std::filesystem::rename(moved, cluster.path(1));
  cluster.start(1);
  Worker worker(cluster.config(0, plan, 3));
  CHECK(worker.join() == 5);
  worker.step(6);
  CHECK(bit_equal(worker.parameters(6), reference(plan, 1, 6)));
  worker.client.leave();
}

TEST_CASE("what a job left is in a snapshot, and the next one goes on from it", "[server]") {
  const uint32_t staleness = GENERATE(0U, kAnyStaleness);
  CAPTURE(staleness);
  Cluster cluster(2);
  const auto plan = plan_for(2, 1, staleness);
  const auto run = [&](uint64_t job, bool restarts) {
    Worker worker(cluster.config(0, plan, job));
    const uint64_t since = worker.join();
    for (uint64_t step = since + 1; step <= since + 5; ++step) {
      staleness == 0 ? worker.step(step) : worker.step_alone(step);
      if (restarts && step == since + 2) cluster.restart(1);
    }
    worker.client.leave();
    return worker.decision.step;
  };
  CHECK(run(1, false) == 5);
  run(2, true);
  for (const uint32_t s : {0U, 1U}) cluster.restart(s);
  run(3, false);
  Worker worker(cluster.config(0, plan, 4));
  const uint64_t since = worker.join();
  if (staleness == 0) {
    CHECK(since == 15);
    CHECK(bit_equal(worker.parameters(0), reference(plan, 1, 15)));
  }
  worker.client.leave();
}

TEST_CASE("a job begins on a server 0 whose folder is older than those of others", "[server]") {
  const uint32_t staleness = GENERATE(0U, kAnyStaleness);
  CAPTURE(staleness);
  Cluster cluster(2);
  const auto plan = plan_for(2, 1, staleness);
  const auto run = [&](uint64_t job) {
    Worker worker(cluster.config(0, plan, job));
    const uint64_t since = worker.join();
    for (uint64_t step = since + 1; step <= since + 3; ++step)
      staleness == 0 ? worker.step(step) : worker.step_alone(step);
    worker.client.leave();
  };
  const testing::Folder backup;
  run(1);
  cluster.kill(0);
  std::filesystem::copy(cluster.path(0), backup.path, std::filesystem::copy_options::recursive);
  cluster.start(0);
  run(2);
  cluster.kill(0);
  std::filesystem::remove_all(cluster.path(0));
  std::filesystem::copy(backup.path, cluster.path(0), std::filesystem::copy_options::recursive);
  std::this_thread::sleep_for(milliseconds(500));  // no server starts four times a second
  cluster.start(0);
  if (staleness != 0) return run(3);  // each server goes on from what it has
  Worker worker(cluster.config(0, plan, 3));
  CHECK(worker.join() == 3);  // which server 1 has, too
  CHECK(bit_equal(worker.parameters(0), reference(plan, 1, 3)));
  worker.client.leave();
}

TEST_CASE("a damaged snapshot costs nothing while workers keep what came after the one before", "[server]") {
  const uint32_t staleness = GENERATE(0U, kAnyStaleness);
  CAPTURE(staleness);
  Cluster cluster(1);
  const auto plan = plan_for(1, 1, staleness);
  const auto values_after = [&](bool is_damaged, uint64_t job) {
    Worker worker(cluster.config(0, plan, job));
    uint64_t step = worker.join();
    for (int i = 1; i <= 12; ++i) {
      ++step;
      staleness == 0 ? worker.step(step) : worker.step_alone(step);
      if (i % 4 == 0) cluster.running[0]->snapshot();
    }
    if (is_damaged) {
      cluster.kill(0);
      damage(cluster.snapshots(0).back());
      cluster.start(0);
    }
    staleness == 0 ? worker.step(step + 1) : worker.step_alone(step + 1);
    auto values = worker.parameters(staleness == 0 ? step + 1 : 0);
    worker.client.leave();
    return values;
  };
  const auto expected = values_after(false, 1);
  cluster.kill(0);
  std::filesystem::remove_all(cluster.path(0));
  cluster.start(0);
  CHECK(bit_equal(values_after(true, 1), expected));
}

TEST_CASE("a server behind every log is said at once", "[server]") {
  const uint32_t staleness = GENERATE(0U, kAnyStaleness);
  CAPTURE(staleness);
  Cluster cluster(1);
  const auto plan = plan_for(1, 1, staleness);
  auto config = cluster.config(0, plan);
  config.log_bytes = 0;  // two steps: the newest snapshot must do
  Worker worker(config);
  worker.join();
  const auto old = cluster.folder.path / "old";
  for (uint64_t step = 1; step <= 9; ++step) {
    staleness == 0 ? worker.step(step) : worker.step_alone(step);
    if (step != 3) continue;
    cluster.running[0]->snapshot();
    std::filesystem::copy(cluster.path(0), old, std::filesystem::copy_options::recursive);
  }
  cluster.kill(0);
  std::filesystem::remove_all(cluster.path(0));
  std::filesystem::rename(old, cluster.path(0));
  cluster.start(0);
  const auto begin = std::chrono::steady_clock::now();
  CHECK_THROWS_AS(staleness == 0 ? worker.step(10) : worker.step_alone(10), CheckpointError);
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(5));
}

TEST_CASE("a job whose processes were all killed goes on from one step of all servers", "[server]") {
  const unsigned seed = GENERATE(0U, 1U, 2U, 3U);
  CAPTURE(seed);
  std::minstd_rand random(seed + 7);
  Cluster cluster(2, milliseconds(40));
  const auto plan = plan_for(2, 2);
  for (uint64_t job = 1; job <= 3; ++job) {
    std::atomic<int> kills{0};
    std::thread killer([&] {
      std::this_thread::sleep_for(milliseconds(150 + random() % 200));
      kills = 1;
      cluster.kill(random() % 2);
      std::this_thread::sleep_for(milliseconds(random() % 30));
      for (const uint32_t s : {0U, 1U}) cluster.kill(s);
    });
    const auto failures = testing::run_threads(2, [&](int rank) {
      auto config = cluster.config(static_cast<uint32_t>(rank), plan, job);
      config.patience = milliseconds(50);
      try {
        Worker worker(config);
        uint64_t step = worker.join();
        MUSTER_CHECK(bit_equal(worker.parameters(step), reference(plan, 2, step)));
        for (;;) worker.step(++step);
      } catch (const PeerLost&) {
        return;  // its servers were killed
      }
    });
    killer.join();
    CHECK(failures == "");
    for (const uint32_t s : {0U, 1U}) cluster.start(s);
  }
  const auto failures = testing::run_threads(2, [&](int rank) {
    Worker worker(cluster.config(static_cast<uint32_t>(rank), plan, 9));
    const uint64_t step = worker.join();
    MUSTER_CHECK(step > 0);
    for (uint64_t s = step + 1; s <= step + 3; ++s) worker.step(s);
    MUSTER_CHECK(bit_equal(worker.parameters(step + 3), reference(plan, 2, step + 3)));
    worker.client.leave();
  });
  CHECK(failures == "");
}

TEST_CASE("a job that begins anew takes the place of what an earlier one trained, on servers that live or come back",
          "[server]") {
  const uint32_t staleness = GENERATE(0U, kAnyStaleness);
  const bool restarts = GENERATE(false, true);
  CAPTURE(staleness, restarts);
  Cluster cluster(2);
  const auto plan = plan_for(2, 1, staleness);
  const auto train = [&](uint64_t job, bool begins_anew, uint64_t steps) {
    Worker worker(cluster.config(0, plan, job, begins_anew));
    const uint64_t first = worker.join();
    for (uint64_t step = first + 1; step <= first + steps; ++step)
      staleness == 0 ? worker.step(step) : worker.step_alone(step);
    const auto values = worker.parameters(staleness == 0 ? first + steps : 0);
    worker.client.leave();
    return std::pair(first, values);
  };
  const auto restart_all = [&] {
    for (const uint32_t s : {0U, 1U}) cluster.restart(s);
  };
  const auto begun = train(1, false, 0).second;
  const auto once = train(2, false, 3);
  const auto old = cluster.snapshots(1);
  std::filesystem::copy(old.back(), cluster.folder.path / "old", std::filesystem::copy_options::recursive);
  if (restarts) restart_all();

  const auto again = train(3, true, 0);
  CHECK(again.first == 0);
  CHECK(bit_equal(again.second, begun));
  for (const auto& path : old) CHECK_FALSE(std::filesystem::exists(path));

  // As where the server had died before it removed what is of the earlier job.
  cluster.kill(1);
  std::filesystem::rename(cluster.folder.path / "old", old.back());
  if (restarts) cluster.restart(0);
  cluster.start(1);
  const auto same = train(4, false, 3);
  CHECK(same.first == 0);
  CHECK(bit_equal(same.second, once.second));
  CHECK_FALSE(std::filesystem::exists(old.back()));
}

TEST_CASE("what an earlier job trained is not lost to one that ends before its values are there", "[server]") {
  Cluster cluster(1);
  const auto plan = plan_for(1, 1);
  {
    Worker worker(cluster.config(0, plan, 1, false));
    worker.join();
    for (uint64_t step = 1; step <= 3; ++step) worker.step(step);
    worker.client.leave();
  }
  CHECK_FALSE(Worker(cluster.config(0, plan, 2, true)).client.is_started());
  CHECK_THROWS_WITH(Worker(cluster.config(0, plan, 3, false)),
                    ContainsSubstring("load it again, or, where the servers keep snapshots"));
  SECTION("the servers start again") {
    cluster.restart(0);
    Worker worker(cluster.config(0, plan, 4, false));
    CHECK(worker.join() == 3);
    CHECK(bit_equal(worker.parameters(3), reference(plan, 1, 3)));
  }
  SECTION("the checkpoint is loaded again") {
    Worker worker(cluster.config(0, plan, 4, true));
    CHECK(worker.join() == 0);
    worker.step(1);
    CHECK(bit_equal(worker.parameters(1), reference(plan, 1, 1)));
  }
}

TEST_CASE("servers whose values began with different jobs are no job's", "[server]") {
  const uint32_t staleness = GENERATE(0U, kAnyStaleness);
  CAPTURE(staleness);
  Cluster cluster(2);
  const auto plan = plan_for(2, 1, staleness);
  {
    Worker worker(cluster.config(0, plan, 1, false));
    worker.join();
    staleness == 0 ? worker.step(1) : worker.step_alone(1);
    worker.client.leave();
  }
  // As where the job that begins anew had died before server 0 had its values.
  cluster.kill(0);
  std::filesystem::copy(cluster.path(0), cluster.folder.path / "old", std::filesystem::copy_options::recursive);
  cluster.start(0);
  Worker(cluster.config(0, plan, 2, true)).join();
  cluster.kill(0);
  std::filesystem::remove_all(cluster.path(0));
  std::filesystem::rename(cluster.folder.path / "old", cluster.path(0));
  cluster.start(0);
  cluster.restart(1);
  const auto join = [&](uint64_t job, bool begins_anew) {
    return Worker(cluster.config(0, plan, job, begins_anew)).join();
  };
  CHECK_THROWS_WITH(join(3, false), ContainsSubstring("came of the values of different jobs"));
  CHECK(join(4, true) == 0);
}

TEST_CASE("what a chief wrote that ended before its job began is not beneath the next one's values", "[server]") {
  Cluster cluster(1);
  const auto plan = plan_for(1, 1);
  const bool starts = GENERATE(false, true);
  CAPTURE(starts);
  {
    Worker chief(cluster.config(0, plan, 1));
    const auto write_state = [&] {
      for (uint32_t c = 0; c < chief.client.chunks().size(); ++c) {
        const std::vector<std::byte> ones(chief.client.part_bytes(c, Part::state0), std::byte{0x3c});
        chief.client.write(c, Part::state0, ones);
      }
    };
    if (starts) {
      chief.client.start([&] {
        chief.write();
        write_state();
      });
    } else {
      write_state();
    }
  }
  Worker worker(cluster.config(0, plan, 2));
  CHECK(worker.join() == 0);
  worker.step(1);
  CHECK(bit_equal(worker.parameters(1), reference(plan, 1, 1)));
}

TEST_CASE("servers without a step in common are named, with what each has", "[server]") {
  Cluster cluster(2);
  const auto plan = plan_for(2, 1);
  const auto train = [&](uint64_t job) {
    Worker worker(cluster.config(0, plan, job));
    const uint64_t since = worker.join();
    for (uint64_t step = since + 1; step <= since + 5; ++step) worker.step(step);
    worker.client.leave();
  };
  train(1);
  const auto old = cluster.folder.path / "old";
  std::filesystem::copy(cluster.path(1), old, std::filesystem::copy_options::recursive);
  for (uint64_t job = 2; job <= 4; ++job) train(job);
  for (const uint32_t s : {0U, 1U}) cluster.kill(s);
  std::filesystem::remove_all(cluster.path(1));
  std::filesystem::rename(old, cluster.path(1));
  for (const uint32_t s : {0U, 1U}) cluster.start(s);
  Worker worker(cluster.config(0, plan, 5));
  CHECK_THROWS_WITH(worker.join(),
                    ContainsSubstring("no step in common") && ContainsSubstring(", 20;") && ContainsSubstring(", 5;"));
}

TEST_CASE("every batch is dealt once through restarts of server 0", "[server]") {
  Cluster cluster(1);
  const auto plan = plan_for(1, 2, kAnyStaleness);
  constexpr uint64_t kBatches = 60;
  Meeting meeting(2);
  std::vector<std::vector<uint64_t>> taken(2);
  const auto failures = testing::run_threads(2, [&](int rank) {
    Worker worker(cluster.config(static_cast<uint32_t>(rank), plan));
    uint64_t step = worker.join();
    meeting.wait();
    std::vector<uint64_t> without_step;
    auto& own = taken[static_cast<size_t>(rank)];
    for (;;) {
      const auto dealt = worker.client.deal(0, 0, kBatches, std::exchange(without_step, {}));
      if (dealt.state == Dealt::State::ended) break;
      if (dealt.state == Dealt::State::none) {
        std::this_thread::sleep_for(milliseconds(1));
        continue;
      }
      own.push_back(dealt.batch);
      // There are enough for both to come so far, since nobody goes on alone.
      if (own.size() % 5 == 0 && own.size() <= 20) {
        meeting.wait();
        if (rank == 0 && own.size() == 10) cluster.running[0]->snapshot();
        if (rank == 0) cluster.restart(0);
        meeting.wait();
      }
      if (own.size() % 7 == 0) {
        without_step = {dealt.batch};
        continue;
      }
      worker.push(++step);
      worker.client.flush();
      Apply apply;
      apply.step = step;
      apply.members = {worker.rank};
      apply.groups = plan.groups;
      apply.batches = {{0, 0, dealt.batch}};
      worker.client.apply(apply);
      worker.client.commit(step, {});
    }
    worker.client.leave();
  });
  CHECK(failures == "");
  std::multiset<uint64_t> all(taken[0].begin(), taken[0].end());
  all.insert(taken[1].begin(), taken[1].end());
  CHECK(all.size() == kBatches);
  CHECK(std::set<uint64_t>(all.begin(), all.end()).size() == kBatches);
}

TEST_CASE("quick restarts of a worker leave nothing on the servers", "[server]") {
  const testing::Servers servers(testing::server_names(1));
  const auto plan = plan_for(1, 1, kAnyStaleness);
  Worker other(testing::config_of(servers.names, 0, plan));
  other.join();
  for (int life = 0; life < 100; ++life) {
    Worker worker(testing::config_of(servers.names, 1, plan));
    const uint64_t step = worker.join();
    worker.push(step + 1);
    worker.client.flush();
  }
  int64_t pushed = 0;
  for (const auto& chunk : other.client.chunks()) pushed += chunk.gradient_bytes();
  CHECK(servers.running[0]->stats().held_bytes <= pushed);
  other.step_alone(1);
}

TEST_CASE("another job may begin only where nobody trains, or by takeover", "[server]") {
  Cluster cluster(1);
  const auto plan = plan_for(1, 1);
  const auto config = [&](uint64_t job, const char* token) {
    auto config = cluster.config(0, plan, job);
    config.token = token;
    config.patience = milliseconds(300);
    return config;
  };
  Worker first(config(1, "a"));
  first.join();
  first.step(1);
  CHECK_THROWS_WITH(Worker(config(2, "b")), ContainsSubstring("another job trains") && ContainsSubstring("takeover"));
  first.step(2);
  auto taking = config(3, "b");
  taking.takes_over = true;
  Worker second(taking);
  CHECK(second.join() == 2);
  CHECK_THROWS_AS(first.step(3), Fenced);
  second.step(3);
  CHECK(bit_equal(second.parameters(3), reference(plan, 1, 3)));
  Worker same(config(4, "b"));  // as a launcher starts it again
  CHECK(same.join() == 3);
  same.client.leave();
}

// Stands still once, after it has asked a server to let it in: the answer waits meanwhile.
class StandsStill final : public testing::ChannelWatcher {
 public:
  explicit StandsStill(milliseconds duration) : duration_(duration) {}

  void sent(uint16_t request) override {
    if (request == Hello::kType) std::this_thread::sleep_for(std::exchange(duration_, milliseconds(0)));
  }

 private:
  milliseconds duration_;
};

TEST_CASE("a job that stood still asks again whether another one trains", "[server]") {
  Cluster cluster(1);
  const auto plan = plan_for(1, 1);
  auto config = cluster.config(0, plan, 1);
  config.token = "a";
  {
    Worker first(config);
    first.join();
    first.step(1);
    cluster.running[0]->snapshot();
  }
  cluster.restart(0);  // its snapshot has the worker, which may come back
  config.job = 2;
  config.token = "b";
  config.patience = milliseconds(300);
  const auto watcher =
      std::make_shared<StandsStill>(milliseconds(plan.heartbeat_ms) + config.patience + milliseconds(200));
  config.surroundings = std::make_shared<testing::WatchedSurroundings>([&](const std::string&) { return watcher; });
  Worker second(config);
  CHECK(second.join() == 1);
}

TEST_CASE("a folder of snapshots has one writer, whose they are", "[server]") {
  Cluster cluster(1);
  const auto another = testing::server_names(1).front();
  CHECK_THROWS_WITH(ParameterServer({another, cluster.path(0)}), ContainsSubstring("another process uses the folder"));
  const testing::Folder others;
  checkpoint::write_snapshot(others.path, {}, {});
  CHECK_THROWS_WITH(ParameterServer({another, others.path}), ContainsSubstring("not a parameter server's"));
  const testing::Folder newer;
  checkpoint::Snapshot snapshot;
  snapshot.metadata = {{"kind", "muster parameter server"}, {"layout", int64_t{999}}, {"step", int64_t{0}}};
  checkpoint::write_snapshot(newer.path, snapshot, {});
  CHECK_THROWS_WITH(ParameterServer({another, newer.path}), ContainsSubstring("another version"));
}

TEST_CASE("who has not joined takes no part", "[server]") {
  Cluster cluster(1);
  const auto plan = plan_for(1, 1);
  Worker worker(cluster.config(0, plan));
  worker.join();
  worker.step(1);
  Link link({cluster.names[0], 7});
  link.connect(99, nullptr, WaitHook::call);
  Apply apply;
  apply.step = 2;
  apply.members = {0};
  apply.groups = plan.groups;
  link.send(apply);
  CHECK_THROWS_WITH(link.receive<Applied>([] {}), ContainsSubstring("before it has joined"));
  link.send(Join{~uint64_t{0}});
  CHECK_THROWS_WITH(link.receive<Joined>([] {}), ContainsSubstring("out of range"));
  worker.step(2);
}

TEST_CASE("a log of few steps costs few snapshots", "[server]") {
  Cluster cluster(2);
  const auto plan = plan_for(2, 1);
  auto config = cluster.config(0, plan);
  uint64_t step_bytes = 0;
  for (const auto& chunk : cut_chunks(plan)) step_bytes += static_cast<uint64_t>(chunk.gradient_bytes());
  config.log_bytes = 9 * step_bytes;
  Worker worker(config);
  worker.join();
  for (uint64_t step = 1; step <= 32; ++step) worker.step(step);
  CHECK(bit_equal(worker.parameters(32), reference(plan, 1, 32)));
  CHECK(cluster.running[0]->stats().snapshots <= 1 + 32 / 3);
  worker.client.leave();
}

TEST_CASE("a step of more rows than the log holds is made while a snapshot of an earlier one is late", "[server]") {
  Cluster cluster(1, milliseconds(1));
  auto plan = plan_for(1, 1);
  plan.tables = {{"rows", 100'000, 64, RowPlacement::modulo, {}, 0}};
  plan.timeout_ms = 2'000;
  auto config = cluster.config(0, plan);
  config.log_bytes = uint64_t{4} << 20;
  Worker worker(config);
  worker.join();
  const auto away = cluster.folder.path / "away";
  std::filesystem::rename(cluster.path(0), away);
  worker.step(1);  // a snapshot of it is begun, and late
  worker.step(2);
  worker.num_rows = 20'000;
  worker.step(3);
  std::filesystem::rename(away, cluster.path(0));
  for (uint64_t step = 4; step <= 8; ++step) {
    worker.num_rows = step % 2 == 0 ? 1 : 20'000;
    worker.step(step);
  }
  worker.client.leave();
}

TEST_CASE("a disk that takes no snapshots is named once the log is full, and training goes on when it does",
          "[server]") {
  const uint32_t staleness = GENERATE(0U, kAnyStaleness);
  CAPTURE(staleness);
  Cluster cluster(2);
  const auto plan = plan_for(2, 1, staleness);
  auto config = cluster.config(0, plan);
  uint64_t step_bytes = 0;
  for (const auto& chunk : cut_chunks(plan)) step_bytes += static_cast<uint64_t>(chunk.gradient_bytes());
  config.log_bytes = 6 * step_bytes;
  Worker worker(config);
  worker.join();
  const auto away = cluster.folder.path / "away";
  std::filesystem::rename(cluster.path(1), away);
  uint64_t step = 0;
  const auto begin = std::chrono::steady_clock::now();
  const auto train = [&] {
    for (;;) {
      staleness == 0 ? worker.step(step + 1) : worker.step_alone(step + 1);
      ++step;
    }
  };
  CHECK_THROWS_WITH(train(),
                    ContainsSubstring("parameter server 1") && ContainsSubstring("cannot write its snapshots"));
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10));
  CHECK(step >= 4);
  std::filesystem::rename(away, cluster.path(1));
  std::this_thread::sleep_for(std::chrono::seconds(5));
  for (int i = 0; i < 3; ++i, ++step) staleness == 0 ? worker.step(step + 1) : worker.step_alone(step + 1);
  if (staleness == 0) CHECK(bit_equal(worker.parameters(step), reference(plan, 1, step)));
  worker.client.leave();
}
