#include "optimizer/flat_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "core/flat_layout.h"
#include "core/plain_memory.h"
#include "device/kernel_dtype.h"
#include "device/kernel_status.h"
#include "muster/error.h"
#include "optimizer/parallel_kernels.h"

namespace muster {

namespace {

bool is_low(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

at::Tensor in_memory_order(const at::Tensor& dense) { return dense.as_strided({dense.numel()}, {1}); }

std::byte* at_element(const at::Tensor& tensor, int64_t element) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr()) + element * static_cast<int64_t>(tensor.element_size());
}

// fp32, without the check of that which data_ptr<float>() makes: a step reads one for every parameter.
float& value_of(const at::Tensor& step) { return *static_cast<float*>(step.mutable_data_ptr()); }

size_t states_needed(const kernels::AdamGroup& group) { return group.amsgrad ? 3 : 2; }
size_t states_needed(const kernels::SgdGroup& group) { return group.momentum != 0 ? 1 : 0; }
size_t states_needed(const kernels::AdagradGroup&) { return 1; }

// Whether a step moves rows without a gradient, too.
bool moves_all_rows(const kernels::AdamGroup&) { return false; }
bool moves_all_rows(const kernels::SgdGroup& group) { return group.momentum != 0 || group.weight_decay != 0; }
bool moves_all_rows(const kernels::AdagradGroup& group) { return group.weight_decay != 0; }

// A storage of its own, so that whoever saves or copies one does not take all.
at::Tensor step_in(const at::Tensor& steps, size_t parameter) {
  return at::from_blob(steps.mutable_data_ptr<float>() + parameter, {}, [steps](void*) {}, steps.options());
}

template <class F>
auto of_group(const FlatGroups& groups, uint32_t group, const F& function) {
  return std::visit([&](const auto& list) { return function(list[group]); }, groups);
}

size_t count_of(const FlatGroups& groups) {
  return std::visit([](const auto& list) { return list.size(); }, groups);
}

}  // namespace

// By accumulation dtype.
struct FlatOptimizer::Segments {
  std::vector<kernels::StepSegment> singles;
  std::vector<kernels::StepSegment> doubles;
  std::vector<kernels::StepSegment> rows;  // of row-wise parameters, whose groups are numbers in row_groups
  std::vector<kernels::RowwiseAdagradGroup> row_groups;
  std::vector<at::Tensor> kept;  // what they point into

  std::vector<kernels::StepSegment>& of(at::ScalarType dtype) { return dtype == at::kDouble ? doubles : singles; }
};

// Calls `function(row, values, first, width)` for each row of a sparse gradient, which is the elements of `values` from
// `first` on; `segments` keep them.
template <class F>
void FlatOptimizer::for_each_row(const at::Tensor& gradient, Segments& segments, const F& function) {
  const auto rows = gradient._indices().cpu().contiguous();
  const auto values = gradient._values().contiguous();
  segments.kept.insert(segments.kept.end(), {rows, values});
  const int64_t width = rows.numel() == 0 ? 0 : values.numel() / rows.numel();
  for (int64_t i = 0; i < rows.numel(); ++i) function(rows.const_data_ptr<int64_t>()[i], values, i * width, width);
}

