// Norms and means of a window's sums, taken by the host.
#pragma once

#include "kernels/kernels.h"
#include "muster/options.h"
#include "window/outcome.h"
#include "window/tail.h"
#include "window/window_context.h"

namespace muster {

/// What the options say of a window's end; growth, backoff and interval are left out.
kernels::WindowOptions window_options(const StrategyOptions& options, double loss_scale);

/// Fills `scalars` from the window's sums. Where they went to their owners alone: collective over workers if the norm
/// is not finite.
void take_host_norm(const WindowContext& context, const Tail& tail, double loss_scale, kernels::StepScalars& scalars);

/// Divides the sums in place.
void divide_sums(const WindowContext& context, const Tail& tail, double divisor);

/// Divides the sums and leaves them in `.grad` of replica 0's parameters (undefined where nobody had a gradient),
/// clipped if the norm is finite. Fills grad_norm and finite of `sums`.
void leave_clipped_means(const WindowContext& context, const Tail& tail, double divisor, WindowSums& sums);

}  // namespace muster
