// The contract of collective communication: one Communicator per rank of a group. In a training group a rank is a
// replica, whichever process it lives in, so that sums follow one tree wherever the replicas are.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/queued_operations.h"
#include "comm/receivers.h"
#include "comm/work.h"
#include "muster/error.h"
#include "muster/reduce_op.h"

namespace muster::comm {

class PeerMemory;

/// Who a handle is: a rank of so many, and where the tensors are that it communicates.
struct Place {
  int rank = 0;
  int size = 1;
  c10::Device device{c10::kCPU};
};

/// Whether size(0) of a gather's tensors may differ, or all have the same sizes, for which no rank need ask then.
enum class GatherSizes : uint8_t { any, equal };

/// How a rank left a scope; see Communicator::begin_scope.
enum class ScopeEnd : uint32_t { finished, failed, absent };

/// One rank's handle on a group. Externally synchronised: collectives are issued by one thread at a time, in the same
/// order on every rank; several may be under way at once and are done in that order. `abort` may be called from any
/// thread. Collectives never block; they throw at once what ended the group.
///
/// Arithmetic: fp64 reduces in fp64, integers exactly, every other floating dtype in fp32 and is rounded once at the
/// end. Sums add along one fixed binary tree over ranks, ((0+1)+(2+3))+..., so every backend that reduces by itself
/// gives the same bits. max and min propagate NaN. What NCCL does otherwise is said in nccl.h.
///
/// Tensors are dense (contiguous in memory in some order of dimensions; sub-views of larger buffers are fine) and
/// equal in numel and dtype on all ranks. A rank that asks for another operation, size, dtype or tag gets, as do its
/// peers, LayoutMismatch naming both; the group is unusable afterwards.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const noexcept { return place_.rank; }
  int size() const noexcept { return place_.size; }
  c10::Device device() const noexcept { return place_.device; }

  /// What ranks that see one another's memory can do besides; null where they do not. See peer_memory.h.
  PeerMemory* peer_memory() const noexcept { return peer_memory_; }

  /// Collective. Memory for a tensor of `numel` elements of `dtype`, zeroed and 64-byte aligned, placed where the
  /// group reduces fastest (memory that all ranks of the host map, for the host backend). It outlives the
  /// communicator if still referenced. All ranks must ask for the same sizes in the same order.
  virtual at::Tensor allocate(int64_t numel, at::ScalarType dtype) = 0;

  /// In place: every rank's `tensor` becomes the reduction over ranks, as far as it is among the `receivers`. `op` is
  /// sum, min or max. `tag` must agree over ranks (a layout digest, say).
  virtual Work all_reduce(const at::Tensor& tensor, ReduceOp op, uint64_t tag = 0, const Receivers& receivers = {}) = 0;

  /// In place: every rank's `tensor` becomes that of `source`.
  virtual Work broadcast(const at::Tensor& tensor, int source) = 0;

  /// Gathers each rank's `input` into Work::outputs(). Inputs agree in dtype and trailing sizes and, unless their sizes
  /// are said to be equal, may differ in size(0); 0-dim inputs are allowed.
  virtual Work all_gather(const at::Tensor& input, GatherSizes sizes = GatherSizes::any) = 0;

  /// `output` (numel n) becomes part `rank()` of the reduction of `input` (numel n * size()).
  virtual Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) = 0;

  virtual Work barrier() = 0;

  /// Scopes serve collectives that user code issues inside one step. Within a scope operations are numbered from zero;
  /// a rank may sit it out (its part is empty): peers then skip it (no term in the sum, an undefined output). If a
  /// rank ends the scope as `failed`, peers waiting for it get RemoteError carrying `reason`, "type: text"; if it ends
  /// as `finished` having issued fewer operations than a peer, that peer gets LayoutMismatch. In both cases the group
  /// stays usable from the next scope on. `scope` increases from step to step and agrees over ranks. On devices a peer
  /// may get these errors later, from the end's Work, and what a failed rank did not give as zeros until then.
  /// `queue`, of all ranks or of none: what else leaves meanwhile, on devices in one order with the scope's operations.
  virtual void begin_scope(uint64_t scope, QueuedOperations* queue = nullptr) = 0;
  /// The scope is over once the Work was waited for; before that what is queued has to be issued.
  virtual Work end_scope(ScopeEnd end, const std::string& reason = {}) = 0;

  /// Ends every operation, under way or later, on this rank and its peers with CommError(reason). Thread-safe,
  /// idempotent, does not block.
  virtual void abort(const std::string& reason) noexcept = 0;

 protected:
  explicit Communicator(const Place& place, PeerMemory* peer_memory = nullptr)
      : place_(place), peer_memory_(peer_memory) {}

 private:
  const Place place_;
  PeerMemory* const peer_memory_;  // of this object
};

using CommunicatorPtr = std::shared_ptr<Communicator>;

/// A group of one: every operation is done when it returns.
CommunicatorPtr make_single(c10::Device device = c10::Device(c10::kCPU));

/// A rank that the others of its group do not know: every collective throws CommError(reason); scopes may be empty.
CommunicatorPtr make_refusing(int rank, int size, const std::string& reason);

/// `host`, whose tensors are on the host, for tensors on `device` as well: those are copied there and back, and their
/// operations have ended when they return. For what is small or rare. What is broadcast may be large: it goes over
/// `direct`, a group of the same ranks for tensors on `device`, where there is one.
CommunicatorPtr make_staged(CommunicatorPtr host, c10::Device device, CommunicatorPtr direct = nullptr);

/// A group whose ranks are threads of this process; element r is rank r's handle.
std::vector<CommunicatorPtr> make_local(int size, Milliseconds timeout);

}  // namespace muster::comm
