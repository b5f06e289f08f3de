// Groups of hyperparameters, and the step that they ask for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>
#include <vector>

#include "device/table.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/kernels.h"

namespace muster {

/// Hyperparameters by parameter group; which alternative says what is computed.
using FlatGroups =
    std::variant<std::vector<kernels::AdamGroup>, std::vector<kernels::SgdGroup>, std::vector<kernels::AdagradGroup>>;

/// How many groups there are.
size_t count_of(const FlatGroups& groups);
/// How many state tensors a group's step needs of each parameter.
size_t states_needed(const FlatGroups& groups, uint32_t group);
/// Whether a group's step moves rows without a gradient, too.
bool moves_all_rows(const FlatGroups& groups, uint32_t group);

/// The row-wise form of a group's Adagrad. Throws InvalidArgument for another optimizer, for weight decay, which would
/// move every row, and where there is no such group.
kernels::RowwiseAdagradGroup rowwise_group_of(const FlatGroups& groups, uint32_t group);

/// Steps on the CPU. If `copies` is not empty, also stores the result in the peers' memory.
void step_by_groups(const kernels::StepArguments& arguments, const FlatGroups& groups,
                    const kernels::StepCopies& copies = {}) noexcept;

/// Steps on a device. Owned by one thread.
class DeviceGroups {
 public:
  /// Makes the device's hyperparameters those of `groups`.
  void follow(const FlatGroups& groups, c10::Device device);
  /// Enqueues a step by what follow was given last.
  kernels::cuda::Status step(const kernels::cuda::StepPlan& plan, kernels::cuda::Stream stream) const;

 private:
  std::variant<DeviceTable<kernels::AdamGroup>, DeviceTable<kernels::SgdGroup>, DeviceTable<kernels::AdagradGroup>>
      table_;
};

}  // namespace muster
