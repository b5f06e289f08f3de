// The part of a window's close that is the same for every end, and what losses weigh.
#pragma once

#include <ATen/ops/zeros.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "muster/error.h"
#include "muster/step.h"
#include "window/window.h"
#include "window/window_context.h"

namespace muster {

/// Losses of a positive weight that a replica had in a window.
struct LossCounts {
  double contributions = 0;
  double mean_losses = 0;
  double sum_losses = 0;

  void add(Reduction reduction) {
    contributions += 1;
    (reduction == Reduction::mean ? mean_losses : sum_losses) += 1;
  }
};

/// The weight of a part's loss, which the host can read. Throws InvalidArgument for one that is negative or not finite.
inline double weight_on_host(const ReplicaPart& part) {
  const double weight = part.loss->weight ? part.loss->weight->item<double>() : part.rows;
  if (weight < 0 || !std::isfinite(weight)) {
    throw InvalidArgument("the weight of a loss must be finite and not negative; it is " + std::to_string(weight));
  }
  return weight;
}

/// What a replica says of the samples in a usual part (not above 0: nothing), to be summed over replicas for unit_of().
inline at::Tensor usual_part(double rows) {
  const auto part = at::zeros({2}, at::kDouble);
  if (rows > 0) {
    part.data_ptr<double>()[0] = rows;
    part.data_ptr<double>()[1] = 1;
  }
  return part;
}

/// Before weights are known: the mean of what replicas say, which is a good guess of the unit. Empty where nobody
/// knows.
inline std::optional<double> unit_of(const at::Tensor& usual_parts) {
  const double* sums = usual_parts.const_data_ptr<double>();
  return sums[1] > 0 ? std::optional(sums[0] / sums[1]) : std::nullopt;
}

/// Collective over `replicas`: the guess from what all of them say.
inline std::optional<double> guess_unit(comm::Communicator& replicas, double rows) {
  const auto parts = usual_part(rows);
  replicas.all_reduce(parts, ReduceOp::sum).wait();
  return unit_of(parts);
}

/// A replica's tail, with the fields that do not depend on the end, and room for `num_extra` numbers.
inline Tail new_tail(const WindowContext& context, int local_replica, const Closing& closing, const LossCounts& losses,
                     int64_t num_extra) {
  const auto r = static_cast<size_t>(local_replica);
  const int replica = context.topology.first_replica + local_replica;
  const auto& engine = context.sums.engine(r);
  const auto tail = Tail::make(context.topology.num_replicas, context.sums.trainable().size(),
                               context.registry.buffers(r).size(), num_extra);
  tail[Tail::failures] = closing.failure ? 1 : 0;
  tail[Tail::stops] = closing.stop_requested ? 1 : 0;
  if (closing.agreement != nullptr) {
    tail.digest(replica) = closing.agreement->digest();
    tail.writes() = closing.agreement->has_writes() ? 1 : 0;
  }
  tail[Tail::hooks] = closing.has_hooks ? 1 : 0;
  if (!closing.failure) {
    tail[Tail::contributions] = losses.contributions;
    tail[Tail::mean_losses] = losses.mean_losses;
    tail[Tail::sum_losses] = losses.sum_losses;
    tail.non_finite(replica) = engine.first_non_finite() + 1;
    engine.add_counts(tail.counts());
  }
  return tail;
}

/// A failure as replicas tell it each other: "type\ntext", or empty.
inline std::string text_of(const Failure& failure) {
  return failure ? failure.type + '\n' + failure.text : std::string();
}

}  // namespace muster
