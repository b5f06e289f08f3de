#include "window/embedding_rows.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "embedding/row_source.h"

namespace muster {

using server::Part;

namespace {

constexpr Part kParameter[] = {Part::parameter};

// Floats a row.
int64_t width_of(const server::TableSpec& spec, Part part) {
  return part != Part::parameter && spec.row_wise_adagrad ? 1 : spec.dim;
}

}  // namespace

// Asked by the forward of any replica's embedding, in a step.
class RowsOnServers::Source : public RowSource {
 public:
  Source(RowsOnServers& rows, size_t table) : rows_(rows), table_(table) {}

  at::Tensor pull(const at::Tensor& rows) override {
    const auto numbers = rows.contiguous();
    auto values = at::empty({numbers.numel(), rows_.plan_.tables[table_].dim}, at::kFloat);
    const std::lock_guard lock(rows_.in_step_);
    rows_.client_.rows().pull(static_cast<uint32_t>(table_), rows_.at_least_, span_of<int64_t>(numbers),
                              span_of<float>(values));
    return values;
  }

  at::Tensor whole() override {
    const std::lock_guard lock(rows_.in_step_);
    return rows_.fetch(table_, kParameter)[0];
  }

 private:
  RowsOnServers& rows_;
  size_t table_;
};

void RowsOnServers::add(const at::Tensor& weight, size_t position, std::shared_ptr<const TableContents> contents) {
  tables_.push_back({weight, position, std::move(contents), 0, !is_row_stub(weight), nullptr});
}

void RowsOnServers::give(const FlatOptimizer& optimizer) {
  constexpr int64_t kBlockElements = int64_t{1} << 20;
  for (size_t t = 0; t < tables_.size(); ++t) {
    const auto table = static_cast<uint32_t>(t);
    const auto& spec = plan_.tables[t];
    const auto& weight = tables_[t].weight;
    const auto position = tables_[t].position;
    const auto& steps = optimizer.state().entry(position).step;
    if (steps.defined()) client_.rows().write_steps(table, static_cast<uint64_t>(steps.item<float>()));
    if (!tables_[t].was_here) {
      if (tables_[t].contents) give_contents(table, *tables_[t].contents);
      continue;
    }
    const int64_t block = std::max<int64_t>(kBlockElements / spec.dim, 1);
    for (int64_t begin = 0; begin < spec.num_rows; begin += block) {
      const int64_t count = std::min(block, spec.num_rows - begin);
      const auto values = weight.detach().narrow(0, begin, count).contiguous();
      const auto first = at::empty_like(values);
      spec.initialiser.fill_rows(first, begin);
      std::vector<at::Tensor> states;
      for (const auto part : {Part::state0, Part::state1, Part::state2}) {
        const auto state = part_of(weight, optimizer, position, part);
        if (state.defined()) states.push_back(state.narrow(0, begin, count));
      }
      auto state = at::zeros({count, client_.rows().state_width(table)}, at::kFloat);
      if (!states.empty()) state.copy_(at::cat(states, 1));
      const auto differs = values.ne(first).any(1).logical_or(state.ne(0).any(1));
      const auto rows = differs.nonzero().view({-1});
      if (rows.numel() == 0) continue;
      const auto numbers = at::add(rows, begin);
      const auto written = values.index_select(0, rows);
      state = state.index_select(0, rows);
      client_.rows().write(table, span_of<int64_t>(numbers), span_of<float>(written), span_of<float>(state));
    }
  }
}

void RowsOnServers::give_contents(uint32_t table, const TableContents& contents) {
  auto states = contents.states;
  if (states.size(1) == 0) states = at::zeros({states.size(0), client_.rows().state_width(table)}, at::kFloat);
  client_.rows().write(table, span_of<int64_t>(contents.rows), span_of<float>(contents.values), span_of<float>(states));
  client_.rows().write_steps(table, contents.steps);
}

void RowsOnServers::leave() {
  for (size_t t = 0; t < tables_.size(); ++t) {
    auto& table = tables_[t];
    table.contents = nullptr;
    if (table.was_here) table.weight.set_data(make_row_stub(plan_.tables[t].num_rows, plan_.tables[t].dim));
    table.version = table.weight._version();
    table.source = std::make_shared<Source>(*this, t);
    set_row_source(table.weight, table.source);
  }
}

void RowsOnServers::bring_back() noexcept {
  for (size_t t = 0; t < tables_.size(); ++t) {
    if (!tables_[t].was_here) continue;
    try {
      tables_[t].weight.set_data(fetch(t, kParameter)[0]);
    } catch (const std::exception&) {
      return;
    }
  }
}

bool RowsOnServers::was_written(size_t table) const {
  const auto& weight = tables_[table].weight;
  return weight._version() != tables_[table].version || !is_row_stub(weight);
}

void RowsOnServers::push(uint64_t step, size_t t, const at::Tensor& sums) {
  const auto table = static_cast<uint32_t>(t);
  if (!sums.defined()) return client_.rows().push(step, table, {}, {});
  const auto rows = sums._indices().view({-1}).contiguous();
  const auto values = sums._values().contiguous();
  client_.rows().push(step, table, span_of<int64_t>(rows), span_of<float>(values));
}

TableContents RowsOnServers::contents(size_t t) {
  const auto table = static_cast<uint32_t>(t);
  const auto kept = std::make_shared<server::TableRows>(client_.rows().fetch(table, at_least_));
  const auto count = static_cast<int64_t>(kept->rows.size());
  const auto tensor = [&](auto& values, at::IntArrayRef sizes, at::ScalarType dtype) {
    return at::from_blob(values.data(), sizes, [kept](void*) {}, dtype);
  };
  return {tensor(kept->rows, {count}, at::kLong), tensor(kept->values, {count, plan_.tables[t].dim}, at::kFloat),
          tensor(kept->states, {count, client_.rows().state_width(table)}, at::kFloat), kept->steps};
}

std::vector<at::Tensor> RowsOnServers::fetch(size_t table, std::span<const Part> parts) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> found(parts.size());
  if (std::none_of(parts.begin(), parts.end(), [&](Part part) { return has(table, part); })) return found;
  auto touched = client_.rows().fetch(static_cast<uint32_t>(table), at_least_);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (has(table, parts[i])) found[i] = whole(table, parts[i], touched);
  }
  return found;
}

