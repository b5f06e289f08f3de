// What must have come of a simulated job.
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <ranges>

#include "optimizer/flat_optimizer.h"
#include "support/simulated_world.h"

namespace muster::testing {

using namespace server;

// Small multiples of 1/8: their sums are exact.
double gradient_of(uint32_t rank, uint64_t step, int parameter, int64_t element) {
  const auto mixed = static_cast<int64_t>(rank * 7 + step * 13) + parameter * 5 + element * 3;
  return static_cast<double>(mixed % 17 - 8) / 8;
}

int64_t row_of_step(uint64_t step) { return kElements + static_cast<int64_t>(step % kElements); }

int64_t row_of_batch(uint64_t job, uint64_t batch) {
  return 2 * kElements + static_cast<int64_t>(job * kElements + batch) % (kRows - 2 * kElements);
}

std::vector<std::byte*> landing_of(const ServerClient& client, std::vector<std::vector<std::byte>>& memory) {
  std::vector<std::byte*> landing;
  for (uint32_t c = 0; c < client.chunks().size(); ++c) {
    landing.push_back(memory.emplace_back(client.part_bytes(c, Part::parameter)).data());
  }
  return landing;
}

World::Values World::values_in(ServerClient& client, const std::vector<std::byte*>& landing, uint64_t at_least) {
  Values values;
  for (uint32_t c = 0; c < client.chunks().size(); ++c) {
    const auto& chunk = client.chunks()[c];
    for (const auto& piece : chunk.pieces) {
      auto& of_piece = values.parameters.emplace_back();
      for (int64_t e = 0; e < kElements; ++e) {
        if (chunk.dtype == at::kDouble) {
          std::memcpy(&of_piece.emplace_back(), landing[c] + (piece.offset + e) * 8, 8);
        } else {
          float value = 0;
          std::memcpy(&value, landing[c] + (piece.offset + e) * 4, 4);
          of_piece.push_back(value);
        }
      }
    }
  }
  if (plan_.tables.empty()) return values;
  std::vector<int64_t> rows(2 * kElements);
  std::iota(rows.begin(), rows.end(), 0);
  for (int64_t batch = 0; setup_.deals && batch < kElements; ++batch) {
    rows.push_back(row_of_batch(job_, static_cast<uint64_t>(batch)));
  }
  std::vector<float> of_rows(rows.size() * kDim);
  client.rows().pull(0, at_least, rows, of_rows);
  for (size_t row = 0; row < rows.size(); ++row) {
    values.rows.push_back(of_rows[row * kDim]);
    for (int64_t d = 1; d < kDim; ++d) {
      if (of_rows[row * kDim + static_cast<size_t>(d)] != values.rows.back()) fail("a row is torn");
    }
  }
  return values;
}

// A job that begins after this one finds them.
World::Values World::read_values() {
  Values values;
  auto& life = *lives_.emplace_back(std::make_unique<Life>());
  life.rank = kChief;
  life.number = lives_.size() - 1;
  life.job = job_ + ++reads_;
  life.until = now_;
  start_thread(life, [&] {
    ServerClient client(config_of(life, /*joins=*/false));
    if (!client.is_started()) return fail("the servers hold no values");
    client.join();
    std::vector<std::vector<std::byte>> memory;
    const auto to = landing_of(client, memory);
    client.read(Part::parameter, 0, to);
    values = values_in(client, to, 0);
    client.leave();
  });
  const auto limit = now_ + std::chrono::seconds(150);
  while (!life.is_over && now_ < limit) {
    if (act()) continue;
    now_ += milliseconds(10);
    for (auto& server : servers_) {
      if (server->core) server->core->expire(now_ - std::exchange(server->looked, now_));
    }
  }
  if (!life.is_over) {
    kill_life(life);
    fail("who reads the values waits for ever");
  }
  if (!life.error.empty()) fail("the values cannot be read: " + life.error);
  return values;
}

void World::check_values() {
  const auto values = read_values();
  if (!failure_.empty()) return;
  if (setup_.is_thorough && plan_.is_synchronous()) return check_trained(values);
  check_counts(values);
  if (setup_.deals && failure_.empty()) check_batches(values);
}

// By element, how often a worker's (of synchronous steps) or a life's steps may have been counted; nothing for elements
// that are nobody's.
std::optional<std::pair<uint64_t, uint64_t>> World::counts_of(size_t element) const {
  if (plan_.is_synchronous()) {
    uint64_t count = 0;
    for (const auto& [step, members] : members_) {
      count += std::count(members.begin(), members.end(), static_cast<uint32_t>(element)) > 0 ? 1 : 0;
    }
    return {{count, count}};
  }
  if (element >= lives_.size()) return std::nullopt;
  const auto& life = *lives_[element];
  if (life.first == Life::kNobody || (setup_.begins_anew && life.job != job_)) return {{0, 0}};
  if (life.has_left) return {{life.acked - life.first, life.acked - life.first}};
  const uint64_t durable = damages_ > 0 ? life.durable.all : life.durable.newest;
  const uint64_t least = have_servers_died_ ? durable : life.acked;
  return {{std::max(least, life.first) - life.first, life.begun - life.first}};
}

void World::check_counts(const Values& values) {
  for (size_t element = 0; element < kElements; ++element) {
    const auto bounds = counts_of(element);
    if (!bounds) continue;
    auto all = values.parameters;  // and rows
    if (!values.rows.empty()) all.push_back(values.rows);
    for (const auto& of_parameter : all) {
      const auto count = static_cast<uint64_t>(-of_parameter[element]);
      if (count >= bounds->first && count <= bounds->second) continue;
      for (const auto& [step, members] : members_) {
        say("step " + std::to_string(step) + " has " + std::to_string(members.size()) + " members");
      }
      std::string counts;
      for (const auto& each : all) counts += " " + std::to_string(static_cast<int64_t>(-each[element]));
      say("parameters have" + counts);
      return fail("element " + std::to_string(element) + " was counted " + std::to_string(count) + " times, not " +
                  std::to_string(bounds->first) + " to " + std::to_string(bounds->second));
    }
  }
}

// Each batch of the last job's pass once, but for those of steps of a worker that died which one server has made and
// another not. Where servers died, too, any step may be one that is not in all their snapshots.
void World::check_batches(const Values& values) {
  std::set<uint64_t> may_differ;
  for (const auto& life : lives_) {
    if (life->job != job_ || life->has_left || life->batches.empty()) continue;
    uint64_t sure = damages_ > 0 ? life->durable.all : life->durable.newest;
    uint64_t last = life->batches.rbegin()->first;
    if (!have_servers_died_) {
      const auto made = [&](const auto& of_parameter) { return static_cast<uint64_t>(-of_parameter[life->number]); };
      const auto [least, most] = std::ranges::minmax(values.parameters | std::views::transform(made));
      sure = life->first + least;
      last = life->first + most;
    }
    for (const auto& [step, batch] : life->batches) {
      if (step > sure && step <= last) may_differ.insert(batch);
    }
  }
  for (uint64_t batch = 0; batch < setup_.steps; ++batch) {
    const double count = -values.rows[2 * kElements + batch];
    if (count == 1 || may_differ.contains(batch)) continue;
    return fail("batch " + std::to_string(batch) + " of the last job was trained on " +
                std::to_string(static_cast<int64_t>(count)) + " times");
  }
}

std::vector<std::vector<double>> World::trained(size_t p, const std::set<uint64_t>& by_joiner) const {
  const auto& spec = plan_.parameters[p];
  const auto own = at::zeros({kElements}, spec.dtype);
  FlatOptimizer optimizer({{spec.name, own, 0}}, groups_of(setup_, false));
  const kernels::StepScalars scalars{.divisor = 1, .clip = 1, .norm = 0, .unit = 1, .finite = 1, .dropped = 0};
  std::vector<std::vector<double>> by_step;
  for (const auto& [step, members] : members_) {
    const auto sum = at::zeros({kElements}, at::kDouble);
    auto* const elements = sum.mutable_data_ptr<double>();
    for (int64_t e = 0; e < kElements; ++e) {
      for (const uint32_t rank : members) elements[e] += gradient_of(rank, step, static_cast<int>(p), e);
    }
    std::vector<FlatGradient> sums(1);
    sums.front().dense = sum.to(spec.dtype);
    optimizer.step(std::move(sums), groups_of(setup_, by_joiner.contains(step)), &scalars, /*keep=*/false);
    const auto doubles = own.to(at::kDouble);
    const auto* const first = doubles.const_data_ptr<double>();
    by_step.emplace_back(first, first + kElements);
  }
  return by_step;
}

bool World::is_trained(size_t p, const Values& values, const std::set<uint64_t>& by_joiner) const {
  const auto expected = trained(p, by_joiner);
  const auto is_as_read = [&](const auto& read) { return read.second.parameters[p] == expected[read.first - 1]; };
  return expected.back() == values.parameters[p] && std::all_of(values_.begin(), values_.end(), is_as_read);
}

World::Hyperparameters World::hyperparameters_in(uint64_t step, const std::vector<uint32_t>& members) const {
  std::vector<const Life*> takers;
  uint64_t senior = Life::kNobody;
  for (const uint32_t rank : members) {
    const Life* taker = nullptr;
    for (const auto& life : lives_) {
      if (life->rank == rank && life->job <= job_ && life->first < step && life->begun >= step) taker = life.get();
    }
    if (taker == nullptr) continue;
    takers.push_back(taker);
    if (taker->acked >= step) senior = std::min(senior, taker->first);
  }
  // Those of one who died with the step may have come before, to one server and not to another.
  Hyperparameters may;
  for (const auto* const taker : takers) {
    if (taker->acked >= step && taker->first > senior) continue;
    (is_late(*taker) ? may.joiners : may.firsts) = true;
  }
  return may;
}

// What the same optimizer makes of the steps' members, in one process, after each step.
void World::check_trained(const Values& values) {
  std::vector<double> rows(2 * kElements);
  std::set<uint64_t> by_joiner;
  std::vector<uint64_t> open;  // steps that may have either's hyperparameters
  uint64_t next = 1;
  for (const auto& [step, members] : members_) {
    if (step != next++) return fail("nobody knows who took part in step " + std::to_string(step - 1));
    for (const uint32_t rank : members) {
      --rows[rank];
      --rows[static_cast<size_t>(row_of_step(step))];
    }
    const auto read = values_.find(step);
    if (read != values_.end() && read->second.rows != rows) {
      return fail("the rows that workers read after step " + std::to_string(step) + " are not what its members make");
    }
    const auto may = hyperparameters_in(step, members);
    if (may.joiners && !may.firsts) by_joiner.insert(step);
    if (may.joiners && may.firsts) open.push_back(step);
  }
  if (next != setup_.steps + 1) return fail("the last steps are nobody's");
  if (values.rows != rows) return fail("the rows are not those of " + std::to_string(setup_.steps) + " steps");
  for (size_t p = 0; p < plan_.parameters.size(); ++p) {
    bool is_right = false;
    for (uint64_t choice = 0; choice < uint64_t{1} << open.size() && !is_right; ++choice) {
      auto chosen = by_joiner;
      for (size_t i = 0; i < open.size(); ++i) {
        if ((choice >> i & 1) != 0) chosen.insert(open[i]);
      }
      is_right = is_trained(p, values, chosen);
    }
    if (!is_right) return fail("parameter " + std::to_string(p) + " was, at some step, not what its members make");
  }
}

}  // namespace muster::testing
