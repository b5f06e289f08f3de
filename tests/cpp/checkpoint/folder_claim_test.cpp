#include "checkpoint/folder_claim.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>

#include "cpp/catch.h"
#include "muster/error.h"
#include "support/folder.h"
#include "support/run_ranks.h"

using namespace muster;
using checkpoint::FolderClaim;

TEST_CASE("a folder has one owner at a time, whose lives are counted", "[checkpoint]") {
  const testing::Folder folder;
  const auto path = folder.path / "deep" / "er";
  auto claim = std::make_unique<FolderClaim>(path);
  const auto first = claim->life();
  CHECK_THROWS_WITH(FolderClaim(path), ContainsSubstring("another process uses the folder"));
  CHECK_NOTHROW(claim->check());
  claim.reset();
  claim = std::make_unique<FolderClaim>(path);
  CHECK(claim->life() == first + 1);

  // Where the file system has no locks another owner is told by its number.
  std::ofstream(path / "life") << first + 2 << '\n';
  CHECK_THROWS_WITH(claim->check(), ContainsSubstring("another process has begun"));
  std::filesystem::rename(path, folder.path / "away");
  CHECK_THROWS_WITH(claim->check(), ContainsSubstring("is gone"));
  claim.reset();
  std::filesystem::rename(folder.path / "away", path);
  for (const auto* const text : {"three\n", "4294967295\n", "4294967296\n", "7", ""}) {
    INFO(text);
    std::ofstream(path / "life") << text;
    CHECK_THROWS_WITH(FolderClaim(path), ContainsSubstring("is damaged"));
  }
}

TEST_CASE("a folder that was removed and made again has a greater life", "[checkpoint]") {
  const testing::Folder folder;
  const auto path = folder.path / "claimed";
  const FolderClaim before(path);
  std::filesystem::remove_all(path);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // servers do not start faster
  const FolderClaim after(path);
  CHECK(after.life() > before.life());
  CHECK(after.life() < uint64_t{1} << 32);
  CHECK_THROWS_WITH(before.check(), ContainsSubstring("another process has begun"));
  CHECK_NOTHROW(after.check());
}

TEST_CASE("a claimed folder that the system refuses to look into is named", "[checkpoint]") {
  const testing::Folder folder;
  const auto path = folder.path / "claimed";
  const FolderClaim claim(path);
  std::filesystem::remove_all(path);
  std::filesystem::create_symlink(path, path);
  const auto message = testing::message_of<CheckpointError>([&] { claim.check(); });
  CHECK_THAT(message, ContainsSubstring("cannot use the folder '" + path.string() + "'"));
  CHECK_THAT(message, ContainsSubstring("check its permissions"));
}

TEST_CASE("what a process has forked does not hold its folder", "[checkpoint]") {
  const testing::Folder folder;
  auto claim = std::make_unique<FolderClaim>(folder.path);
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    while (::write(ends[1], "", 1) != 1) {
    }
    ::pause();
    ::_exit(0);
  }
  char byte;
  REQUIRE(::read(ends[0], &byte, 1) == 1);  // the child runs
  ::close(ends[0]);
  ::close(ends[1]);
  claim.reset();  // as the system does where the process dies
  CHECK_NOTHROW(FolderClaim(folder.path));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}
