// Copies past the processor's caches.
#pragma once

#include <cstddef>

namespace muster::kernels {

/// What is written at once beyond this is no longer in a core's own cache when it is read.
inline constexpr size_t kStreamedBytes = size_t{2} << 20;
/// Beyond this most of it is in no cache at all by then.
inline constexpr size_t kUncachedBytes = size_t{16} << 20;

/// As memcpy, but where the processor can, the destination's lines are not read into a cache first, nor kept there.
/// Other threads see it as they see any write.
void stream_copy(void* destination, const void* source, size_t bytes) noexcept;

/// Whether what is a part of `bytes` that are written at once had better go past the caches: where it leaves them in
/// any case, on a processor that gains from that.
bool is_streamed(size_t bytes) noexcept;

/// How to copy a part of `bytes` that are written at once.
using Copy = void (*)(void* destination, const void* source, size_t bytes) noexcept;
Copy copy_for(size_t bytes) noexcept;

}  // namespace muster::kernels
