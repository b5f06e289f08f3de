#include "server/shard/server.h"

#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <fstream>
#include <mutex>
#include <thread>

#include "core/log.h"
#include "core/wait_hook.h"
#include "cpp/catch.h"
#include "kernels/kernels.h"
#include "muster/error.h"
#include "server/shard/shard.h"
#include "server/worker/client.h"
#include "server/worker/link.h"
#include "support/folder.h"
#include "support/run_ranks.h"
#include "support/servers.h"

using namespace muster;
using namespace muster::server;
using testing::config_of;
using testing::Servers;
using testing::small_plan;
using testing::Worker;

namespace {

std::vector<kernels::AdamGroup> adam(bool decoupled, bool amsgrad) {
  kernels::AdamGroup group{.lr = 0.01,
                           .beta1 = 0.9,
                           .beta2 = 0.999,
                           .eps = 1e-8,
                           .weight_decay = 0.01,
                           .decoupled = decoupled,
                           .amsgrad = amsgrad,
                           .maximize = false};
  auto other = group;
  other.lr = 0.05;
  return {group, other};
}

std::vector<kernels::SgdGroup> sgd() {
  const kernels::SgdGroup group{
      .lr = 0.1, .momentum = 0.9, .dampening = 0, .weight_decay = 0.001, .nesterov = true, .maximize = false};
  return {group,
          {.lr = 0.2, .momentum = 0.9, .dampening = 0.1, .weight_decay = 0, .nesterov = false, .maximize = true}};
}

std::vector<kernels::AdagradGroup> adagrad() {
  return {{.lr = 0.1, .lr_decay = 0.01, .eps = 1e-10, .weight_decay = 0.01, .maximize = false},
          {.lr = 0.2, .lr_decay = 0, .eps = 1e-10, .weight_decay = 0, .maximize = false}};
}

// Plain descent, of which each update is known: parameters lose lr * gradient.
FlatGroups plain() {
  const kernels::SgdGroup group{
      .lr = 1, .momentum = 0, .dampening = 0, .weight_decay = 0, .nesterov = false, .maximize = false};
  return std::vector<kernels::SgdGroup>{group, group};
}

}  // namespace

TEST_CASE("synchronous steps equal those of replicas, bit for bit", "[server]") {
  const std::vector<FlatGroups> optimizers{adam(true, false), adam(false, true), sgd(), adagrad()};
  for (const auto& groups : optimizers) {
    for (const uint32_t servers : {1U, 2U, 3U}) {
      for (const uint32_t workers : {1U, 3U}) {
        const uint64_t steps = 5;
        const Plan plan = small_plan(servers, workers, groups);
        const Servers running(testing::server_names(servers));
        double norm = 0;
        const auto expected = testing::reference(plan, workers, steps, 0.5, 6, &norm);
        const std::string failures = testing::run_threads(static_cast<int>(workers), [&](int rank) {
          Worker worker(config_of(running.names, static_cast<uint32_t>(rank), plan, (servers + workers) % 2 == 0));
          worker.skipped_parameter = 6;
          MUSTER_CHECK(worker.join() == 0);
          for (uint64_t step = 1; step <= steps; ++step) worker.step(step, 0.5);
          MUSTER_CHECK(worker.norm == norm);
          MUSTER_CHECK(testing::bit_equal(worker.parameters(steps), expected));
          worker.client.leave();
        });
        CAPTURE(groups.index(), servers, workers);
        CHECK(failures == "");
        for (const auto& server : running.running) {
          CHECK(server->is_deserted());
          CHECK(server->stats().held_bytes == 0);
          CHECK(server->stats().duplicates == 0);
        }
      }
    }
  }
}

TEST_CASE("steps equal those of replicas after fifty of them", "[server][.][long]") {
  const Plan plan = small_plan(3, 4, adam(true, false));
  const Servers running(testing::server_names(3));
  const auto expected = testing::reference(plan, 4, 50, 1.0);
  const std::string failures = testing::run_threads(4, [&](int rank) {
    Worker worker(config_of(running.names, static_cast<uint32_t>(rank), plan));
    worker.join();
    for (uint64_t step = 1; step <= 50; ++step) worker.step(step, 1.0);
    MUSTER_CHECK(testing::bit_equal(worker.parameters(50), expected));
  });
  CHECK(failures == "");
}

