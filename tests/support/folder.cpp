#include "support/folder.h"

#include <cstdlib>
#include <string>

#include "support/run_ranks.h"

namespace muster::testing {

Folder::Folder() {
  std::string name = (std::filesystem::temp_directory_path() / "muster-test-XXXXXX").string();
  MUSTER_CHECK(::mkdtemp(name.data()) != nullptr);
  path = name;
}

Folder::~Folder() { std::filesystem::remove_all(path); }

}  // namespace muster::testing