FlatOptimizer::FlatOptimizer(std::vector<FlatParameter> parameters, const FlatGroups& groups, const Shard& shard)
    : algorithm_(groups.index()),
      shard_(shard),
      device_(parameters.empty() ? c10::Device(c10::kCPU) : parameters.front().tensor.device()) {
  const bool is_served = device_.is_cpu() || device_.is_cuda();
  if (muster::is_streamed(device_))
    steps_ = at::zeros({static_cast<int64_t>(parameters.size())}, device_options(at::kFloat));
  std::vector<int64_t> numels;
  for (auto& parameter : parameters) {
    const auto& tensor = parameter.tensor;
    const auto dtype = tensor.scalar_type();
    if (!is_served || tensor.device() != device_ || !(dtype == at::kFloat || dtype == at::kDouble || is_low(dtype))) {
      throw InvalidArgument("parameter '" + parameter.name + "' (" + c10::toString(dtype) + " on " +
                            tensor.device().str() + ", the first one on " + device_.str() +
                            ") cannot be stepped by a flat optimizer; pass fuse=False");
    }
    if (parameter.is_row_wise) check_row_wise(parameter, groups);
    numels.push_back(tensor.numel());
    Entry entry;
    entry.parameter = std::move(parameter);
    entry.step = steps_.defined() ? step_in(steps_, entries_.size()) : at::zeros({}, at::kFloat);
    entries_.push_back(std::move(entry));
  }
  const auto runs = runs_of(numels, shard_);
  for (size_t p = 0; p < entries_.size(); ++p) {
    auto& entry = entries_[p];
    entry.run = runs[p];
    follow(entry);
  }
}

void FlatOptimizer::check_row_wise(const FlatParameter& parameter, const FlatGroups& groups) const {
  const auto& tensor = parameter.tensor;
  const auto refuse = [&](const std::string& why) {
    throw InvalidArgument("row-wise Adagrad of parameter '" + parameter.name + "': " + why);
  };
  // A matrix whose rows are on servers is a stub, of stride 0 (embedding/row_source.h).
  if (!tensor.is_cpu() || tensor.scalar_type() != at::kFloat || tensor.dim() != 2 ||
      !(tensor.is_contiguous() || tensor.stride(0) == 0)) {
    refuse("it must be a contiguous float32 matrix on the CPU, not " + c10::str(tensor.sizes()) + " of " +
           c10::toString(tensor.scalar_type()) + " on " + tensor.device().str());
  }
  if (shard_.size > 1) refuse("its rows are not sharded; leave shard_optimizer out");
  rowwise_group_of(groups, parameter.group);
}

// A parameter may have been moved, converted or reordered since the last step: its state follows.
void FlatOptimizer::follow(Entry& entry) {
  const auto& tensor = entry.parameter.tensor;
  if (entry.dtype == tensor.scalar_type() && entry.strides == tensor.strides()) return;
  if (entry.parameter.is_row_wise && entry.num_states > 0) {
    throw InvalidArgument("parameter '" + entry.parameter.name +
                          "' was moved or converted after a row-wise step; do that before prepare()");
  }
  const bool is_dense_now = is_dense(tensor.sizes().vec(), tensor.strides().vec());
  if (shard_.size > 1 && (!is_dense_now || entry.num_states > 0)) {
    throw InvalidArgument("parameter '" + entry.parameter.name +
                          "' has gaps in its memory, or another layout or dtype than when it was first stepped; with "
                          "shard_optimizer=True convert the module before prepare()");
  }
  entry.dtype = tensor.scalar_type();
  entry.strides = tensor.strides().vec();
  entry.is_dense = is_dense_now;
  for (auto& state : entry.states) {
    if (!state.defined()) continue;
    const auto old = std::exchange(state, empty_state(entry));
    state.copy_(old);
  }
  entry.master_version = -1;
  entry.master = is_low(entry.dtype) ? empty_state(entry) : at::Tensor();
  std::fill(std::begin(entry.common), std::end(entry.common), nullptr);
}

at::TensorOptions FlatOptimizer::device_options(at::ScalarType dtype) const {
  return at::TensorOptions(dtype).device(device_);
}

at::Tensor FlatOptimizer::empty_state(const Entry& entry) const {
  const auto& tensor = entry.parameter.tensor;
  const auto options = device_options(accumulation_dtype(tensor.scalar_type()));
  if (entry.parameter.is_row_wise) return at::zeros({tensor.size(0), 1}, options);
  if (shard_.size > 1) return entry.run.count > 0 ? at::zeros({entry.run.count}, options) : at::Tensor();
  if (!entry.is_dense) return at::zeros(tensor.sizes(), options);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options).zero_();
}

