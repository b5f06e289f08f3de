// reduce, gather and broadcast as users see them: inside a step between replicas with non-empty parts, differentiable;
// outside a step between workers.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "comm/communicator.h"
#include "muster/reduce_op.h"
#include "strategy/leaves.h"

namespace muster {

/// In a step, leaves are moved to the group's device, and results are there; outside, results are on the device of the
/// leaves that this worker gave.
///
/// In a step. The reduction of each leaf over the replicas that take part; gradients flow (for sum and mean by the sum
/// convention: the gradient of a sum is the sum of the gradients; for min and max to the replicas that attain it, in
/// equal parts). `mean` weighs each replica by `weight` (0-dim). Leaves of one dtype travel together.
/// Backward of these collectives is made of such collectives: it can be differentiated again, as often as one likes,
/// where all replicas do so, and a replica that leaves one out is LayoutMismatch at the others. Backward in another
/// call than the collective's throws InvalidArgument.
Leaves reduce_in_step(comm::Communicator& group, const Leaves& values, ReduceOp op, const at::Tensor& weight);

/// In a step. Each leaf concatenated along dimension 0 in replica order (0-dim leaves are stacked); gradients flow.
/// Without `comm::GatherSizes::equal` size(0) may differ.
Leaves gather_in_step(comm::Communicator& group, const Leaves& values,
                      comm::GatherSizes sizes = comm::GatherSizes::any);

/// In a step. The leaves of replica `source`, with their gradients flowing back to it.
Leaves broadcast_in_step(comm::Communicator& group, const Leaves& values, int source);

/// In a step. Waits for the replicas that take part.
void barrier_in_step(comm::Communicator& group);

/// The sum of a tensor over the replicas that take part, of the same shape and dtype at all of them; no gradient.
using SumInBackward = std::function<at::Tensor(const at::Tensor& value)>;
/// In a step, where an operation begins that is one node of the graph: what its backward sums by, as that of a
/// reduce_in_step would. In backward of another call it throws InvalidArgument.
SumInBackward sum_in_backward(comm::Communicator& group);

/// What a worker brings to a collective outside a step: one entry for each of its replicas that has a value.
struct Contribution {
  Leaves values;
  double weight = 1;
};

/// Outside a step; collective over workers. A worker may contribute nothing and gets the result all the same.
/// `mean` of integer leaves is fp64. Throws InvalidArgument if nobody contributes, LayoutMismatch if the structures
/// differ.
Leaves reduce_over_workers(comm::Communicator& workers, const std::vector<Contribution>& mine, ReduceOp op);

/// Outside a step; collective over workers. Concatenation over all contributions, in worker and replica order.
Leaves gather_over_workers(comm::Communicator& workers, const std::vector<Contribution>& mine);

/// Outside a step; collective over workers. The leaves of worker `source`; the values of others are ignored.
Leaves broadcast_over_workers(comm::Communicator& workers, const Leaves& mine, int source);
/// The same; none at `source`, which takes no memory for them but for those that are not contiguous.
Leaves send_over_workers(comm::Communicator& workers, const Leaves& mine, int source);

}  // namespace muster
