#include "checkpoint/snapshot.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iomanip>
#include <limits>
#include <random>
#include <sstream>

#include "checkpoint/crc32.h"
#include "checkpoint/snapshot_writer.h"
#include "core/log.h"
#include "cpp/catch.h"
#include "cpp/checkpoint/texts.h"
#include "muster/error.h"
#include "support/child.h"
#include "support/folder.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::checkpoint;
namespace fs = std::filesystem;

using testing::contents;
using testing::replace;

namespace {

struct Warnings {
  Warnings() {
    set_log_sink([this](LogLevel level, const std::string& message) {
      if (level != LogLevel::info) texts.push_back(message);
    });
  }
  ~Warnings() { set_log_sink({}); }
  std::vector<std::string> texts;
};

// A safetensors file of this header and data.
std::string file_of(const std::string& header, const std::string& data, uint64_t length) {
  std::string text(8, '\0');
  std::memcpy(text.data(), &length, sizeof(length));
  return text + header + data;
}
std::string file_of(const std::string& header, const std::string& data) { return file_of(header, data, header.size()); }

NamedTensors read(const fs::path& path) {
  TensorSums sums;
  return read_safetensors(path, sums);
}

Snapshot numbered(int64_t number, int64_t elements = 1000) {
  return {{{"w", at::full({elements}, number, at::kLong)}, {"v", at::full({3}, number, at::kDouble)}},
          {{"number", number}}};
}

int64_t number_in(const Snapshot& snapshot) {
  const auto number = std::get<int64_t>(snapshot.metadata.at("number"));
  for (const auto& [name, tensor] : snapshot.tensors) CHECK(tensor.eq(number).all().item<bool>());
  return number;
}

std::vector<std::string> sorted_names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

TEST_CASE("the checksum is zlib's", "[checkpoint]") {
  CHECK(crc32("123456789", 9) == 0xcbf43926U);
  CHECK(crc32("6789", 4, crc32("12345", 5)) == 0xcbf43926U);
}

TEST_CASE("tensors of every dtype and shape come back", "[checkpoint]") {
  const testing::Folder folder;
  Snapshot snapshot;
  for (const auto dtype :
       {at::kBool, at::kByte, at::kChar, at::kShort, at::kUInt16, at::kInt, at::kUInt32, at::kLong, at::kUInt64,
        at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    snapshot.tensors[std::string("of ") + c10::toString(dtype)] = at::arange(7).to(dtype);
  }
  snapshot.tensors["a \"name\" \\ é\n"] = at::rand({2, 3, 4}).transpose(0, 2);
  snapshot.tensors["scalar"] = at::full({}, 2.5);
  snapshot.tensors["empty"] = at::empty({0, 5});
  snapshot.tensors["leaf"] = at::rand({4}).requires_grad_();
  snapshot.metadata = {{"text", std::string("one\ntwo")},
                       {"low", std::numeric_limits<int64_t>::min()},
                       {"tenth", 0.1},
                       {"whole", 2.0},
                       {"tiny", 5e-324},
                       {"infinite", -std::numeric_limits<double>::infinity()}};
  const uint64_t shard_bytes = GENERATE(uint64_t{1}, uint64_t{40}, uint64_t{1} << 30);
  const auto path = write_snapshot(folder.path, snapshot, {.shard_bytes = shard_bytes});

  const auto back = read_snapshot(path);
  CHECK((back.metadata == snapshot.metadata));
  REQUIRE(back.tensors.size() == snapshot.tensors.size());
  for (const auto& [name, tensor] : snapshot.tensors) {
    INFO(name);
    const auto& copy = back.tensors.at(name);
    REQUIRE(copy.scalar_type() == tensor.scalar_type());
    REQUIRE(copy.sizes() == tensor.sizes());
    const auto plain = tensor.contiguous();
    CHECK((plain.nbytes() == 0 || std::memcmp(copy.const_data_ptr(), plain.const_data_ptr(), plain.nbytes()) == 0));
  }
  const size_t files = shard_bytes == 1 ? 20 : shard_bytes == 40 ? 7 : 2;
  CHECK(sorted_names_in(path).size() >= files);
}

TEST_CASE("elements of a shard are aligned", "[checkpoint]") {
  const testing::Folder folder;
  write_safetensors(folder.path / "a", {{"a", at::zeros({3}, at::kByte)}, {"b", at::zeros({1}, at::kDouble)}});
  const auto text = contents(folder.path / "a");
  uint64_t length = 0;
  std::memcpy(&length, text.data(), 8);
  CHECK(length % 8 == 0);
  CHECK(text.find(R"("b":{"dtype":"F64","shape":[1],"data_offsets":[0,8]})") != std::string::npos);
}

TEST_CASE("tensors that are never there together make one snapshot, and come back in their order", "[checkpoint]") {
  const testing::Folder folder;
  const uint64_t shard_bytes = GENERATE(uint64_t{1}, uint64_t{2000}, uint64_t{1} << 30);
  constexpr int64_t kParts = 7;
  int64_t given = 0;
  // Names that are not in the order of their parts.
  const auto next = [&]() -> NamedTensors {
    if (given == kParts) return {};
    ++given;
    const auto name = std::to_string(100 - given);
    return {{"a" + name, at::full({50}, given, at::kLong)}, {"b" + name, at::full({50}, given, at::kLong)}};
  };
  const auto path = write_snapshot(folder.path, {{"number", int64_t{5}}}, next, {.shard_bytes = shard_bytes});
  CHECK(read_snapshot(path).tensors.size() == 2 * kParts);

  SnapshotReader reader(path);
  CHECK(std::get<int64_t>(reader.metadata().at("number")) == 5);
  size_t files = 0;
  int64_t came = 0;
  while (const auto tensors = reader.next()) {
    ++files;
    CHECK(tensors->size() % 2 == 0);  // what was given at once is in one file
    for (size_t i = 0; i < tensors->size() / 2; ++i) {
      const auto name = std::to_string(100 - ++came);
      CHECK(tensors->at("a" + name).eq(came).all().item<bool>());
      CHECK(tensors->at("b" + name).eq(came).all().item<bool>());
    }
  }
  CHECK(came == kParts);
  CHECK(files == (shard_bytes == 1 ? 7 : shard_bytes == 2000 ? 4 : 1));
  CHECK_FALSE(reader.next());
}

TEST_CASE("tensors that end with an error leave no snapshot", "[checkpoint]") {
  const testing::Folder folder;
  write_snapshot(folder.path, numbered(1), {});
  int left = 3;
  const bool repeats = GENERATE(false, true);
  const auto next = [&]() -> NamedTensors {
    if (left-- == 0 && !repeats) throw Timeout("x");
    return {{repeats ? "same" : std::to_string(left), at::zeros({9})}};
  };
  const SnapshotOptions options{.keep = 1, .shard_bytes = repeats ? uint64_t{1} << 30 : 1};
  if (repeats) {
    CHECK_THROWS_AS(write_snapshot(folder.path, {}, next, options), InvalidArgument);
  } else {
    CHECK_THROWS_AS(write_snapshot(folder.path, {}, next, options), Timeout);
  }
  CHECK(sorted_names_in(folder.path) == std::vector<std::string>{"snapshot-0000000001"});
}

TEST_CASE("a folder that hinders a snapshot is tried again, before the first file and after the last", "[checkpoint]") {
  const testing::Folder folder;
  const auto base = folder.path / "base";
  std::ofstream(base) << "a file where the folder should be";
  std::vector<std::string> errors;
  SnapshotOptions options;
  options.try_again = [&](const Error& error) {
    errors.emplace_back(error.what());
    fs::remove_all(errors.size() == 1 ? base : base / "snapshot-0000000001");
    return errors.size() < 3;
  };
  int given = 0;
  const auto next = [&] {
    if (++given > 1) {  // another one has come in its way
      fs::create_directories(base / "snapshot-0000000001" / "something");
      return NamedTensors();
    }
    return NamedTensors{{"x", at::ones({3})}};
  };
  const auto written = write_snapshot(base, {}, next, options);
  CHECK(errors.size() == 2);
  for (const auto& error : errors) CHECK(error.find(base.string()) != std::string::npos);
  CHECK(written == base / "snapshot-0000000001");
  CHECK(at::equal(read_snapshot(written).tensors.at("x"), at::ones({3})));
  options.try_again = [](const Error&) { return false; };
  given = 0;
  fs::remove_all(base);
  CHECK_THROWS_AS(write_snapshot(base, {}, next, options), CheckpointError);
  CHECK(sorted_names_in(base) == std::vector<std::string>{"snapshot-0000000001"});  // the other one
}

TEST_CASE("a folder that has gone is not made anew for who says so", "[checkpoint]") {
  const testing::Folder folder;
  const auto gone = folder.path / "gone";
  CHECK_THROWS_AS(write_snapshot(gone, numbered(1), {.makes_folder = false}), CheckpointError);
  CHECK_FALSE(fs::exists(gone));
  write_snapshot(gone, numbered(1), {});
  CHECK(number_in(read_snapshot(write_snapshot(gone, numbered(2), {.makes_folder = false}))) == 2);
}

TEST_CASE("whoever reads file by file begins anew with the snapshot before a damaged one", "[checkpoint]") {
  const testing::Folder folder;
  const Warnings warnings;
  CHECK_FALSE(read_newest_snapshot(folder.path, [](SnapshotReader&) { FAIL(); }));
  for (int64_t n = 1; n <= 3; ++n) write_snapshot(folder.path, numbered(n), {.shard_bytes = 1});
  const auto newest = folder.path / "snapshot-0000000003";
  auto text = contents(newest / "shard-00001.safetensors");
  text.back() ^= 1;
  replace(newest / "shard-00001.safetensors", text);
  std::vector<int64_t> seen;
  CHECK(read_newest_snapshot(folder.path, [&](SnapshotReader& reader) {
    while (const auto tensors = reader.next()) seen.push_back(tensors->begin()->second.flatten()[0].item<int64_t>());
    // What the reader finds wrong counts as damage, too.
    if (seen.back() == 2) throw CheckpointError("x");
  }));
  CHECK(seen == std::vector<int64_t>{3, 2, 2, 1, 1});
  CHECK(warnings.texts.size() == 2);
}

TEST_CASE("who reads beside a writer that keeps one snapshot finds the later one", "[checkpoint]") {
  const testing::Folder folder;
  const Warnings warnings;
  write_snapshot(folder.path, numbered(1), {.keep = 1});
  int64_t read = 0;
  CHECK(read_newest_snapshot(folder.path, [&](SnapshotReader& reader) {
    if (read++ == 0) write_snapshot(folder.path, numbered(2), {.keep = 1});
    read = 10 * read + reader.next()->begin()->second.flatten()[0].item<int64_t>();
  }));
  CHECK(read == 22);
}

TEST_CASE("what would make too long a manifest is refused, and the snapshot before stays", "[checkpoint]") {
  const testing::Folder folder;
  write_snapshot(folder.path, numbered(1), {.keep = 1});
  auto large = numbered(2);
  large.metadata["text"] = std::string(size_t{1} << 27, 'x');
  CHECK_THROWS_WITH(write_snapshot(folder.path, large, {.keep = 1}), ContainsSubstring("at most 128"));
  CHECK(number_in(*read_newest_snapshot(folder.path)) == 1);
}

TEST_CASE("what no file can hold is refused before anything is written", "[checkpoint]") {
  const testing::Folder folder;
  for (const auto& tensor : {at::Tensor(), at::zeros({2}, at::kComplexDouble), at::zeros({2, 2}).to_sparse()}) {
    CHECK_THROWS_AS(write_snapshot(folder.path, {{{"x", tensor}}, {}}, {}), InvalidArgument);
  }
  CHECK_THROWS_AS(write_snapshot(folder.path, {{{"__metadata__", at::zeros({2})}}, {}}, {}), InvalidArgument);
  CHECK_THROWS_AS(write_snapshot(folder.path, {{{"\xff", at::zeros({2})}}, {}}, {}), InvalidArgument);
  CHECK_THROWS_AS(write_snapshot(folder.path, numbered(1), {.keep = 0}), InvalidArgument);
  CHECK(sorted_names_in(folder.path).empty());
  CHECK_FALSE(read_newest_snapshot(folder.path));
  CHECK_FALSE(read_newest_snapshot(folder.path / "absent"));
}

TEST_CASE("the newest few snapshots stay", "[checkpoint]") {
  const testing::Folder folder;
  for (int64_t n = 1; n <= 4; ++n) {
    write_snapshot(folder.path, numbered(n), {.keep = 2});
    CHECK(number_in(*read_newest_snapshot(folder.path)) == n);
  }
  CHECK(sorted_names_in(folder.path) == std::vector<std::string>{"snapshot-0000000003", "snapshot-0000000004"});
  write_snapshot(folder.path, numbered(5), {});
  CHECK(sorted_names_in(folder.path).size() == 3);
}

TEST_CASE("a damaged snapshot is passed over by name, and numbers go on behind it", "[checkpoint]") {
  const testing::Folder folder;
  const Warnings warnings;
  for (int64_t n = 1; n <= 3; ++n) write_snapshot(folder.path, numbered(n), {});
  const auto newest = folder.path / "snapshot-0000000003";
  SECTION("a byte of a tensor") {
    auto text = contents(newest / "shard-00000.safetensors");
    text.back() ^= 1;
    replace(newest / "shard-00000.safetensors", text);
  }
  SECTION("a byte of the metadata") {
    auto text = contents(newest / "manifest.json");
    text[text.find("\"number\":3") + 9] = '4';
    replace(newest / "manifest.json", text);
  }
  SECTION("a shard that is cut off") { fs::resize_file(newest / "shard-00000.safetensors", 100); }
  SECTION("no shard") { fs::remove(newest / "shard-00000.safetensors"); }
  SECTION("no manifest") { fs::remove(newest / "manifest.json"); }
  SECTION("a shard that is a pipe") {
    fs::remove(newest / "shard-00000.safetensors");
    REQUIRE(::mkfifo((newest / "shard-00000.safetensors").c_str(), 0600) == 0);
  }
  SECTION("a file in the snapshot's place") {
    fs::remove_all(newest);
    replace(newest, "x");
  }
  CHECK(number_in(*read_newest_snapshot(folder.path)) == 2);
  REQUIRE(warnings.texts.size() == 1);
  CHECK_THAT(warnings.texts[0], ContainsSubstring("snapshot-0000000003"));
  CHECK(write_snapshot(folder.path, numbered(4), {}).filename() == "snapshot-0000000004");
  CHECK(number_in(*read_newest_snapshot(folder.path)) == 4);
}

TEST_CASE("a damaged snapshot does not take the place of a good one", "[checkpoint]") {
  const testing::Folder folder;
  const Warnings warnings;
  for (int64_t n = 1; n <= 2; ++n) write_snapshot(folder.path, numbered(n), {});
  const auto newest = folder.path / "snapshot-0000000002";
  auto text = contents(newest / "shard-00000.safetensors");
  text.back() ^= 1;
  replace(newest / "shard-00000.safetensors", text);
  CHECK(number_in(*read_newest_snapshot(folder.path)) == 1);
  write_snapshot(folder.path, numbered(3), {.keep = 2});
  CHECK(sorted_names_in(folder.path) ==
        std::vector<std::string>{"snapshot-0000000001", "snapshot-0000000002", "snapshot-0000000003"});
  write_snapshot(folder.path, numbered(4), {.keep = 2});
  CHECK(sorted_names_in(folder.path) == std::vector<std::string>{"snapshot-0000000003", "snapshot-0000000004"});
}

TEST_CASE("only damaged snapshots are an error, not a new beginning", "[checkpoint]") {
  const testing::Folder folder;
  const Warnings warnings;
  fs::remove(write_snapshot(folder.path, numbered(1), {}) / "manifest.json");
  CHECK_THROWS_AS(read_newest_snapshot(folder.path), CheckpointError);
}

TEST_CASE("what a dead writer left is never taken, and removed by the next", "[checkpoint]") {
  const testing::Folder folder;
  const auto whole = write_snapshot(folder.path, numbered(1), {});
  fs::copy(whole, folder.path / ".partial-snapshot-0000000009");
  fs::copy(whole, folder.path / ".removed-snapshot-0000000008");
  fs::create_directory(folder.path / "snapshot-of-mine");
  fs::create_directory(folder.path / ".partial-of-mine");
  CHECK(number_in(*read_newest_snapshot(folder.path)) == 1);
  write_snapshot(folder.path, numbered(2), {});
  CHECK(sorted_names_in(folder.path) ==
        std::vector<std::string>{".partial-of-mine", "snapshot-0000000001", "snapshot-0000000002", "snapshot-of-mine"});
}

TEST_CASE("names that no writer gives are not snapshots", "[checkpoint]") {
  const testing::Folder folder;
  const Warnings warnings;
  for (int64_t n = 1; n <= 3; ++n) write_snapshot(folder.path, numbered(n), {});
  const std::vector<std::string> others = {"snapshot-3",
                                           "snapshot-03",
                                           "snapshot-00000000003",
                                           "snapshot-00000000099",
                                           "snapshot-0000000000",
                                           "snapshot-000000000x",
                                           "snapshot-",
                                           "snapshot-+000000009",
                                           "snapshot-9223372036854775808",
                                           "snapshot--1",
                                           "snapshot-0000000009 ",
                                           "snapshot-99999999999999999999999"};
  for (const auto& name : others) fs::create_directory(folder.path / name);
  CHECK(number_in(*read_newest_snapshot(folder.path)) == 3);
  CHECK(list_snapshots(folder.path).size() == 3);
  CHECK(write_snapshot(folder.path, numbered(4), {.keep = 1}).filename() == "snapshot-0000000004");
  CHECK(sorted_names_in(folder.path).size() == others.size() + 1);
  CHECK(warnings.texts.empty());
}

TEST_CASE("numbers grow wider than their zeros, and behind the last one nothing is written", "[checkpoint]") {
  const testing::Folder folder;
  fs::rename(write_snapshot(folder.path, numbered(1), {}), folder.path / "snapshot-9999999999");
  CHECK(write_snapshot(folder.path, numbered(2), {}).filename() == "snapshot-10000000000");
  CHECK(number_in(*read_newest_snapshot(folder.path)) == 2);
  const auto last = folder.path / "snapshot-9223372036854775807";
  fs::rename(folder.path / "snapshot-10000000000", last);
  CHECK(number_in(*read_newest_snapshot(folder.path)) == 2);
  const auto message = testing::message_of<CheckpointError>([&] { write_snapshot(folder.path, numbered(3), {}); });
  CHECK_THAT(message, ContainsSubstring("'" + last.string() + "'"));
  CHECK_THAT(message, ContainsSubstring("move it away"));
  CHECK(number_in(*read_newest_snapshot(folder.path)) == 2);
}

TEST_CASE("a writer that is killed leaves good snapshots alone", "[checkpoint]") {
  const testing::Folder folder;
  const Warnings warnings;
  std::mt19937 random(1);
  int64_t newest = 0;
  for (int kill = 0; kill < 25; ++kill) {
    const auto first = newest + 1;
    const pid_t child = ::fork();
    if (child == 0) {
      // Neither Catch2 nor torch's threads may run here.
      for (int64_t n = first;; ++n) {
        try {
          write_snapshot(folder.path, numbered(n, 30'000), {.keep = 2, .shard_bytes = 100'000});
        } catch (...) {
          ::_exit(1);
        }
      }
    }
    REQUIRE(child > 0);
    ::usleep(random() % 30'000 * (newest == 0 ? 4 : 1));  // a busy machine is slow to begin
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    CHECK(WIFSIGNALED(status));
    const auto loaded = read_newest_snapshot(folder.path);
    if (!loaded) continue;
    const auto number = number_in(*loaded);
    CHECK(number >= newest);
    newest = number;
  }
  CHECK(newest > 0);
  CHECK(warnings.texts.empty());
}

TEST_CASE("a header that lies is an error of its own", "[checkpoint]") {
  const testing::Folder folder;
  const auto path = folder.path / "lies";
  const std::string good = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  replace(path, file_of(good, "12345678"));
  REQUIRE(read(path).at("a").numel() == 2);

  const auto with = [&](const std::string& from, const std::string& to) {
    auto header = good;
    return header.replace(header.find(from), from.size(), to);
  };
  const std::vector<std::string> files = {
      "",
      "1234567",
      file_of("", "", 0),
      file_of(good, "12345678", ~uint64_t{0}),
      file_of(good, "12345678", good.size() + 9),
      file_of(good, "12345678", uint64_t{1} << 62),
      file_of(good, "12345678", kMaxHeaderBytes + 1),
      file_of(good, "1234567"),
      file_of(good, "123456789"),
      file_of(" " + good, "12345678"),
      file_of("[]", ""),
      file_of("{}", "1"),
      file_of(good + "x", "12345678"),
      file_of(with("F32", "F31"), "12345678"),
      file_of(with("F32", "F64"), "12345678"),
      file_of(with("[2]", "[3]"), "12345678"),
      file_of(with("[2]", "[-2]"), "12345678"),
      file_of(with("[2]", "[-1,-2]"), "12345678"),
      file_of(with("[2]", "[4611686018427387906]"), "12345678"),
      file_of(with("[2]", "[2,4611686018427387904,4]"), "12345678"),
      file_of(with("[2]", "[2305843009213693952,0]"), "12345678"),
      file_of(with("[2]", "[2.0]"), "12345678"),
      file_of(with("[2]", "2"), "12345678"),
      file_of(with("[0,8]", "[0]"), "12345678"),
      file_of(with("[0,8]", "[0,8,8]"), "12345678"),
      file_of(with("[0,8]", "[8,0]"), "12345678"),
      file_of(with("[0,8]", "[-8,0]"), "12345678"),
      file_of(with("[0,8]", "[1,9]"), "12345678"),
      file_of(with("[0,8]", "[9223372036854775800,9223372036854775808]"), "12345678"),
      file_of(with("\"dtype\"", "\"type\""), "12345678"),
      file_of(with("\"dtype\":\"F32\",", ""), "12345678"),
      file_of(
          R"({"a":{"dtype":"U8","shape":[5],"data_offsets":[0,5]},"b":{"dtype":"U8","shape":[5],"data_offsets":[3,8]}})",
          "12345678"),
      file_of(
          R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[3],"data_offsets":[5,8]}})",
          "12345678"),
      file_of(
          R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})",
          "12345678"),
      file_of(R"({"__metadata__":{"a":1}})", ""),
      file_of(std::string(100'000, '['), ""),
      file_of("{\"a\":" + std::string(100'000, '{'), ""),
      file_of(with("[2]", "[" + std::string(64 * 2, '1').replace(1, 127, std::string(127, '1')) + "]"), "12345678"),
  };
  for (const auto& text : files) {
    INFO(text.substr(0, 200));
    replace(path, text);
    CHECK_THROWS_AS(read(path), CheckpointError);
  }
  std::string many = "[2";
  for (int i = 0; i < 64; ++i) many += ",1";
  replace(path, file_of(with("[2]", many + "]"), "12345678"));
  CHECK_THROWS_AS(read(path), CheckpointError);
}

TEST_CASE("whatever a file holds, reading ends with tensors or an error of its own", "[checkpoint]") {
  const testing::Folder folder;
  const auto snapshot = write_snapshot(
      folder.path, {{{"a", at::rand({5, 3})}, {"b", at::zeros({7}, at::kByte)}}, {{"s", std::string("x")}, {"d", 0.5}}},
      {});
  const auto whole = read_snapshot(snapshot);
  std::mt19937 random(7);
  for (const char* name : {"manifest.json", "shard-00000.safetensors"}) {
    const auto good = contents(snapshot / name);
    for (int round = 0; round < 4000; ++round) {
      auto text = good;
      for (uint32_t i = random() % 4 + 1; i > 0; --i) {
        const size_t at = random() % std::min<size_t>(text.size(), 300);
        switch (random() % 4) {
          case 0:
            text[at] = static_cast<char>(random());
            break;
          case 1:
            text[at] = "0123456789-{}[],:\""[random() % 18];
            break;
          case 2:
            text.erase(at, random() % 9);
            break;
          default:
            text.insert(at, text.substr(random() % text.size(), random() % 9));
        }
      }
      replace(snapshot / name, text);
      try {
        read(snapshot / "shard-00000.safetensors");
        const auto back = read_snapshot(snapshot);
        REQUIRE((back.metadata == whole.metadata && back.tensors.size() == 2));
        REQUIRE(back.tensors.at("a").equal(whole.tensors.at("a")));
      } catch (const CheckpointError&) {
      }
    }
    replace(snapshot / name, good);
  }
}

TEST_CASE("a manifest names no files but its own", "[checkpoint]") {
  const testing::Folder folder;
  const auto path = write_snapshot(folder.path, numbered(1), {});
  fs::copy_file(path / "shard-00000.safetensors", folder.path / "outside");
  for (const std::string name : {"../outside", "..", "", "/etc/passwd", "manifest.json\\u0000", ".hidden"}) {
    auto text = contents(path / "manifest.json");
    const auto begin = text.find("{\"version\"");
    auto inner = text.substr(begin, text.rfind('}') - begin);
    inner.replace(inner.find("shard-00000.safetensors"), 23, name);
    std::ostringstream sum;
    sum << std::hex << std::setw(8) << std::setfill('0') << crc32(inner.data(), inner.size());
    replace(path / "manifest.json", "{\"crc32\":\"" + sum.str() + "\",\"manifest\":" + inner + "}");
    INFO(name);
    CHECK_THROWS_WITH(read_snapshot(path), ContainsSubstring("no name of a shard"));
    write_snapshot(folder.path, numbered(1), {});
    fs::remove_all(path);
    fs::rename(folder.path / "snapshot-0000000002", path);
  }
}

TEST_CASE("another version is named", "[checkpoint]") {
  const testing::Folder folder;
  const auto path = write_snapshot(folder.path, numbered(1), {}) / "manifest.json";
  auto text = contents(path);
  text.replace(text.find("\"version\":2"), 11, "\"version\":3");
  replace(path, text);
  CHECK_THROWS_WITH(read_snapshot(path.parent_path()), ContainsSubstring("version is 3"));
}

TEST_CASE("tensors are put together from pieces, whichever file has them", "[checkpoint]") {
  const testing::Folder folder;
  const auto whole = at::arange(12, at::kFloat).view({3, 4});
  const auto flat = whole.flatten();
  const auto path =
      write_snapshot(folder.path, {{{"a", flat.slice(0, 0, 5)}, {"b", flat.slice(0, 5)}, {"c", at::ones({2})}}, {}},
                     {.shard_bytes = 36});
  auto manifest = read_manifest(path / "manifest.json", {});
  REQUIRE(manifest.shards.size() == 2);
  auto [first, second, other] = std::tuple(manifest.tensors[0], manifest.tensors[1], manifest.tensors[2]);
  auto piece = second.pieces[0];
  piece.begin = 5;
  const auto written = [&](const TensorEntry& entry) {
    manifest.tensors = {entry, other};
    replace(path / "manifest.json", manifest_of(manifest, {}));
  };
  TensorEntry entry{"whole", "F32", {3, 4}, {first.pieces[0], piece}};
  written(entry);
  const auto read = read_snapshot(path).tensors;
  CHECK(read.size() == 2);
  CHECK(read.at("whole").equal(whole));
  SECTION("a gap") {
    entry.pieces[1].begin = 6;
    written(entry);
    CHECK_THROWS_WITH(read_snapshot(path), ContainsSubstring("the pieces of 'whole' overlap or leave a gap"));
  }
  SECTION("too few") {
    entry.pieces.pop_back();
    written(entry);
    CHECK_THROWS_WITH(read_snapshot(path), ContainsSubstring("do not fill its shape"));
  }
  SECTION("a shape that is too large") {
    entry.shape = {int64_t{1} << 40, int64_t{1} << 40};
    written(entry);
    CHECK_THROWS_WITH(read_snapshot(path), ContainsSubstring("a shape that no tensor has"));
  }
  SECTION("one that is not there") {
    entry.pieces[1].name = "d";
    written(entry);
    CHECK_THROWS_WITH(read_snapshot(path), ContainsSubstring("does not know its tensor 'b'"));
  }
  SECTION("another dtype") {
    entry.dtype = "I32";
    written(entry);
    CHECK_THROWS_WITH(read_snapshot(path), ContainsSubstring("is not what the manifest says"));
  }
  SECTION("twice") {
    manifest.tensors = {entry, entry};
    replace(path / "manifest.json", manifest_of(manifest, {}));
    CHECK_THROWS_WITH(read_snapshot(path), ContainsSubstring("two tensors 'whole'"));
  }
}

TEST_CASE("a tensor whose bytes have changed is named", "[checkpoint]") {
  const testing::Folder folder;
  const auto path = write_snapshot(folder.path, {{{"a", at::zeros({3})}, {"b", at::zeros({3})}}, {}}, {});
  auto text = contents(path / "shard-00000.safetensors");
  text.back() = '\1';
  replace(path / "shard-00000.safetensors", text);
  CHECK_THROWS_WITH(read_snapshot(path), ContainsSubstring("tensor 'b' has another checksum"));
}

TEST_CASE("a writer does not hold up its caller, and copies are of the time of the call", "[checkpoint]") {
  const testing::Folder folder;
  SnapshotWriter writer(folder.path / "deep" / "er", {.keep = 1});
  auto snapshot = numbered(1, 200'000);
  for (int64_t n = 1; n <= 3; ++n) {
    for (const auto& [name, tensor] : snapshot.tensors) tensor.fill_(n);
    snapshot.metadata["number"] = n;
    writer.write_copy(snapshot);
    for (const auto& [name, tensor] : snapshot.tensors) tensor.fill_(-1);
    writer.wait();
    CHECK(writer.done());
    CHECK(number_in(*read_newest_snapshot(folder.path / "deep" / "er")) == n);
  }
  writer.write(numbered(4));
  writer.write(numbered(5));
  writer.wait();
  CHECK(number_in(*read_newest_snapshot(folder.path / "deep" / "er")) == 5);
}

TEST_CASE("a forked child waits for no writer of its parent", "[checkpoint]") {
  const testing::Folder folder;
  SnapshotWriter writer(folder.path, {});
  writer.write(numbered(1));
  const auto wait_and_write = [&] {
    writer.wait();
    if (!writer.done()) return 1;
    try {
      writer.write(numbered(2));
    } catch (const CheckpointError&) {
      return 0;
    }
    return 2;
  };
  CHECK(testing::exit_code_of_child(wait_and_write) == 0);
  writer.wait();
  CHECK(number_in(*read_newest_snapshot(folder.path)) == 1);
}

TEST_CASE("what a writer could not do reaches its caller once", "[checkpoint]") {
  const testing::Folder folder;
  SECTION("a folder that is a file") {
    replace(folder.path / "file", "x");
    SnapshotWriter writer(folder.path / "file", {});
    CHECK_THROWS_AS(writer.write(numbered(1)), CheckpointError);
    CHECK_NOTHROW(writer.wait());
    CHECK(writer.done());
  }
  SECTION("a folder that is taken away") {
    SnapshotWriter writer(folder.path / "folder", {});
    writer.write(numbered(1));
    writer.wait();
    std::filesystem::remove_all(folder.path / "folder");
    writer.write(numbered(2));
    CHECK_THROWS_AS(writer.wait(), CheckpointError);
    CHECK_NOTHROW(writer.wait());
    writer.write(numbered(3));
    CHECK_THROWS_AS(writer.write(numbered(4)), CheckpointError);
    CHECK(writer.done());
  }
  SECTION("what went wrong elsewhere") {
    SnapshotWriter writer(folder.path, {});
    writer.note_failure(std::make_exception_ptr(CheckpointError("no thread")));
    CHECK_THROWS_WITH(writer.write(numbered(1)), "no thread");
    writer.write(numbered(1));
    CHECK_NOTHROW(writer.wait());
  }
  SECTION("a folder that another writes") {
    SnapshotWriter writer(folder.path, {});
    writer.write(numbered(1));
    SnapshotWriter other(folder.path, {});
    CHECK_THROWS_AS(other.write(numbered(2)), CheckpointError);
  }
  SECTION("a disk without room") {
    write_snapshot(folder.path, numbered(1), {});
    struct rlimit before{};
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
    auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
    struct rlimit small = before;
    small.rlim_cur = 4096;
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
    SnapshotWriter writer(folder.path, {.keep = 1});
    writer.write(numbered(2, 10'000));
    std::string message;
    try {
      writer.wait();
    } catch (const CheckpointError& error) {
      message = error.what();
    }
    ::setrlimit(RLIMIT_FSIZE, &before);
    std::signal(SIGXFSZ, handler);
    CHECK_THAT(message, ContainsSubstring("shard-00000.safetensors"));
    CHECK(number_in(*read_newest_snapshot(folder.path)) == 1);
    CHECK(std::filesystem::exists(folder.path / "snapshot-0000000001"));
    CHECK(sorted_names_in(folder.path).size() == 3);  // and what claims the folder
  }
  SECTION("no thread") {
    fs::permissions(folder.path, fs::perms::all);
    const auto write_without_threads = [&] {
      try {
        const struct rlimit none{};
        if (::setrlimit(RLIMIT_NPROC, &none) != 0 || (::getuid() == 0 && ::setuid(65534) != 0)) return 2;
        SnapshotWriter writer(folder.path, {});
        writer.write(numbered(1));
      } catch (const CheckpointError& error) {
        return std::string(error.what()).find(folder.path) == std::string::npos ? 3 : 0;
      } catch (...) {
        return 4;
      }
      return 5;
    };
    CHECK(testing::exit_code_of_child(write_without_threads) == 0);
  }
  SECTION("a tensor that cannot be stored") {
    SnapshotWriter writer(folder.path, {});
    CHECK_THROWS_AS(writer.write({{{"x", at::Tensor()}}, {}}), InvalidArgument);
  }
  SECTION("an error that nobody took is logged") {
    const Warnings warnings;
    {
      SnapshotWriter writer(folder.path / "folder", {});
      writer.write(numbered(1));
      writer.wait();
      std::filesystem::remove_all(folder.path / "folder");
      writer.write(numbered(2));
    }
    REQUIRE(warnings.texts.size() == 1);
    CHECK_THAT(warnings.texts[0], ContainsSubstring("not written"));
  }
}