bool RowsOnServers::has(size_t table, Part part) const {
  if (part == Part::parameter || part == Part::steps) return true;
  if (part == Part::master) return false;
  const int64_t which = static_cast<int64_t>(part) - static_cast<int64_t>(Part::state0);
  return (which + 1) * width_of(plan_.tables[table], part) <= client_.rows().state_width(static_cast<uint32_t>(table));
}

at::Tensor RowsOnServers::whole(size_t table, Part part, server::TableRows& touched) const {
  if (part == Part::steps) return at::scalar_tensor(static_cast<double>(touched.steps), at::kFloat);
  const auto& spec = plan_.tables[table];
  const int64_t width = width_of(spec, part);
  auto whole = at::zeros({spec.num_rows, width}, at::kFloat);
  if (part == Part::parameter) spec.initialiser.fill_rows(whole);
  const auto count = static_cast<int64_t>(touched.rows.size());
  if (count == 0) return whole;
  const auto rows = at::from_blob(touched.rows.data(), {count}, at::kLong);
  auto& values = part == Part::parameter ? touched.values : touched.states;
  const auto all = at::from_blob(values.data(), {count, static_cast<int64_t>(values.size()) / count}, at::kFloat);
  if (part == Part::parameter) return whole.index_copy_(0, rows, all);
  const int64_t which = static_cast<int64_t>(part) - static_cast<int64_t>(Part::state0);
  return whole.index_copy_(0, rows, all.narrow(1, which * width, width));
}

}  // namespace muster