// This shard's part of a tensor of the parameter's sizes, shaped as empty_state.
at::Tensor FlatOptimizer::own_part(const Entry& entry, const at::Tensor& whole) const {
  if (shard_.size == 1) return whole;
  const auto& tensor = entry.parameter.tensor;
  const auto ordered = at::empty_strided(tensor.sizes(), tensor.strides(), whole.options()).copy_(whole);
  return elements_of(ordered, entry.run);
}

// In the parameter's memory order.
at::Tensor FlatOptimizer::dense_of(const Entry& entry, const at::Tensor& sparse) const {
  const auto& tensor = entry.parameter.tensor;
  const auto dense = entry.is_dense
                         ? at::empty_strided(tensor.sizes(), tensor.strides(), sparse.options().layout(at::kStrided))
                         : at::empty(tensor.sizes(), sparse.options().layout(at::kStrided));
  return dense.zero_().add_(sparse);
}

void FlatOptimizer::allocate(Entry& entry, size_t num_states) {
  for (size_t s = entry.num_states; s < num_states; ++s) entry.states[s] = empty_state(entry);
  entry.num_states = std::max(entry.num_states, num_states);
}

at::Tensor& FlatOptimizer::tensor_of(Entry& entry, size_t which) const {
  return which == kMaster ? entry.master : entry.states[which];
}

const at::Tensor& FlatOptimizer::tensor_of(const Entry& entry, size_t which) const {
  return which == kMaster ? entry.master : entry.states[which];
}

void FlatOptimizer::note_started(size_t p) {
  if (started_.empty() || started_.back() != p) started_.push_back(p);
}

void FlatOptimizer::refresh_master(const Entry& entry, const Run& run) const {
  const auto& tensor = entry.parameter.tensor;
  if (!entry.is_dense) {
    entry.master.copy_(tensor);
    return;
  }
  elements_of(entry.master, {run.begin - entry.run.begin, run.count}).copy_(elements_of(tensor, run));
}

// `parameter`: its elements in memory order, of which `run` takes some that this shard owns; `gradient` points to the
// run's first.
void FlatOptimizer::add_run(const Entry& entry, const Run& run, void* parameter, void* gradient,
                            Segments& segments) const {
  const auto size = static_cast<int64_t>(entry.parameter.tensor.element_size());
  const int64_t offset = run.begin - entry.run.begin;
  void* own = static_cast<std::byte*>(parameter) + run.begin * size;
  kernels::StepSegment segment{};
  segment.gradient = gradient;
  segment.parameter = entry.master.defined() ? at_element(entry.master, offset) : own;
  if (entry.master.defined()) {
    segment.low = own;
    segment.low_dtype = kernel_dtype(entry.dtype);
  }
  for (size_t s = 0; s < entry.num_states; ++s) segment.state[s] = at_element(entry.states[s], offset);
  segment.step = &value_of(entry.step);
  segment.n = static_cast<size_t>(run.count);
  segment.group = entry.parameter.group;
  segments.of(accumulation_dtype(entry.dtype)).push_back(segment);
}

void FlatOptimizer::add_dense(const Entry& entry, const Run& run, void* parameter, const at::Tensor& gradient,
                              Segments& segments) const {
  if (run.count == 0) return;
  add_run(entry, run, parameter, at_element(gradient, run.begin), segments);
}

void FlatOptimizer::add_sparse(const Entry& entry, const Run& run, void* parameter, const at::Tensor& gradient,
                               Segments& segments) const {
  for_each_row(gradient, segments, [&](int64_t number, const at::Tensor& values, int64_t first, int64_t width) {
    const int64_t row = number * width;
    const int64_t begin = std::max(row, run.begin);
    const int64_t end = std::min(row + width, run.begin + run.count);
    if (begin >= end) return;
    add_run(entry, {begin, end - begin}, parameter, at_element(values, first + begin - row), segments);
  });
}

