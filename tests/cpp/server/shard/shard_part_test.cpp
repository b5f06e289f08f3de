// Checkpoints that servers write with the chief.
#include "server/shard/shard_part.h"

#include <ATen/ops/cat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/awaited_part.h"
#include "checkpoint/draft.h"
#include "checkpoint/snapshot.h"
#include "cpp/catch.h"
#include "muster/error.h"
#include "support/folder.h"
#include "support/servers.h"

using namespace muster;
using namespace muster::server;
using namespace muster::testing;
namespace fs = std::filesystem;

namespace {

constexpr int64_t kPartRows = 30'000;

// Chunks, and tables: one of several blocks and stripes, a small one, one that nobody touches.
Plan saved_plan(uint32_t servers, uint32_t staleness, RowPlacement placement) {
  Plan plan = small_plan(servers, 1, std::vector<kernels::AdamGroup>(2, {.01, .9, .99, 1e-8, 0, false, false, false}));
  plan.tables = {{"large", kPartRows, 64, placement, {RowInitialiser::Kind::normal, 1, 3}, 0},
                 {"small", 100, 3, placement, {RowInitialiser::Kind::normal, 1, 4}, 1},
                 {"untouched", 100, 3, placement, {}, 0}};
  plan.staleness = staleness;
  return plan;
}

// Nobody pushes to the last table.
void push_rows(Worker& worker, uint64_t step) {
  for (uint32_t t = 0; t < 3; ++t) {
    const auto [rows, gradients] = t == 2 ? PushedRows() : pushed_rows(worker.plan.tables[t], step);
    worker.client.rows().push(step, t, rows, gradients);
  }
}

void make_step(Worker& worker, uint64_t step) {
  worker.push_chunks(step);
  push_rows(worker, step);
  worker.client.flush();
  Apply command;
  command.step = step;
  command.members = {0};
  command.groups = worker.plan.groups;
  if (worker.plan.is_synchronous()) {
    command.members = worker.client.commit(step, {1}).members;
    worker.client.apply(command);
  } else {
    worker.client.apply(command);
    worker.client.commit(step, {});
  }
}

void await_part(const fs::path& draft, const std::string& writer) {
  const auto failure = checkpoint::await_parts(draft, {{writer, true}}, std::chrono::seconds(60));
  if (failure) std::rethrow_exception(failure);
}

// With the lock of the chief that waits for the parts.
struct Draft {
  explicit Draft(const fs::path& folder)
      : path(checkpoint::begin_draft(folder)), lock(std::make_unique<checkpoint::PartLock>(path, kChiefsPart)) {
    REQUIRE(lock->is_held());
  }

  const fs::path path;
  std::unique_ptr<checkpoint::PartLock> lock;
};

// A worker of two servers that has made a step, and a folder.
struct TwoServers {
  TwoServers() {
    worker.join();
    make_step(worker, 1);
  }

  const Plan plan = saved_plan(2, 0, RowPlacement::modulo);
  Servers running{server_names(2)};
  Worker worker{config_of(running.names, 0, plan)};
  const Folder folder;
};

std::vector<std::string> writers_of(const Plan& plan, uint64_t id = 1) {
  std::vector<std::string> writers;
  for (uint32_t s = 0; s < plan.servers; ++s) writers.push_back(writer_of_server(s, id));
  return writers;
}

WritePart request_of(uint64_t step, const fs::path& draft, uint64_t id = 1) {
  return {step, id, draft.string(), {}, {}, {0, 1, 2}};
}

void check_rows(const checkpoint::NamedTensors& tensors, const TableSpec& spec, const TableRows& expected) {
  CAPTURE(spec.name);
  const auto& rows = tensors.at(name_of_rows(spec));
  REQUIRE(rows.numel() == static_cast<int64_t>(expected.rows.size()));
  const auto same = [](const at::Tensor& tensor, const float* values) {
    return std::equal(values, values + tensor.numel(), tensor.const_data_ptr<float>());
  };
  CHECK(std::equal(expected.rows.begin(), expected.rows.end(), rows.const_data_ptr<int64_t>()));
  CHECK(same(tensors.at(name_of_row_values(spec)), expected.values.data()));
  const auto states = at::cat({tensors.at(name_of_row_states(spec, 0)), tensors.at(name_of_row_states(spec, 1))}, 1);
  CHECK(states.sizes() == at::IntArrayRef({rows.numel(), 2 * spec.dim}));
  CHECK(same(states.contiguous(), expected.states.data()));
}

}  // namespace

