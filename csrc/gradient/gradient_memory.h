// Gradients that come where the other ranks of a host read them, so that nobody has to copy them there, and where they
// came in the step before, so that no page of theirs has to be made.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "comm/communicator.h"

namespace muster {

/// Memory for the gradients of one replica, which it keeps from step to step. Torch's CPU allocator takes from it
/// inside a Scope; what comes from there may outlive both.
class GradientMemory {
 public:
  /// Local. `bytes`: sizes of the gradients that may come. The communicator has PeerMemory and is used by the threads
  /// that open scopes.
  GradientMemory(comm::CommunicatorPtr communicator, const std::vector<size_t>& bytes);
  ~GradientMemory();
  GradientMemory(const GradientMemory&) = delete;
  GradientMemory& operator=(const GradientMemory&) = delete;

  /// Memory comes from elsewhere from now on; what is in use stays as it is. No-op where it has ended. Thread-safe.
  void end() noexcept;

  /// Until close(), or the end of a Scope, in this thread: as within a Scope. For a backward that somebody else calls.
  void open() const;
  /// No-op where nothing is open in this thread.
  static void close() noexcept;

  /// While it lives, CPU memory that torch takes in this thread, of a size that was asked for, comes from here, as far
  /// as there is any: about as much as the gradients need.
  class Scope {
   public:
    /// Null: nothing changes.
    explicit Scope(GradientMemory* memory) noexcept;
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
  };

 private:
  class Allocator;
  struct Opened;
  struct Pool;

  const std::shared_ptr<Pool> pool_;
};

}  // namespace muster
