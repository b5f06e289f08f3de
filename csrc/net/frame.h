// What travels on a Channel: a header of fixed size, a message of typed fields, and a payload of raw numbers. All
// integers are little-endian. docs/parameter_server_protocol.md gives the bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace muster::net {

/// Where a frame's payload is.
enum class Placement : uint8_t {
  follows,    ///< behind the message, on the connection
  in_sender,  ///< in the memory that the sender shares, at `place`
  in_reader,  ///< in the memory that the receiver shares, at `place`: the sender has written it there
};

struct FrameHeader {
  static constexpr size_t kBytes = 40;
  static constexpr uint32_t kMagic = 0x4652534d;  // "MSRF"
  static constexpr uint16_t kVersion = 1;
  static constexpr uint64_t kMaxMessageBytes = uint64_t{64} << 20;
  static constexpr uint64_t kMaxPayloadBytes = uint64_t{16} << 20;

  uint16_t type = 0;
  Placement placement = Placement::follows;
  uint64_t message_bytes = 0;
  uint64_t payload_bytes = 0;
  uint64_t place = 0;  ///< 0 where the payload follows

  bool operator==(const FrameHeader&) const = default;
};

std::array<std::byte, FrameHeader::kBytes> encode(const FrameHeader& header) noexcept;

/// `bytes`: at least FrameHeader::kBytes. Throws CommError for another magic or version, a length above its bound, an
/// unknown placement, or bytes that must be 0 and are not.
FrameHeader decode_header(const std::byte* bytes);

/// One frame as its receiver sees it.
struct Frame {
  uint16_t type = 0;
  std::string message;
  /// Valid as long as `owner` lives. What a peer shares it can still change: nothing in it may be a length or an index.
  std::span<const std::byte> payload;
  std::shared_ptr<const void> owner;
};

}  // namespace muster::net
