#include "net/frame.h"

#include <algorithm>

#include "muster/error.h"

namespace muster::net {

namespace {

constexpr size_t kVersionAt = 4, kTypeAt = 6, kMessageAt = 8, kPayloadAt = 16, kPlaceAt = 24, kPlacementAt = 32;

template <class T>
void put(std::byte* to, T value) noexcept {
  for (size_t i = 0; i < sizeof(T); ++i) to[i] = static_cast<std::byte>(static_cast<uint64_t>(value) >> (8 * i));
}

template <class T>
T get(const std::byte* from) noexcept {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value |= std::to_integer<uint64_t>(from[i]) << (8 * i);
  return static_cast<T>(value);
}

void check(bool is_valid, const char* what) {
  if (is_valid) return;
  throw CommError(std::string("a frame with ") + what +
                  " arrived; run one version of Muster on all workers and servers, and let nothing else use their "
                  "sockets");
}

}  // namespace

std::array<std::byte, FrameHeader::kBytes> encode(const FrameHeader& header) noexcept {
  std::array<std::byte, FrameHeader::kBytes> bytes{};
  put(bytes.data(), FrameHeader::kMagic);
  put(bytes.data() + kVersionAt, FrameHeader::kVersion);
  put(bytes.data() + kTypeAt, header.type);
  put(bytes.data() + kMessageAt, header.message_bytes);
  put(bytes.data() + kPayloadAt, header.payload_bytes);
  put(bytes.data() + kPlaceAt, header.place);
  put(bytes.data() + kPlacementAt, static_cast<uint8_t>(header.placement));
  return bytes;
}

FrameHeader decode_header(const std::byte* bytes) {
  check(get<uint32_t>(bytes) == FrameHeader::kMagic, "a wrong beginning");
  check(get<uint16_t>(bytes + kVersionAt) == FrameHeader::kVersion, "another version of the format");
  FrameHeader header;
  header.type = get<uint16_t>(bytes + kTypeAt);
  header.message_bytes = get<uint64_t>(bytes + kMessageAt);
  header.payload_bytes = get<uint64_t>(bytes + kPayloadAt);
  header.place = get<uint64_t>(bytes + kPlaceAt);
  check(header.message_bytes <= FrameHeader::kMaxMessageBytes, "a message that is too long");
  check(header.payload_bytes <= FrameHeader::kMaxPayloadBytes, "a payload that is too long");
  const auto placement = get<uint8_t>(bytes + kPlacementAt);
  check(placement <= static_cast<uint8_t>(Placement::in_reader), "an unknown placement");
  header.placement = static_cast<Placement>(placement);
  check(header.placement != Placement::follows || header.place == 0, "a place for what follows");
  check(std::all_of(bytes + kPlacementAt + 1, bytes + FrameHeader::kBytes,
                    [](std::byte byte) { return byte == std::byte{0}; }),
        "bytes that must be 0");
  return header;
}

}  // namespace muster::net
