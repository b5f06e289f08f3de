#include <ATen/ops/zeros.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
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

namespace muster {
namespace {

namespace py = pybind11;
namespace cuda = kernels::cuda;
using at::Tensor;
using kernels::DType;

/// One rank's gradients, parameters of their dtype, bf16 and f16, partials, tail, its sum, step counts, scalars and
/// loss scale; see cuda::PeerBuffers and cuda::PeerState.
using RankTensors =
    std::tuple<Tensor, std::vector<OptionalTensor>, Tensor, Tensor, Tensor, Tensor, Tensor, OptionalTensor>;

/// A run of a parameter's elements: the first one among gradients and among parameters, which of the parameters' three
/// tensors, how many, the first tile, the parameter, its group, master and states; see cuda::PeerSegment.
using RunTensors = std::tuple<uint64_t, uint64_t, uint32_t, uint64_t, uint32_t, uint32_t, uint32_t, OptionalTensor,
                              std::vector<Tensor>>;

/// Ranks on one device that reduce and step together: on the CPU by its kernels, one after the other.
class ReduceSteps {
 public:
  ReduceSteps(const std::string& algorithm, std::vector<RankTensors> ranks, std::vector<std::vector<RunTensors>> runs,
              const std::vector<std::vector<double>>& groups, uint64_t used,
              const std::tuple<double, double, double, double, int32_t>& options, unsigned blocks)
      : ranks_(std::move(ranks)),
        runs_(std::move(runs)),
        groups_(flat_groups(algorithm, groups)),
        device_(c10::kCPU),
        peers_{static_cast<int>(ranks_.size()), cuda::kAllRanks, blocks, {}} {
    if (ranks_.empty() || ranks_.size() > cuda::kMaxPeers || runs_.size() != ranks_.size()) {
      throw InvalidArgument("1 to " + std::to_string(cuda::kMaxPeers) + " ranks take part, each with runs of its own");
    }
    const auto& first = std::get<0>(ranks_.front());
    device_ = first.device();
    step_.dtype = kernel_dtype(first.scalar_type());
    step_.num_partials = static_cast<uint64_t>(std::get<2>(ranks_.front()).numel());
    step_.tail_size = static_cast<uint64_t>(std::get<3>(ranks_.front()).numel());
    step_.num_parameters = static_cast<uint64_t>(std::get<5>(ranks_.front()).numel());
    step_.used = used;
    step_.options = window_options(options);
    if (step_.tail_size < kernels::kTailFields || used + step_.num_parameters > step_.tail_size) {
      throw InvalidArgument("a tail needs its first fields and one count a parameter");
    }
    std::visit([&](const auto& rows) { group_rows_.replace(rows.data(), rows.size() * sizeof(rows[0]), device_); },
               groups_);
    segments_.resize(ranks_.size());
    on_device_.resize(ranks_.size());
    for (size_t r = 0; r < ranks_.size(); ++r) add_rank(r, first.scalar_type(), groups.size());
    const auto bytes = static_cast<int64_t>(ranks_.size() * sizeof(cuda::PeerSignals));
    signals_ = at::zeros({bytes}, at::TensorOptions(c10::kByte).device(device_));
    for (size_t r = 0; r < ranks_.size(); ++r) {
      peers_.signals[r] = static_cast<cuda::PeerSignals*>(signals_.data_ptr()) + r;
    }
  }

  void run(bool keep_gradient, uintptr_t stream) {
    step_.keep_gradient = keep_gradient;
    if (device_.is_cpu()) return run_on_host();
    const auto enqueue = std::holds_alternative<std::vector<kernels::AdamGroup>>(groups_)  ? &cuda::reduce_adam_step
                         : std::holds_alternative<std::vector<kernels::SgdGroup>>(groups_) ? &cuda::reduce_sgd_step
                                                                                           : &cuda::reduce_adagrad_step;
    check_kernel(enqueue(peers_, step_, stream_of(stream)), "a reduction with a step");
  }

