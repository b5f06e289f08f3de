#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/optimizer.h"
#include "bindings/probes/kernel_arguments.h"
#include "device/kernel_dtype.h"
#include "device/kernel_status.h"
#include "device/segments.h"
#include "kernels/cuda/cuda_kernels.h"
#include "muster/error.h"

namespace muster {
namespace {

namespace py = pybind11;
namespace cuda = kernels::cuda;
using at::Tensor;
using kernels::DType;

// --- pack ------------------------------------------------------------------------------------------------------------

/// Sources and the bucket they go to.
class PackingProbe {
 public:
  PackingProbe(std::vector<OptionalTensor> sources, const std::vector<uint64_t>& offsets,
               const std::vector<uint64_t>& sizes, Tensor bucket)
      : sources_(std::move(sources)), bucket_(std::move(bucket)), device_(bucket_.device()) {
    if (offsets.size() != sources_.size() || sizes.size() != sources_.size()) {
      throw InvalidArgument("a packing needs one offset and one size for each source");
    }
    bucket_dtype_ = kernel_dtype(bucket_.scalar_type());
    auto* base = static_cast<char*>(data_of(bucket_, device_));
    const DType widest = bucket_dtype_ == DType::f64 ? DType::f64 : DType::f32;
    std::vector<cuda::PackSlot> slots;
    for (size_t i = 0; i < sources_.size(); ++i) {
      if (offsets[i] + sizes[i] > static_cast<uint64_t>(bucket_.numel())) {
        throw InvalidArgument("slot " + std::to_string(i) + " ends past its bucket");
      }
      const OptionalTensor& source = sources_[i];
      const DType dtype = source ? kernel_dtype(source->scalar_type()) : widest;
      const void* data =
          source ? data_as<void>(*source, device_, static_cast<int64_t>(sizes[i]), source->scalar_type()) : nullptr;
      pointers_.push_back(data);
      slots.push_back({offsets[i], sizes[i], dtype});
      items_.push_back({data, dtype, base + offsets[i] * kernels::size_of(bucket_dtype_), sizes[i]});
    }
    slots_.follow(slots, device_);
  }

  void run(bool accumulate, double factor, const OptionalTensor& gate, uintptr_t stream) const {
    const auto* is_open = optional_data_as<double>(gate, device_, 1, c10::kDouble);
    if (device_.is_cpu()) {
      if (gate) throw InvalidArgument("a gate is for CUDA: on the CPU pass None for what shall not count");
      if (bucket_dtype_ != DType::f32 && bucket_dtype_ != DType::f64) {
        throw InvalidArgument("the CPU packs into buckets of float32 and float64");
      }
      return kernels::pack(items_.data(), items_.size(), accumulate, factor);
    }
    const cuda::PackPlan plan{slots_.items(), slots_.num_items(), slots_.chunks(), slots_.num_chunks(), bucket_dtype_};
    check_kernel(cuda::pack(plan, pointers_.data(), bucket_.data_ptr(), accumulate, factor, is_open, stream_of(stream)),
                 "pack");
  }

