#include "checkpoint/crc32.h"

#include <libdeflate.h>

namespace muster::checkpoint {

// Ten times as fast as zlib's.
uint32_t crc32(const void* data, size_t bytes, uint32_t before) noexcept {
  return ::libdeflate_crc32(before, data, bytes);
}

}  // namespace muster::checkpoint
