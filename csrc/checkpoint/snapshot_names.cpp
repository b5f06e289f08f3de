#include "checkpoint/snapshot_names.h"

#include <algorithm>
#include <charconv>
#include <limits>

#include "muster/error.h"

namespace muster::checkpoint {

namespace {

namespace fs = std::filesystem;

constexpr size_t kDigits = 10;

}  // namespace

std::string padded(int64_t number, size_t digits) {
  const auto text = std::to_string(number);
  return std::string(digits - std::min(digits, text.size()), '0') + text;
}

std::string name_of(int64_t number) { return std::string(kSnapshotPrefix) + padded(number, kDigits); }

std::optional<int64_t> number_of(const fs::path& snapshot) {
  const auto name = snapshot.filename().string();
  if (!name.starts_with(kSnapshotPrefix)) return std::nullopt;
  int64_t number = 0;
  std::from_chars(name.data() + kSnapshotPrefix.size(), name.data() + name.size(), number);
  if (number < 1 || name != name_of(number)) return std::nullopt;
  return number;
}

std::map<int64_t, fs::path> snapshots_in(const fs::path& folder) {
  std::map<int64_t, fs::path> found;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (const auto number = number_of(entry.path())) found.emplace(*number, entry.path());
  }
  return found;
}

std::string next_name(const std::map<int64_t, fs::path>& earlier, int64_t least) {
  if (earlier.empty()) return name_of(least);
  const auto& [number, newest] = *earlier.rbegin();
  if (number < std::numeric_limits<int64_t>::max()) return name_of(std::max(number + 1, least));
  throw CheckpointError("no number is left behind that of '" + newest.string() +
                        "'; move it away, or rename it to a lower number, or write to another folder");
}

}  // namespace muster::checkpoint