// Rows of one element of state each; in no share, for they are not cut.
void FlatOptimizer::add_whole_rows(const Entry& entry, const FlatGradient& gradient, const FlatGroups& groups,
                                   Segments& segments) const {
  if (!gradient.sparse.defined()) {
    throw InvalidArgument("parameter '" + entry.parameter.name +
                          "' has a dense gradient, and row-wise Adagrad steps rows; use the embedding's forward alone");
  }
  const auto group = static_cast<uint32_t>(segments.row_groups.size());
  segments.row_groups.push_back(rowwise_group_of(groups, entry.parameter.group));
  for_each_row(gradient.sparse, segments, [&](int64_t row, const at::Tensor& values, int64_t first, int64_t width) {
    kernels::StepSegment segment{};
    segment.gradient = at_element(values, first);
    segment.parameter = at_element(entry.parameter.tensor, row * width);
    segment.state[0] = at_element(entry.states[0], row);
    segment.step = &value_of(entry.step);
    segment.n = static_cast<size_t>(width);
    segment.group = group;
    segments.rows.push_back(segment);
  });
}

void FlatOptimizer::add_gradient(const Entry& entry, const Run& run, void* parameter, const FlatGradient& gradient,
                                 const FlatGroups& groups, Segments& segments) const {
  if (!gradient.sparse.defined()) return add_dense(entry, run, parameter, gradient.dense, segments);
  const bool by_row = entry.parameter.tensor.is_contiguous() &&
                      !of_group(groups, entry.parameter.group, [](const auto& g) { return moves_all_rows(g); });
  if (by_row) return add_sparse(entry, run, parameter, gradient.sparse, segments);
  const auto dense = dense_of(entry, gradient.sparse);
  segments.kept.push_back(dense);
  add_dense(entry, run, parameter, dense, segments);
}

void FlatOptimizer::run(const Segments& segments, const FlatGroups& groups, const kernels::StepScalars& scalars,
                        bool keep, const kernels::StepCopies& copies) const {
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
  parallel_step(singles.dtype, segments.singles, step, &singles);
  parallel_step(doubles.dtype, segments.doubles, step, &doubles);
  if (segments.rows.empty()) return;
  struct RowContext {
    const kernels::RowwiseAdagradGroup* groups;
    const kernels::StepScalars& scalars;
    bool keep;
  };
  const RowContext of_rows{segments.row_groups.data(), scalars, keep};
  parallel_row_step(
      segments.rows,
      [](const void* pointer, const kernels::StepSegment* first, size_t count) {
        const auto& context = *static_cast<const RowContext*>(pointer);
        kernels::rowwise_adagrad_step({kernels::DType::f32, first, count, &context.scalars, context.keep},
                                      context.groups);
      },
      &of_rows);
}

void FlatOptimizer::enqueue(const Segments& segments, const FlatGroups& groups, const kernels::StepScalars* scalars,
                            bool keep) {
  namespace cuda = kernels::cuda;
  auto* const stream = stream_handle(device_);
  const bool all_used = std::all_of(used_.begin(), used_.end(), [](double used) { return used > 0; });
  check_kernel(
      cuda::count_steps(steps_.mutable_data_ptr<float>(), all_used ? nullptr : used_table_.follow(used_, device_),
                        used_.size(), scalars, stream),
      "counting steps");
  device_groups_.follow(groups, device_);
  const auto launch = [&](kernels::DType dtype, const std::vector<kernels::StepSegment>& host,
                          DeviceSegments<kernels::StepSegment>& tables) {
    if (host.empty()) return;
    tables.follow(host, device_);
    cuda::StepPlan plan{};
    plan.dtype = dtype;
    plan.segments = tables.items();
    plan.chunks = tables.chunks();
    plan.num_chunks = tables.num_chunks();
    plan.scalars = scalars;
    plan.keep_gradient = keep;
    check_kernel(device_groups_.step(plan, stream), "an optimizer step");
  };
  launch(kernels::DType::f32, segments.singles, singles_);
  launch(kernels::DType::f64, segments.doubles, doubles_);
}

