// Memory that is not in use: what the C library's heap does with it, and pages that nobody needs to keep.
#pragma once

#include <cstddef>

namespace muster {

/// Large blocks that this process frees stay with it from the first call on. A training step frees its gradients and
/// activations and allocates them anew; what goes back to the kernel in between, as glibc does by default, costs a page
/// fault for every 4 KiB. Returns whether it is so: not without glibc, where the environment tunes glibc's heap itself
/// (MALLOC_..._ or GLIBC_TUNABLES), or where MUSTER_KEEP_FREED_MEMORY is 0. Thread-safe.
bool keep_freed_memory();

/// Gives what is free in the heap back to the kernel, where keep_freed_memory() is true: for large blocks that were
/// freed for good. Thread-safe.
void return_freed_memory();

/// Gives the whole pages of a range of a shared mapping back to the kernel. They are zero when they are used next, and
/// take memory again then. What is private stays as it is. Local; does not throw.
void return_shared_pages(void* data, size_t bytes) noexcept;

}  // namespace muster
