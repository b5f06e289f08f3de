#include "optimizer/step_segments.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>

#include "core/flat_layout.h"
#include "device/device.h"
#include "device/kernel_dtype.h"
#include "device/kernel_status.h"
#include "muster/error.h"
#include "optimizer/parallel_kernels.h"

namespace muster {

namespace {

std::byte* at_element(const at::Tensor& tensor, int64_t element) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr()) + element * static_cast<int64_t>(tensor.element_size());
}

// In the parameter's memory order.
at::Tensor dense_of(const StateEntry& entry, const at::Tensor& sparse) {
  const auto& tensor = entry.parameter.tensor;
  const auto dense = entry.is_dense
                         ? at::empty_strided(tensor.sizes(), tensor.strides(), sparse.options().layout(at::kStrided))
                         : at::empty(tensor.sizes(), sparse.options().layout(at::kStrided));
  return dense.zero_().add_(sparse);
}

}  // namespace

// Calls `function(row, values, first, width)` for each row of a sparse gradient, which is the elements of `values` from
// `first` on; both are kept.
template <class F>
void StepSegments::for_each_row(const at::Tensor& gradient, const F& function) {
  const auto rows = gradient._indices().cpu().contiguous();
  const auto values = gradient._values().contiguous();
  kept_.insert(kept_.end(), {rows, values});
  const int64_t width = rows.numel() == 0 ? 0 : values.numel() / rows.numel();
  for (int64_t i = 0; i < rows.numel(); ++i) function(rows.const_data_ptr<int64_t>()[i], values, i * width, width);
}

// `gradient` points to the run's first element.
void StepSegments::add_run(const StateEntry& entry, const Run& run, const Place& parameter, void* gradient) {
  const auto size = static_cast<int64_t>(entry.parameter.tensor.element_size());
  const int64_t offset = run.begin - entry.run.begin;
  void* own = static_cast<std::byte*>(parameter.own) + run.begin * size;
  kernels::StepSegment segment{};
  segment.gradient = gradient;
  segment.parameter = entry.master.defined() ? at_element(entry.master, offset) : own;
  if (entry.master.defined()) {
    segment.low = own;
    segment.low_dtype = kernel_dtype(entry.dtype);
  }
  for (size_t s = 0; s < entry.num_states; ++s) segment.state[s] = at_element(entry.states[s], offset);
  segment.step = &entry.count();
  segment.n = static_cast<size_t>(run.count);
  segment.group = entry.parameter.group;
  auto& kind = accumulation_dtype(entry.dtype) == at::kDouble ? doubles_ : singles_;
  kind.segments.push_back(segment);
  for (void* copy : parameter.copies) kind.copies.push_back(static_cast<std::byte*>(copy) + run.begin * size);
}

void StepSegments::add_dense(const StateEntry& entry, const Run& run, const Place& parameter,
                             const at::Tensor& gradient) {
  add_run(entry, run, parameter, at_element(gradient, run.begin));
}

void StepSegments::add_sparse(const StateEntry& entry, const Run& run, const Place& parameter,
                              const at::Tensor& gradient) {
  for_each_row(gradient, [&](int64_t number, const at::Tensor& values, int64_t first, int64_t width) {
    const int64_t row = number * width;
    const int64_t begin = std::max(row, run.begin);
    const int64_t end = std::min(row + width, run.begin + run.count);
    if (begin >= end) return;
    add_run(entry, {begin, end - begin}, parameter, at_element(values, first + begin - row));
  });
}