void FlatOptimizer::begin_step(size_t p, const FlatGroups& groups, bool is_common) {
  auto& entry = entries_[p];
  if (entry.parameter.group >= count_of(groups)) {
    throw InvalidArgument("parameter '" + entry.parameter.name + "' is in group " +
                          std::to_string(entry.parameter.group) + " of " + std::to_string(count_of(groups)));
  }
  follow(entry);
  const size_t num_states = entry.num_states;
  is_common = is_common && !entry.parameter.is_row_wise;
  const size_t needed = of_group(groups, entry.parameter.group, [](const auto& group) { return states_needed(group); });
  if (is_common && entry.parameter.tensor.numel() > 0) {
    entry.num_states = std::max(num_states, needed);
  } else {
    allocate(entry, needed);
  }
  if (!entry.started || entry.num_states != num_states) note_started(p);
  entry.started = true;
  if (is_streamed()) {
    used_[p] = 1;
  } else {
    value_of(entry.step) += 1;
  }
}

// As if begin_step had not been called: nothing was stepped.
void FlatOptimizer::take_back_step(size_t p) {
  auto& entry = entries_[p];
  value_of(entry.step) -= 1;
  entry.num_states = static_cast<size_t>(std::count_if(std::begin(entry.states), std::end(entry.states),
                                                       [](const auto& state) { return state.defined(); }));
  if (value_of(entry.step) > 0 || entry.num_states > 0) return;
  entry.started = false;
  std::erase(started_, p);
}

void FlatOptimizer::step(std::vector<FlatGradient> gradients, const FlatGroups& groups,
                         const kernels::StepScalars* scalars, bool keep) {
  DividedStep whole;
  whole.shares.resize(1);
  whole.shares.front().gradients = std::move(gradients);
  for (const auto& entry : entries_) whole.shares.front().runs.push_back(entry.run);
  step_divided(whole, groups, scalars, keep);
}

void FlatOptimizer::step_divided(const DividedStep& divided, const FlatGroups& groups,
                                 const kernels::StepScalars* scalars, bool keep) {
  if (groups.index() != algorithm_) throw InvalidArgument("a flat optimizer cannot become another kind of optimizer");
  if (divided.allocate_common && shard_.size > 1) {
    throw InvalidArgument("a sharded optimizer keeps its own part of the state; step() it");
  }
  const at::NoGradGuard no_grad;
  const OnDevice on_device(device_);
  const auto& shares = divided.shares;
  std::vector<size_t> stepped;
  for (size_t p = 0; p < entries_.size(); ++p) {
    const auto& gradient = shares.front().gradients[p];
    if (gradient.dense.defined() || gradient.sparse.defined()) stepped.push_back(p);
  }
  used_.assign(is_streamed() ? entries_.size() : 0, 0);
  std::atomic<bool> has_begun{is_streamed()};
  size_t num_counted = 0;
  const auto take_back = c10::make_scope_exit([&] {
    if (has_begun) return;
    for (size_t i = 0; i < num_counted; ++i) take_back_step(stepped[i]);
  });
  for (const size_t p : stepped) {
    begin_step(p, groups, divided.allocate_common != nullptr);
    ++num_counted;
  }
  if (divided.allocate_common) move_to_common(divided);

  std::vector<Segments> segments(shares.size());
  std::vector<std::pair<Entry*, at::Tensor>> packed;  // of parameters with gaps in their memory
  for (const size_t p : stepped) {
    auto& entry = entries_[p];
    const auto& tensor = entry.parameter.tensor;
    void* memory = tensor.mutable_data_ptr();
    if (!entry.is_dense) {
      packed.emplace_back(&entry, tensor.contiguous());
      memory = packed.back().second.mutable_data_ptr();
    }
    const bool was_written = entry.master_version != static_cast<int64_t>(tensor._version());
    if (entry.parameter.is_row_wise) {
      add_whole_rows(entry, shares.front().gradients[p], groups, segments.front());
      continue;
    }
    for (size_t s = 0; s < shares.size(); ++s) {
      const auto& run = shares[s].runs[p];
      if (entry.master.defined() && was_written) refresh_master(entry, run);
      add_gradient(entry, run, memory, shares[s].gradients[p], groups, segments[s]);
    }
  }
  if (is_streamed()) {
    enqueue(segments.front(), groups, scalars, keep);
  } else {
    const kernels::StepCopies copies{divided.displacements.data(), static_cast<int>(divided.displacements.size())};
    const auto work = [&](size_t share) {
      has_begun = true;
      run(segments[share], groups, *scalars, keep, copies);
    };
    if (divided.for_each) {
      divided.for_each(work);
    } else {
      for (size_t s = 0; s < shares.size(); ++s) work(s);
    }
  }
  for (auto& [entry, values] : packed) entry->parameter.tensor.copy_(values);
  for (const size_t p : stepped) {
    auto& entry = entries_[p];
    entry.parameter.tensor.unsafeGetTensorImpl()->bump_version();
    entry.master_version = static_cast<int64_t>(entry.parameter.tensor._version());
  }
}

