// Communicators over any c10d::ProcessGroup (Gloo, MPI, UCC, NCCL, ...): what a user already has keeps working.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <vector>

#include "comm/communicator.h"
#include "comm/transport.h"

namespace muster::comm {

struct C10dOptions {
  bool check = false;  ///< exchange requests before every operation; see make_exchange_communicator
  Milliseconds timeout{600'000};
  c10::Device device{c10::kCPU};  ///< of the tensors that will be communicated; the group needs a backend for it
};

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

/// One rank per process of `group`. Errors of the backend become CommError, or Timeout where it says so. abort() ends
/// this rank's waits; peers notice by the backend's means or by their deadline.
CommunicatorPtr make_c10d(ProcessGroupPtr group, const C10dOptions& options);

/// Several replicas per process: element i is the handle of this process's replica i. Ranks of the handles are job-wide
/// replica indices, counted process by process. Replicas are reduced within the process along the fixed tree first and
/// then, by the first of them, across. `replicas` may differ between processes. Collective.
std::vector<CommunicatorPtr> make_hierarchical(ProcessGroupPtr group, int replicas, const C10dOptions& options);

}  // namespace muster::comm
