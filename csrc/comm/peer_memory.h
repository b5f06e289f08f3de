// The contract of ranks that see one another's memory, beyond that of Communicator.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "comm/communicator.h"

namespace muster::comm {

/// Of one rank; externally synchronised with its Communicator, whose numbering of operations, deadlines and errors it
/// shares. It belongs to the communicator.
class PeerMemory {
 public:
  /// data[r]: where rank r's tensor lies in this process. Must not throw.
  using Visit = std::function<void(void* const* data)>;

  virtual ~PeerMemory() = default;

  /// A collective that moves nothing by itself: once every rank has issued it, `visit` is called on this rank, by
  /// whoever advances its operations. Done when this rank's call has returned, so the tensors may still be read by
  /// peers: a rank changes what they look at only after a later collective that peers issue after their visit.
  /// Tensors come from Communicator::allocate() and agree in numel and dtype; `tag` must agree. Outside of scopes only.
  virtual Work visit(const at::Tensor& tensor, uint64_t tag, Visit visit) = 0;

  /// Collective over processes, blocking: `bytes` of zeroed memory that is one and the same for all of them, 64-byte
  /// aligned, kept by the tensor (uint8) and by those of the others. All ask for the same sizes in the same order, one
  /// rank of each.
  virtual at::Tensor allocate_common(int64_t bytes) = 0;

  /// The address by which peers find these bytes of this rank, or none where they cannot. Thread-safe.
  virtual std::optional<uint64_t> address_of(const void* data, size_t bytes) const noexcept = 0;

  /// Where an address that rank `rank` was given by its address_of lies in this process. Thread-safe.
  virtual void* at(int rank, uint64_t address) const noexcept = 0;

  /// Between these two, which all ranks call with a collective before the second, a rank stores into memory that others
  /// read. begin_stores throws what ended the group: of a group that has ended no rank begins to store, whoever comes
  /// late. Local; a store and a load.
  virtual void begin_stores() = 0;
  virtual void end_stores() noexcept = 0;

  /// Ends the group as Communicator::abort() does, with this error on every rank: PeerLost and Timeout stay what they
  /// are. Thread-safe, idempotent, does not block.
  virtual void end(const Error& error) noexcept = 0;
  /// Whether something ended the group. Thread-safe, does not block.
  virtual bool has_ended() const noexcept = 0;
  /// Of a group that has ended: whether a rank had begun stores of which this rank cannot say that all of them were
  /// made.
  virtual bool may_have_stores() const noexcept = 0;

  /// Where every rank's `tensor` lies in this process; see visit(). Collective, blocking.
  std::vector<void*> find(const at::Tensor& tensor, uint64_t tag, int size) {
    std::vector<void*> found;
    visit(tensor, tag, [&](void* const* data) { found.assign(data, data + size); }).wait();
    return found;
  }
};

}  // namespace muster::comm