 private:
  void add_rank(size_t r, c10::ScalarType type, size_t num_groups) {
    const auto& [gradients, parameters, partials, tail, tail_sum, steps, scalars, scale] = ranks_[r];
    const auto tail_size = static_cast<int64_t>(step_.tail_size);
    if (parameters.size() != 3) throw InvalidArgument("a rank's parameters are three tensors, or None");
    const auto parameters_of = [&](size_t kind, c10::ScalarType dtype) {
      return optional_data_as<void>(parameters[kind], device_, 0, dtype);
    };
    auto& buffers = step_.buffers[r];
    buffers.gradients = data_as<void>(gradients, device_, 0, type);
    buffers.parameters = parameters_of(0, type);
    buffers.low[0] = parameters_of(1, c10::kBFloat16);
    buffers.low[1] = parameters_of(2, c10::kHalf);
    buffers.partials = data_as<double>(partials, device_, static_cast<int64_t>(step_.num_partials), c10::kDouble);
    buffers.tail = data_as<double>(tail, device_, tail_size, c10::kDouble);
    buffers.tail_sum = data_as<double>(tail_sum, device_, tail_size, c10::kDouble);
    for (const auto& run : runs_[r]) segments_[r].push_back(segment_of(r, run, type, num_groups));
    on_device_[r].follow(segments_[r], device_);
    auto& state = step_.state[r];
    state.segments = on_device_[r].items();
    state.chunks = on_device_[r].chunks();
    state.num_chunks = on_device_[r].num_chunks();
    state.steps = data_as<float>(steps, device_, static_cast<int64_t>(step_.num_parameters), c10::kFloat);
    state.scalars = struct_in<kernels::StepScalars>(scalars, device_);
    state.scale = scale ? struct_in<kernels::LossScaleState>(*scale, device_) : nullptr;
    state.groups = group_rows_.data();
  }

  cuda::PeerSegment segment_of(size_t r, const RunTensors& run, c10::ScalarType type, size_t num_groups) const {
    const auto& [gradient, parameter, kind, n, partial, index, group, master, states] = run;
    const auto& gradients = std::get<0>(ranks_[r]);
    const auto& parameters = std::get<1>(ranks_[r]);
    const OptionalTensor none;
    const auto& among = kind < parameters.size() ? parameters[kind] : none;
    if (!among) throw InvalidArgument("a run is of a parameter's tensor that its rank does not have");
    const bool fits = parameter + n <= static_cast<uint64_t>(among->numel()) &&
                      gradient + n <= static_cast<uint64_t>(gradients.numel()) &&
                      partial + kernels::num_tiles(n) <= step_.num_partials && index < step_.num_parameters;
    if (!fits || group >= num_groups || states.size() > 3 || (kind != 0) != master.has_value()) {
      throw InvalidArgument("a run ends past its rank's memory, or has no master, group or state");
    }
    const auto count = static_cast<int64_t>(n);
    cuda::PeerSegment segment{};
    segment.gradient = gradient;
    segment.parameter = parameter;
    segment.master = optional_data_as<void>(master, device_, count, type);
    for (size_t s = 0; s < states.size(); ++s) segment.state[s] = data_as<void>(states[s], device_, count, type);
    segment.n = n;
    segment.partial = partial;
    segment.index = index;
    segment.group = group;
    segment.parameter_dtype = kernel_dtype(among->scalar_type());
    return segment;
  }

  static void* element(void* buffer, DType dtype, uint64_t index) {
    return static_cast<char*>(buffer) + index * kernels::size_of(dtype);
  }

  void* parameter_in(size_t r, const cuda::PeerSegment& segment) const {
    const auto& buffers = step_.buffers[r];
    void* base = segment.master == nullptr ? buffers.parameters : buffers.low[segment.parameter_dtype == DType::f16];
    return element(base, segment.parameter_dtype, segment.parameter);
  }

