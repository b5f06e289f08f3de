// Communicators over NCCL, for CUDA devices: what callers need, without a header of NCCL or CUDA.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <vector>

#include "comm/communicator.h"

namespace muster::comm {

struct NcclOptions {
  /// How late a live peer may be: bounds the start, the end, and every operation (a thread watches the oldest one).
  Milliseconds timeout{600'000};
  /// Communicator::allocate takes memory from NCCL in pieces of at least so many bytes. With the bytes of all buckets
  /// here, they lie in one registered piece.
  size_t arena_bytes = 0;
  /// A group over the same ranks whose tensors live on the host: it carries what the ranks have to tell each other.
  /// Without it scopes are InvalidArgument, all_gather exchanges sizes through the devices, and peers learn of an
  /// abort by their deadlines alone. Each rank gives its own handle, which is used by nobody else.
  CommunicatorPtr control;
  /// Ranks compare their requests over `control` before every operation (which then waits for the peers), so that
  /// disagreement is LayoutMismatch; without it, only disagreement between the ranks of one process is found, and
  /// that between processes shows as an error of NCCL, as Timeout, or not at all.
  bool check = false;
  /// Operations go to communicators of NCCL's blocking kind, which launch them in the thread that calls; a thread of
  /// the group ends calls that take longer than `timeout`. False: NCCL makes a thread for every operation.
  bool blocking = true;
};

/// Whether this build has NCCL.
bool has_nccl() noexcept;

/// Collective over `size` ranks; `store` is theirs alone. This process's only rank. Throws NotBuilt where this build
/// has no NCCL, InvalidArgument, Timeout naming what was waited for, CommError with NCCL's text.
///
/// What differs from other backends:
/// - Stream-ordered: an operation follows what the caller's current stream holds when it is issued, on a stream of the
///   communicator's own, and Work::wait makes the caller's current stream wait (see Work). It can be captured in a CUDA
///   graph.
/// - Arithmetic is NCCL's: sums follow its own order, with bf16 and fp16 rounded on the way, and NaN in min and max
///   follows its rules. int16 is InvalidArgument.
/// - A view of memory from `allocate` lies at the same offset on all ranks of an operation, or on none.
/// - all_gather waits on the host for the peers' shapes; its data are stream-ordered.
/// - Scopes need NcclOptions::control. An operation in a scope waits on the host until its peers have issued theirs or
///   ended the scope, unless all know what it is from an earlier scope that began alike: then the first operation and
///   the end wait, barriers, gathers of any sizes, and where something queued leaves. Where a rank is absent, those
///   present exchange their tensors directly and add along the tree.
/// - In a capture barrier, and all_gather without a control group, are InvalidArgument. Graphs are reset before the
///   group's end: NCCL keeps a communicator while one holds operations of it.
/// - After an error or an abort no operation of this process's ranks can be used.
CommunicatorPtr make_nccl(c10d::Store& store, int rank, int size, c10::Device device, const NcclOptions& options);

/// The same for a process with several ranks, `first_rank` and those after it, each on its own device; element i is the
/// handle of rank `first_rank` + i, for a thread of its own. One thread launches each operation for all of them at once
/// after all have issued it, so that no order of the ranks' threads can deadlock; Work::wait waits on the host for that
/// launch. `options[i]` belongs to element i; timeout, arena_bytes, check and blocking are those of element 0. Not
/// capturable. Ranks of one process that disagree get LayoutMismatch.
std::vector<CommunicatorPtr> make_nccl(c10d::Store& store, int first_rank, int size,
                                       const std::vector<c10::Device>& devices,
                                       const std::vector<NcclOptions>& options);

/// Another handle of the same rank in the same group, with memory and a device stream in common: operations of both are
/// done in the order in which they are issued, which has to be the same on all ranks. `control` is as
/// NcclOptions::control, used by this handle alone. For one thread at a time. `handle`: of a group of this header.
CommunicatorPtr make_another(const CommunicatorPtr& handle, CommunicatorPtr control);

/// A group whose ranks are threads of this process with tensors on CUDA devices, several of them perhaps on one device,
/// which NCCL refuses; element r is the handle of rank r, on `devices[r]`. Throws NotBuilt where this build has no
/// CUDA, and InvalidArgument.
///
/// As make_nccl of several ranks in one process, but that no NCCL is called: arithmetic is that of the Communicator
/// contract, so sums have the bits of the CPU's, and an operation is computed on one device, that of the first rank.
std::vector<CommunicatorPtr> make_device_local(const std::vector<c10::Device>& devices,
                                               const std::vector<NcclOptions>& options);

}  // namespace muster::comm
