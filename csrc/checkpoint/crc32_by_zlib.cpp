// Where the build has no libdeflate.
#include <zlib.h>

#include "checkpoint/crc32.h"

namespace muster::checkpoint {

uint32_t crc32(const void* data, size_t bytes, uint32_t before) noexcept {
  return static_cast<uint32_t>(::crc32_z(before, static_cast<const Bytef*>(data), bytes));
}

}  // namespace muster::checkpoint
