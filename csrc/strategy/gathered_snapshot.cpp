#include "strategy/gathered_snapshot.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/snapshot_folder.h"
#include "checkpoint/snapshot_names.h"
#include "core/log.h"
#include "muster/error.h"
#include "strategy/collectives.h"
#include "strategy/telling.h"

namespace muster {

namespace {

namespace fs = std::filesystem;
using checkpoint::SnapshotReader;

// What a worker's text begins with where a snapshot cannot be used, and why follows.
constexpr char kUnusable = '!';

// What `act` gives, or in words why the snapshot is damaged.
std::string usable(const std::function<std::string()>& act) {
  try {
    return ' ' + act();
  } catch (const CheckpointError& error) {
    return kUnusable + std::string(error.what());
  }
}

// One snapshot, on one of the workers.
class GatheredSnapshot {
 public:
  GatheredSnapshot(comm::Communicator& workers, fs::path snapshot)
      : workers_(workers), snapshot_(std::move(snapshot)) {}

  // Whether all of it is good on some worker; else the chief's log says why not. `with_manifest`: the worker that has
  // its manifest. Collective.
  bool is_good(int with_manifest) {
    const auto manifests = told([&] {
      return rank() == with_manifest ? checkpoint::manifest_text(snapshot_ / checkpoint::kManifest) : std::string();
    });
    if (!manifests) return false;
    const auto& text = (*manifests)[static_cast<size_t>(with_manifest)];
    const auto there = told([&] {
      reader_ = std::make_unique<SnapshotReader>(
          snapshot_, checkpoint::parse_manifest(text, snapshot_ / checkpoint::kManifest, net::job_secret()),
          checkpoint::Memory::of_file);
      std::string files;
      for (const auto& shard : reader_->shards()) {
        std::error_code ignored;
        files += fs::exists(snapshot_ / shard.file, ignored) ? '1' : '0';
      }
      return files;
    });
    if (!there) return false;
    for (size_t shard = 0; shard < reader_->shards().size(); ++shard) {
      const auto has_it = [&](const std::string& files) { return files.at(shard) == '1'; };
      const auto owner = std::ranges::find_if(*there, has_it) - there->begin();
      if (owner == std::ssize(*there)) return pass_over_without(shard);
      owners_.push_back(static_cast<int>(owner));
    }
    return told([&] {
             for (const auto shard : shards_of(rank())) tensors_.emplace(shard, reader_->read(shard));
             return std::string();
           })
        .has_value();
  }

  // The whole on the chief, once it is good. Collective.
  std::optional<checkpoint::StoredSnapshot> gather() {
    for (int owner = 0; owner < workers_.size(); ++owner) {
      const auto shards = shards_of(owner);
      if (shards.empty()) continue;
      Leaves leaves;
      for (const auto shard : shards) {
        for (const auto& [name, tensor] : tensors_[shard]) leaves.push_back(tensor);
      }
      if (owner > 0) leaves = send_over_workers(workers_, leaves, owner);
      if (rank() > 0) continue;
      auto leaf = leaves.begin();
      for (const auto shard : shards) {
        checkpoint::NamedTensors tensors;
        for (const auto& name : reader_->names_in(shard)) tensors.emplace(name, *leaf++);
        reader_->give(shard, std::move(tensors));
      }
    }
    std::optional<checkpoint::StoredSnapshot> whole;
    told_by_all(workers_, "load", [&] {
      if (rank() == 0) whole = {reader_->rest(), snapshot_};
      return std::string();
    });
    return whole;
  }

 private:
  int rank() const { return workers_.rank(); }

  std::vector<size_t> shards_of(int owner) const {
    std::vector<size_t> shards;
    for (size_t shard = 0; shard < owners_.size(); ++shard) {
      if (owners_[shard] == owner) shards.push_back(shard);
    }
    return shards;
  }

  // By rank; nothing where the snapshot is damaged on any. Collective.
  std::optional<std::vector<std::string>> told(const std::function<std::string()>& act) {
    auto texts = told_by_all(workers_, "load", [&] { return usable(act); });
    for (size_t worker = 0; worker < texts.size(); ++worker) {
      const bool is_unusable = texts[worker].front() == kUnusable;
      texts[worker].erase(0, 1);
      if (!is_unusable) continue;
      pass_over((worker == 0 ? "" : "on rank " + std::to_string(worker) + ", ") + texts[worker]);
      return std::nullopt;
    }
    return texts;
  }

  bool pass_over_without(size_t shard) const {
    const auto& [file, sum, host] = reader_->shards()[shard];
    pass_over("no rank has its file '" + file + "'" +
              (host.empty() ? "" : ", which was written on host '" + host + "'"));
    return false;
  }

  void pass_over(const std::string& reason) const {
    checkpoint::note_good(snapshot_, false);
    if (rank() > 0) return;
    log(LogLevel::warning, "snapshot '" + snapshot_.string() + "' is passed over: " + reason);
  }

  comm::Communicator& workers_;
  const fs::path snapshot_;
  std::unique_ptr<SnapshotReader> reader_;
  std::vector<int> owners_;                             // by shard: the first worker that has the file
  std::map<size_t, checkpoint::NamedTensors> tensors_;  // of this worker's shards
};

// The numbers of the snapshots in a folder, those with a manifest after a '+'. Where others than the chief may not
// look, they have none.
std::string listed(const fs::path& folder, bool is_chief) {
  std::string text;
  try {
    checkpoint::in_folder(folder, [&] {
      if (!fs::exists(folder)) return false;
      for (const auto& [number, path] : checkpoint::snapshots_in(folder)) {
        text += (fs::exists(path / checkpoint::kManifest) ? " + " : " - ") + std::to_string(number);
      }
      return true;
    });
  } catch (const CheckpointError&) {
    if (is_chief) throw;
  }
  return text;
}

}  // namespace

std::optional<checkpoint::StoredSnapshot> read_newest_snapshot(comm::Communicator& workers, const fs::path& folder) {
  const bool is_chief = workers.rank() == 0;
  std::map<int64_t, int> with_manifest;  // by number: its first worker
  std::set<int64_t> parts;
  const auto lists = told_by_all(workers, "load", [&] { return listed(folder, is_chief); });
  for (size_t worker = 0; worker < lists.size(); ++worker) {
    std::istringstream words(lists[worker]);
    int64_t number = 0;
    for (char sign = 0; words >> sign >> number;) {
      if (sign == '+') {
        with_manifest.emplace(number, static_cast<int>(worker));
      } else {
        parts.insert(number);
      }
    }
  }
  for (const auto number : parts) {
    if (with_manifest.contains(number) || !is_chief) continue;
    log(LogLevel::warning, "of '" + (folder / checkpoint::name_of(number)).string() +
                               "' hosts have parts that are no snapshot without the " +
                               "manifest, which no rank has: it was not finished, or the chief's host was another one");
  }
  for (auto found = with_manifest.rbegin(); found != with_manifest.rend(); ++found) {
    GatheredSnapshot snapshot(workers, folder / checkpoint::name_of(found->first));
    if (snapshot.is_good(found->second)) return snapshot.gather();
  }
  if (!with_manifest.empty()) checkpoint::fail_without_good(folder);
  return std::nullopt;
}

}  // namespace muster