TEST_CASE("servers write what stood after a step, whatever is stepped meanwhile", "[server][saving]") {
  const uint32_t servers = GENERATE(1U, 2U, 3U);
  const uint32_t staleness = GENERATE(0U, kAnyStaleness);
  const auto placement = servers == 2 ? RowPlacement::range : RowPlacement::modulo;
  const auto plan = saved_plan(servers, staleness, placement);
  const Servers running(server_names(servers));
  Worker worker(config_of(running.names, 0, plan));
  worker.join();
  make_step(worker, 1);
  make_step(worker, 2);
  const uint64_t at_least = plan.is_synchronous() ? 2 : 0;
  const auto parameters = worker.parameters(at_least);
  std::vector<TableRows> tables;
  for (uint32_t t = 0; t < 3; ++t) tables.push_back(worker.client.rows().fetch(t, at_least));

  const Folder folder;
  const Draft its_draft(folder.path);
  const auto& draft = its_draft.path;
  const auto answers = worker.client.write_parts(request_of(at_least, draft));
  for (uint64_t step = 3; step < 6; ++step) make_step(worker, step);
  CHECK_FALSE(bit_equal(worker.parameters(plan.is_synchronous() ? 5 : 0), parameters));
  const auto again = worker.client.write_parts(request_of(at_least, draft));
  CHECK((again.front().tables == answers.front().tables));
  for (const auto& writer : writers_of(plan)) await_part(draft, writer);
  const auto saved = checkpoint::finish_draft(draft, writers_of(plan), {}, {}, {{"rows/small", "else/where"}});

  auto tensors = checkpoint::read_snapshot(saved).tensors;
  tensors["rows/small"] = tensors.at("else/where");
  for (size_t p = 0; p < parameters.size(); ++p) {
    if (parameters[p].numel() == 0) continue;  // no server has it
    CAPTURE(plan.parameters[p].name);
    const auto& saved_one = tensors.at(name_in_part(plan.parameters[p], Part::parameter));
    CHECK(saved_one.sizes() == at::IntArrayRef(plan.parameters[p].sizes));
    CHECK(bit_equal({saved_one}, {parameters[p]}));
    CHECK(tensors.contains(name_in_part(plan.parameters[p], Part::state1)));
  }
  for (size_t t = 0; t < 3; ++t) check_rows(tensors, plan.tables[t], tables[t]);
  for (const auto& entry : fs::directory_iterator(saved)) CHECK(entry.path().filename().string().front() != '.');
  // Another one, while nothing of the first is left.
  const Draft its_next(folder.path);
  const auto& next = its_next.path;
  worker.client.write_parts(request_of(plan.is_synchronous() ? 5 : 0, next, 2));
  for (const auto& writer : writers_of(plan, 2)) await_part(next, writer);
  checkpoint::finish_draft(next, writers_of(plan, 2), {}, {});
}

TEST_CASE("parameters that are left, and state of what was never stepped, are in no part", "[server][saving]") {
  const auto plan = saved_plan(1, 0, RowPlacement::modulo);
  const Servers running(server_names(1));
  Worker worker(config_of(running.names, 0, plan));
  worker.join();
  const Folder folder;
  const Draft its_draft(folder.path);
  const auto& draft = its_draft.path;
  const auto answer = worker.client.write_parts({0, 1, draft.string(), {0}, {1}, {}}).front();
  CHECK(std::ranges::all_of(answer.parameters, [](const PartOfParameter& part) {
    return part.steps == 0 && (part.states & 3) == 0;  // there is none before a step, though it would count
  }));
  await_part(draft, "server-0-1");
  const auto tensors = checkpoint::read_snapshot(checkpoint::finish_draft(draft, {"server-0-1"}, {}, {})).tensors;
  CHECK_FALSE(tensors.contains(name_in_part(plan.parameters[0], Part::parameter)));
  CHECK(tensors.contains(name_in_part(plan.parameters[1], Part::parameter)));
  CHECK_FALSE(tensors.contains(name_in_part(plan.parameters[1], Part::state0)));
  CHECK_FALSE(tensors.contains(name_of_rows(plan.tables[0])));
}