TEST_CASE("a changed learning rate reaches the servers; what is not finite changes nothing", "[server]") {
  const Plan plan = small_plan(1, 1, sgd());
  const Servers running(testing::server_names(1));
  Worker worker(config_of(running.names, 0, plan));
  worker.join();
  worker.step(1);
  const auto before = worker.parameters(1);

  worker.push(2);
  worker.client.flush();
  Apply skipped;
  skipped.step = 2;
  skipped.members = worker.client.commit(2, {1}).members;
  skipped.groups = plan.groups;
  skipped.scalars.finite = 0;
  worker.client.apply(skipped);
  CHECK(testing::bit_equal(worker.parameters(2), before));

  Plan slower = plan;
  for (auto& group : std::get<1>(slower.groups)) group.lr = 0;
  worker.step(3, 0, &slower.groups);
  CHECK(testing::bit_equal(worker.parameters(3), before));
}

TEST_CASE("optimizer state can be read and written", "[server]") {
  const Plan plan = small_plan(2, 1, adam(true, false));
  const Servers running(testing::server_names(2));
  Worker worker(config_of(running.names, 0, plan));
  worker.join();
  for (uint64_t step = 1; step <= 3; ++step) worker.step(step);
  auto& client = worker.client;

  const Servers others(testing::server_names(2));
  Worker copy(config_of(others.names, 0, plan));
  for (const auto part : {Part::parameter, Part::state0, Part::state1, Part::state2, Part::master, Part::steps}) {
    std::vector<std::byte*> to;
    for (uint32_t c = 0; c < client.chunks().size(); ++c) to.push_back(client.allocate(client.part_bytes(c, part)));
    const auto exists = client.read(part, 3, to);
    for (uint32_t c = 0; c < client.chunks().size(); ++c) {
      const bool is_low = client.chunks()[c].dtype == at::kBFloat16;
      CHECK(exists[c] == (part != Part::state2 && (part != Part::master || is_low)));
      if (exists[c]) copy.client.write(c, part, {to[c], client.part_bytes(c, part)});
    }
  }
  copy.client.start([] {});
  CHECK(copy.join() == 0);
  copy.shift = 3;
  worker.step(4);
  copy.step(1);
  CHECK(testing::bit_equal(copy.parameters(1), worker.parameters(4)));
}

TEST_CASE("who trains another model is told where it differs", "[server]") {
  const Plan plan = small_plan(1, 2, sgd());
  const Servers running(testing::server_names(1));
  const ServerClient client(config_of(running.names, 0, plan));
  Plan other = plan;
  other.parameters[6].sizes = {130};
  const auto message =
      testing::message_of<LayoutMismatch>([&] { const ServerClient second(config_of(running.names, 1, other)); });
  CHECK(testing::contains(message, "bias"));
  other = plan;
  other.staleness = kAnyStaleness;
  CHECK(testing::contains(plan.describe_difference(other), "the staleness is 0 and any number of steps"));
  other.servers = 3;
  CHECK(testing::contains(plan.describe_difference(other), "1 and 3 parameter servers"));
}

