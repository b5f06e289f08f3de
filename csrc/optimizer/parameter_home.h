// The memory where parameters live when other processes of the host store into them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "comm/communicator.h"
#include "core/ownership.h"

namespace muster {

/// Memory of this process that the host's other processes see, laid out alike in each: an owner stores what it stepped
/// straight into the parameters of all. Owned by the thread that steps.
class ParameterHome {
 public:
  /// Collective, blocking. `parameters`: this process's, by local replica, on the CPU, of the same sizes and dtypes
  /// everywhere; replica 0's move here, and with them what shares their storages. `replicas`: the handles of this
  /// process's replicas in a group with PeerMemory.
  ParameterHome(const std::vector<std::vector<at::Tensor>>& parameters,
                const std::vector<comm::CommunicatorPtr>& replicas);

  /// Whether these are the parameters, of the sizes and dtypes that there is room for.
  bool fits(const std::vector<at::Tensor>& parameters) const;

  /// Lets parameters live here whose memory user code has replaced since, with their values, unless they do not fit any
  /// more. Local; while no other process steps.
  void bring_back();
  /// The same while others may store what they own: of parameter i only `runs(i)` are copied.
  void bring_back(const std::function<std::vector<Run>(size_t parameter)>& runs);

  /// Gives every parameter that lives here memory of its own, with its values. Local; others may still store here,
  /// which no parameter sees then.
  void leave();

  /// In bytes, from a parameter here to that of each other process.
  const std::vector<ptrdiff_t>& displacements() const noexcept { return displacements_; }

 private:
  struct Place {
    at::Tensor parameter;            // a leaf
    std::vector<at::Tensor> others;  // of the other replicas
    at::ScalarType dtype;
    std::vector<int64_t> sizes;
    size_t offset;  // in bytes
    bool has_room() const;
    size_t num_sharing() const;
  };

  std::vector<Place> places_;
  at::Tensor memory_;
  std::vector<ptrdiff_t> displacements_;
};

}  // namespace muster
