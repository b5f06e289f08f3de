#include "core/pages.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "cpp/catch.h"

using namespace muster;

namespace {

constexpr size_t kHugePage = size_t{2} << 20;

// What the kernel keeps of the mapping that an address is in: "hg", huge pages are wished for; "nh", they are not.
std::string flags_at(const std::byte* address) {
  std::ifstream mappings("/proc/self/smaps");
  bool is_there = false;
  for (std::string line; std::getline(mappings, line);) {
    std::istringstream words(line);
    uintptr_t begin = 0;
    uintptr_t end = 0;
    char dash = 0;
    if (words >> std::hex >> begin >> dash >> end && dash == '-') {
      const auto wanted = reinterpret_cast<uintptr_t>(address);
      is_there = begin <= wanted && wanted < end;
    } else if (is_there && line.starts_with("VmFlags:")) {
      return line + " ";
    }
  }
  return {};
}

bool has(const std::byte* address, const std::string& flag) {
  return flags_at(address).find(" " + flag + " ") != std::string::npos;
}

bool has_huge_pages() { return std::filesystem::exists("/sys/kernel/mm/transparent_hugepage"); }

}  // namespace

TEST_CASE("memory comes on the pages that it is asked for on, and begins with one", "[core]") {
  const size_t bytes = GENERATE(size_t{0}, size_t{1}, kHugePage, 3 * kHugePage + 1);
  const auto huge = allocate_pages(bytes, Pages::huge);
  const auto ordinary = allocate_pages(bytes, Pages::ordinary);
  for (const auto* const memory : {huge.get(), ordinary.get()}) {
    CHECK(reinterpret_cast<uintptr_t>(memory) % kHugePage == 0);
  }
  std::memset(huge.get(), 1, bytes);
  if (!has_huge_pages()) return;
  CHECK(has(huge.get(), "hg"));
  CHECK(has(ordinary.get(), "nh"));
}

TEST_CASE("huge pages that are preferred are whole ones of the memory alone", "[core]") {
  const auto memory = allocate_pages(8 * kHugePage, Pages::ordinary);
  std::byte* const begin = memory.get() + 4096;
  prefer_huge_pages(begin, 3 * kHugePage / 2);  // too little
  if (!has_huge_pages()) return;
  CHECK_FALSE(has(memory.get() + kHugePage, "hg"));
  prefer_huge_pages(begin, 4 * kHugePage);
  CHECK_FALSE(has(begin, "hg"));
  CHECK(has(memory.get() + kHugePage, "hg"));
  CHECK(has(memory.get() + 4 * kHugePage - 1, "hg"));
  CHECK_FALSE(has(memory.get() + 4 * kHugePage, "hg"));
}
