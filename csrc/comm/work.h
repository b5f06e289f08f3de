// A collective that was issued: what its caller waits for.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

namespace muster::comm {

using Milliseconds = std::chrono::milliseconds;

/// A collective under way, from one rank's side. Owned by the thread that issued it (one thread at a time); the
/// tensors it was given must live until it is done. Copies share the operation. Destroying it does not cancel.
///
/// On a CUDA device operations are ordered by streams. An operation follows what the caller's current stream holds when
/// it is issued. wait() does not wait on the host for the device: it makes the caller's current stream wait, so that
/// what is enqueued there afterwards sees the result, and what goes wrong later is thrown by the next use of the group.
/// Only a barrier's wait() blocks the host. done() is true once the device has finished or wait() has returned.
class Work {
 public:
  class Impl {
   public:
    virtual ~Impl() = default;
    virtual bool advance() = 0;  // never blocks; true once done; throws what went wrong
    virtual void wait(Milliseconds timeout) = 0;
    virtual std::vector<at::Tensor> outputs() { return {}; }
  };

  Work() = default;  ///< already done
  explicit Work(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

  /// Advances the operation as far as it goes without blocking. Throws the error that ended it.
  bool done() { return impl_ == nullptr || impl_->advance(); }

  /// Blocks until done, at most `timeout` (the group's when negative). Throws Timeout naming the ranks that did not
  /// arrive, PeerLost, LayoutMismatch, RemoteError or CommError (aborted).
  void wait(Milliseconds timeout = Milliseconds(-1)) {
    if (impl_) impl_->wait(timeout);
  }

  /// Results of all_gather, after wait(): one tensor per rank, undefined for a rank that sits the scope out.
  std::vector<at::Tensor> outputs() { return impl_ ? impl_->outputs() : std::vector<at::Tensor>{}; }

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace muster::comm
