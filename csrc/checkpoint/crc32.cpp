#include "checkpoint/crc32.h"

#include <caffe2/serialize/crc_alt.h>

namespace muster::checkpoint {

uint32_t crc32(const void* data, size_t bytes, uint32_t before) noexcept { return crc32_fast(data, bytes, before); }

}  // namespace muster::checkpoint
