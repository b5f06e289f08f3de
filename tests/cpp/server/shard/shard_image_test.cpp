#include "server/shard/shard_image.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cpp/catch.h"
#include "muster/error.h"
#include "server/shard/server.h"
#include "support/folder.h"
#include "support/servers.h"

using namespace muster;
using namespace muster::server;
using checkpoint::NamedTensors;

namespace {

Timekeeper& real_time() {
  static Timekeeper time;
  return time;
}

constexpr int64_t kRows = 60'000;

// Chunks, and tables: one of several blocks, one that fits into one, one that nobody touches.
Plan mixed_plan(const FlatGroups& groups, uint32_t staleness = 0) {
  Plan plan = testing::small_plan(1, 1, groups);
  plan.tables = {{"large", kRows, 64, RowPlacement::modulo, {RowInitialiser::Kind::normal, 1, 3}, 0},
                 {"large/small", 100, 3, RowPlacement::modulo, {RowInitialiser::Kind::normal, 1, 4}, 1},
                 {"untouched", 100, 3, RowPlacement::modulo, {}, 0}};
  plan.staleness = staleness;
  return plan;
}

FlatGroups two_of_sgd() { return std::vector<kernels::SgdGroup>(2, {.5, 0, 0, 0, false, false}); }
FlatGroups two_of_adam() { return std::vector<kernels::AdamGroup>(2, {.01, .9, .99, 1e-8, 0, false, false, false}); }

std::shared_ptr<server::Shard> shard_of(const Plan& plan) {
  return std::make_shared<server::Shard>(plan, 0, [](std::optional<uint32_t>, uint64_t) { return true; }, real_time());
}

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

std::vector<int64_t> by_stripe(const Plan& plan, uint32_t table, std::vector<int64_t> rows) {
  const auto stripes = stripes_of(plan.tables[table], plan);
  const auto stripe_of = [&](int64_t row) { return stripes.of(row); };
  std::stable_sort(rows.begin(), rows.end(), [&](int64_t a, int64_t b) { return stripe_of(a) < stripe_of(b); });
  return rows;
}

// The first step touches most rows of a table, later ones few, and one that is new.
void make_step(server::Shard& shard, uint64_t step) {
  const auto& plan = shard.plan();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (const uint32_t chunk : shard.chunks()) {
    const auto bytes = static_cast<size_t>(cut_chunks(plan)[chunk].gradient_bytes());
    const auto gradients = std::make_shared<std::vector<std::byte>>(bytes, std::byte{0x3c});
    shard.hold(0, 1, {step, chunk}, *gradients, gradients);
  }
  for (uint32_t t = 0; t < 3; ++t) {
    auto [rows, gradients] = t == 2 ? PushedRows() : pushed_rows(plan.tables[t], step);
    const auto owner = std::make_shared<std::vector<float>>(std::move(gradients));
    shard.tables().hold(0, 1, {step, t, 0, 1}, by_stripe(plan, t, std::move(rows)), bytes_of(*owner), owner);
  }
  Apply command;
  command.step = step;
  command.members = {0};
  command.groups = plan.groups;
  shard.apply(0, 1, command, deadline);
}

struct Whole {
  std::vector<Image::Facts> facts;
  std::vector<NamedTensors> parts;

  NamedTensors tensors() const {
    NamedTensors all;
    for (const auto& part : parts) all.insert(part.begin(), part.end());
    return all;
  }
};

Whole image_of(const std::shared_ptr<server::Shard>& shard) {
  ShardImage image(shard, shard->begin_images());
  Whole whole{image.facts(), {}};
  for (auto part = image.next(); !part.empty(); part = image.next()) whole.parts.push_back(std::move(part));
  return whole;
}

bool same(const Whole& a, const Whole& b) {
  const auto left = a.tensors(), right = b.tensors();
  if (left.size() != right.size() || a.facts.size() != b.facts.size()) return false;
  for (size_t i = 0; i < a.facts.size(); ++i) {
    const auto &x = a.facts[i], &y = b.facts[i];
    if (x.made.steps != y.made.steps || x.made.applied != y.made.applied || x.has_norm != y.has_norm ||
        !(x.norm == y.norm) || x.counted != y.counted || x.rows != y.rows) {
      return false;
    }
  }
  return std::all_of(left.begin(), left.end(), [&](const auto& named) {
    const auto found = right.find(named.first);
    return found != right.end() && found->second.equal(named.second);
  });
}

}  // namespace

