#include "kernels/cpu/stream_copy.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpp/catch.h"
#include "cpp/kernels/support.h"

using namespace muster::kernels;
using namespace muster::kernels::testing;

TEST_CASE("a copy past the caches is a copy, wherever it begins and ends", "[kernels]") {
  const size_t bytes =
      GENERATE(size_t{0}, size_t{1}, size_t{63}, size_t{64}, size_t{200}, size_t{4096} * 4 + 77, size_t{4096} * 13 + 1);
  constexpr size_t kRoom = 130;
  const std::byte around{0x5a};
  std::vector<std::byte> from(bytes + kRoom);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 2654435761U >> 11);
  for (const size_t to_offset : {0, 1, 64, 127}) {
    for (const size_t from_offset : {0, 3}) {
      std::vector<std::byte> to(bytes + kRoom, around);
      stream_copy(to.data() + to_offset, from.data() + from_offset, bytes);
      bool is_right = true;
      for (size_t i = 0; i < to.size(); ++i) {
        const bool is_inside = i >= to_offset && i < to_offset + bytes;
        is_right = is_right && to[i] == (is_inside ? from[i - to_offset + from_offset] : around);
      }
      CHECK(is_right);
    }
  }
}

TEST_CASE("whole lines go past the caches with every instruction set", "[kernels]") {
  constexpr size_t kLine = 64;
  const size_t bytes = kLine * GENERATE(size_t{0}, size_t{1}, size_t{5}, size_t{70});
  std::vector<char> from(bytes + 3);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 2654435761U >> 11);
  for (const NamedTable& isa : tables()) {
    INFO(isa.name);
    std::vector<char> memory(bytes + 2 * kLine);
    char* const to = memory.data() + kLine - reinterpret_cast<uintptr_t>(memory.data()) % kLine;
    isa.stream_lines(to, from.data() + 3, bytes);
    CHECK(std::equal(to, to + bytes, from.data() + 3));
    CHECK(to[bytes] == 0);
  }
}
