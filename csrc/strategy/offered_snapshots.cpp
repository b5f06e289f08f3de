#include "strategy/offered_snapshots.h"

#include <algorithm>
#include <fstream>
#include <mutex>
#include <optional>
#include <string_view>
#include <tuple>
#include <variant>

#include "checkpoint/parts_elsewhere.h"
#include "checkpoint/snapshot.h"
#include "checkpoint/snapshot_folder.h"
#include "checkpoint/snapshot_names.h"
#include "core/log.h"
#include "core/plain_text.h"
#include "muster/error.h"
#include "strategy/telling.h"

namespace muster {

namespace {

namespace fs = std::filesystem;

constexpr const char* kNone = "-";
constexpr const char* kNoSum = "damaged";

// Good ones, that this process has found to be so with all hosts.
struct GoodOnHosts {
  std::mutex mutex;
  std::set<std::pair<fs::path, std::string>> snapshots;  // with their sums; guarded by mutex
};

GoodOnHosts& good_on_hosts() {
  static GoodOnHosts good;
  return good;
}

bool is_good_on_hosts(const fs::path& snapshot, const std::string& sum) {
  const std::lock_guard lock(good_on_hosts().mutex);
  return good_on_hosts().snapshots.contains({fs::absolute(snapshot), sum});
}

bool is_word(const std::string& text) {
  constexpr size_t kMostCharacters = 64;
  const auto is_usual = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z'); };
  return !text.empty() && text.size() <= kMostCharacters && std::ranges::all_of(text, is_usual);
}

std::string word_or_none(const std::string& text) { return is_word(text) ? text : kNone; }
std::string text_of_word(const std::string& word) { return word == kNone ? "" : word; }

// The checksum that a manifest begins with.
std::string sum_in(const fs::path& manifest) {
  constexpr std::string_view kBegin = "{\"crc32\":\"";
  std::string text(kBegin.size() + 8, '\0');
  std::ifstream file(manifest, std::ios::binary);
  if (!file.read(text.data(), static_cast<std::streamsize>(text.size())) || !text.starts_with(kBegin)) return kNoSum;
  const auto sum = text.substr(kBegin.size());
  return is_word(sum) ? sum : kNoSum;
}

// That of a writer of another host, "worker-2-5f3a09c1".
std::string token_in(const std::string& file) {
  const auto rank = file.find('-');
  const auto token = file.find('-', rank == std::string::npos ? rank : rank + 1);
  if (token == std::string::npos) return kNone;
  return word_or_none(file.substr(token + 1, file.find_first_of("-.", token + 1) - token - 1));
}

// Nothing where there are no parts.
std::optional<std::string> token_of_parts(const fs::path& snapshot) {
  std::error_code ignored;
  for (fs::directory_iterator entry(snapshot, ignored), end; entry != end; entry.increment(ignored)) {
    const auto name = entry->path().filename().string();
    if (name.ends_with(checkpoint::kPartSuffix)) return token_in(name);
  }
  return std::nullopt;
}

// Of one worker: its host, and its snapshots: "+ number sum 1" where this process knows that it is good, and 0, which
// those have too that have neither a manifest nor parts, or cannot be looked into; and "- number token" of parts
// without their manifest.
std::string listed(const fs::path& folder, bool is_chief) {
  std::string text = checkpoint::host_name() + '\n';
  try {
    checkpoint::in_folder(folder, [&] {
      if (!fs::exists(folder)) return false;
      for (const auto& [number, path] : checkpoint::snapshots_in(folder)) {
        std::error_code error;
        const bool has_manifest = fs::exists(path / checkpoint::kManifest, error) || error;
        const auto token = has_manifest ? std::nullopt : token_of_parts(path);
        if (token) {
          text += "- " + std::to_string(number) + ' ' + *token + '\n';
          continue;
        }
        const auto sum = sum_in(path / checkpoint::kManifest);
        const bool is_known = sum != kNoSum && (checkpoint::is_known_good(path) || is_good_on_hosts(path, sum));
        text += "+ " + std::to_string(number) + ' ' + sum + (is_known ? " 1\n" : " 0\n");
      }
      return true;
    });
  } catch (const CheckpointError&) {
    if (is_chief) throw;
  }
  return text;
}

// Adds what a worker has.
void read_listed(const std::string& text, int rank, OfferedSnapshots& offered) {
  TextReader lines(text);
  std::string host;
  std::getline(lines, host);
  offered.hosts.push_back(host);
  int64_t number = 0;
  std::string word;
  for (char sign = 0; lines >> sign >> number >> word;) {
    if (sign == '-') {
      offered.parts[{number, text_of_word(word)}].insert(rank);
      continue;
    }
    bool is_known = false;
    lines >> is_known;
    const auto is_same = [&](const OfferedSnapshot& other) { return other.number == number && other.sum == word; };
    if (word != kNoSum && std::ranges::any_of(offered.in_order, is_same)) continue;
    offered.in_order.push_back({.number = number, .sum = word, .rank = rank, .is_known_good = rank == 0 && is_known});
  }
}

// What a manifest says, "index steps lineage token"; nothing where it cannot be read, which is said where it is tried.
std::string described(const fs::path& folder, const OfferedSnapshot& snapshot, size_t index) {
  try {
    const auto manifest = checkpoint::read_manifest(
        folder / checkpoint::name_of(snapshot.number) / checkpoint::kManifest, net::job_secret());
    const auto found = [&](const char* key) {
      const auto it = manifest.metadata.find(key);
      return it == manifest.metadata.end() ? checkpoint::Metadata::mapped_type() : it->second;
    };
    const auto steps = found("steps");
    const auto lineage = found("muster.lineage");
    const auto* const number = std::get_if<int64_t>(&steps);
    const auto* const word = std::get_if<std::string>(&lineage);
    std::string token = kNone;
    for (const auto& shard : manifest.shards) {
      if (!shard.host.empty()) token = token_in(shard.file);
    }
    return std::to_string(index) + ' ' + std::to_string(number == nullptr ? -1 : *number) + ' ' +
           (word == nullptr ? kNone : word_or_none(*word)) + ' ' + token + '\n';
  } catch (const CheckpointError&) {
    return "";
  }
}

void read_described(const std::string& text, OfferedSnapshots& offered) {
  TextReader lines(text);
  size_t index = 0;
  int64_t steps = 0;
  std::string lineage;
  std::string token;
  while (lines >> index >> steps >> lineage >> token) {
    auto& snapshot = offered.in_order.at(index);
    snapshot.steps = steps;
    snapshot.lineage = lineage == kNone ? '@' + std::to_string(snapshot.rank) : lineage;
    snapshot.token = text_of_word(token);
  }
}

// That of the newest of which the chief's host has something; none where it has nothing, or that cannot be read.
std::optional<std::string> lineage_of_chief(const OfferedSnapshots& offered) {
  const OfferedSnapshot* newest = nullptr;
  for (const auto& snapshot : offered.in_order) {
    const auto parts = offered.parts.find({snapshot.number, snapshot.token});
    const bool has_part = parts != offered.parts.end() && parts->second.contains(0);
    if (snapshot.steps < 0 || (snapshot.rank > 0 && !has_part)) continue;
    if (newest == nullptr || snapshot.number > newest->number) newest = &snapshot;
  }
  return newest == nullptr ? std::nullopt : std::optional(newest->lineage);
}

void put_in_order(OfferedSnapshots& offered) {
  const auto of_chief = lineage_of_chief(offered);
  const auto is_on_chief = [](const OfferedSnapshot& snapshot) { return snapshot.rank == 0; };
  if (of_chief || std::ranges::any_of(offered.in_order, is_on_chief)) {
    for (auto& snapshot : offered.in_order) {
      snapshot.is_foreign = snapshot.rank > 0 && !snapshot.lineage.empty() && snapshot.lineage != of_chief;
    }
  }
  std::map<std::string, int64_t> steps;  // the most of each lineage
  for (const auto& snapshot : offered.in_order) {
    auto& most = steps.emplace(snapshot.lineage, -1).first->second;
    most = std::max(most, snapshot.steps);
  }
  const auto place = [&](const OfferedSnapshot& snapshot) {
    // What the chief cannot read is tried where its number says.
    const bool is_chiefs = snapshot.lineage == of_chief || (snapshot.rank == 0 && snapshot.steps < 0);
    return std::tuple(!is_chiefs, is_chiefs ? 0 : -steps.at(snapshot.lineage),
                      is_chiefs ? std::string() : snapshot.lineage, -snapshot.number, -snapshot.steps, snapshot.rank);
  };
  std::ranges::stable_sort(offered.in_order, {}, place);
}

}  // namespace

OfferedSnapshots offered_snapshots(comm::Communicator& workers, const fs::path& folder) {
  OfferedSnapshots offered;
  const auto lists = told_by_all(workers, "load", [&] { return listed(folder, workers.rank() == 0); });
  for (size_t rank = 0; rank < lists.size(); ++rank) read_listed(lists[rank], static_cast<int>(rank), offered);
  const auto is_elsewhere = [](const OfferedSnapshot& snapshot) { return snapshot.rank > 0; };
  // Else numbers say all.
  if (!offered.parts.empty() || std::ranges::any_of(offered.in_order, is_elsewhere)) {
    const auto descriptions = told_by_all(workers, "load", [&] {
      std::string text;
      for (size_t i = 0; i < offered.in_order.size(); ++i) {
        if (offered.in_order[i].rank == workers.rank()) text += described(folder, offered.in_order[i], i);
      }
      return text;
    });
    for (const auto& text : descriptions) read_described(text, offered);
  }
  put_in_order(offered);
  return offered;
}

void note_known_good(const fs::path& folder, const OfferedSnapshot& snapshot) {
  const std::lock_guard lock(good_on_hosts().mutex);
  good_on_hosts().snapshots.emplace(fs::absolute(folder / checkpoint::name_of(snapshot.number)), snapshot.sum);
}

void warn_of_other_hosts(const fs::path& folder, const OfferedSnapshots& offered, const OfferedSnapshot* taken) {
  const auto place_of = [&](int64_t number, int rank) {
    return "'" + (folder / checkpoint::name_of(number)).string() + "' on host '" +
           offered.hosts.at(static_cast<size_t>(rank)) + "' (rank " + std::to_string(rank) + ")";
  };
  const auto said_of = [&](const OfferedSnapshot& snapshot) {
    return place_of(snapshot.number, snapshot.rank) + ", of " + std::to_string(snapshot.steps) + " steps, ";
  };
  if (taken != nullptr && taken->rank > 0) {
    log(LogLevel::warning, said_of(*taken) + "is loaded: its manifest is on that host, and not on the chief's");
  }
  std::set<std::string> lineages;
  for (const auto& snapshot : offered.in_order) {
    if (snapshot.rank == 0 || (taken == nullptr ? !snapshot.is_foreign : snapshot.lineage == taken->lineage)) continue;
    if (taken != nullptr && snapshot.number < taken->number && snapshot.steps <= taken->steps) continue;
    if (!lineages.insert(snapshot.lineage).second) continue;
    const auto instead = taken == nullptr ? std::string()
                                          : " for '" + checkpoint::name_of(taken->number) + "', of " +
                                                std::to_string(taken->steps) + " steps";
    log(LogLevel::warning, said_of(snapshot) + "is passed over" + instead +
                               ": it is of another lineage than what the chief's host has. Move it away; or, to go "
                               "on from it, move away what the chief's host has");
  }
  for (const auto& [part, ranks] : offered.parts) {
    const auto& [number, token] = part;
    const auto is_whole = [&, number = number, token = token](const OfferedSnapshot& snapshot) {
      return snapshot.number == number && snapshot.token == token;
    };
    if ((taken != nullptr && number < taken->number) || std::ranges::any_of(offered.in_order, is_whole)) continue;
    log(LogLevel::warning, place_of(number, *ranks.begin()) +
                               " has parts of a snapshot whose manifest no rank has, and is passed over: it was not "
                               "finished, or the host that was the chief's then is not in this job");
  }
}

}  // namespace muster
