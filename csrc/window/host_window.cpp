#include "window/host_window.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "comm/text_exchange.h"
#include "muster/error.h"
#include "window/buffer_sizes.h"
#include "window/host_norm.h"

namespace muster {

double buffer_share(const comm::Communicator& replicas, const WindowContext& context, size_t r,
                    const HostNumbers& numbers) {
  if (context.options.buffers != Buffers::chief) return numbers.weight(r);
  return replicas.rank() == 0 ? 1.0 : 0.0;
}

ClosedWindow close_on_host(comm::Communicator& replicas, const WindowContext& context, size_t r, const Closing& closing,
                           double share, HostNumbers& numbers, HostBuffers& buffers) {
  auto& engine = context.sums.engine(r);
  const bool to_owners = context.sums.go_to_owners();
  const bool chief_only = context.options.buffers == Buffers::chief;
  const auto& failure = closing.failure;
  const auto tail = new_tail(context, static_cast<int>(r), closing, numbers.losses(r), buffers.num_doubles(r));
  if (!failure) numbers.fill(tail, r);
  buffers.fill(tail, r, share);
  const auto integers = buffers.integers_of(r);
  // Who has the tail's sum knows then that the statistics of all owners are there.
  if (to_owners) engine.wait();
  auto tail_work = replicas.all_reduce(tail.tensor, ReduceOp::sum, tail.tensor.numel());
  comm::Work integer_work;
  if (integers.numel() > 0) {
    integer_work = chief_only ? replicas.broadcast(integers, 0) : replicas.all_reduce(integers, ReduceOp::max);
  }
  try {
    engine.wait();
    tail_work.wait();
  } catch (const LayoutMismatch& mismatch) {
    throw_sizes_differ(context.registry, r, mismatch.what());
  }
  // Nobody reads gradients in place any more: all replicas' sums were there before the tail's was.
  if (to_owners) engine.release_gradients();
  integer_work.wait();
  buffers.set_integers(r, integers);
  if (tail[Tail::failures] > 0) return {tail, exchange_texts(replicas, text_of(failure))};
  numbers.set_metric_texts(
      r, tail[Tail::metrics] > 0 ? exchange_texts(replicas, numbers.metric_text(r)) : std::vector<std::string>());
  return {tail, {}};
}

void merge_host_buffers(const WindowContext& context, const Tail& tail, bool adopts, HostBuffers& buffers) {
  buffers.merge(tail, context.options.buffers == Buffers::chief ? 1.0 : tail[Tail::weight], adopts);
}

HostWindow::HostWindow(const WindowContext& context, DividedUpdate* divided)
    : context_(context),
      divided_(divided),
      numbers_(context.topology.devices.size(), context.options),
      buffers_(context.registry, context.topology.devices.size(), /*merges=*/context.topology.num_replicas > 1) {}

void HostWindow::open() {
  numbers_.open();
  buffers_.open();
}

void HostWindow::weigh(int local_replica, double rows) {
  if (numbers_.has_unit()) return;
  const auto r = static_cast<size_t>(local_replica);
  if (const auto unit = guess_unit(*context_.groups.control_of(r), rows)) numbers_.set_unit(r, *unit);
}

ClosedWindow HostWindow::close(int local_replica, const Closing& closing) {
  const auto r = static_cast<size_t>(local_replica);
  auto& replicas = *context_.groups.gradients[r];
  const double share = buffer_share(replicas, context_, r, numbers_);
  auto closed = close_on_host(replicas, context_, r, closing, share, numbers_, buffers_);
  if (closed.tail[Tail::failures] > 0) return closed;
  auto& engine = context_.sums.engine(r);
  engine.reduce_sparse(closed.tail.counts());
  if (closed.tail[Tail::weight] > 0) engine.learn_order(closed.tail.counts());
  return closed;
}

// A step makes means only of what it reads: not of other ranks' shards, nor of rows that it reads as a dense copy.
bool HostWindow::makes_means_first(const Tail& tail) const {
  if (!context_.options.keep_gradients) return false;
  return context_.options.shard_optimizer || divided_ != nullptr || context_.sums.has_sparse(tail);
}

void HostWindow::finish(const Tail& tail, bool fused, WindowSums& sums) {
  numbers_.take_unit();
  if (sums.ends_unchanged()) return;
  numbers_.read(tail, sums);
  const double divisor = numbers_.divisor(tail);
  auto& scalars = numbers_.scalars();
  if (fused) {
    take_host_norm(context_, tail, numbers_.scale().on_host().scale, scalars);
    sums.grad_norm = scalars.norm;
    sums.finite = scalars.finite != 0;
    if (sums.finite && makes_means_first(tail)) {
      divide_sums(context_, tail, scalars.divisor);
      scalars.divisor = 1;
    }
  }
  // Of a fused window, somebody may want to look at what was not finite.
  if (!fused || (!sums.finite && context_.options.keep_gradients)) leave_clipped_means(context_, tail, divisor, sums);
  merge_host_buffers(context_, tail, /*adopts=*/false, buffers_);
  numbers_.end(tail, sums.finite);
}

kernels::StepScalars* HostWindow::leave_means(const Tail& tail, const std::function<void()>& edit) {
  const at::NoGradGuard no_grad;
  auto& scalars = numbers_.scalars();
  divide_sums(context_, tail, scalars.divisor);
  context_.sums.edit(tail, edit);
  // A window of sums has nothing left to divide by.
  auto means = tail;
  means.tensor = tail.tensor.clone();
  means[Tail::sum_losses] = 1;
  take_host_norm(context_, means, 1, scalars);
  return &scalars;
}

void HostWindow::update(const Tail& tail, FlatOptimizer& optimizer, const std::vector<int>& parameters,
                        const FlatGroups& groups, const OnReplicas& on_replicas) {
  const auto means = context_.sums.gradients_of(tail, parameters, 0);
  const auto& scalars = numbers_.scalars();
  if (divided_ != nullptr) {
    divided_->step(optimizer, tail, means, parameters, groups, scalars, on_replicas);
  } else {
    optimizer.step(means, groups, &scalars, context_.options.keep_gradients);
    optimizer.gather_parameters(*context_.groups.workers);
  }
  for (const int p : parameters) context_.registry.note_agreed(static_cast<size_t>(p));
  if (context_.options.keep_gradients) context_.sums.show(means, parameters);
}

}  // namespace muster
