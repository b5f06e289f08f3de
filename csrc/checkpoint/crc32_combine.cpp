#include <zlib.h>

#include "checkpoint/crc32.h"

namespace muster::checkpoint {

uint32_t crc32_combine(uint32_t first, uint32_t second, uint64_t second_bytes) noexcept {
  return static_cast<uint32_t>(::crc32_combine(first, second, static_cast<z_off_t>(second_bytes)));
}

}  // namespace muster::checkpoint