 private:
  std::vector<OptionalTensor> sources_;
  Tensor bucket_;
  c10::Device device_;
  DType bucket_dtype_;
  std::vector<const void*> pointers_;
  std::vector<kernels::PackItem> items_;
  DeviceSegments<cuda::PackSlot> slots_;
};

// --- reduction -------------------------------------------------------------------------------------------------------

std::vector<void*> pointers_of(const std::vector<Tensor>& tensors) {
  if (tensors.empty()) throw InvalidArgument("a reduction needs tensors");
  const Tensor& first = tensors.front();
  std::vector<void*> pointers;
  for (const Tensor& tensor : tensors) {
    pointers.push_back(data_as<void>(tensor, first.device(), first.numel(), first.scalar_type()));
  }
  return pointers;
}

void tree_sum(const std::vector<Tensor>& sources, const std::vector<Tensor>& destinations, uintptr_t stream) {
  const std::vector<void*> from = pointers_of(sources), to = pointers_of(destinations);
  const Tensor& first = sources.front();
  const DType dtype = kernel_dtype(first.scalar_type());
  const auto n = static_cast<size_t>(first.numel());
  const int num_sources = static_cast<int>(from.size()), num_destinations = static_cast<int>(to.size());
  data_as<void>(destinations.front(), first.device(), first.numel(), first.scalar_type());
  if (first.is_cpu()) {
    return kernels::tree_reduce(dtype, kernels::Reduction::sum, from.data(), num_sources, to.data(), num_destinations,
                                n);
  }
  check_kernel(cuda::tree_sum(dtype, from.data(), num_sources, to.data(), num_destinations, n, stream_of(stream)),
               "tree_sum");
}

void peer_reduce(const std::vector<Tensor>& buffers, const Tensor& signals, unsigned blocks, uintptr_t stream) {
  const std::vector<void*> pointers = pointers_of(buffers);
  const Tensor& first = buffers.front();
  if (first.is_cpu()) return tree_sum(buffers, buffers, stream);
  const auto size = static_cast<int>(buffers.size());
  if (size > cuda::kMaxPeers) throw InvalidArgument("at most " + std::to_string(cuda::kMaxPeers) + " peers take part");
  auto* own = data_as<cuda::PeerSignals>(signals, first.device(),
                                         static_cast<int64_t>(buffers.size() * sizeof(cuda::PeerSignals)), c10::kByte);
  cuda::Peers peers{size, cuda::kAllRanks, blocks, {}};
  for (int r = 0; r < size; ++r) peers.signals[r] = own + r;
  check_kernel(cuda::peer_reduce(peers, kernel_dtype(first.scalar_type()), pointers.data(),
                                 static_cast<size_t>(first.numel()), stream_of(stream)),
               "peer_reduce");
}

// --- statistics ------------------------------------------------------------------------------------------------------

/// Gradients and the partials of all their tiles, one gradient's after the other's.
class Statistics {
 public:
  explicit Statistics(std::vector<Tensor> gradients) : gradients_(std::move(gradients)), device_(c10::kCPU) {
    if (gradients_.empty()) throw InvalidArgument("statistics need gradients");
    device_ = gradients_.front().device();
    size_t tiles = 0;
    for (const Tensor& gradient : gradients_) tiles += kernels::num_tiles(static_cast<size_t>(gradient.numel()));
    partials_ = at::empty({static_cast<int64_t>(tiles)}, at::TensorOptions(c10::kDouble).device(device_));
    auto* partials = static_cast<double*>(partials_.data_ptr());
    for (const Tensor& gradient : gradients_) {
      const auto n = static_cast<size_t>(gradient.numel());
      segments_.push_back({data_of(gradient, device_), partials, n, kernel_dtype(gradient.scalar_type())});
      partials += kernels::num_tiles(n);
    }
    on_device_.follow(segments_, device_);
  }

  const Tensor& partials() const noexcept { return partials_; }

  void run(uintptr_t stream) const {
    if (device_.is_cpu()) return kernels::grad_stats(segments_.data(), segments_.size());
    check_kernel(cuda::grad_stats(on_device_.items(), on_device_.chunks(), on_device_.num_chunks(), /*norm_type=*/2,
                                  stream_of(stream)),
                 "grad_stats");
  }

 private:
  std::vector<Tensor> gradients_;
  c10::Device device_;
  Tensor partials_;
  std::vector<kernels::StatsSegment> segments_;
  DeviceSegments<kernels::StatsSegment> on_device_;
};

// --- optimizer steps -------------------------------------------------------------------------------------------------

/// Gradient, parameter, its copy of low precision, state, step count, used-count and group; see kernels::StepSegment.
using Segment =
    std::tuple<Tensor, Tensor, OptionalTensor, std::vector<Tensor>, OptionalTensor, OptionalTensor, uint32_t>;

/// Segments that step together. Their parameters, those of low precision where there are such, are also stored in
/// `copies`, as many of each segment.
class Steps {
 public:
  Steps(const std::string& algorithm, std::vector<Segment> segments, const std::vector<std::vector<double>>& rows,
        std::vector<std::vector<Tensor>> copies)
      : segments_(std::move(segments)),
        groups_(flat_groups(algorithm, rows)),
        device_(c10::kCPU),
        copies_(std::move(copies)) {
    if (segments_.empty()) throw InvalidArgument("a step needs segments");
    const Tensor& first = std::get<0>(segments_.front());
    device_ = first.device();
    dtype_ = kernel_dtype(first.scalar_type());
    for (const Segment& segment : segments_) {
      if (std::get<6>(segment) >= rows.size()) throw InvalidArgument("a segment names a group that is not there");
      rows_.push_back(row_of(segment, first.scalar_type()));
    }
    on_device_.follow(rows_, device_);
    device_groups_.follow(groups_, device_);
    if (!copies_.empty()) copies_on_device_.follow(places_of_copies(), device_);
  }

