#include "checkpoint/file.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "checkpoint/crc32.h"
#include "cpp/catch.h"
#include "muster/error.h"
#include "support/folder.h"

using namespace muster;
using namespace muster::checkpoint;
using muster::testing::Folder;

namespace {

// Of several pieces and threads' worth, none of which begins where another section's does.
constexpr size_t kSizes[] = {0, 7, size_t{33} << 20, 1, (size_t{17} << 20) + 5};

std::vector<std::byte> some_bytes(size_t count) {
  std::vector<std::byte> bytes(count);
  uint32_t state = 1;
  for (auto& byte : bytes) {
    state = state * 1664525 + 1013904223;
    byte = static_cast<std::byte>(state >> 24);
  }
  return bytes;
}

size_t whole_size() { return std::accumulate(std::begin(kSizes), std::end(kSizes), size_t{0}); }

// Memory for sections of kSizes.
struct Sections {
  Sections() {
    for (const size_t size : kSizes) sections.push_back({parts.emplace_back(size).data(), size});
  }

  std::vector<std::vector<std::byte>> parts;
  std::vector<Section> sections;
};

}  // namespace

TEST_CASE("a CRC-32 is that of zlib, in parts as well", "[checkpoint]") {
  const std::string digits = "123456789";
  CHECK(crc32(digits.data(), digits.size()) == 0xcbf43926);  // the check value of CRC-32/ISO-HDLC
  const uint32_t first = crc32(digits.data(), 4);
  CHECK(crc32(digits.data() + 4, 5, first) == 0xcbf43926);
  CHECK(crc32_combine(first, crc32(digits.data() + 4, 5), 5) == 0xcbf43926);
  CHECK(crc32(nullptr, 0) == 0);
}

TEST_CASE("sections are read by several threads as by one", "[checkpoint]") {
  const bool hashes = GENERATE(false, true) && has_sha256();
  const Folder folder;
  const auto path = folder.path / "file";
  const std::string header = "header";
  const auto written = some_bytes(whole_size());
  FileSum expected;
  {
    FileWriter file(path, hashes);
    file.write(header.data(), header.size());
    file.write(written.data(), written.size());
    expected = file.finish();
  }
  FileReader file(path, hashes);
  CHECK(file.read_text(header.size()) == header);
  Sections memory;
  const auto sums = file.read_sections(memory.sections);
  size_t begin = 0;
  for (size_t s = 0; s < memory.parts.size(); ++s) {
    CHECK(std::equal(memory.parts[s].begin(), memory.parts[s].end(),
                     written.begin() + static_cast<std::ptrdiff_t>(begin)));
    CHECK(sums[s] == crc32(written.data() + begin, kSizes[s]));
    begin += kSizes[s];
  }
  CHECK(file.sum() == expected);
  CHECK(file.rest() == 0);
}

TEST_CASE("a file that is mapped gives what one gives that is read", "[checkpoint]") {
  const Folder folder;
  const auto path = folder.path / "file";
  const auto written = some_bytes(whole_size());
  FileSum expected;
  {
    FileWriter file(path);
    file.write("header", 6);
    file.write(written.data(), written.size());
    expected = file.finish();
  }
  std::shared_ptr<std::byte> map;
  {
    FileReader file(path);
    file.read_text(6);
    std::vector<uint32_t> sums;
    map = file.map_sections(kSizes, sums);
    if (!map) {
      WARN("this file system, or the system, cannot map files");
      return;
    }
    size_t begin = 0;
    for (size_t s = 0; s < std::size(kSizes); ++s) {
      CHECK(sums.at(s) == crc32(written.data() + begin, kSizes[s]));
      begin += kSizes[s];
    }
    CHECK(file.sum() == expected);
    CHECK(file.rest() == 0);
  }
  *map = ~*map;  // which the file does not see
  FileReader again(path);
  again.read_text(6);
  std::byte first;
  again.read(&first, 1);
  CHECK(first == written.front());
  std::filesystem::remove(path);
  CHECK(std::equal(written.begin() + 1, written.end(), map.get() + 1));
}

TEST_CASE("of an empty rest nothing is mapped", "[checkpoint]") {
  const Folder folder;
  const auto path = folder.path / "file";
  FileWriter(path).finish();
  FileReader file(path);
  std::vector<uint32_t> sums;
  CHECK(file.map_sections({}, sums) == nullptr);
}

TEST_CASE("what has a SHA-256 is not mapped, and can be read then", "[checkpoint]") {
  if (!has_sha256()) return;
  const Folder folder;
  const auto path = folder.path / "file";
  FileWriter writer(path, true);
  writer.write("some text", 9);
  const auto expected = writer.finish();
  FileReader file(path, true);
  std::vector<uint32_t> sums;
  const size_t sizes[] = {9};
  CHECK(file.map_sections(sizes, sums) == nullptr);
  CHECK(file.read_text(9) == "some text");
  CHECK(file.sum() == expected);
}

TEST_CASE("a file that ends within a section is an error, whichever thread sees it", "[checkpoint]") {
  const Folder folder;
  const auto path = folder.path / "file";
  const auto written = some_bytes(whole_size());
  {
    FileWriter file(path);
    file.write(written.data(), written.size());
    file.finish();
  }
  FileReader file(path);
  std::filesystem::resize_file(path, whole_size() - 1);
  Sections memory;
  CHECK_THROWS_WITH(file.read_sections(memory.sections), ContainsSubstring("ends early"));
  FileReader mapped(path);
  std::filesystem::resize_file(path, whole_size() - (size_t{1} << 20));
  std::vector<uint32_t> sums;
  std::string error;
  try {
    if (mapped.map_sections(kSizes, sums) == nullptr) error = "ends early";  // it cannot be mapped, and reading says so
  } catch (const CheckpointError& problem) {
    error = problem.what();
  }
  CHECK_THAT(error, ContainsSubstring("ends early"));
}