TEST_CASE("a shard comes back as it was when its image began, whatever is stepped meanwhile", "[server]") {
  const auto groups = GENERATE(two_of_sgd(), two_of_adam());
  const uint32_t staleness = GENERATE(0U, kAnyStaleness);
  const auto plan = mixed_plan(groups, staleness);
  const auto shard = shard_of(plan);
  for (uint64_t step = 1; step <= 3; ++step) make_step(*shard, step);
  const Whole expected = image_of(shard);
  CHECK(expected.parts.size() > shard->chunks().size() + 3);  // blocks

  Whole image;
  {
    ShardImage slow(shard, shard->begin_images());
    image.facts = slow.facts();
    uint64_t step = 3;
    for (auto part = slow.next(); !part.empty(); part = slow.next()) {
      image.parts.push_back(std::move(part));
      make_step(*shard, ++step);
    }
  }
  CHECK(same(image, expected));
  CHECK_FALSE(same(image_of(shard), expected));

  // Parts may come one by one, some together, or all.
  for (const size_t together : {size_t{1}, size_t{3}, image.parts.size()}) {
    const auto back = shard_of(plan);
    ShardRestorer restorer(*back, image.facts);
    for (size_t begin = 0; begin < image.parts.size(); begin += together) {
      NamedTensors tensors = {{"another", at::Tensor()}};
      for (size_t i = begin; i < std::min(begin + together, image.parts.size()); ++i) {
        tensors.insert(image.parts[i].begin(), image.parts[i].end());
      }
      restorer.take(tensors);
    }
    restorer.finish();
    CHECK(same(image_of(back), expected));
    CHECK(back->least_step(0, 1) == 3);
  }
}

TEST_CASE("a shard does not come back from less than its image, or from another", "[server]") {
  const auto plan = mixed_plan(two_of_adam());
  const auto shard = shard_of(plan);
  make_step(*shard, 1);
  const Whole whole = image_of(shard);
  const auto restore = [&](const std::vector<NamedTensors>& parts, const std::vector<Image::Facts>& facts) {
    const auto back = shard_of(plan);
    ShardRestorer restorer(*back, facts);
    for (const auto& part : parts) restorer.take(part);
    restorer.finish();
  };
  restore(whole.parts, whole.facts);
  for (size_t lost = 0; lost < whole.parts.size(); ++lost) {
    CAPTURE(lost);
    auto parts = whole.parts;
    parts.erase(parts.begin() + static_cast<ptrdiff_t>(lost));
    CHECK_THROWS_AS(restore(parts, whole.facts), CheckpointError);
  }
  auto facts = whole.facts;
  facts.pop_back();
  CHECK_THROWS_AS(restore(whole.parts, facts), CheckpointError);
  for (auto& part : whole.parts) {
    for (const auto& [name, tensor] : part) {
      if (!name.starts_with("row")) continue;
      CAPTURE(name);
      for (const auto& other : {tensor.narrow(0, 1, tensor.size(0) - 1), tensor.to(at::kHalf)}) {
        NamedTensors all = whole.tensors();
        all[name] = other;
        CHECK_THROWS_AS(restore({all}, whole.facts), CheckpointError);
      }
      if (!name.starts_with("rows/")) continue;
      NamedTensors all = whole.tensors();
      all[name] = tensor.flatten()[0].expand({tensor.numel()}).contiguous();
      CHECK_THROWS_AS(restore({all}, whole.facts), CheckpointError);
    }
  }
}

// A server's images are not all of one step where workers step on their own.
TEST_CASE("chunks and stripes that come back from different steps make each step once", "[server]") {
  const auto plan = mixed_plan(two_of_sgd(), kAnyStaleness);
  const auto shard = shard_of(plan);
  std::vector<std::vector<Image::Facts>> facts;            // by step
  std::vector<std::vector<std::vector<NamedTensors>>> of;  // by step and member
  for (uint64_t step = 1; step <= 2; ++step) {
    make_step(*shard, step);
    facts.emplace_back();
    of.emplace_back();
    for (const auto& image : shard->begin_images()) {
      facts.back().push_back(image->facts);
      auto& parts = of.back().emplace_back();
      for (auto part = image->next(); !part.empty(); part = image->next()) parts.push_back(std::move(part));
    }
  }
  const size_t members = shard->members().size();
  REQUIRE(members > shard->chunks().size() + 3);  // a table has several stripes
  std::vector<Image::Facts> mixed;
  for (size_t m = 0; m < members; ++m) mixed.push_back(facts[m % 2][m]);
  const auto back = shard_of(plan);
  ShardRestorer restorer(*back, mixed);
  for (size_t m = 0; m < members; ++m) {
    for (const auto& part : of[m % 2][m]) restorer.take(part);
  }
  restorer.finish();
  const auto steps = back->steps(0, 1);
  CHECK(steps.size() == back->chunks().size() + plan.tables.size());
  CHECK(steps[back->chunks().size()] == 1);  // the least of its stripes
  CHECK(back->least_step(0, 1) == 1);
  CHECK_FALSE(same(image_of(back), image_of(shard)));
  make_step(*back, 2);
  CHECK(back->held_bytes() == 0);
  CHECK(same(image_of(back), image_of(shard)));
}

