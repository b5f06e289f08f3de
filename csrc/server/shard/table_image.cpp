// A table in snapshots.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>

#include "kernels/kernels.h"
#include "muster/error.h"
#include "server/shard/held_table.h"
#include "server/shard/image.h"

namespace muster::server {

namespace {

template <class T>
std::span<T> span_of(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr<T>(), static_cast<size_t>(tensor.numel())};
}

template <class T>
at::Tensor tensor_of(const std::vector<T>& values, at::ScalarType dtype) {
  const auto tensor = at::empty({static_cast<int64_t>(values.size())}, dtype);
  std::copy(values.begin(), values.end(), tensor.template mutable_data_ptr<T>());
  return tensor;
}

// Names of files' tensors. Those of rows say which of the image's is the first.
std::string rows_name(const TableSpec& spec, uint64_t first) {
  return "rows/" + spec.name + "/" + std::to_string(first);
}
std::string values_name(const TableSpec& spec, uint64_t first) {
  return "row_values/" + spec.name + "/" + std::to_string(first);
}
std::string states_name(const TableSpec& spec, uint64_t first) {
  return "row_states/" + spec.name + "/" + std::to_string(first);
}
std::string summed_name(const TableSpec& spec) { return "summed_rows/" + spec.name; }
std::string partials_name(const TableSpec& spec) { return "row_partials/" + spec.name; }

const at::Tensor& tensor_of(const checkpoint::NamedTensors& tensors, const std::string& name, uint64_t numel,
                            at::ScalarType dtype) {
  const auto found = tensors.find(name);
  if (found == tensors.end() || static_cast<uint64_t>(found->second.numel()) != numel ||
      found->second.scalar_type() != dtype) {
    throw CheckpointError("a snapshot lacks '" + name + "', or has another shape or dtype; use an older snapshot");
  }
  return found->second;
}

class TableImage final : public Image {
 public:
  // `sums`: tensors of the last step's.
  TableImage(HeldTable& table, Facts facts, checkpoint::NamedTensors sums)
      : Image(std::move(facts)), table_(table), sums_(std::move(sums)) {}

  ~TableImage() override {
    const std::unique_lock ending(table_.rows_mutex);
    table_.rows.end_image();
    table_.image_ended.notify_all();
  }

  checkpoint::NamedTensors next() override {
    if (!sums_.empty()) return std::exchange(sums_, {});
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
    tensors[rows_name(table_.spec, first_)] = rows;
    tensors[values_name(table_.spec, first_)] = values;
    if (states.numel() > 0) tensors[states_name(table_.spec, first_)] = states;
    first_ += static_cast<uint64_t>(count);
    return tensors;
  }

 private:
  int64_t rows_of_block() const {
    const std::shared_lock reading(table_.rows_mutex);
    return table_.rows.image_block_rows();
  }

  HeldTable& table_;
  checkpoint::NamedTensors sums_;
  uint64_t first_ = 0;
};

}  // namespace

std::unique_ptr<Image> HeldTable::begin_image() {
  Image::Facts facts;
  facts.made = record();
  facts.counted = counted;
  checkpoint::NamedTensors sums;
  if (const auto* const last = made()) {
    facts.has_sums = true;
    facts.summed_rows = last->rows.size();
    if (!last->rows.empty()) {
      sums[summed_name(spec)] = tensor_of(last->rows, at::kLong);
      sums[partials_name(spec)] = tensor_of(last->partials, at::kDouble);
    }
  }
  std::unique_lock beginning(rows_mutex);
  image_ended.wait(beginning, [&] { return !rows.has_image(); });
  facts.rows = static_cast<uint64_t>(rows.begin_image());
  return std::make_unique<TableImage>(*this, std::move(facts), std::move(sums));
}

bool HeldTable::restore(const Image::Facts& facts, const checkpoint::NamedTensors& tensors) {
  const auto lock = this->lock();
  const std::unique_lock writing(rows_mutex);
  counted = facts.counted;
  if (!facts.has_sums || facts.summed_rows == 0 || tensors.contains(summed_name(spec))) restore_sums(facts, tensors);
  const auto dim = static_cast<uint64_t>(spec.dim);
  const auto width = static_cast<uint64_t>(rows.state_width());
  const auto size = [&] { return static_cast<uint64_t>(rows.size()); };
  while (size() < facts.rows) {
    const uint64_t first = size();
    const auto found = tensors.find(rows_name(spec, first));
    if (found == tensors.end()) return false;
    const auto count = static_cast<uint64_t>(found->second.numel());
    const auto& numbers = tensor_of(tensors, found->first, count, at::kLong);
    const auto& values = tensor_of(tensors, values_name(spec, first), count * dim, at::kFloat);
    std::span<const float> states;
    if (width > 0) states = span_of<float>(tensor_of(tensors, states_name(spec, first), count * width, at::kFloat));
    rows.import_rows(span_of<int64_t>(numbers), span_of<float>(values), states);
    if (count == 0 || size() != first + count || size() > facts.rows) {
      throw CheckpointError("a snapshot's '" + found->first +
                            "' has rows that come twice, or too many or none; use an " + "older snapshot");
    }
  }
  if (facts.has_sums && made() == nullptr) {
    throw CheckpointError("a snapshot lacks '" + summed_name(spec) + "'; use an older snapshot");
  }
  return true;
}

void HeldTable::restore_sums(const Image::Facts& facts, const checkpoint::NamedTensors& tensors) {
  Statistics made;
  if (facts.has_sums) made.step = facts.made.steps;
  if (facts.summed_rows > 0) {
    const size_t tiles = kernels::num_tiles(static_cast<size_t>(spec.dim));
    const auto summed = span_of<int64_t>(tensor_of(tensors, summed_name(spec), facts.summed_rows, at::kLong));
    const auto partials =
        span_of<double>(tensor_of(tensors, partials_name(spec), facts.summed_rows * tiles, at::kDouble));
    made.rows.assign(summed.begin(), summed.end());
    made.partials.assign(partials.begin(), partials.end());
  }
  HeldSums::restore(facts.made, std::move(made));
}

}  // namespace muster::server