void FlatOptimizer::step_from_grad(const FlatGroups& groups) {
  if (shard_.size > 1) {
    throw InvalidArgument("with shard_optimizer=True an optimizer steps within strategy.step only; call that");
  }
  const at::NoGradGuard no_grad;
  const OnDevice on_device(device_);
  std::vector<FlatGradient> gradients(entries_.size());
  for (size_t p = 0; p < entries_.size(); ++p) {
    auto& entry = entries_[p];
    const auto& gradient = entry.parameter.tensor.grad();
    if (!gradient.defined()) continue;
    follow(entry);
    leave_common(p);
    const auto wide = in_plain_memory(gradient.to(accumulation_dtype(entry.dtype)));
    if (wide.is_sparse()) {
      gradients[p].sparse = wide.coalesce();
    } else if (entry.is_dense ? wide.strides() == entry.parameter.tensor.strides() : wide.is_contiguous()) {
      gradients[p].dense = wide;
    } else {
      gradients[p].dense = empty_state(entry).copy_(wide);
    }
  }
  const kernels::StepScalars plain{.divisor = 1, .clip = 1, .norm = 0, .unit = 1, .finite = 1, .dropped = 0};
  step(std::move(gradients), groups, is_streamed() ? scalars_table_.follow({plain}, device_) : &plain, /*keep=*/false);
}

std::vector<std::vector<Run>> FlatOptimizer::runs_of_ranks() const {
  std::vector<int64_t> numels;
  for (const auto& entry : entries_) numels.push_back(entry.parameter.tensor.numel());
  std::vector<std::vector<Run>> runs;
  for (int r = 0; r < shard_.size; ++r) runs.push_back(runs_of(numels, {r, shard_.size}));
  return runs;
}

void FlatOptimizer::gather_parameters(comm::Communicator& ranks) {
  if (shard_.size == 1) return;
  const at::NoGradGuard no_grad;
  const auto all_runs = runs_of_ranks();
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    std::vector<at::Tensor> memories;
    std::vector<std::vector<Run>> runs(all_runs.size());
    for (size_t p = 0; p < entries_.size(); ++p) {
      if (entries_[p].dtype != dtype || !entries_[p].started) continue;
      // A tensor of its own version counter: step() has counted this write.
      memories.push_back(in_memory_order(entries_[p].parameter.tensor.variable_data()));
      for (size_t r = 0; r < runs.size(); ++r) runs[r].push_back(all_runs[r][p]);
    }
    exchange_runs(memories, runs, ranks);
  }
}