TEST_CASE("who is at one stripe of a table keeps nobody from the others", "[server]") {
  const auto plan = mixed_plan(two_of_sgd());
  const auto shard = shard_of(plan);
  make_step(*shard, 1);
  const auto stripes = stripes_of(plan.tables[0], plan);
  REQUIRE(stripes.count() > 1);
  std::vector<int64_t> rows;
  for (int64_t row = 0; row < 100; ++row) {
    if (stripes.of(row) != 0) rows.push_back(row);
  }
  std::vector<float> values(rows.size() * 64), wanted(values.size());
  auto& tables = shard->tables();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  CHECK(tables.pull(0, 1, rows, wanted, deadline) == 1);
  const auto busy = shard->members()[shard->chunks().size()]->lock();
  CHECK(tables.pull(0, 1, rows, values, deadline) == 1);
  CHECK(values == wanted);
}

TEST_CASE("an image that is left at any point leaves the shard as it is", "[server]") {
  const auto shard = shard_of(mixed_plan(two_of_adam()));
  make_step(*shard, 1);
  const Whole expected = image_of(shard);
  for (size_t taken = 0; taken < expected.parts.size(); ++taken) {
    ShardImage image(shard, shard->begin_images());
    for (size_t i = 0; i < taken; ++i) image.next();
  }
  CHECK(same(image_of(shard), expected));
}

TEST_CASE("a server takes up the snapshot before one whose last file is damaged", "[server]") {
  const auto plan = mixed_plan(two_of_adam());
  const testing::Folder folder;
  const auto names = testing::server_names(1);
  const ServerConfig config{names[0], folder.path, std::chrono::milliseconds(1'000'000)};
  const auto rows_of_server = [&] {
    auto config = testing::config_of(names, 3, plan);
    config.patience = std::chrono::milliseconds(20'000);
    ServerClient client(config);
    return client.rows().fetch(0, 0);
  };
  std::vector<float> older;
  {
    ParameterServer server(config);
    ServerClient client(testing::config_of(names, 0, plan));
    std::vector<int64_t> rows(kRows);
    std::iota(rows.begin(), rows.end(), 0);
    const std::vector<float> values(rows.size() * 64, 2), states(rows.size() * 128, 3);
    client.start([&] { client.rows().write(0, rows, values, states); });
    older = rows_of_server().values;
    client.join();
    for (uint32_t c = 0; c < client.chunks().size(); ++c) {
      const std::vector<std::byte> zeros(static_cast<size_t>(client.chunks()[c].gradient_bytes()));
      const Bytes piece(zeros);
      client.push(1, c, {&piece, 1});
    }
    for (uint32_t t = 0; t < plan.tables.size(); ++t) {
      const auto dim = static_cast<size_t>(plan.tables[t].dim);
      const int64_t row = std::min(kRows, plan.tables[t].num_rows) / 2;
      client.rows().push(1, t, std::vector<int64_t>{row}, std::vector<float>(dim, 9));
    }
    client.flush();
    Apply command;
    command.step = 1;
    command.members = client.commit(1, {1}).members;
    command.groups = plan.groups;
    client.apply(command);
    CHECK(rows_of_server().values != older);
    server.snapshot();
  }
  std::vector<std::filesystem::path> snapshots;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path)) {
    if (entry.is_directory()) snapshots.push_back(entry.path());
  }
  std::sort(snapshots.begin(), snapshots.end());
  REQUIRE(snapshots.size() > 1);
  for (const auto& snapshot : std::span(snapshots).subspan(1)) {
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(snapshot)) files.push_back(entry.path());
    const auto last = *std::max_element(files.begin(), files.end());
    REQUIRE(last.filename() > "shard-00001");
    std::filesystem::resize_file(last, std::filesystem::file_size(last) - 1);
  }
  const ParameterServer server(config);
  CHECK(rows_of_server().values == older);
}