TEST_CASE("a dead worker leaves the quorum, a new one comes in at the current parameters", "[server]") {
  Plan plan = small_plan(2, 3, plain());
  plan.heartbeat_ms = 1'500;
  const auto names = testing::server_names(2);
  const std::vector<uint32_t> all{0, 1, 2}, rest{0, 1};
  const std::string failures = testing::run_processes(5, [&](int index) {
    if (index == 4) {
      const Servers servers(names);
      const auto is_deserted = [](const auto& server) { return server->is_deserted(); };
      while (!std::all_of(servers.running.begin(), servers.running.end(), is_deserted)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
      return;
    }
    const auto rank = static_cast<uint32_t>(index == 3 ? 2 : index);
    if (index == 3) std::this_thread::sleep_for(std::chrono::milliseconds(4'000));
    Worker worker(config_of(names, rank, plan));
    uint64_t step = worker.join();
    const bool is_first = step == 0;
    MUSTER_CHECK(is_first == (index < 3));
    bool is_alone = !is_first;
    double moved = 0;
    for (int together = 0; together < 5;) {
      ++step;
      if (index == 2 && step == 3) {
        worker.push(step);  // of which nobody will hear more
        ::kill(::getpid(), SIGKILL);
      }
      worker.step(step);
      const auto& members = worker.decision.members;
      MUSTER_CHECK(members == all || members == rest);
      is_alone = is_alone || members == rest;
      together += is_alone && members == all ? 1 : 0;
      double gradient = 0, weight = 0;
      for (const uint32_t member : members) {
        gradient += testing::gradient_of(plan, 5, member, step)[77].item<double>();
        weight += testing::weight_of(member);
      }
      moved += gradient / weight;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    const auto now = worker.parameters(step)[5][77].item<double>();
    if (is_first) MUSTER_CHECK(std::abs(testing::initial_values(plan, 5)[77].item<double>() - moved - now) < 1e-9);
    worker.client.leave();
  });
  CHECK(failures == "");
}

TEST_CASE("a job goes on after one that was killed between a decision and its step", "[server]") {
  const bool reaches_one = GENERATE(false, true);
  CAPTURE(reaches_one);
  const auto plan = small_plan(2, 2, adam(true, false));
  const Servers running(testing::server_names(2));
  const auto config = [&](int rank, uint64_t job) {
    auto config = config_of(running.names, static_cast<uint32_t>(rank), plan);
    config.job = job;
    return config;
  };
  std::string failures = testing::run_threads(2, [&](int rank) {
    Worker worker(config(rank, 1));
    worker.join();
    worker.step(1);
    worker.step(2);
    worker.push(3);
    worker.client.flush();
    worker.client.commit(3, {testing::weight_of(worker.rank), 0, 1, 0, 0, 0, 1, 0});
    if (rank != 0 || !reaches_one) return;
    Apply command;
    command.step = 3;
    command.members = {0, 1};
    command.groups = plan.groups;
    Link to_one({running.names[1], 0});
    to_one.connect(worker.client.incarnation(), nullptr, WaitHook::call);
    to_one.send(command);
    MUSTER_CHECK(to_one.receive<Applied>([] {}).step == 3);
  });
  CHECK(failures == "");
  failures = testing::run_threads(2, [&](int rank) {
    Worker worker(config(rank, 2));
    const uint64_t step = worker.join();
    MUSTER_CHECK(step == (reaches_one ? 3 : 2));
    worker.step(step + 1);
    worker.step(step + 2);
    const auto values = worker.parameters(step + 2);
    if (!reaches_one) MUSTER_CHECK(testing::bit_equal(values, testing::reference(plan, 2, 4)));
    worker.client.leave();
  });
  CHECK(failures == "");
  for (const auto& server : running.running) {
    CHECK(server->stats().duplicates == 0);
    CHECK(server->stats().held_bytes == 0);
  }
}

TEST_CASE("a server that comes back is pushed what it forgot, though the worker has its memory again", "[server]") {
  const bool shares_memory = GENERATE(false, true);
  const uint32_t staleness = GENERATE(0U, kAnyStaleness);
  CAPTURE(shares_memory, staleness);
  Plan plan = small_plan(1, 1, adam(true, false));
  plan.staleness = staleness;
  const auto values_after = [&](bool comes_back) {
    const testing::Folder folder;
    const auto names = testing::server_names(1);
    const ServerConfig at{names[0], folder.path, std::chrono::milliseconds(1'000'000)};
    auto running = std::make_unique<ParameterServer>(at);
    auto config = config_of(names, 0, plan, shares_memory);
    config.log_bytes = uint64_t{64} << 20;
    Worker worker(config);
    worker.join();
    for (uint64_t step = 1; step <= 5; ++step) {
      staleness == 0 ? worker.step(step) : worker.step_alone(step);
      if (step == 1) running->snapshot();
      if (step < 3 || !comes_back) continue;
      running.reset();
      running = std::make_unique<ParameterServer>(at);
    }
    const auto values = worker.parameters(staleness == 0 ? 5 : 0);
    worker.client.leave();
    return values;
  };
  CHECK(testing::bit_equal(values_after(true), values_after(false)));
}

TEST_CASE("a push counts once, however often it is sent", "[server]") {
  for (const uint32_t staleness : {0U, kAnyStaleness}) {
    Plan plan = small_plan(1, 1, plain());
    plan.staleness = staleness;
    const Servers running(testing::server_names(1));
    Worker worker(config_of(running.names, 0, plan));
    worker.join();
    worker.push(1);
    worker.client.flush();
    worker.push(1);
    worker.client.flush();
    CHECK(running.running[0]->stats().duplicates == worker.client.chunks().size());
    Apply command;
    command.step = 1;
    command.members = {0};
    command.groups = plan.groups;
    worker.client.apply(command);
    const auto once = worker.parameters(1);
    worker.push(1);
    worker.client.flush();
    worker.client.apply(command);
    CHECK(testing::bit_equal(worker.parameters(1), once));
    const double moved = testing::initial_values(plan, 5)[77].item<double>() - once[5][77].item<double>();
    CHECK(moved == Approx(testing::gradient_of(plan, 5, 0, 1)[77].item<double>()));
  }
}

TEST_CASE("an incarnation that was replaced is fenced", "[server]") {
  const Plan plan = small_plan(2, 1, sgd());
  const Servers running(testing::server_names(2));
  Worker first(config_of(running.names, 0, plan));
  first.join();
  first.step(1);
  Worker second(config_of(running.names, 0, plan));
  CHECK(second.client.is_started());
  CHECK(second.join() == 1);
  CHECK(second.client.incarnation() > first.client.incarnation());
  CHECK_THROWS_AS(first.step(2), Fenced);
  second.step(2);
}

TEST_CASE("a server says how its job stands, and who is there", "[server]") {
  const auto nobody = testing::server_names(1);
  CHECK_FALSE(inquire(nobody[0], std::chrono::milliseconds(50)));
  const Servers running(testing::server_names(2));
  const auto standing = [&] { return inquire(running.names[0], std::chrono::seconds(5)).value(); };
  CHECK_FALSE(standing().started);
  CHECK(standing().job == 0);

  const auto config = [&](uint32_t rank, uint64_t job, const std::string& facts) {
    auto made = config_of(running.names, rank, small_plan(2, 2, sgd()));
    made.job = job;
    made.facts = facts;
    return made;
  };
  const auto is_there = [&](const std::vector<uint32_t>& ranks) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (standing().present != ranks && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    return standing().present == ranks;
  };
  Worker first(config(0, 5, "first"));
  CHECK(standing().present.empty());
  first.join();
  {
    Worker second(config(1, 5, "not asked for"));
    second.join();
    CHECK(is_there({0, 1}));
  }
  // Its connections ended without a word: it is a member still, but not there.
  CHECK(is_there({0}));
  CHECK(standing().started);
  CHECK(standing().job == 5);
  CHECK(standing().facts == "first");

  Worker next(config(1, 6, "second"));
  CHECK(standing().job == 6);
  CHECK(standing().facts == "second");
  CHECK(standing().present.empty());
  CHECK_THROWS_AS(first.step(1), Fenced);
  CHECK_THROWS_AS(Worker(config(0, 5, "")), Fenced);
}

TEST_CASE("nobody runs more than k steps ahead of the slowest", "[server]") {
  constexpr uint64_t kSteps = 12;
  for (const uint32_t staleness : {1U, 4U}) {
    Plan plan = small_plan(1, 3, plain());
    plan.staleness = staleness;
    const Servers running(testing::server_names(1));
    std::mutex mutex;
    uint64_t furthest = 0;
    set_log_sink([&](LogLevel, const std::string& text) {
      unsigned rank = 0;
      unsigned long step = 0, slowest = 0;
      const auto at = text.find("worker ");
      if (at == std::string::npos ||
          std::sscanf(text.c_str() + at, "worker %u goes on after step %lu, the slowest live worker has completed %lu",
                      &rank, &step, &slowest) != 3) {
        return;
      }
      const std::lock_guard lock(mutex);
      furthest = std::max<uint64_t>(furthest, step > slowest ? step - slowest : 0);
    });
    const std::string failures = testing::run_threads(3, [&](int rank) {
      Worker worker(config_of(running.names, static_cast<uint32_t>(rank), plan));
      worker.join();
      for (uint64_t step = 1; step <= kSteps; ++step) {
        if (rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(15));
        worker.step_alone(step);
      }
      worker.client.leave();
    });
    set_log_sink({});
    CHECK(failures == "");
    CHECK(furthest <= staleness);
    CHECK(furthest > 0);
    Worker last(config_of(running.names, 7, plan));
    last.join();
    const auto values = last.parameters(0);
    double moved = 0;
    for (uint32_t rank = 0; rank < 3; ++rank) {
      for (uint64_t step = 1; step <= kSteps; ++step) {
        moved += testing::gradient_of(plan, 5, rank, step)[100].item<double>();
      }
    }
    CHECK(testing::initial_values(plan, 5)[100].item<double>() - values[5][100].item<double>() == Approx(moved));
  }
}

TEST_CASE("a server that stays away is PeerLost, by name, in time", "[server]") {
  Plan plan = small_plan(2, 1, sgd());
  plan.heartbeat_ms = 500;
  Servers running(testing::server_names(2));
  auto config = config_of(running.names, 0, plan);
  config.patience = std::chrono::milliseconds(300);
  Worker worker(config);
  worker.join();
  worker.step(1);
  running.running[1].reset();
  const auto began = std::chrono::steady_clock::now();
  const auto message = testing::message_of<PeerLost>([&] { worker.step(2); });
  CHECK(testing::contains(message, running.names[1]));
  CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(5));
}

TEST_CASE("a worker goes on after a request that was refused", "[server]") {
  const Plan plan = small_plan(2, 1, plain());
  const Servers running(testing::server_names(2));
  Worker worker(config_of(running.names, 0, plan));
  worker.join();
  worker.step(1);
  CHECK_THROWS_AS(worker.client.commit(0, {}), InvalidArgument);
  CHECK_THROWS_AS(worker.client.sum(2, {1, 0}), InvalidArgument);
  std::vector<std::byte*> to(worker.client.chunks().size(), worker.client.allocate(kMaxChunkBytes));
  CHECK_THROWS_AS(worker.client.read(static_cast<Part>(9), 0, to), CommError);
  worker.step(2);
  worker.step(3);
  CHECK(testing::bit_equal(worker.parameters(3), testing::reference(plan, 1, 3)));
}

TEST_CASE("a server serves on whatever somebody sends", "[server]") {
  const Plan plan = small_plan(1, 1, plain());
  const Servers running(testing::server_names(1));
  Worker worker(config_of(running.names, 0, plan));
  worker.join();
  const auto in = [](int ms) { return std::chrono::steady_clock::now() + std::chrono::milliseconds(ms); };
  const auto answer_to = [&](net::Channel& channel, uint16_t type, const std::string& message, Bytes payload = {}) {
    channel.send(type, message, {&payload, 1}, in(5'000));
    net::Frame frame;
    MUSTER_CHECK(channel.receive(frame, in(5'000)));
    return frame;
  };
  const auto channel = net::connect_on_host(running.names[0], nullptr, in(5'000));
  CHECK(answer_to(*channel, Push::kType, encode(Push{1, 0})).type == Refusal::kType);  // before Hello
  CHECK(answer_to(*channel, 999, "").type == Refusal::kType);
  CHECK(answer_to(*channel, Hello::kType, encode(Hello{kMaxWorkers, 0, 0})).type == Refusal::kType);
  CHECK(answer_to(*channel, Hello::kType, encode(Hello{1, 0, 0})).type == Welcome::kType);
  CHECK(answer_to(*channel, 999, "").type == Refusal::kType);
  CHECK(answer_to(*channel, Push::kType, "short").type == Refusal::kType);
  CHECK(answer_to(*channel, Push::kType, encode(Push{1, 0})).type == Refusal::kType);  // no payload
  CHECK(answer_to(*channel, Push::kType, encode(Push{1, 999})).type == Refusal::kType);
  CHECK(answer_to(*channel, Read::kType, encode(Read{0, static_cast<Part>(77), 0, false, 0})).type == Refusal::kType);
  CHECK(answer_to(*channel, Read::kType, encode(Read{0, Part::parameter, 0, true, 0})).type == Refusal::kType);
  // Parts that there are not, of the right size: a message of this one is a chunk and a part.
  const std::vector<std::byte> values(static_cast<size_t>(cut_chunks(plan).front().numel) * sizeof(float));
  for (const auto part : {uint8_t{6}, uint8_t{77}, uint8_t{255}, static_cast<uint8_t>(Part::state1)}) {
    auto write = encode(Write{0, Part::parameter});
    write.back() = static_cast<char>(part);
    CHECK(answer_to(*channel, Write::kType, write, values).type == Refusal::kType);
  }
  CHECK(answer_to(*channel, Sum::kType, encode(Sum{1, {5, 4}})).type == Refusal::kType);
  CHECK(answer_to(*channel, Commit::kType, encode(Commit{1, {}, {}})).type == Refusal::kType);  // has not joined
  Configure bad{0, plan};
  bad.plan.parameters.clear();
  CHECK(answer_to(*channel, Configure::kType, encode(bad)).type == Refusal::kType);

  const net::FileDescriptor raw = net::connect_to(running.names[0], SOCK_STREAM);
  REQUIRE(::send(raw.get(), "this is no frame, and much longer than a header of one", 54, 0) == 54);
  CHECK(net::wait_readable({raw.get()}, in(5'000)));  // it ends the connection
  worker.step(1);
  CHECK(testing::bit_equal(worker.parameters(1), testing::reference(plan, 1, 1)));
}

TEST_CASE("connections that say nothing end in time, and hold nobody up", "[server]") {
  const Plan plan = small_plan(1, 1, plain());
  const Servers running(testing::server_names(1));
  std::vector<net::FileDescriptor> silent;
  for (int i = 0; i < 200; ++i) silent.push_back(net::connect_to(running.names[0], SOCK_STREAM));
  const auto begin = std::chrono::steady_clock::now();
  while (running.running[0]->stats().connections < 64) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK(net::wait_readable({silent.front().get()}, begin + std::chrono::seconds(10)));  // it ends the connection
  CHECK(std::chrono::steady_clock::now() - begin > std::chrono::seconds(4));
  CHECK(running.running[0]->stats().connections <= 64);
  silent.clear();
  Worker worker(config_of(running.names, 0, plan));
  worker.join();
  worker.step(1);
  CHECK(testing::bit_equal(worker.parameters(1), testing::reference(plan, 1, 1)));
}

TEST_CASE("many workers on one server: no leak, nobody starves", "[server][.][long]") {
  constexpr int kWorkers = 32;
  Plan plan = small_plan(1, kWorkers, plain());
  plan.staleness = kAnyStaleness;
  const Servers running(testing::server_names(1));
  std::vector<uint64_t> made(kWorkers);
  std::atomic<int> joined{0};
  uint64_t early = 0, late = 0;  // pages
  const auto pages = [] {
    uint64_t size = 0, resident = 0;
    std::ifstream("/proc/self/statm") >> size >> resident;
    return resident;
  };
  const std::string failures = testing::run_threads(kWorkers, [&](int rank) {
    Worker worker(config_of(running.names, static_cast<uint32_t>(rank), plan));
    uint64_t step = worker.join();
    ++joined;
    while (joined < kWorkers) std::this_thread::yield();
    const auto began = std::chrono::steady_clock::now();
    const auto after = [&](int seconds) {
      return std::chrono::steady_clock::now() > began + std::chrono::seconds(seconds);
    };
    while (!after(120)) {
      worker.step_alone(++step);
      ++made[static_cast<size_t>(rank)];
      if (rank == 0 && early == 0 && after(30)) early = pages();
    }
    if (rank == 0) late = pages();
  });
  CHECK(failures == "");
  uint64_t total = 0;
  for (const uint64_t count : made) total += count;
  for (const uint64_t count : made) CHECK(2 * count * kWorkers > total);
  CHECK(static_cast<double>(late) < static_cast<double>(early) * 1.05);
}
