#include "net/frame.h"

#include <random>

#include "cpp/catch.h"
#include "muster/error.h"

using namespace muster;
using namespace muster::net;

TEST_CASE("a frame's header keeps its fields", "[net]") {
  const FrameHeader header{.type = 513,
                           .placement = Placement::in_reader,
                           .message_bytes = FrameHeader::kMaxMessageBytes,
                           .payload_bytes = 3,
                           .place = 0x0102030405060708};
  const auto bytes = encode(header);
  CHECK(decode_header(bytes.data()) == header);
  CHECK(bytes[0] == std::byte{'M'});
  CHECK(bytes[24] == std::byte{8});
}

TEST_CASE("no header passes that is not well formed", "[net]") {
  const auto with = [](size_t at, int value) {
    auto bytes = encode(FrameHeader{});
    bytes[at] = static_cast<std::byte>(value);
    return bytes;
  };
  for (const auto& bytes :
       {with(0, 'N'), with(4, 2), with(15, 1), with(23, 1), with(24, 1), with(32, 3), with(39, 1)}) {
    CHECK_THROWS_AS(decode_header(bytes.data()), CommError);
  }
  CHECK_NOTHROW(decode_header(with(6, 200).data()));
}