TEST_CASE("a server writes no part where it should not", "[server][saving]") {
  const auto plan = saved_plan(1, 0, RowPlacement::modulo);
  const Servers running(server_names(1));
  Worker worker(config_of(running.names, 0, plan));
  worker.join();
  const Folder folder;
  const Draft its_draft(folder.path);
  const auto& draft = its_draft.path;
  const auto ask = [&](const WritePart& request) { return worker.client.write_parts(request).front().refusal; };
  const auto with_draft = [&](const std::string& path) { return WritePart{0, 1, path, {}, {}, {}}; };
  CHECK_THROWS_AS(ask(with_draft("")), InvalidArgument);
  CHECK_THROWS_AS(ask(with_draft(".partial-snapshot-0000000001")), InvalidArgument);
  CHECK_THROWS_AS(ask(with_draft(folder.path.string())), InvalidArgument);
  CHECK_THROWS_AS(ask(with_draft(draft.string() + std::string("\0", 1))), InvalidArgument);
  CHECK_THAT(ask(with_draft((folder.path / ".partial-snapshot-0000000002").string())),
             ContainsSubstring("is not seen there"));
  fs::create_directory_symlink(folder.path, folder.path / ".partial-snapshot-0000000003");
  CHECK_THAT(ask(with_draft((folder.path / ".partial-snapshot-0000000003").string())),
             ContainsSubstring("is not seen there"));
  if (::geteuid() == 0) {
    const auto others = folder.path / ".partial-snapshot-0000000004";
    fs::create_directory(others);
    REQUIRE(::chown(others.c_str(), 1, 1) == 0);
    CHECK_THAT(ask(with_draft(others.string())), ContainsSubstring("is of another user than the server"));
  }
  const auto unlocked = folder.path / ".partial-snapshot-0000000005";
  fs::create_directory(unlocked);
  std::ofstream(unlocked / "chief.lock").flush();  // as where a lock does not reach from host to host
  CHECK_THAT(ask(with_draft(unlocked.string())), ContainsSubstring("locks (flock)"));
  for (const auto& numbers : {std::vector<uint32_t>{1, 0}, std::vector<uint32_t>{0, 0}, std::vector<uint32_t>{99}}) {
    CHECK_THROWS_AS(ask({0, 1, draft.string(), numbers, {}, {}}), InvalidArgument);
    CHECK_THROWS_AS(ask({0, 1, draft.string(), {}, numbers, {}}), InvalidArgument);
    CHECK_THROWS_AS(ask({0, 1, draft.string(), {}, {}, numbers}), InvalidArgument);
  }
  for (const auto& entry : fs::directory_iterator(draft)) CHECK(entry.path().extension() == ".lock");
  // What was refused holds nothing up.
  ask(with_draft(draft.string()));
  await_part(draft, "server-0-1");
  make_step(worker, 1);
  CHECK_THROWS_AS(ask({0, 2, draft.string(), {}, {}, {}}), CheckpointError);  // step 0 is past
}

TEST_CASE("a part of a draft that is gone is given up, and the next one written", "[server][saving]") {
  TwoServers two;
  auto& worker = two.worker;
  const Draft its_first(two.folder.path);
  const auto& first = its_first.path;
  worker.client.write_parts(request_of(1, first));
  checkpoint::drop_draft(first);
  const Draft its_second(two.folder.path);
  const auto& second = its_second.path;
  make_step(worker, 2);
  // What is left of the first one does no harm.
  std::ofstream(second / "server-0-1.part.json") << "not this one's";
  worker.client.write_parts(request_of(2, second, 2));
  for (const auto& writer : writers_of(two.plan, 2)) await_part(second, writer);
  const auto tensors =
      checkpoint::read_snapshot(checkpoint::finish_draft(second, writers_of(two.plan, 2), {}, {})).tensors;
  check_rows(tensors, two.plan.tables[0], worker.client.rows().fetch(0, 2));
}

TEST_CASE("a server that could not write, or is gone, is named", "[server][saving]") {
  TwoServers two;
  auto& worker = two.worker;
  const Draft its_draft(two.folder.path);
  const auto& draft = its_draft.path;
  fs::create_directory(draft / "server-1-1-rows-0.unfinished");  // where its file cannot be
  worker.client.write_parts(request_of(1, draft));
  CHECK_THROWS_WITH(await_part(draft, "server-1-1"), ContainsSubstring("server-1-1 could not write its part"));
  CHECK_THROWS_AS(await_part(draft, "server-0-1"), CheckpointError);  // it cannot do without
  checkpoint::drop_draft(draft);
  make_step(worker, 2);
}

TEST_CASE("a server waits for one that has not begun, as long as the chief waits", "[server][saving]") {
  TwoServers two;
  auto& worker = two.worker;
  Draft begun(two.folder.path);
  const auto& draft = begun.path;
  fs::create_directory(draft / ".server-1-1.lock");  // where its lock is made
  const auto answers = worker.client.write_parts(request_of(1, draft));
  CHECK(answers[0].refusal.empty());
  CHECK_THAT(answers[1].refusal, ContainsSubstring("no file can be made and locked there"));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK_FALSE(checkpoint::has_part(draft, "server-0-1"));
  begun.lock = nullptr;
  CHECK_THROWS_WITH(await_part(draft, "server-0-1"), ContainsSubstring("the chief gave the checkpoint up"));
}
