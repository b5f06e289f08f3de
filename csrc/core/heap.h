// The C library's heap: what it does with memory that is freed.
#pragma once

namespace muster {

/// Large blocks that this process frees stay with it from the first call on. A training step frees its gradients and
/// activations and allocates them anew; what goes back to the kernel in between, as glibc does by default, costs a page
/// fault for every 4 KiB. Returns whether it is so: not without glibc, where the environment tunes glibc's heap itself
/// (MALLOC_..._ or GLIBC_TUNABLES), or where MUSTER_KEEP_FREED_MEMORY is 0. Thread-safe.
bool keep_freed_memory();

}  // namespace muster
