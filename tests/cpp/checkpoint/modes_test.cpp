// Whose the folders and files of snapshots are.
#include <ATen/ops/ones.h>
#include <sys/stat.h>

#include <filesystem>
#include <map>
#include <string>

#include "checkpoint/snapshot_writer.h"
#include "cpp/catch.h"
#include "muster/error.h"
#include "support/folder.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::checkpoint;
namespace fs = std::filesystem;

namespace {

// Takes nothing away from what is made.
struct NoUmask {
  NoUmask() : before(::umask(0)) {}
  ~NoUmask() { ::umask(before); }
  mode_t before;
};

mode_t mode_of(const fs::path& path) {
  struct stat status{};
  REQUIRE(::stat(path.c_str(), &status) == 0);
  return status.st_mode & ALLPERMS;
}

void write_two(const fs::path& folder) {
  SnapshotWriter writer(folder, {});
  for (int i = 0; i < 2; ++i) writer.write({{{"x", at::ones({3})}}, {}});
  writer.wait();
}

// Of all that is in it: with the mode of each folder and of each file.
void check_inside(const fs::path& folder, mode_t folders, mode_t files) {
  size_t count = 0;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    INFO(entry.path());
    CHECK(mode_of(entry.path()) == (entry.is_directory() ? folders : files));
    ++count;
  }
  CHECK(count == 8);  // two snapshots with a manifest and a shard each, the lock and the life
}

}  // namespace

TEST_CASE("what is written is its owner's alone, whatever the umask", "[checkpoint]") {
  const testing::Folder folder;
  const NoUmask none;
  const auto path = folder.path / "deep" / "er";
  const std::string end = GENERATE("", "/", "/.", "//");
  write_two(path.string() + end);
  CHECK(mode_of(path) == 0700);
  CHECK(mode_of(path.parent_path()) == 0777);  // as by mkdir -p
  check_inside(path, 0700, 0600);
}

TEST_CASE("without a claim, too, a folder is its owner's alone", "[checkpoint]") {
  const testing::Folder folder;
  const NoUmask none;
  write_snapshot(folder.path / "own", {{{"x", at::ones({3})}}, {}}, {});
  CHECK(mode_of(folder.path / "own") == 0700);
  CHECK(mode_of(folder.path / "own" / "snapshot-0000000001") == 0700);
}

TEST_CASE("a folder that is there keeps its mode, and what is inside is its owner's alone", "[checkpoint]") {
  const testing::Folder folder;
  fs::permissions(folder.path, fs::perms(0775));
  write_two(folder.path);
  CHECK(mode_of(folder.path) == 0775);
  check_inside(folder.path, 0700, 0600);
}

TEST_CASE("in a folder with the set-group-ID bit the group has the rights that it has there", "[checkpoint]") {
  const testing::Folder folder;
  const auto [mode, folders, files] = GENERATE(std::tuple<mode_t, mode_t, mode_t>{02750, 02750, 0640},
                                               std::tuple<mode_t, mode_t, mode_t>{02775, 02770, 0660},
                                               std::tuple<mode_t, mode_t, mode_t>{02700, 02700, 0600});
  REQUIRE(::chmod(folder.path.c_str(), mode) == 0);
  write_two(folder.path);
  CHECK(mode_of(folder.path) == mode);
  check_inside(folder.path, folders, files);
  // One that is made there is not shared by itself.
  write_two(folder.path / "own");
  CHECK(mode_of(folder.path / "own") == 02700);
  check_inside(folder.path / "own", 02700, 0600);
}

TEST_CASE("a folder that cannot be made is named", "[checkpoint]") {
  const testing::Folder folder;
  fs::create_directory(folder.path / "a");
  write_snapshot(folder.path / "a" / "b", {{{"x", at::ones({3})}}, {}}, {});
  const auto file = folder.path / "a" / "b" / "snapshot-0000000001" / "manifest.json";
  for (const auto& path : {file, file / "below"}) {
    const auto message = testing::message_of<CheckpointError>([&] { write_two(path); });
    CHECK_THAT(message, ContainsSubstring("'" + path.string() + "': Not a directory"));
  }
}