const std::vector<const char*>& FlatOptimizer::state_names() const noexcept {
  static const std::vector<const char*> names[] = {
      {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, {"momentum_buffer"}, {"sum"}};
  return names[algorithm_];
}

at::Tensor FlatOptimizer::state(size_t parameter, size_t which) const { return entries_.at(parameter).states[which]; }

const at::Tensor& FlatOptimizer::step_count(size_t parameter) const { return entries_.at(parameter).step; }

std::vector<float> FlatOptimizer::step_counts() const {
  std::vector<float> counts;
  const auto streamed = steps_.defined() ? steps_.cpu() : at::Tensor();
  for (size_t p = 0; p < entries_.size(); ++p) {
    counts.push_back(streamed.defined() ? streamed.const_data_ptr<float>()[p] : value_of(entries_[p].step));
  }
  return counts;
}

const at::Tensor& FlatOptimizer::master(size_t parameter) const { return entries_.at(parameter).master; }

void FlatOptimizer::set_state(size_t parameter, size_t which, const at::Tensor& whole) {
  auto& entry = entries_.at(parameter);
  auto sizes = entry.parameter.tensor.sizes().vec();
  auto values = whole;
  if (entry.parameter.is_row_wise) {
    if (whole.sizes() == at::IntArrayRef(sizes)) values = whole.mean(1, /*keepdim=*/true, at::kDouble);
    sizes[1] = 1;
  }
  const bool is_part = shard_.size > 1 && whole.sizes() == at::IntArrayRef({entry.run.count});
  if (!is_part) check_sizes(entry, values, sizes);
  follow(entry);
  allocate(entry, which + 1);
  auto& state = entry.states[which];
  if (state.defined()) state = empty_state(entry).copy_(is_part ? values : own_part(entry, values));
  entry.common[which] = nullptr;
  entry.started = true;
}

void FlatOptimizer::set_step_count(size_t parameter, double count) {
  auto& entry = entries_.at(parameter);
  if (!is_streamed()) entry.step = at::zeros({}, at::kFloat);
  entry.step.fill_(count);
  entry.started = true;
}

void FlatOptimizer::set_master(size_t parameter, const at::Tensor& whole) {
  auto& entry = entries_.at(parameter);
  const bool is_part = shard_.size > 1 && whole.defined() && whole.sizes() == at::IntArrayRef({entry.run.count});
  if (whole.defined() && !is_part) check_sizes(entry, whole, entry.parameter.tensor.sizes());
  follow(entry);
  if (!entry.master.defined()) return;
  entry.master = empty_state(entry);
  entry.common[kMaster] = nullptr;
  entry.master_version = -1;
  if (!whole.defined()) return;
  entry.master.copy_(is_part ? whole : own_part(entry, whole));
  entry.master_version = static_cast<int64_t>(entry.parameter.tensor._version());
}

void FlatOptimizer::reset(size_t parameter) {
  auto& entry = entries_.at(parameter);
  set_step_count(parameter, 0);
  set_master(parameter, {});
  for (auto& state : entry.states) state.reset();
  std::fill(std::begin(entry.common), std::end(entry.common), nullptr);
  entry.num_states = 0;
  entry.started = false;
}

void FlatOptimizer::check_sizes(const Entry& entry, const at::Tensor& whole, at::IntArrayRef sizes) const {
  if (whole.sizes() == sizes) return;
  throw InvalidArgument("optimizer state of shape " + c10::str(whole.sizes()) + " for parameter '" +
                        entry.parameter.name + "', whose state has shape " + c10::str(sizes) +
                        "; load the state that was saved with this model");
}

at::Tensor FlatOptimizer::whole_state(size_t parameter, size_t which, comm::Communicator& ranks) const {
  const auto& entry = entries_.at(parameter);
  if (which == kMaster ? !is_low(entry.dtype) : which >= entry.num_states) return {};
  const auto& own = which == kMaster ? entry.master : entry.states[which];
  if (shard_.size == 1) return own.clone();
  const auto& tensor = entry.parameter.tensor;
  const auto whole =
      at::empty_strided(tensor.sizes(), tensor.strides(), device_options(accumulation_dtype(entry.dtype)));
  const auto memory = in_memory_order(whole);
  if (own.defined()) memory.narrow(0, entry.run.begin, entry.run.count).copy_(own);
  std::vector<std::vector<Run>> runs;
  for (const auto& of_rank : runs_of_ranks()) runs.push_back({of_rank[parameter]});
  exchange_runs({memory}, runs, ranks);
  return whole;
}

std::vector<size_t> FlatOptimizer::take_started() { return std::exchange(started_, {}); }

}  // namespace muster
