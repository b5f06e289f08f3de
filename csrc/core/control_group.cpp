#include "core/control_group.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>

namespace muster {

namespace {

namespace fs = std::filesystem;

// The number that a file begins with, or `otherwise`: where there is no such file, and for cgroup v2's "max".
int64_t number_in(const fs::path& file, int64_t otherwise) {
  std::string text;
  if (!(std::ifstream(file) >> text)) return otherwise;
  int64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && stop == end ? number : otherwise;
}

// Calls visit(folder, is_v2) for this process's group and those above it, up to the root, in the hierarchies that
// `controller` may be in. A container may see its own group as the root, under whatever name its host gave it.
template <class F>
void for_each_group(const fs::path& proc, const fs::path& cgroup, const std::string& controller, const F& visit) {
  // A line a hierarchy: its number, its controllers, and the group there (cgroups(7)).
  std::ifstream groups(proc / "self" / "cgroup");
  for (std::string line; std::getline(groups, line);) {
    const auto first = line.find(':');
    const auto second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const auto controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool is_v2 = controllers == ",,";
    if (!is_v2 && controllers.find("," + controller + ",") == std::string::npos) continue;
    fs::path folder = is_v2 ? cgroup : cgroup / controller;
    visit(folder, is_v2);
    for (const auto& name : fs::path(line.substr(second + 1)).relative_path()) {
      folder /= name;
      visit(folder, is_v2);
    }
  }
}

// The second number of "200000 100000", microseconds of CPU time a period; 0 where there is none.
int64_t period_in(const fs::path& file) {
  std::string quota;
  int64_t period = 0;
  std::ifstream(file) >> quota >> period;
  return period;
}

std::string identity_of(const fs::path& folder) {
  struct stat status{};
  if (::stat(folder.c_str(), &status) != 0) return folder;
  return std::to_string(status.st_dev) + "-" + std::to_string(status.st_ino);
}

}  // namespace

int64_t memory_limit(const fs::path& proc, const fs::path& cgroup) {
  int64_t least = static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGE_SIZE);
  for_each_group(proc, cgroup, "memory", [&](const fs::path& folder, bool is_v2) {
    least = std::min(least, number_in(folder / (is_v2 ? "memory.max" : "memory.limit_in_bytes"), least));
  });
  return least;
}

std::optional<CpuLimit> cpu_limit(const fs::path& proc, const fs::path& cgroup) {
  std::optional<CpuLimit> least;
  for_each_group(proc, cgroup, "cpu", [&](const fs::path& folder, bool is_v2) {
    const auto quota = number_in(folder / (is_v2 ? "cpu.max" : "cpu.cfs_quota_us"), -1);
    const auto period = is_v2 ? period_in(folder / "cpu.max") : number_in(folder / "cpu.cfs_period_us", 0);
    if (quota <= 0 || period <= 0) return;
    const double cores = static_cast<double>(quota) / static_cast<double>(period);
    if (!least || cores < least->cores) least = CpuLimit{cores, identity_of(folder)};
  });
  return least;
}

}  // namespace muster
