#include "checkpoint/crc32.h"

#include <zlib.h>

namespace muster::checkpoint {

uint32_t crc32(const void* data, size_t bytes, uint32_t before) noexcept {
  return static_cast<uint32_t>(::crc32_z(before, static_cast<const Bytef*>(data), bytes));
}

uint32_t crc32_combine(uint32_t first, uint32_t second, uint64_t second_bytes) noexcept {
  return static_cast<uint32_t>(::crc32_combine(first, second, static_cast<z_off_t>(second_bytes)));
}

}  // namespace muster::checkpoint
