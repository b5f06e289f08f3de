#include "checkpoint/folder_claim.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <memory>

#include "cpp/catch.h"
#include "muster/error.h"
#include "support/folder.h"

using namespace muster;
using checkpoint::FolderClaim;

TEST_CASE("a folder has one owner at a time, whose lives are counted", "[checkpoint]") {
  const testing::Folder folder;
  const auto path = folder.path / "deep" / "er";
  auto claim = std::make_unique<FolderClaim>(path);
  CHECK(claim->life() == 1);
  CHECK_THROWS_WITH(FolderClaim(path), ContainsSubstring("another process uses the folder"));
  CHECK_NOTHROW(claim->check());
  claim.reset();
  claim = std::make_unique<FolderClaim>(path);
  CHECK(claim->life() == 2);

  // Where the file system has no locks another owner is told by its number.
  std::ofstream(path / "life") << "3\n";
  CHECK_THROWS_WITH(claim->check(), ContainsSubstring("another process has begun"));
  std::filesystem::rename(path, folder.path / "away");
  CHECK_THROWS_WITH(claim->check(), ContainsSubstring("is gone"));
  claim.reset();
  std::filesystem::rename(folder.path / "away", path);
  std::ofstream(path / "life") << "three\n";
  CHECK_THROWS_WITH(FolderClaim(path), ContainsSubstring("is damaged"));
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
