// A stripe of a table in snapshots.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>

#include "muster/error.h"
#include "server/shard/held_table.h"
#include "server/shard/image.h"

namespace muster::server {

namespace {

template <class T>
std::span<T> span_of(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr<T>(), static_cast<size_t>(tensor.numel())};
}

// Names of files' tensors, which say which of the image's rows is the first.
std::string name_of(const char* what, const HeldTable& table, uint64_t first) {
  return std::string(what) + "/" + table.spec.name + "/" + std::to_string(table.stripe) + "/" + std::to_string(first);
}
std::string rows_name(const HeldTable& table, uint64_t first) { return name_of("rows", table, first); }
std::string values_name(const HeldTable& table, uint64_t first) { return name_of("row_values", table, first); }
std::string states_name(const HeldTable& table, uint64_t first) { return name_of("row_states", table, first); }

const at::Tensor& tensor_of(const checkpoint::NamedTensors& tensors, const std::string& name, uint64_t numel,
                            at::ScalarType dtype) {
  const auto found = tensors.find(name);
  if (found == tensors.end() || static_cast<uint64_t>(found->second.numel()) != numel ||
      found->second.scalar_type() != dtype) {
    throw CheckpointError("a snapshot lacks '" + name + "', or has another shape or dtype; use an older snapshot");
  }
  return found->second;
}

uint64_t row_bytes_of(const HeldTable& table, const Image::Facts& facts) {
  return facts.rows * static_cast<uint64_t>(table.spec.dim + table.rows.state_width()) * sizeof(float);
}

class TableImage final : public Image {
 public:
  TableImage(HeldTable& table, Facts facts) : Image(std::move(facts)), table_(table) {}

  ~TableImage() override {
    const std::unique_lock ending(table_.rows_mutex);
    table_.rows.end_image();
    table_.image_ended.notify_all();
  }

  uint64_t row_bytes() const override { return row_bytes_of(table_, facts); }

  checkpoint::NamedTensors next() override {
    const int64_t count = rows_of_block();
    if (count == 0) return {};
    const auto rows = at::empty({count}, at::kLong);
    const auto values = at::empty({count, table_.spec.dim}, at::kFloat);
    const auto states = at::empty({count, table_.rows.state_width()}, at::kFloat);
    {
      const std::shared_lock reading(table_.rows_mutex);
      table_.rows.copy_image_block(span_of<int64_t>(rows), span_of<float>(values), span_of<float>(states));
    }
    checkpoint::NamedTensors tensors;
    tensors[rows_name(table_, first_)] = rows;
    tensors[values_name(table_, first_)] = values;
    if (states.numel() > 0) tensors[states_name(table_, first_)] = states;
    first_ += static_cast<uint64_t>(count);
    return tensors;
  }

 private:
  int64_t rows_of_block() const {
    const std::shared_lock reading(table_.rows_mutex);
    return table_.rows.image_block_rows();
  }

  HeldTable& table_;
  uint64_t first_ = 0;
};

// Its rows are read from the stripe.
class StripeCut final : public Image {
 public:
  StripeCut(HeldTable& table, Facts facts) : Image(std::move(facts)), table_(table) {}

  ~StripeCut() override {
    const std::unique_lock ending(table_.rows_mutex);
    table_.rows.end_cut();
  }

  uint64_t row_bytes() const override { return row_bytes_of(table_, facts); }
  checkpoint::NamedTensors next() override { return {}; }

 private:
  HeldTable& table_;
};

}  // namespace

std::unique_ptr<Image> HeldTable::begin_image() {
  auto facts = facts_of_steps();
  facts.counted = counted;
  std::unique_lock beginning(rows_mutex);
  image_ended.wait(beginning, [&] { return !rows.has_image(); });
  facts.rows = static_cast<uint64_t>(rows.begin_image());
  return std::make_unique<TableImage>(*this, std::move(facts));
}

std::unique_ptr<Image> HeldTable::begin_cut() {
  auto facts = facts_of_steps();
  facts.counted = counted;
  const std::unique_lock beginning(rows_mutex);
  facts.rows = static_cast<uint64_t>(rows.begin_cut());
  return std::make_unique<StripeCut>(*this, std::move(facts));
}

std::vector<int64_t> HeldTable::first_rows(uint64_t count) {
  constexpr size_t kSlice = size_t{1} << 16;
  std::vector<int64_t> numbers(count);
  for (size_t first = 0; first < count; first += kSlice) {
    const std::shared_lock reading(rows_mutex);
    rows.export_numbers(static_cast<int64_t>(first),
                        std::span(numbers).subspan(first, std::min(kSlice, count - first)));
  }
  return numbers;
}

void HeldTable::copy_cut(std::span<const int64_t> numbers, std::span<float> values, std::span<float> states) {
  const std::shared_lock reading(rows_mutex);
  rows.copy_cut(numbers, values, states);
}

bool HeldTable::restore(const Image::Facts& facts, const checkpoint::NamedTensors& tensors) {
  const auto lock = this->lock();
  const std::unique_lock writing(rows_mutex);
  counted = facts.counted;
  restore_steps(facts);
  const auto dim = static_cast<uint64_t>(spec.dim);
  const auto width = static_cast<uint64_t>(rows.state_width());
  const auto size = [&] { return static_cast<uint64_t>(rows.size()); };
  while (size() < facts.rows) {
    const uint64_t first = size();
    const auto found = tensors.find(rows_name(*this, first));
    if (found == tensors.end()) return false;
    const auto count = static_cast<uint64_t>(found->second.numel());
    const auto& numbers = tensor_of(tensors, found->first, count, at::kLong);
    const auto& values = tensor_of(tensors, values_name(*this, first), count * dim, at::kFloat);
    std::span<const float> states;
    if (width > 0) states = span_of<float>(tensor_of(tensors, states_name(*this, first), count * width, at::kFloat));
    rows.import_rows(span_of<int64_t>(numbers), span_of<float>(values), states);
    if (count == 0 || size() != first + count || size() > facts.rows) {
      throw CheckpointError("a snapshot's '" + found->first +
                            "' has rows that come twice, or too many or none; use an " + "older snapshot");
    }
  }
  return true;
}

}  // namespace muster::server
