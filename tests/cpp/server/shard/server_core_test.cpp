// The logic of a server without threads: what comes while it does something else.
#include "server/shard/server_core.h"

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpp/catch.h"
#include "support/memory_channel.h"
#include "support/servers.h"
#include "support/simulated_disk.h"

using namespace muster;
using namespace muster::server;
using namespace muster::testing;

namespace {

constexpr auto kNow = net::Deadline::min();

// A worker's connection.
struct Caller {
  explicit Caller(ServerCore& core) : Caller(core, connect_in_memory()) {}
  ~Caller() { core.detach(session); }

  // The answer.
  template <class Message>
  net::Frame ask(const Message& message, std::span<const Bytes> payload = {}) {
    channel->send(Message::kType, encode(message), payload, net::Deadline::max());
    net::Frame frame;
    session.channel->receive(frame, kNow);
    core.answer(session, frame);
    channel->receive(frame, kNow);
    return frame;
  }
  // The same of one that is not refused.
  template <class Answer, class Message>
  Answer get(const Message& message, std::span<const Bytes> payload = {}) {
    const auto frame = ask(message, payload);
    if (frame.type == Refusal::kType) raise(decode<Refusal>(frame.message));
    return decode<Answer>(frame.message);
  }

  void begin(uint32_t rank, const Plan& plan, uint64_t job) {
    get<Welcome>(Hello{rank, 0, 0});
    CHECK_FALSE(get<Configured>(Configure{0, plan, job}).started);
  }
  // As the chief, up to Start.
  void begin_and_write(const Plan& plan, uint64_t job) {
    begin(kChief, plan, job);
    const auto chunks = cut_chunks(plan);
    for (uint32_t c = 0; c < chunks.size(); ++c) {
      const std::vector<std::byte> zeros(static_cast<size_t>(chunks[c].parameter_bytes()));
      const Bytes values(zeros);
      get<Done>(Write{c, Part::parameter}, {&values, 1});
    }
  }

  ServerCore& core;
  std::unique_ptr<net::Channel> channel;
  Session session;

 private:
  Caller(ServerCore& of, MemoryEnds ends) : core(of), channel(std::move(ends.caller)), session(std::move(ends.callee)) {
    core.attach(session);
  }
};

// What comes while a request waits for something else, once.
struct MeanwhileTime : Timekeeper {
  bool wait(std::unique_lock<std::mutex>& lock, std::condition_variable& /*changed*/, Time /*deadline*/) override {
    lock.unlock();
    if (meanwhile) std::exchange(meanwhile, {})();
    lock.lock();
    return true;
  }

  std::function<void()> meanwhile;
};

// Passes where somebody waits.
struct PassingTime : Timekeeper {
  Time now() const override { return now_; }
  bool wait(std::unique_lock<std::mutex>& /*lock*/, std::condition_variable& /*changed*/, Time deadline) override {
    now_ = deadline;
    return false;
  }
  void pass(std::chrono::seconds some) { now_ += some; }

