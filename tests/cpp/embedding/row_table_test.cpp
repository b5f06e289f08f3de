#include "embedding/row_table.h"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <span>

#include "cpp/catch.h"
#include "cpp/kernels/support.h"
#include "muster/error.h"
#include "optimizer/flat_optimizer.h"

using namespace muster;

namespace {

using Rows = std::vector<int64_t>;
using Values = std::vector<float>;

constexpr kernels::StepScalars kPlain{.divisor = 1, .clip = 1, .norm = 0, .unit = 1, .finite = 1, .dropped = 0};

kernels::SgdGroup sgd(double momentum = 0, double weight_decay = 0) {
  return {0.1, momentum, 0, weight_decay, false, false};
}
kernels::AdamGroup adam(bool amsgrad) { return {0.01, 0.9, 0.99, 1e-8, 0, false, amsgrad, false}; }

const RowOptimizer kSgd = sgd();
const RowOptimizer kRowwise = kernels::RowwiseAdagradGroup{.lr = 0.1, .lr_decay = 0, .eps = 1e-8, .maximize = false};

RowInitialiser with_seed(uint64_t seed) { return {RowInitialiser::Kind::normal, 1, seed}; }

Values pulled(const RowTable& table, const Rows& rows) {
  Values values(rows.size() * static_cast<size_t>(table.dim()));
  table.pull(rows, values);
  return values;
}

Values random_values(size_t count, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  Values values(count);
  for (auto& value : values) value = normal(random);
  return values;
}

Rows some_rows(int64_t num_rows, size_t count, std::mt19937_64& random) {
  std::set<int64_t> rows;
  while (rows.size() < count) rows.insert(static_cast<int64_t>(random() % static_cast<uint64_t>(num_rows)));
  return {rows.begin(), rows.end()};
}

bool same_bits(const float* a, const float* b, size_t count) { return std::memcmp(a, b, count * sizeof(float)) == 0; }

}  // namespace