void StepSegments::add_rows(const StateEntry& entry, const FlatGradient& gradient, const FlatGroups& groups) {
  if (!gradient.sparse.defined()) {
    throw InvalidArgument("parameter '" + entry.parameter.name +
                          "' has a dense gradient, and row-wise Adagrad steps rows; use the embedding's forward alone");
  }
  const auto group = static_cast<uint32_t>(row_groups_.size());
  row_groups_.push_back(rowwise_group_of(groups, entry.parameter.group));
  for_each_row(gradient.sparse, [&](int64_t row, const at::Tensor& values, int64_t first, int64_t width) {
    kernels::StepSegment segment{};
    segment.gradient = at_element(values, first);
    segment.parameter = at_element(entry.parameter.tensor, row * width);
    segment.state[0] = at_element(entry.states[0], row);
    segment.step = &entry.count();
    segment.n = static_cast<size_t>(width);
    segment.group = group;
    rows_.push_back(segment);
  });
}

void StepSegments::add(const StateEntry& entry, const Run& run, void* parameter, const FlatGradient& gradient,
                       const FlatGroups& groups, const std::vector<void*>& copies) {
  if (run.count == 0) return;
  const Place place{parameter, copies};
  if (!gradient.sparse.defined()) return add_dense(entry, run, place, gradient.dense);
  const bool by_row = entry.parameter.tensor.is_contiguous() && !moves_all_rows(groups, entry.parameter.group);
  if (by_row) return add_sparse(entry, run, place, gradient.sparse);
  const auto dense = dense_of(entry, gradient.sparse);
  kept_.push_back(dense);
  add_dense(entry, run, place, dense);
}

void StepSegments::run(const FlatGroups& groups, const kernels::StepScalars& scalars, bool keep,
                       const kernels::StepCopies& copies) const {
  struct Context {
    kernels::DType dtype;
    const FlatGroups& groups;
    const kernels::StepScalars& scalars;
    bool keep;
    const kernels::StepCopies& copies;
  };
  const auto step = [](const void* pointer, const kernels::StepSegment* first, size_t count) {
    const auto& context = *static_cast<const Context*>(pointer);
    step_by_groups({context.dtype, first, count, &context.scalars, context.keep}, context.groups, context.copies);
  };
  const Context singles{kernels::DType::f32, groups, scalars, keep, copies};
  const Context doubles{kernels::DType::f64, groups, scalars, keep, copies};
  parallel_step(singles.dtype, singles_.segments, step, &singles);
  parallel_step(doubles.dtype, doubles_.segments, step, &doubles);
  if (rows_.empty()) return;
  struct RowContext {
    const kernels::RowwiseAdagradGroup* groups;
    const kernels::StepScalars& scalars;
    bool keep;
  };
  const RowContext of_rows{row_groups_.data(), scalars, keep};
  parallel_row_step(
      rows_,
      [](const void* pointer, const kernels::StepSegment* first, size_t count) {
        const auto& context = *static_cast<const RowContext*>(pointer);
        kernels::rowwise_adagrad_step({kernels::DType::f32, first, count, &context.scalars, context.keep},
                                      context.groups);
      },
      &of_rows);
}

void StepQueue::enqueue(const StepSegments& segments, const FlatGroups& groups, const kernels::StepScalars* scalars,
                        bool keep, c10::Device device) {
  groups_.follow(groups, device);
  launch(kernels::DType::f32, segments.singles(), singles_, scalars, keep, device);
  launch(kernels::DType::f64, segments.doubles(), doubles_, scalars, keep, device);
}

void StepQueue::launch(kernels::DType dtype, const StepSegments::Kind& host, Tables& tables,
                       const kernels::StepScalars* scalars, bool keep, c10::Device device) {
  if (host.segments.empty()) return;
  tables.segments.follow(host.segments, device);
  kernels::cuda::StepPlan plan{};
  plan.dtype = dtype;
  plan.segments = tables.segments.items();
  plan.chunks = tables.segments.chunks();
  plan.num_chunks = tables.segments.num_chunks();
  plan.scalars = scalars;
  plan.keep_gradient = keep;
  plan.copies = tables.copies.follow(host.copies, device);
  plan.num_copies = static_cast<uint32_t>(host.copies.size() / host.segments.size());
  check_kernel(groups_.step(plan, stream_handle(device)), "an optimizer step");
}

}  // namespace muster
