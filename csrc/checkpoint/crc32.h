// The checksum of a snapshot's files.
#pragma once

#include <cstddef>
#include <cstdint>

namespace muster::checkpoint {

/// CRC-32 as in zlib, gzip and PNG: of `bytes` after what gave `before`.
uint32_t crc32(const void* data, size_t bytes, uint32_t before = 0) noexcept;

/// That of one run of bytes and another behind it, from theirs.
uint32_t crc32_combine(uint32_t first, uint32_t second, uint64_t second_bytes) noexcept;

}  // namespace muster::checkpoint
