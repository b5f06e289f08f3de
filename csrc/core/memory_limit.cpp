#include "core/memory_limit.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <string>

namespace muster {

namespace {

namespace fs = std::filesystem;

// The number in a file, or `otherwise`: where there is no such file, and for cgroup v2's "max".
int64_t number_in(const fs::path& file, int64_t otherwise) {
  std::string text;
  if (!std::getline(std::ifstream(file), text)) return otherwise;
  int64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && stop == end ? number : otherwise;
}

// The least limit of a group and those above it, up to the hierarchy's root. A container may see its own group as the
// root, under whatever name its host gave it.
int64_t least_limit(const fs::path& root, const std::string& group, const char* file, int64_t least) {
  least = std::min(least, number_in(root / file, least));
  fs::path folder = root;
  for (const auto& name : fs::path(group).relative_path()) {
    folder /= name;
    least = std::min(least, number_in(folder / file, least));
  }
  return least;
}

}  // namespace

int64_t memory_limit(const fs::path& proc, const fs::path& cgroup) {
  int64_t least = static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGE_SIZE);
  // A line a hierarchy: its number, its controllers, and the group there (cgroups(7)).
  std::ifstream groups(proc / "self" / "cgroup");
  for (std::string line; std::getline(groups, line);) {
    const auto first = line.find(':');
    const auto second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const auto controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const auto group = line.substr(second + 1);
    if (controllers == ",,") least = least_limit(cgroup, group, "memory.max", least);
    if (controllers.find(",memory,") != std::string::npos) {
      least = least_limit(cgroup / "memory", group, "memory.limit_in_bytes", least);
    }
  }
  return least;
}

}  // namespace muster
