// A server's tables in snapshots.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>

#include "kernels/kernels.h"
#include "muster/error.h"
#include "server/shard/table_shard.h"

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

// Names of files' tensors, each of one kind of what a table has.
std::string rows_name(const TableSpec& spec) { return "rows/" + spec.name; }
std::string values_name(const TableSpec& spec) { return "row_values/" + spec.name; }
std::string states_name(const TableSpec& spec) { return "row_states/" + spec.name; }
std::string summed_name(const TableSpec& spec) { return "summed_rows/" + spec.name; }
std::string partials_name(const TableSpec& spec) { return "row_partials/" + spec.name; }

at::Tensor find(const std::map<std::string, at::Tensor>& tensors, const std::string& name, uint64_t numel,
                at::ScalarType dtype) {
  if (numel == 0) return at::empty({0}, dtype);
  const auto found = tensors.find(name);
  if (found == tensors.end() || static_cast<uint64_t>(found->second.numel()) != numel ||
      found->second.scalar_type() != dtype) {
    throw CheckpointError("a snapshot lacks '" + name + "', or has another shape or dtype; use an older snapshot");
  }
  return found->second;
}

}  // namespace

TableShard::Image TableShard::image(uint32_t index) {
  auto& own = table(index);
  Image image;
  auto lock = own.lock();
  image.made = own.record();
  image.counted = own.counted;
  const auto* const made = own.made();
  image.has_sums = made != nullptr;
  if (image.has_sums && !made->rows.empty()) {
    image.summed_rows = made->rows.size();
    image.tensors[summed_name(own.spec)] = tensor_of(made->rows, at::kLong);
    image.tensors[partials_name(own.spec)] = tensor_of(made->partials, at::kDouble);
  }
  const std::shared_lock reading(own.rows_mutex);
  lock.unlock();
  const int64_t count = own.rows.size();
  if (count == 0) return image;
  image.rows = static_cast<uint64_t>(count);
  const auto rows = at::empty({count}, at::kLong);
  const auto values = at::empty({count, own.spec.dim}, at::kFloat);
  const auto states = at::empty({count, own.rows.state_width()}, at::kFloat);
  own.rows.export_rows(0, span_of<int64_t>(rows), span_of<float>(values), span_of<float>(states));
  image.tensors[rows_name(own.spec)] = rows;
  image.tensors[values_name(own.spec)] = values;
  if (states.numel() > 0) image.tensors[states_name(own.spec)] = states;
  return image;
}

void TableShard::restore(uint32_t index, const Image& image) {
  auto& own = table(index);
  const auto& spec = own.spec;
  const auto& tensors = image.tensors;
  const auto dim = static_cast<uint64_t>(spec.dim);
  const auto rows = find(tensors, rows_name(spec), image.rows, at::kLong);
  const auto values = find(tensors, values_name(spec), image.rows * dim, at::kFloat);
  const auto states =
      find(tensors, states_name(spec), image.rows * static_cast<uint64_t>(own.rows.state_width()), at::kFloat);
  const auto summed = find(tensors, summed_name(spec), image.summed_rows, at::kLong);
  const auto partials = find(tensors, partials_name(spec), image.summed_rows * kernels::num_tiles(dim), at::kDouble);
  const auto lock = own.lock();
  const std::unique_lock writing(own.rows_mutex);
  own.rows.import_rows(span_of<int64_t>(rows), span_of<float>(values), span_of<float>(states));
  own.counted = image.counted;
  HeldSums::Statistics made;
  if (image.has_sums) {
    made.step = image.made.steps;
    const auto summed_rows = span_of<int64_t>(summed);
    made.rows.assign(summed_rows.begin(), summed_rows.end());
    const auto of_rows = span_of<double>(partials);
    made.partials.assign(of_rows.begin(), of_rows.end());
  }
  own.restore(image.made, std::move(made));
}

}  // namespace muster::server
