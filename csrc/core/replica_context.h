// The replica that a thread works for, and its random stream. It travels with torch's ThreadLocalState, so autograd's
// threads find the replica whose backward they run.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <exception>
#include <memory>

namespace muster {

class PartTimer;

/// What is known of the replica whose step is running. Owned by the replica's step (always through a shared_ptr); read
/// by the threads it uses.
struct ReplicaContext : c10::DebugInfoBase, std::enable_shared_from_this<ReplicaContext> {
  int replica = 0;                    ///< job-wide index
  int local_replica = 0;              ///< index within this process
  const void* strategy = nullptr;     ///< identity of the strategy that runs the step
  at::Generator generator;            ///< the replica's CPU stream; aten random ops without a generator draw from it
  at::Generator device_generator;     ///< likewise of its CUDA device; undefined where it has none
  std::shared_ptr<PartTimer> timer;   ///< of its part, stopped while it waits for others; null where nobody asks
  uint64_t collectives = 0;           ///< that user code has asked for in this call
  std::exception_ptr wait_error;      ///< of the last of them that failed
  bool is_in_run = false;             ///< the call is run(), which takes no gradients
  std::exception_ptr stray_gradient;  ///< there: the error of the first one that came
};

/// The context of the calling thread's replica, or null outside a step.
std::shared_ptr<ReplicaContext> current_replica();

/// While it lives, the calling thread (and the autograd work started from it) belongs to `context`, and aten random
/// operators on the CPU that are given no generator draw from `context->generator` where that is defined, those on CUDA
/// from `context->device_generator` (dropout too, but not the dropout inside fused attention and recurrent kernels,
/// which take no generator); the ambient generators are untouched. Tracing, torch.compile, functorch, Python's modes
/// and tensor subclasses see the calls they would see without it. Scopes nest and end in reverse order; owned by one
/// thread. The first scope of a process registers a kernel for c10::DispatchKey::BackendSelect with every aten operator
/// that takes an optional generator and has none there. That costs each call of those, in and outside of scopes, a
/// boxed call (below 1 us); other operators cost what they did.
class ReplicaScope {
 public:
  /// Throws InvalidArgument for a null context.
  explicit ReplicaScope(std::shared_ptr<ReplicaContext> context);
  ReplicaScope(const ReplicaScope&) = delete;
  ReplicaScope& operator=(const ReplicaScope&) = delete;

 private:
  c10::DebugInfoGuard guard_;
};

/// The seed of replica `replica` at call `t` of a job seeded with `seed`: SplitMix64 (Steele, Lea, Flood 2014, "Fast
/// splittable pseudorandom number generators") over the three numbers. Never depends on the strategy.
uint64_t stream_seed(uint64_t seed, uint64_t replica, uint64_t t) noexcept;

}  // namespace muster