  void run(const Tensor& scalars, bool keep_gradient, uintptr_t stream) const {
    const auto* at = struct_in<kernels::StepScalars>(scalars, device_);
    if (device_.is_cpu()) return run_on_host({dtype_, rows_.data(), rows_.size(), at, keep_gradient});
    cuda::StepPlan plan{dtype_, on_device_.items(), on_device_.chunks(), on_device_.num_chunks(), at, keep_gradient};
    plan.copies = copies_on_device_.data();
    plan.num_copies = copies_.empty() ? 0 : static_cast<uint32_t>(copies_.front().size());
    check_kernel(device_groups_.step(plan, stream_of(stream)), "an optimizer step");
  }

 private:
  std::vector<void*> places_of_copies() const {
    std::vector<void*> places;
    for (size_t i = 0; i < segments_.size(); ++i) {
      const auto& [gradient, parameter, low, states, step, used, group] = segments_[i];
      const auto& of_segment = copies_.at(i);
      if (of_segment.size() != copies_.front().size()) throw InvalidArgument("a segment has more copies than another");
      const auto dtype = low ? low->scalar_type() : parameter.scalar_type();
      for (const Tensor& copy : of_segment) places.push_back(data_as<void>(copy, device_, gradient.numel(), dtype));
    }
    return places;
  }

  void run_on_host(const kernels::StepArguments& arguments) const {
    step_by_groups(arguments, groups_);
    for (size_t i = 0; i < copies_.size(); ++i) {
      const auto& low = std::get<2>(segments_[i]);
      for (const Tensor& copy : copies_[i]) copy.copy_(low ? *low : std::get<1>(segments_[i]));
    }
  }

  kernels::StepSegment row_of(const Segment& segment, c10::ScalarType type) const {
    const auto& [gradient, parameter, low, states, step, used, group] = segment;
    const int64_t n = gradient.numel();
    kernels::StepSegment row{};
    row.gradient = data_as<void>(gradient, device_, n, type);
    row.parameter = data_as<void>(parameter, device_, n, type);
    row.low_dtype = low ? kernel_dtype(low->scalar_type()) : DType::bf16;
    row.low = low ? data_as<void>(*low, device_, n, low->scalar_type()) : nullptr;
    if (states.size() > std::size(row.state)) throw InvalidArgument("a segment has at most 3 states");
    for (size_t s = 0; s < states.size(); ++s) row.state[s] = data_as<void>(states[s], device_, n, type);
    row.step = optional_data_as<float>(step, device_, 1, c10::kFloat);
    row.used = optional_data_as<double>(used, device_, 1, c10::kDouble);
    row.n = static_cast<size_t>(n);
    row.group = group;
    return row;
  }