TEST_CASE("initial values follow from seed and row alone", "[server]") {
  const auto kind = GENERATE(RowInitialiser::Kind::normal, RowInitialiser::Kind::uniform);
  const RowInitialiser initialiser{kind, 0.5, 17};
  const RowTable table(1'000'000'000'000, 5, initialiser, kSgd);
  const Rows rows = {7, 0, 999'999'999'999, 7};
  const auto values = pulled(table, rows);
  CHECK(table.size() == 0);
  CHECK(same_bits(values.data(), values.data() + 15, 5));
  Values longer(9);
  initialiser.fill(7, longer);
  CHECK(same_bits(values.data(), longer.data(), 5));

  const std::set<float> different(values.begin(), values.begin() + 15);
  CHECK(different.size() == 15);
  Values other(5);
  RowInitialiser{kind, 0.5, 18}.fill(7, other);
  CHECK(other[0] != values[0]);
  RowInitialiser{kind, 0.5, 17 + (uint64_t{1} << 32)}.fill(7, other);
  CHECK(other[0] != values[0]);
}

TEST_CASE("initial values have the distribution that was asked for", "[server]") {
  constexpr size_t kCount = 1 << 20;
  const auto kind = GENERATE(RowInitialiser::Kind::normal, RowInitialiser::Kind::uniform);
  Values values(kCount);
  for (size_t row = 0; row < kCount / 64; ++row) {
    RowInitialiser{kind, 2, 3}.fill(static_cast<int64_t>(row), std::span(values).subspan(row * 64, 64));
  }
  std::sort(values.begin(), values.end());
  // Kolmogorov and Smirnov: at most 2.0 / sqrt(n), but for one seed in 1500.
  double distance = 0;
  for (size_t i = 0; i < kCount; ++i) {
    const double x = values[i] / 2.0;
    const double expected = kind == RowInitialiser::Kind::normal ? 0.5 * std::erfc(-x / std::sqrt(2.0)) : (x + 1) / 2;
    distance = std::max(distance, std::abs(expected - static_cast<double>(i) / kCount));
  }
  CHECK(distance < 2.0 / std::sqrt(static_cast<double>(kCount)));
  if (kind == RowInitialiser::Kind::uniform) {
    CHECK((values.front() >= -2 && values.back() <= 2));
  } else {
    CHECK((values.front() < -8.5 && values.back() > 8.5));
  }
}

TEST_CASE("the bits of initial values stay what they are", "[server]") {
  Values values(3);
  RowInitialiser{RowInitialiser::Kind::normal, 1, 1}.fill(2, values);
  // Philox4x32-10 with key 1 and counter (0, 0, 2, 0), and scipy.special.ndtri of its outputs.
  CHECK(values[0] == Approx(1.299638166).epsilon(2e-7));
  CHECK(values[1] == Approx(0.126932591).epsilon(2e-7));
  CHECK(values[2] == Approx(-0.686490441).epsilon(2e-7));
}

TEST_CASE("pushes have the bits of a flat optimizer's sparse rows", "[server]") {
  using Pair = std::pair<FlatGroups, RowOptimizer>;
  const kernels::AdagradGroup adagrad{0.1, 0.01, 1e-10, 0, true};
  const kernels::AdamGroup amsgrad{0.01, 0.9, 0.99, 1e-8, 0.1, true, true, true};
  const auto [flat_groups, row_optimizer] =
      GENERATE_COPY(Pair{std::vector{sgd()}, sgd()}, Pair{std::vector{adagrad}, adagrad},
                    Pair{std::vector{adagrad}, kernels::RowwiseAdagradGroup{0.1, 0.01, 1e-10, true}},
                    Pair{std::vector{adam(false)}, adam(false)}, Pair{std::vector{amsgrad}, amsgrad});
  const bool is_row_wise = std::holds_alternative<kernels::RowwiseAdagradGroup>(row_optimizer);
  constexpr int64_t kRows = 300;
  const int64_t dim = GENERATE(1, 7, 64);
  const RowInitialiser initialiser{RowInitialiser::Kind::normal, 1, 5};
  RowTable table(kRows, dim, initialiser, row_optimizer);
  Rows all(kRows);
  std::iota(all.begin(), all.end(), 0);
  auto initial = pulled(table, all);
  const auto weight = at::from_blob(initial.data(), {kRows, dim}).clone();
  FlatOptimizer flat({{"weight", weight, 0, is_row_wise}}, flat_groups);

  std::mt19937_64 random(3);
  for (int64_t step = 1; step <= 20; ++step) {
    auto rows = some_rows(kRows, 1 + random() % 90, random);
    auto gradients = random_values(rows.size() * static_cast<size_t>(dim), random);
    const auto n = static_cast<int64_t>(rows.size());
    kernels::StepScalars scalars = kPlain;
    scalars.divisor = step % 3 == 0 ? 3 : 8;
    scalars.clip = step % 2 == 0 ? 0.7 : 1;

    // In two parts, as of two chunks; and a copy, since flat may write its own.
    const auto half = static_cast<size_t>(n / 2);
    const auto width = static_cast<size_t>(dim);
    table.push(std::span(rows).first(half), std::span(gradients).first(half * width), row_optimizer, step, scalars);
    table.push(std::span(rows).subspan(half), std::span(gradients).subspan(half * width), row_optimizer, step, scalars);
    const auto sparse = at::_sparse_coo_tensor_unsafe(at::from_blob(rows.data(), {1, n}, at::kLong).clone(),
                                                      at::from_blob(gradients.data(), {n, dim}).clone(), {kRows, dim},
                                                      at::TensorOptions(at::kFloat).layout(at::kSparse))
                            ._coalesced_(true);
    flat.step({{.dense = {}, .sparse = sparse}}, flat_groups, &scalars, false);
    const auto values = pulled(table, all);
    REQUIRE(same_bits(values.data(), weight.const_data_ptr<float>(), values.size()));
  }
  const auto size = static_cast<size_t>(table.size());
  Rows rows(size);
  Values values(size * static_cast<size_t>(dim)), states(size * static_cast<size_t>(table.state_width()));
  table.export_rows(0, rows, values, states);
  for (size_t i = 0; i < size; ++i) {
    const int64_t width = is_row_wise ? 1 : dim;
    for (int64_t s = 0; s < table.state_width() / width; ++s) {
      const auto whole = flat.state().tensor(0, static_cast<size_t>(s));
      CHECK(same_bits(states.data() + static_cast<ptrdiff_t>(i) * table.state_width() + s * width,
                      whole.const_data_ptr<float>() + rows[i] * width, static_cast<size_t>(width)));
    }
  }
}

TEST_CASE("row-wise Adagrad has one accumulator a row", "[server]") {
  const size_t dim = GENERATE(size_t{1}, size_t{5}, size_t{32}, size_t{70}, size_t{2500});
  const bool maximize = GENERATE(false, true);
  const kernels::RowwiseAdagradGroup group{.lr = 0.3, .lr_decay = 0.1, .eps = 1e-3, .maximize = maximize};
  RowTable table(10, static_cast<int64_t>(dim), {}, group);
  CHECK(table.state_width() == 1);
  auto values = pulled(table, {4});
  std::mt19937_64 random(1);
  float sum = 0;
  for (int64_t step = 1; step <= 5; ++step) {
    const auto gradient = random_values(dim, random);
    kernels::StepScalars scalars = kPlain;
    scalars.divisor = 3;
    scalars.clip = 0.5;
    table.push(Rows{4}, gradient, group, step, scalars);

    Values mean(dim);
    for (size_t i = 0; i < dim; ++i) mean[i] = gradient[i] / 3.0F * 0.5F;
    double lanes[kernels::kLanes] = {};
    for (size_t i = 0; i < dim; ++i) {
      lanes[i % kernels::kLanes] += static_cast<double>(mean[i]) * static_cast<double>(mean[i]);
    }
    for (size_t half = kernels::kLanes / 2; half > 0; half /= 2) {
      for (size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
    }
    sum += static_cast<float>(lanes[0] / static_cast<double>(dim));
    const double decayed = 0.3 / (1 + static_cast<double>(step - 1) * 0.1);
    const auto rate = static_cast<float>(decayed / (std::sqrt(static_cast<double>(sum)) + 1e-3));
    for (size_t i = 0; i < dim; ++i) values[i] -= rate * (maximize ? -mean[i] : mean[i]);
    CHECK(same_bits(pulled(table, {4}).data(), values.data(), dim));
  }
  Rows rows(1);
  Values copy(dim), state(1);
  table.export_rows(0, rows, copy, state);
  CHECK(same_bits(state.data(), &sum, 1));
}

TEST_CASE("row-wise Adagrad is the same on every instruction set", "[server]") {
  using namespace kernels;
  std::mt19937_64 random(2);
  for (const size_t n : kernels::testing::kSizes) {
    const auto gradient = random_values(n, random), parameter = random_values(n, random);
    std::vector<std::pair<Values, float>> results;
    for (const auto& isa : kernels::testing::tables()) {
      auto g = gradient, p = parameter;
      float sum = 0.25F;
      StepSegment segment{};
      segment.gradient = g.data();
      segment.parameter = p.data();
      segment.state[0] = &sum;
      segment.n = n;
      StepScalars scalars = kPlain;
      scalars.divisor = 3;
      const RowwiseAdagradGroup group{.lr = 0.1, .lr_decay = 0, .eps = 1e-8, .maximize = false};
      isa.steps->rowwise_adagrad({DType::f32, &segment, 1, &scalars, true}, &group);
      for (size_t i = 0; i < n; ++i) REQUIRE(g[i] == gradient[i] / 3.0F);
      results.emplace_back(std::move(p), sum);
    }
    for (const auto& result : results) {
      CHECK(result.second == results[0].second);
      CHECK(same_bits(result.first.data(), results[0].first.data(), n));
    }
  }
}

TEST_CASE("values depend neither on the number of servers nor on the order of touches", "[server]") {
  constexpr int64_t kRows = 1000, kDim = 16;
  const RowOptimizer optimizer = adam(false);
  RowTable whole(kRows, kDim, with_seed(9), optimizer);
  std::vector<RowTable> servers;
  for (int s = 0; s < 3; ++s) servers.emplace_back(kRows, kDim, with_seed(9), optimizer);
  std::mt19937_64 random(4);
  for (int64_t step = 1; step <= 10; ++step) {
    const auto rows = some_rows(kRows, 200, random);
    const auto gradients = random_values(rows.size() * kDim, random);
    whole.push(rows, gradients, optimizer, step, kPlain);
    for (int s = 2; s >= 0; --s) {
      Rows own;
      Values of_own;
      for (size_t i = 0; i < rows.size(); ++i) {
        if (rows[i] % 3 != s) continue;
        own.push_back(rows[i]);
        of_own.insert(of_own.end(), gradients.begin() + static_cast<ptrdiff_t>(i) * kDim,
                      gradients.begin() + static_cast<ptrdiff_t>(i + 1) * kDim);
      }
      servers[static_cast<size_t>(s)].push(own, of_own, optimizer, step, kPlain);
    }
  }
  for (int64_t row = 0; row < kRows; ++row) {
    REQUIRE(pulled(whole, {row}) == pulled(servers[static_cast<size_t>(row % 3)], {row}));
  }
}

TEST_CASE("rows of many slabs keep their place", "[server]") {
  constexpr int64_t kRows = 1 << 20;
  const int64_t dim = GENERATE(64, 100'000);  // 2^13 rows a slab, and 8
  const int64_t touched = dim == 64 ? 100'000 : 50;
  RowTable table(kRows, dim, {}, kRowwise);
  Rows rows(static_cast<size_t>(touched));
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int64_t>(i) * 10;
  const Values gradients(rows.size() * static_cast<size_t>(dim), 1.0F);
  const auto before = pulled(table, rows);
  table.push(rows, gradients, kRowwise, 1, kPlain);
  CHECK(table.size() == touched);
  const auto after = pulled(table, rows);
  bool moved = true;
  for (size_t i = 0; i < before.size(); ++i) moved = moved && after[i] == before[i] - 0.1F;
  CHECK(moved);
  table.push(rows, gradients, kRowwise, 2, kPlain);
  CHECK(table.size() == touched);
}

TEST_CASE("an exported table goes on as the one that it came from", "[server]") {
  constexpr int64_t kRows = 5000, kDim = 3;
  const RowOptimizer optimizer = adam(true);
  RowTable table(kRows, kDim, with_seed(1), optimizer);
  std::mt19937_64 random(4);
  const auto push = [&](RowTable& to, int64_t step) {
    std::mt19937_64 own(static_cast<uint64_t>(step));
    const auto rows = some_rows(kRows, 800, own);
    to.push(rows, random_values(rows.size() * kDim, own), optimizer, step, kPlain);
  };
  for (int64_t step = 1; step <= 5; ++step) push(table, step);

  RowTable copy(kRows, kDim, with_seed(1), optimizer);
  for (int64_t first = 0; first < table.size(); first += 700) {
    const auto count = static_cast<size_t>(std::min<int64_t>(700, table.size() - first));
    Rows rows(count);
    Values values(count * kDim), states(count * static_cast<size_t>(table.state_width()));
    table.export_rows(first, rows, values, states);
    copy.import_rows(rows, values, states);
  }
  CHECK(copy.size() == table.size());
  for (int64_t step = 6; step <= 9; ++step) {
    push(table, step);
    push(copy, step);
  }
  Rows all(kRows);
  std::iota(all.begin(), all.end(), 0);
  CHECK(pulled(copy, all) == pulled(table, all));
}

TEST_CASE("a skipped or dropped window changes nothing", "[server]") {
  RowTable table(10, 2, {}, kSgd);
  auto scalars = kPlain;
  SECTION("skipped") { scalars.finite = 0; }
  SECTION("dropped") { scalars.dropped = 1; }
  table.push(Rows{3}, Values{1, 1}, kSgd, 1, scalars);
  CHECK(table.size() == 0);
}

TEST_CASE("what a table cannot do is refused, and changes nothing", "[server]") {
  RowTable table(10, 2, {}, kSgd);
  const auto before = pulled(table, {1, 2, 3});
  Values values(2);
  CHECK_THROWS_AS(table.pull(Rows{10}, values), InvalidArgument);
  CHECK_THROWS_AS(table.pull(Rows{-1}, values), InvalidArgument);
  CHECK_THROWS_AS(table.pull(Rows{1, 2}, values), InvalidArgument);
  CHECK_THROWS_AS(table.push(Rows{1, 10}, Values(4), kSgd, 1, kPlain), InvalidArgument);
  CHECK_THROWS_AS(table.push(Rows{1, 1}, Values(4), kSgd, 1, kPlain), InvalidArgument);
  CHECK_THROWS_AS(table.push(Rows{2, 1}, Values(4), kSgd, 1, kPlain), InvalidArgument);
  CHECK_THROWS_AS(table.push(Rows{1, 2}, Values(3), kSgd, 1, kPlain), InvalidArgument);
  CHECK_THROWS_AS(table.push(Rows{1}, Values(2), kSgd, 0, kPlain), InvalidArgument);
  CHECK_THROWS_AS(table.push(Rows{1}, Values(2), kRowwise, 1, kPlain), InvalidArgument);
  CHECK_THROWS_AS(table.push(Rows{1}, Values(2), sgd(0.9), 1, kPlain), InvalidArgument);
  Rows rows(1);
  CHECK_THROWS_AS(table.export_rows(0, rows, values, {}), InvalidArgument);
  CHECK_THROWS_AS(table.import_rows(Rows{11}, values, {}), InvalidArgument);
  CHECK_THROWS_AS(table.import_rows(Rows{1}, values, values), InvalidArgument);
  CHECK_THROWS_AS(RowTable(0, 1, {}, kSgd), InvalidArgument);
  CHECK_THROWS_AS(RowTable(1, 0, {}, kSgd), InvalidArgument);
  CHECK_THROWS_AS(RowTable(1, 1, {}, sgd(0, 0.1)), InvalidArgument);
  CHECK_THROWS_AS(RowTable(1, 1, {}, kernels::AdagradGroup{0.1, 0, 1e-10, 0.1, false}), InvalidArgument);
  CHECK(table.size() == 0);
  CHECK(pulled(table, {1, 2, 3}) == before);
  RowTable plain(10, 2, {}, adam(false));
  CHECK_THROWS_AS(plain.push(Rows{1}, Values(2), adam(true), 1, kPlain), InvalidArgument);
}

namespace {

struct Copied {
  Rows rows;
  Values values, states;

  bool operator==(const Copied&) const = default;
};

Copied sized(const RowTable& table, int64_t rows) {
  const auto count = static_cast<size_t>(rows);
  return {Rows(count), Values(count * static_cast<size_t>(table.dim())),
          Values(count * static_cast<size_t>(table.state_width()))};
}

Copied exported(const RowTable& table) {
  Copied all = sized(table, table.size());
  table.export_rows(0, all.rows, all.values, all.states);
  return all;
}

// Appends the image's next block; false where there was none.
bool append_block(RowTable& table, Copied& image) {
  Copied block = sized(table, table.image_block_rows());
  if (block.rows.empty()) return false;
  table.copy_image_block(block.rows, block.values, block.states);
  image.rows.insert(image.rows.end(), block.rows.begin(), block.rows.end());
  image.values.insert(image.values.end(), block.values.begin(), block.values.end());
  image.states.insert(image.states.end(), block.states.begin(), block.states.end());
  return true;
}

}  // namespace

TEST_CASE("an image has the rows of the moment it began, whatever changes between its blocks", "[server]") {
  constexpr int64_t kRows = 1 << 20;
  const RowOptimizer optimizer = GENERATE(RowOptimizer(sgd()), RowOptimizer(adam(true)), kRowwise);
  const int64_t dim = GENERATE(int64_t{20}, int64_t{4'000});
  const auto touched = static_cast<size_t>(dim == 20 ? 100'000 : 900);  // several blocks, the last of which is smaller
  RowTable table(kRows, dim, with_seed(9), optimizer);
  std::mt19937_64 random(5);
  int64_t step = 0;
  const auto push = [&](const Rows& rows) {
    table.push(rows, random_values(rows.size() * static_cast<size_t>(dim), random), optimizer, ++step, kPlain);
  };
  push(some_rows(kRows, touched, random));
  for (int round = 0; round < 2; ++round) {
    const Copied before = exported(table);
    CHECK(table.begin_image() == table.size());
    Copied image;
    size_t blocks = 0;
    for (bool goes_on = true; goes_on;) {
      // Rows of every slab, some twice, and some that are new; then an import.
      for (int i = 0; i < 2; ++i) {
        Rows rows = some_rows(kRows, 50, random);
        for (int old = 0; old < 50; ++old) rows.push_back(before.rows[random() % before.rows.size()]);
        std::sort(rows.begin(), rows.end());
        rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
        push(rows);
      }
      const Rows imported = {before.rows.front(), before.rows.back()};
      table.import_rows(imported, Values(2 * static_cast<size_t>(dim), 7.0F),
                        Values(2 * static_cast<size_t>(table.state_width()), 8.0F));
      goes_on = append_block(table, image);
      blocks += goes_on ? 1 : 0;
    }
    CHECK(blocks > 1);
    CHECK(image == before);
    CHECK(table.image_block_rows() == 0);
    table.end_image();
  }
}

TEST_CASE("a cut has the rows of the moment it began in their order, beside an image", "[server]") {
  constexpr int64_t kRows = 1 << 20;
  constexpr int64_t kDim = 20;
  const RowOptimizer optimizer = GENERATE(RowOptimizer(sgd()), RowOptimizer(adam(true)), kRowwise);
  RowTable table(kRows, kDim, with_seed(9), optimizer);
  std::mt19937_64 random(5);
  int64_t step = 0;
  const auto push = [&](const Rows& rows) {
    table.push(rows, random_values(rows.size() * static_cast<size_t>(kDim), random), optimizer, ++step, kPlain);
  };
  for (int i = 0; i < 3; ++i) push(some_rows(kRows, 3'000, random));  // which do not ascend over the pushes
  const Copied before = exported(table);
  CHECK(table.begin_cut() == table.size());
  table.begin_image();
  CHECK_THROWS_AS(table.begin_cut(), InvalidArgument);
  Rows rows(before.rows.size());
  table.export_numbers(0, rows);
  CHECK(rows == before.rows);
  std::sort(rows.begin(), rows.end());
  std::map<int64_t, size_t> place;
  for (size_t i = 0; i < before.rows.size(); ++i) place[before.rows[i]] = i;

  Copied image;
  const auto width = static_cast<size_t>(table.state_width());
  constexpr size_t kAtOnce = 500;
  bool is_same = true;
  for (size_t begin = 0; begin < rows.size(); begin += kAtOnce) {
    Rows changed = some_rows(kRows, 50, random);
    for (int old = 0; old < 300; ++old) changed.push_back(rows[random() % rows.size()]);
    std::sort(changed.begin(), changed.end());
    changed.erase(std::unique(changed.begin(), changed.end()), changed.end());
    push(changed);
    const auto block = std::span(rows).subspan(begin, std::min(kAtOnce, rows.size() - begin));
    Values values(block.size() * kDim), states(block.size() * width);
    table.copy_cut(block, values, states);
    for (size_t i = 0; i < block.size(); ++i) {
      const size_t p = place.at(block[i]);
      is_same = is_same && same_bits(&values[i * kDim], &before.values[p * kDim], kDim) &&
                (width == 0 || same_bits(&states[i * width], &before.states[p * width], width));
    }
    append_block(table, image);
  }
  CHECK(is_same);
  while (append_block(table, image)) continue;
  CHECK(image == before);
  table.end_image();
  table.end_cut();
  Values values(kDim), states(width);
  CHECK_THROWS_AS(table.copy_cut(std::span(rows).first(1), values, states), InvalidArgument);
  CHECK_THROWS_AS(table.export_numbers(table.size(), std::span(rows).first(1)), InvalidArgument);
}

TEST_CASE("an image may be left before its end, and one of no rows has no block", "[server]") {
  RowTable table(100, 2, {}, kSgd);
  CHECK(table.begin_image() == 0);
  CHECK(table.image_block_rows() == 0);
  Rows rows(1);
  Values values(2);
  CHECK_THROWS_AS(table.copy_image_block(rows, values, {}), InvalidArgument);
  table.push(Rows{3}, Values(2, 1), kSgd, 1, kPlain);
  CHECK(table.image_block_rows() == 0);
  table.end_image();

  const Copied before = exported(table);
  CHECK(table.begin_image() == 1);
  table.push(Rows{3}, Values(2, 1), kSgd, 2, kPlain);
  table.end_image();
  CHECK(table.image_block_rows() == 0);
  table.begin_image();
  CHECK_THROWS_AS(table.begin_image(), InvalidArgument);
  CHECK_THROWS_AS(table.copy_image_block({}, {}, {}), InvalidArgument);
  Copied image;
  while (append_block(table, image)) {
  }
  CHECK(image == exported(table));
  CHECK(image != before);
}
