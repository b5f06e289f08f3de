#include "optimizer/gradient_norm.h"

#include <ATen/ops/isfinite.h>

#include <algorithm>

#include "comm/wait_all.h"
#include "device/kernel_dtype.h"
#include "device/kernel_status.h"
#include "kernels/pieces.h"
#include "optimizer/parallel_kernels.h"

namespace muster {

namespace {

std::vector<kernels::StatsSegment> segments_of(const std::vector<at::Tensor>& sums) {
  std::vector<kernels::StatsSegment> segments;
  segments.reserve(sums.size());
  const auto append = [&](const at::Tensor& values, int64_t rows) {
    const auto dtype = kernel_dtype(values.scalar_type());
    const auto n = static_cast<size_t>(rows == 0 ? 0 : values.numel() / rows);
    const auto* next = static_cast<const std::byte*>(values.const_data_ptr());
    for (int64_t row = 0; row < rows; ++row, next += n * kernels::size_of(dtype)) {
      segments.push_back({next, nullptr, n, dtype});
    }
  };
  for (const auto& sum : sums) {
    if (sum.is_sparse()) {
      append(dense_values(sum), sum._values().size(0));
    } else {
      append(dense_values(sum), 1);
    }
  }
  return segments;
}

size_t count_tiles(const std::vector<kernels::StatsSegment>& segments) {
  size_t tiles = 0;
  for (const auto& segment : segments) tiles += kernels::num_tiles(segment.n);
  return tiles;
}

void place_partials(std::vector<kernels::StatsSegment>& segments, double* next) {
  for (auto& segment : segments) {
    segment.partials = next;
    next += kernels::num_tiles(segment.n);
  }
}

constexpr size_t kSumsBytes = kernels::cuda::kNormSums * sizeof(kernels::NormSum);

void cut(std::vector<kernels::StatsSegment>& segments, const std::vector<Run>& runs) {
  for (size_t i = 0; i < segments.size(); ++i) {
    const auto& run = runs[i];
    segments[i] = kernels::piece_of(segments[i], static_cast<size_t>(run.begin), static_cast<size_t>(run.count));
  }
}

}  // namespace

void add_partials(const std::vector<at::Tensor>& sums, double norm_type, kernels::NormSum& sum) {
  auto segments = segments_of(sums);
  std::vector<double> partials(count_tiles(segments));
  place_partials(segments, partials.data());
  parallel_grad_stats(segments, norm_type);
  for (const double partial : partials) kernels::add_partial(sum, partial, norm_type);
}

void finish_norm(const kernels::NormSum& sum, const double* tail, const kernels::WindowOptions& options,
                 kernels::StepScalars& scalars) {
  const double unit = scalars.unit;
  kernels::close_scalars(kernels::norm_total(sum), tail, options.loss_scale, options, &scalars);
  scalars.unit = unit;
}

void take_norm(const std::vector<at::Tensor>& sums, const double* tail, const kernels::WindowOptions& options,
               kernels::StepScalars& scalars) {
  kernels::NormSum sum;
  add_partials(sums, options.norm_type, sum);
  finish_norm(sum, tail, options, scalars);
  // The square of an fp64 value may overflow, and high powers.
  if (scalars.finite == 0 && kernels::keeps_digits(scalars.divisor) &&
      std::all_of(sums.begin(), sums.end(),
                  [](const at::Tensor& values) { return at::isfinite(dense_values(values)).all().item<bool>(); })) {
    scalars.finite = 1;
  }
}

// Memory for the partials of their tiles; returns how many there are.
size_t DeviceNorm::place(Segments& segments, GraphMemory& memory, c10::Device device) {
  const size_t tiles = count_tiles(segments);
  memory.reserve(kSumsBytes + tiles * sizeof(double), device);
  memory.note_launch(device);
  place_partials(segments, reinterpret_cast<double*>(static_cast<std::byte*>(memory.data()) + kSumsBytes));
  return tiles;
}

void DeviceNorm::launch_stats(DeviceSegments<kernels::StatsSegment>& table, const Segments& segments, double norm_type,
                              c10::Device device) {
  table.follow(segments, device);
  check_kernel(
      kernels::cuda::grad_stats(table.items(), table.chunks(), table.num_chunks(), norm_type, stream_handle(device)),
      "the gradient's statistics");
}

void DeviceNorm::launch_end(size_t tiles, const kernels::WindowOptions& options, const Window& window,
                            c10::Device device) {
  auto* const memory = static_cast<std::byte*>(memories_.front().data());
  auto* const sums = reinterpret_cast<kernels::NormSum*>(memory);
  const auto* const partials = reinterpret_cast<const double*>(memory + kSumsBytes);
  check_kernel(
      kernels::cuda::finish_window(partials, tiles, sums, window.tail, nullptr, nullptr, 0, options, window.scalars,
                                   window.scale, window.report, window.num_slots, stream_handle(device)),
      "the end of a window");
}

void DeviceNorm::enqueue(const std::vector<at::Tensor>& gradients, c10::Device device,
                         const kernels::WindowOptions& options, const Window& window) {
  tables_.resize(std::max<size_t>(tables_.size(), 1));
  auto segments = segments_of(gradients);
  const size_t tiles = place(segments, memories_.front(), device);
  launch_stats(tables_.front(), segments, options.norm_type, device);
  launch_end(tiles, options, window, device);
}

// Each device writes the partials of its part where the first one adds them all up.
void DeviceNorm::enqueue(const std::vector<Part>& parts, const kernels::WindowOptions& options, const Window& window) {
  tables_.resize(std::max(tables_.size(), parts.size()));
  const auto first = parts.front().device;
  size_t tiles = 0;
  for (const auto& part : parts) order_devices(first, part.device);  // the partials of the window before were read
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto& part = parts[i];
    auto segments = segments_of(part.gradients);
    tiles = place(segments, memories_.front(), first);
    cut(segments, part.runs);
    const OnDevice on_device(part.device);
    launch_stats(tables_[i], segments, options.norm_type, part.device);
  }
  for (const auto& part : parts) order_devices(part.device, first);
  launch_end(tiles, options, window, first);
}

// Each replica's partials are zeros but for its part, and become the sum of all.
void DeviceNorm::enqueue(const std::vector<Part>& parts, const std::vector<comm::CommunicatorPtr>& replicas,
                         const kernels::WindowOptions& options, const Window& window) {
  tables_.resize(std::max(tables_.size(), parts.size()));
  memories_.resize(std::max(memories_.size(), parts.size()));
  size_t tiles = 0;
  std::vector<comm::Work> works;
  for (size_t l = 0; l < parts.size(); ++l) {
    const auto& part = parts[l];
    const OnDevice on_device(part.device);
    auto segments = segments_of(part.gradients);
    tiles = place(segments, memories_[l], part.device);
    const auto bytes = static_cast<int64_t>(tiles * sizeof(double));
    const auto partials =
        memories_[l].tensor().narrow(0, static_cast<int64_t>(kSumsBytes), bytes).view(at::kDouble).zero_();
    cut(segments, part.runs);
    launch_stats(tables_[l], segments, options.norm_type, part.device);
    works.push_back(replicas[l]->all_reduce(partials, ReduceOp::sum, tiles, {.has_this = l == 0}));
  }
  comm::wait_all(works, parts.front().device);
  launch_end(tiles, options, window, parts.front().device);
}

}  // namespace muster
