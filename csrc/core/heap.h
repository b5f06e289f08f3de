// Memory that is not in use: what the C library's heap does with it, and pages that nobody needs to keep.
#pragma once

#include <cstddef>

namespace muster {

/// Large blocks that this process frees stay with it from the first call on. A training step frees its gradients and
/// activations and allocates them anew; what goes back to the kernel in between, as glibc does by default, costs a page
/// fault for every 4 KiB. No-op without glibc, where the environment tunes glibc's heap itself (MALLOC_..._ or
/// GLIBC_TUNABLES), and where MUSTER_KEEP_FREED_MEMORY is 0. Thread-safe.
void keep_freed_memory();

/// Whether they do. Thread-safe.
bool keeps_freed_memory() noexcept;

/// Gives what is free in the heap back to the kernel, where keeps_freed_memory(): for large blocks that were freed for
/// good. Thread-safe.
void return_freed_memory();

/// Gives the whole pages of a range of a shared mapping back to the kernel. They are zero when they are used next, and
/// take memory again then. What is private stays as it is. Local; does not throw.
void return_shared_pages(void* data, size_t bytes) noexcept;

}  // namespace muster