 private:
  Time now_{std::chrono::hours(1)};
};

// Of two servers, of which the first one owns nothing.
Plan plan_of_another_server() {
  Plan plan;
  plan.parameters = {{"weight", {64}, {1}, at::kFloat}};
  plan.group_of = {0};
  plan.groups = std::vector<kernels::SgdGroup>(1);
  plan.servers = 2;
  return plan;
}

// A server that begins, or goes on, with what is on the disk.
std::unique_ptr<ServerCore> start_on(SimulatedDisk& disk, Timekeeper& time) {
  auto core = std::make_unique<ServerCore>(std::make_unique<DiskStore>(disk, [](bool) {}),
                                           std::chrono::milliseconds(1'000), time);
  core->restore();
  return core;
}

// A step, made with the chief alone, of which a snapshot is due.
Apply cut_of(const Plan& plan, uint64_t step) {
  Apply command;
  command.step = step;
  command.members = {kChief};
  command.groups = plan.groups;
  command.cut.is_due = true;
  return command;
}

}  // namespace

TEST_CASE("a start whose chief was replaced meanwhile is none", "[server]") {
  SimulatedDisk disk;
  Timekeeper time;
  std::function<void()> meanwhile;
  const auto on_write = [&](bool is_there) {
    if (is_there && meanwhile) std::exchange(meanwhile, {})();
  };
  ServerCore core(std::make_unique<DiskStore>(disk, on_write), std::chrono::milliseconds(1'000), time);
  core.restore();
  const Plan plan = small_plan(1, 2, std::vector<kernels::SgdGroup>(2));
  Caller first(core);
  Caller second(core);
  first.begin_and_write(plan, 1);
  meanwhile = [&] { second.begin_and_write(plan, 2); };
  CHECK_THROWS_AS(first.get<Done>(Start{}), CommError);
  CHECK_FALSE(second.get<Standing>(Inquire{}).started);
  second.get<Done>(Start{});
  CHECK(second.get<Standing>(Inquire{}).started);
  CHECK(second.get<Joined>(Join{}).step == 0);
}

TEST_CASE("a chief that another one replaced meanwhile lets no job go on", "[server]") {
  SimulatedDisk disk;
  Timekeeper time;
  std::function<void()> meanwhile;
  const auto on_write = [&](bool is_there) {
    if (is_there && meanwhile) std::exchange(meanwhile, {})();
  };
  const Plan plan = plan_of_another_server();
  ServerCore core(std::make_unique<DiskStore>(disk, on_write), std::chrono::milliseconds(1'000), time);
  core.restore();
  Caller first(core);
  first.begin(kChief, plan, 1);
  first.get<Done>(Start{});
  const auto come = [&](Caller& chief, uint64_t job) {
    chief.get<Welcome>(Hello{kChief, 0, 0});
    return chief.get<Configured>(Configure{0, plan, job});
  };
  Caller second(core);
  Caller third(core);
  CHECK_FALSE(come(second, 2).is_settled);
  meanwhile = [&] { CHECK_FALSE(come(third, 3).is_settled); };
  CHECK_THROWS_AS(second.get<Done>(Resume{6, {}}), CommError);
  CHECK_FALSE(come(third, 3).is_settled);
  third.get<Done>(Resume{6, {}});
  CHECK(come(third, 3).is_settled);
}

TEST_CASE("who waits to come into a job does not come into the next one", "[server]") {
  SimulatedDisk disk;
  MeanwhileTime time;
  ServerCore core(std::make_unique<DiskStore>(disk, [](bool) {}), std::chrono::milliseconds(1'000), time);
  core.restore();
  const Plan plan = small_plan(1, 2, std::vector<kernels::SgdGroup>(2));
  Caller worker(core);
  Caller chief(core);
  worker.begin(1, plan, 1);
  time.meanwhile = [&] {
    chief.begin_and_write(plan, 2);
    chief.get<Done>(Start{});
  };
  CHECK_THROWS_AS(worker.get<Joined>(Join{}), Fenced);
  CHECK_THROWS_AS(worker.get<Done>(Start{}), Fenced);
  CHECK(chief.get<Joined>(Join{}).step == 0);
  CHECK(chief.get<Standing>(Inquire{}).present == std::vector<uint32_t>{0});
}

TEST_CASE("a server that starts again before its job was told where it goes on waits for that", "[server]") {
  SimulatedDisk disk;
  PassingTime time;
  const auto start = [&] { return start_on(disk, time); };
  auto plan = small_plan(1, 2, std::vector<kernels::SgdGroup>(2));
  plan.staleness = kAnyStaleness;
  {
    const auto core = start();
    Caller chief(*core);
    chief.begin_and_write(plan, 1);
    chief.get<Done>(Start{});
    chief.get<Welcome>(Hello{kChief, 0, 0});
    CHECK_FALSE(chief.get<Configured>(Configure{0, plan, 2}).is_settled);
    core->snapshot();
  }
  {
    const auto core = start();
    Caller chief(*core);
    CHECK_FALSE(chief.get<Standing>(Inquire{}).started);
    chief.get<Welcome>(Hello{kChief, 0, 0});
    const auto configured = chief.get<Configured>(Configure{0, plan, 2});
    CHECK(configured.started);
    CHECK(configured.is_untouched);
    CHECK_FALSE(configured.is_settled);
    CHECK_THROWS_AS(chief.get<Joined>(Join{}), Timeout);
    chief.get<Done>(Resume{});
    CHECK(chief.get<Joined>(Join{}).step == 0);
    core->snapshot();
  }
  const auto core = start();
  Caller chief(*core);
  CHECK(chief.get<Standing>(Inquire{}).started);
}

TEST_CASE("a job of another model takes the place of one that ended before its values were there", "[server]") {
  Timekeeper time;
  ServerCore core(nullptr, std::chrono::milliseconds(1'000), time);
  core.restore();
  const Plan plan = small_plan(1, 1, std::vector<kernels::SgdGroup>(2));
  Plan other = plan;
  other.parameters.front().name = "renamed";
  other.staleness = 3;
  Caller chief(core);
  chief.begin(kChief, plan, 1);
  CHECK_THROWS_AS(chief.get<Configured>(Configure{0, other, 1}), LayoutMismatch);  // a worker of the same job
  chief.begin_and_write(other, 2);
  chief.get<Done>(Start{});
  CHECK_THROWS_AS(chief.get<Configured>(Configure{0, plan, 3}), LayoutMismatch);
}

TEST_CASE("a server without a part of the model keeps snapshots of the steps that the job goes on from", "[server]") {
  SimulatedDisk disk;
  PassingTime time;
  const auto start = [&] { return start_on(disk, time); };
  const auto steps = [&] {
    std::vector<int64_t> steps;
    for (const auto& kept : disk.kept) steps.push_back(std::get<int64_t>(kept.metadata.at("step")));
    return steps;
  };
  const Plan plan = plan_of_another_server();
  REQUIRE(cut_chunks(plan).front().server == 1);
  {
    const auto core = start();
    Caller chief(*core);
    chief.begin(kChief, plan, 1);
    chief.get<Done>(Start{});
    chief.get<Joined>(Join{});
    chief.get<Applied>(cut_of(plan, 5));
    core->keep_snapshot();
    CHECK(steps() == std::vector<int64_t>{0, 5});
  }
  {
    const auto core = start();
    Caller chief(*core);
    chief.get<Welcome>(Hello{kChief, 0, 0});
    CHECK_FALSE(chief.get<Configured>(Configure{0, plan, 2}).is_settled);
    chief.get<Done>(Resume{6, {}});
    CHECK(steps() == std::vector<int64_t>{0, 5, 6});
    core->snapshot();
    CHECK(steps() == std::vector<int64_t>{0, 5, 6});
  }
  {
    const auto core = start();
    core->snapshot();
    CHECK(steps() == std::vector<int64_t>{0, 5, 6});
    // The step was decided, though nobody is left who took part in it.
    Caller joiner(*core);
    joiner.get<Welcome>(Hello{1, 0, 0});
    joiner.get<Configured>(Configure{.server = 0, .plan = plan, .job = 2, .coming = Configure::Coming::joins});
    CHECK(joiner.get<Joined>(Join{}).step == 6);
  }
  disk.kept.back().is_damaged = true;
  CHECK_NOTHROW(start());
}

TEST_CASE("a worker is not held for one of another job that a snapshot knows by the same incarnation", "[server]") {
  SimulatedDisk disk;
  PassingTime time;
  const auto start = [&] { return start_on(disk, time); };
  const Plan plan = plan_of_another_server();
  uint64_t incarnation = 0;
  {
    const auto core = start();
    Caller chief(*core);
    incarnation = chief.get<Welcome>(Hello{kChief, 0, 0, "one"}).incarnation;
    CHECK_FALSE(chief.get<Configured>(Configure{0, plan, 1}).started);
    chief.get<Done>(Start{});
    chief.get<Joined>(Join{});
    chief.get<Applied>(cut_of(plan, 1));
    core->keep_snapshot();
  }
  const auto core = start();
  time.pass(std::chrono::seconds(2));
  Caller chief(*core);
  Caller beside(*core);
  const Hello hello{kChief, 0, incarnation, "other"};
  CHECK(chief.get<Welcome>(hello).incarnation == incarnation);
  CHECK(beside.get<Welcome>(Hello{kChief, 1, incarnation, "other"}).incarnation == incarnation);
  CHECK(chief.get<Welcome>(hello).incarnation == incarnation);
  CHECK(chief.get<Standing>(Inquire{}).present.empty());
}

TEST_CASE("workers that wait for a cut hear at once that a server gave it up", "[server]") {
  SimulatedDisk disk;
  PassingTime time;
  bool fails = false;
  const auto on_write = [&](bool /*is_there*/) {
    if (fails) throw std::runtime_error("no memory");
  };
  const Plan plan = plan_of_another_server();
  ServerCore core(std::make_unique<DiskStore>(disk, on_write), std::chrono::milliseconds(1'000), time);
  core.restore();
  Caller chief(core);
  chief.begin(kChief, plan, 1);
  chief.get<Done>(Start{});
  chief.get<Joined>(Join{});
  CHECK(chief.get<Beaten>(Beat{}).failures == 0);
  chief.get<Applied>(cut_of(plan, 1));
  fails = true;
  core.keep_snapshot();
  const auto beaten = chief.get<Beaten>(Beat{});
  CHECK(beaten.failures == Beaten::kTooMany);
  CHECK(beaten.trouble == "no memory");
  fails = false;
  core.snapshot();
  CHECK(chief.get<Beaten>(Beat{}).failures == 0);
}
