#include "window/host_norm.h"

#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "device/kernel_dtype.h"
#include "gradient/gradient_dtype.h"
#include "kernels/step_math.h"
#include "optimizer/gradient_norm.h"

namespace muster {

namespace {

// In place; `partials` becomes those of grad_stats.
void divide(const at::Tensor& values, double divisor, double norm_type, std::vector<double>& partials) {
  const auto n = static_cast<size_t>(values.numel());
  const auto dtype = kernel_dtype(values.scalar_type());
  partials.resize(kernels::num_tiles(n));
  kernels::divide_with_stats(dtype, values.mutable_data_ptr(), n, divisor, partials.data());
  if (norm_type == 2) return;
  const kernels::StatsSegment stats{values.const_data_ptr(), partials.data(), n, dtype};
  kernels::grad_stats(&stats, 1, norm_type);
}

}  // namespace

kernels::WindowOptions window_options(const StrategyOptions& from, double loss_scale) {
  kernels::WindowOptions options{};
  options.clip_norm = from.clip_norm.value_or(0);
  options.norm_type = from.clip_norm_type;
  options.clip_value = from.clip_value.value_or(0);
  options.loss_scale = loss_scale;
  return options;
}

void take_host_norm(const WindowContext& context, const Tail& tail, double loss_scale, kernels::StepScalars& scalars) {
  const auto window = window_options(context.options, loss_scale);
  const auto& gradients = context.sums;
  if (!gradients.go_to_owners()) return take_norm(gradients.used(tail), tail.data(), window, scalars);
  kernels::NormSum sum;
  const auto& engine = gradients.engine(0);
  const auto* const counts = tail.counts();
  for (size_t p = 0; p < gradients.trainable().size(); ++p) {
    if (engine.sparse_sum(p).defined()) {
      add_partials({engine.sparse_sum(p)}, window.norm_type, sum);
    } else if (counts[p] > 0) {
      engine.owners()->add_partials(p, window.norm_type, sum);
    }
  }
  finish_norm(sum, tail.data(), window, scalars);
  if (scalars.finite != 0) return;
  const auto sums = gradients.used(tail);
  // The square of an fp64 value, and high powers.
  const bool has_doubles = std::any_of(
      sums.begin(), sums.end(), [](const auto& sum) { return c10::toRealValueType(sum.scalar_type()) == at::kDouble; });
  const bool may_overflow = kernels::keeps_digits(scalars.divisor) && (window.norm_type > 2 || has_doubles);
  if (!may_overflow) {
    // No step follows, and who closes now would take away the statistics that others still read.
    context.groups.workers->barrier().wait();
    return;
  }
  const auto finite = at::scalar_tensor(gradients.owned_are_finite(tail) ? 1 : 0, at::kInt);
  context.groups.workers->all_reduce(finite, ReduceOp::min).wait();
  scalars.finite = finite.item<int>();
}

void divide_sums(const WindowContext& context, const Tail& tail, double divisor) {
  std::vector<double> partials;
  for (const auto& values : context.sums.dense(tail)) {
    divide(values, divisor, context.options.clip_norm_type, partials);
  }
}

void leave_clipped_means(const WindowContext& context, const Tail& tail, double divisor, WindowSums& sums) {
  const auto& options = context.options;
  const auto& engine = context.sums.engine(0);
  struct Piece {
    at::Tensor values;
    at::Tensor gradient;
  };
  std::vector<Piece> pieces;
  std::vector<double> partials;
  const double norm_type = options.clip_norm_type;
  kernels::NormSum norm_sum;
  for (size_t p = 0; p < context.sums.trainable().size(); ++p) {
    const auto& parameter = engine.parameters()[p].tensor;
    auto& gradient = parameter.mutable_grad();
    gradient.reset();
    const auto& sum = context.sums.sum_of(tail, p);
    if (!sum.defined()) continue;
    Piece piece{dense_values(sum), sum};
    divide(piece.values, divisor, norm_type, partials);
    for (const double partial : partials) kernels::add_partial(norm_sum, partial, norm_type);
    gradient = piece.gradient.to(gradient_dtype(parameter));
    pieces.push_back(std::move(piece));
  }
  const double total = kernels::norm_total(norm_sum);
  sums.grad_norm = kernels::norm_root(total, norm_type);
  sums.finite = kernels::keeps_digits(divisor) && (std::isfinite(total) || context.sums.are_finite(tail));
  if (!sums.finite) return;
  kernels::StepScalars clipping{};
  clipping.divisor = 1;
  clipping.finite = 1;
  clipping.clip = kernels::norm_clip(sums.grad_norm, options.clip_norm.value_or(0));
  clipping.clip_value = options.clip_value.value_or(0);
  if (clipping.clip == 1 && clipping.clip_value == 0) return;
  size_t next = 0;
  for (size_t p = 0; p < context.sums.trainable().size(); ++p) {
    const auto& parameter = engine.parameters()[p].tensor;
    auto& gradient = parameter.mutable_grad();
    if (!gradient.defined()) continue;
    const auto& piece = pieces[next++];
    kernels::MeanSegment segment{};
    segment.values = piece.values.mutable_data_ptr();
    segment.n = static_cast<size_t>(piece.values.numel());
    segment.dtype = kernel_dtype(piece.values.scalar_type());
    kernels::apply_means(&segment, 1, &clipping, /*clips=*/true);
    gradient = piece.gradient.to(gradient_dtype(parameter));
  }
}

}  // namespace muster
