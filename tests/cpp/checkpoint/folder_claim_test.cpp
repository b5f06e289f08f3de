#include "checkpoint/folder_claim.h"

#include <filesystem>
#include <fstream>
#include <optional>

#include "cpp/catch.h"
#include "muster/error.h"
#include "support/folder.h"

using namespace muster;
using checkpoint::FolderClaim;

TEST_CASE("a folder has one owner at a time, whose lives are counted", "[checkpoint]") {
  const testing::Folder folder;
  const auto path = folder.path / "deep" / "er";
  std::optional<FolderClaim> claim(path);
  CHECK(claim->life() == 1);
  CHECK_THROWS_WITH(FolderClaim(path), ContainsSubstring("another process uses the folder"));
  CHECK_NOTHROW(claim->check());
  claim.reset();
  claim.emplace(path);
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