  std::vector<Segment> segments_;
  FlatGroups groups_;
  c10::Device device_;
  DType dtype_;
  std::vector<kernels::StepSegment> rows_;
  std::vector<std::vector<Tensor>> copies_;
  DeviceSegments<kernels::StepSegment> on_device_;
  DeviceTable<void*> copies_on_device_;
  DeviceGroups device_groups_;
};

// --- the end of a window ---------------------------------------------------------------------------------------------

/// WindowReport and the metrics after it.
kernels::WindowReport* report_in(const OptionalTensor& report, c10::Device device, uint32_t num_slots) {
  const auto bytes = static_cast<int64_t>(kernels::report_bytes(num_slots));
  return report ? reinterpret_cast<kernels::WindowReport*>(data_as<char>(*report, device, bytes, c10::kByte)) : nullptr;
}

constexpr auto kNormSumsBytes = static_cast<int64_t>(cuda::kNormSums * sizeof(kernels::NormSum));

void finish_window(const Tensor& partials, const Tensor& tail, const Tensor& used, const Tensor& steps,
                   const std::tuple<double, double, double, double, int32_t>& options, const Tensor& scalars,
                   const OptionalTensor& scale, const OptionalTensor& report, uint32_t num_slots,
                   const OptionalTensor& sums, uintptr_t stream) {
  const c10::Device device = partials.device();
  const auto* squares = data_as<double>(partials, device, 0, c10::kDouble);
  const auto* fields = data_as<double>(tail, device, static_cast<int64_t>(kernels::tail_size(num_slots)), c10::kDouble);
  const auto* counts = data_as<double>(used, device, steps.numel(), c10::kDouble);
  auto* taken = data_as<float>(steps, device, 0, c10::kFloat);
  auto* found = struct_in<kernels::StepScalars>(scalars, device);
  auto* state = scale ? struct_in<kernels::LossScaleState>(*scale, device) : nullptr;
  auto* told = report_in(report, device, num_slots);
  const auto num_partials = static_cast<size_t>(partials.numel()), parameters = static_cast<size_t>(steps.numel());
  const kernels::WindowOptions window = window_options(options);
  if (device.is_cpu()) {
    return kernels::finish_window(squares, num_partials, fields, counts, taken, parameters, window, found, state, told,
                                  num_slots);
  }
  auto* const room = sums ? data_as<char>(*sums, device, kNormSumsBytes, c10::kByte) : nullptr;
  check_kernel(cuda::finish_window(squares, num_partials, reinterpret_cast<kernels::NormSum*>(room), fields, counts,
                                   taken, parameters, window, found, state, told, num_slots, stream_of(stream)),
               "finish_window");
}

void count_steps(const Tensor& steps, const OptionalTensor& used, const Tensor& scalars, uintptr_t stream) {
  const c10::Device device = steps.device();
  auto* taken = data_as<float>(steps, device, 0, c10::kFloat);
  const auto* counts = optional_data_as<double>(used, device, steps.numel(), c10::kDouble);
  const auto* found = struct_in<kernels::StepScalars>(scalars, device);
  const auto n = static_cast<size_t>(steps.numel());
  if (device.is_cpu()) return kernels::count_steps(taken, counts, n, found);
  check_kernel(cuda::count_steps(taken, counts, n, found, stream_of(stream)), "count_steps");
}

/// Summed gradients, each with a copy of low precision or none.
void apply_means(const std::vector<std::pair<Tensor, OptionalTensor>>& segments, const Tensor& scalars, bool clips,
                 uintptr_t stream) {
  const c10::Device device = scalars.device();
  std::vector<kernels::MeanSegment> rows;
  for (const auto& [values, low] : segments) {
    rows.push_back({data_of(values, device),
                    low ? data_as<void>(*low, device, values.numel(), low->scalar_type()) : nullptr,
                    static_cast<size_t>(values.numel()), kernel_dtype(values.scalar_type()),
                    low ? kernel_dtype(low->scalar_type()) : DType::bf16});
  }
  const auto* found = struct_in<kernels::StepScalars>(scalars, device);
  if (device.is_cpu()) return kernels::apply_means(rows.data(), rows.size(), found, clips);
  // Freed to torch's allocator on return, which gives memory to later work of the same stream alone.
  DeviceSegments<kernels::MeanSegment> on_device;
  on_device.follow(rows, device);
  check_kernel(
      cuda::apply_means(on_device.items(), on_device.chunks(), on_device.num_chunks(), found, clips, stream_of(stream)),
      "apply_means");
}

// --- losses ----------------------------------------------------------------------------------------------------------

/// `metrics` are pairs of a value and its slot. `seed` is of the loss's dtype.
void note_loss(const OptionalTensor& loss, const OptionalTensor& weight, double rows, bool is_mean, bool first,
               uint32_t num_slots, const std::vector<std::pair<Tensor, uint32_t>>& metrics, const Tensor& scalars,
               const OptionalTensor& scale, const Tensor& tail, const Tensor& gate, const OptionalTensor& seed,
               const OptionalTensor& report, uintptr_t stream) {
  const c10::Device device = tail.device();
  if (metrics.size() > kernels::kMaxMetrics) {
    throw InvalidArgument("a loss has at most " + std::to_string(kernels::kMaxMetrics) + " metrics");
  }
  kernels::LossTerms terms{};
  terms.loss = loss ? data_as<void>(*loss, device, 1, loss->scalar_type()) : nullptr;
  terms.loss_dtype = loss ? kernel_dtype(loss->scalar_type()) : DType::f32;
  terms.weight = weight ? data_as<void>(*weight, device, 1, weight->scalar_type()) : nullptr;
  terms.weight_dtype = weight ? kernel_dtype(weight->scalar_type()) : DType::f64;
  terms.rows = rows;
  terms.is_mean = is_mean;
  terms.first = first;
  terms.num_slots = num_slots;
  for (const auto& [value, slot] : metrics) {
    if (slot >= num_slots) throw InvalidArgument("a metric's slot is past the tail's");
    terms.metrics[terms.num_metrics++] = {data_as<void>(value, device, 1, value.scalar_type()),
                                          kernel_dtype(value.scalar_type()), slot};
  }
  auto* fields = data_as<double>(tail, device, static_cast<int64_t>(kernels::tail_size(num_slots)), c10::kDouble);
  auto* is_open = data_as<double>(gate, device, 1, c10::kDouble);
  auto* from = loss && seed ? data_as<void>(*seed, device, 1, loss->scalar_type()) : nullptr;
  const auto* found = struct_in<kernels::StepScalars>(scalars, device);
  const auto* state = scale ? struct_in<kernels::LossScaleState>(*scale, device) : nullptr;
  auto* told = report_in(report, device, num_slots);
  if (device.is_cpu()) return kernels::note_loss(terms, found, state, fields, is_open, from, told);
  check_kernel(cuda::note_loss(terms, found, state, fields, is_open, from, told, stream_of(stream)), "note_loss");
}

py::dict read_scalars(const Tensor& bytes) {
  const auto scalars = from_bytes<kernels::StepScalars>(bytes);
  py::dict fields;
  fields["divisor"] = scalars.divisor;
  fields["clip"] = scalars.clip;
  fields["norm"] = scalars.norm;
  fields["unit"] = scalars.unit;
  fields["finite"] = scalars.finite;
  fields["dropped"] = scalars.dropped;
  return fields;
}

}  // namespace

void bind_kernels(py::module_& parent) {
  using py::literals::operator""_a;
  py::module_ m =
      parent.def_submodule("kernels", "Kernels over tensors of the CPU or of CUDA, for tests and benchmarks.");
  m.def("is_built", &cuda::is_built);
  m.attr("TILE") = kernels::kTile;
  m.attr("MAX_PACK_SOURCES") = cuda::kMaxPackSources;
  m.attr("MAX_PEERS") = cuda::kMaxPeers;
  m.attr("PEER_SIGNALS_BYTES") = sizeof(cuda::PeerSignals);

  m.def(
      "make_scalars",
      [](double divisor, double clip, double norm, double unit, bool finite, bool dropped) {
        return bytes_of(kernels::StepScalars{divisor, clip, norm, unit, finite ? 1 : 0, dropped ? 1 : 0});
      },
      "divisor"_a = 1.0, "clip"_a = 1.0, "norm"_a = 0.0, "unit"_a = 1.0, "finite"_a = true, "dropped"_a = false);
  m.def("read_scalars", &read_scalars);
  m.def("make_loss_scale",
        [](float scale, int32_t tracker) { return bytes_of(kernels::LossScaleState{scale, tracker}); });
  m.def("read_loss_scale", [](const Tensor& bytes) {
    const auto state = from_bytes<kernels::LossScaleState>(bytes);
    return std::tuple(state.scale, state.growth_tracker);
  });

  py::class_<PackingProbe>(m, "Packing")
      .def(py::init<std::vector<OptionalTensor>, const std::vector<uint64_t>&, const std::vector<uint64_t>&, Tensor>(),
           "sources"_a, "offsets"_a, "sizes"_a, "bucket"_a)
      .def("run", &PackingProbe::run, "accumulate"_a = false, "factor"_a = 1.0, "gate"_a = py::none(), "stream"_a = 0,
           Release());
  py::class_<Statistics>(m, "Statistics")
      .def(py::init<std::vector<Tensor>>(), "gradients"_a)
      .def_property_readonly("partials", &Statistics::partials)
      .def("run", &Statistics::run, "stream"_a = 0, Release());
  py::class_<Steps>(m, "Steps")
      .def(py::init<const std::string&, std::vector<Segment>, const std::vector<std::vector<double>>&,
                    std::vector<std::vector<Tensor>>>(),
           "algorithm"_a, "segments"_a, "groups"_a, "copies"_a = std::vector<std::vector<Tensor>>())
      .def("run", &Steps::run, "scalars"_a, "keep_gradient"_a = false, "stream"_a = 0, Release());
  m.def("tree_sum", &tree_sum, "sources"_a, "destinations"_a, "stream"_a = 0, Release());
  m.def("peer_reduce", &peer_reduce, "buffers"_a, "signals"_a, "blocks"_a, "stream"_a = 0, Release());
  m.def("finish_window", &finish_window, "partials"_a, "tail"_a, "used"_a, "steps"_a, "options"_a, "scalars"_a,
        "scale"_a = py::none(), "report"_a = py::none(), "num_slots"_a = 0, "sums"_a = py::none(), "stream"_a = 0,
        Release());
  m.def("count_steps", &count_steps, "steps"_a, "used"_a, "scalars"_a, "stream"_a = 0, Release());
  m.def("apply_means", &apply_means, "segments"_a, "scalars"_a, "clips"_a, "stream"_a = 0, Release());
  m.def("note_loss", &note_loss, "loss"_a, "weight"_a, "rows"_a, "is_mean"_a, "first"_a, "num_slots"_a, "metrics"_a,
        "scalars"_a, "scale"_a, "tail"_a, "gate"_a, "seed"_a, "report"_a = py::none(), "stream"_a = 0, Release());
  m.def("report_bytes", &kernels::report_bytes);
  m.attr("norm_sums_bytes") = kNormSumsBytes;
}

}  // namespace muster