  void run_on_host() const {
    const size_t size = ranks_.size();
    for (size_t r = 0; r < size; ++r) {
      for (const auto& segment : segments_[r]) reduce_on_host(r, segment);
    }
    std::vector<const void*> tails;
    std::vector<void*> sums;
    for (size_t r = 0; r < size; ++r) {
      tails.push_back(step_.buffers[r].tail);
      sums.push_back(step_.buffers[r].tail_sum);
    }
    kernels::tree_reduce(DType::f64, kernels::Reduction::sum, tails.data(), peers_.size, sums.data(), peers_.size,
                         step_.tail_size);
    for (size_t r = 0; r < size; ++r) step_on_host(r);
  }

  void reduce_on_host(size_t r, const cuda::PeerSegment& segment) const {
    std::vector<const void*> sources;
    for (size_t q = 0; q < ranks_.size(); ++q) {
      sources.push_back(element(step_.buffers[q].gradients, step_.dtype, segment.gradient));
    }
    void* sum = element(step_.buffers[r].gradients, step_.dtype, segment.gradient);
    kernels::tree_reduce(step_.dtype, kernels::Reduction::sum, sources.data(), peers_.size, &sum, 1, segment.n);
    auto* own = step_.buffers[r].partials + segment.partial;
    const kernels::StatsSegment stats{sum, own, segment.n, step_.dtype};
    kernels::grad_stats(&stats, 1);
    for (size_t q = 0; q < ranks_.size(); ++q) {
      if (q != r) std::copy_n(own, kernels::num_tiles(segment.n), step_.buffers[q].partials + segment.partial);
    }
  }

  void step_on_host(size_t r) const {
    const auto& buffers = step_.buffers[r];
    const auto& state = step_.state[r];
    const auto* used = buffers.tail_sum + step_.used;
    kernels::finish_window(buffers.partials, step_.num_partials, buffers.tail_sum, used, state.steps,
                           step_.num_parameters, step_.options, state.scalars, state.scale);
    std::vector<kernels::StepSegment> segments;
    for (const auto& own : segments_[r]) {
      kernels::StepSegment segment{};
      segment.gradient = element(buffers.gradients, step_.dtype, own.gradient);
      segment.parameter = own.master == nullptr ? parameter_in(r, own) : own.master;
      segment.low = own.master == nullptr ? nullptr : parameter_in(r, own);
      segment.low_dtype = own.parameter_dtype;
      std::copy_n(own.state, 3, segment.state);
      segment.step = state.steps + own.index;
      segment.used = used + own.index;
      segment.n = own.n;
      segment.group = own.group;
      segments.push_back(segment);
    }
    step_by_groups({step_.dtype, segments.data(), segments.size(), state.scalars, step_.keep_gradient}, groups_);
    for (const auto& own : segments_[r]) {
      for (size_t q = 0; q < ranks_.size(); ++q) {
        if (q == r) continue;
        std::memcpy(parameter_in(q, own), parameter_in(r, own), own.n * kernels::size_of(own.parameter_dtype));
      }
    }
  }

  std::vector<RankTensors> ranks_;
  std::vector<std::vector<RunTensors>> runs_;  // by rank
  FlatGroups groups_;
  c10::Device device_;
  cuda::Peers peers_;
  cuda::ReduceStep step_{};
  DeviceBytes group_rows_;
  std::vector<std::vector<cuda::PeerSegment>> segments_;  // by rank
  std::vector<DeviceSegments<cuda::PeerSegment>> on_device_;
  Tensor signals_;
};

}  // namespace

void bind_reduce_steps(py::module_& parent) {
  using py::literals::operator""_a;
  py::module_ m = parent.attr("kernels");
  py::class_<ReduceSteps>(m, "ReduceSteps")
      .def(py::init<const std::string&, std::vector<RankTensors>, std::vector<std::vector<RunTensors>>,
                    const std::vector<std::vector<double>>&, uint64_t,
                    const std::tuple<double, double, double, double, int32_t>&, unsigned>(),
           "algorithm"_a, "ranks"_a, "runs"_a, "groups"_a, "used"_a, "options"_a, "blocks"_a)
      .def("run", &ReduceSteps::run, "keep_gradient"_a = false, "stream"_a = 0, Release());
}

}  // namespace muster
