#include "strategy/gathered_snapshot.h"

#include <sys/stat.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "checkpoint/asked_snapshot.h"
#include "checkpoint/parts_elsewhere.h"
#include "checkpoint/saved_tree.h"
#include "checkpoint/snapshot_folder.h"
#include "checkpoint/snapshot_names.h"
#include "core/log.h"
#include "muster/error.h"
#include "strategy/collectives.h"
#include "strategy/offered_snapshots.h"
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

// Where a snapshot's folder is: the same for the ranks of a host that see one.
std::string place_of(const fs::path& snapshot) {
  struct stat status{};
  if (::stat(snapshot.c_str(), &status) != 0) return "";  // which has no file
  return checkpoint::host_name() + ' ' + std::to_string(status.st_dev) + ' ' + std::to_string(status.st_ino);
}

// One snapshot, on one of the workers. All its functions but those of one worker's are collective.
class GatheredSnapshot {
 public:
  GatheredSnapshot(comm::Communicator& workers, const fs::path& folder, const OfferedSnapshot& offered)
      : workers_(workers), snapshot_(folder / checkpoint::name_of(offered.number)), with_manifest_(offered.rank) {}

  // Whether it has a manifest that is good; else the chief's log says why not.
  bool open() {
    const auto manifests = told([&] {
      return rank() == with_manifest_ ? checkpoint::manifest_text(snapshot_ / checkpoint::kManifest) : std::string();
    });
    if (!manifests) return false;
    const auto& text = (*manifests)[static_cast<size_t>(with_manifest_)];
    return told([&] {
             reader_ = std::make_unique<SnapshotReader>(
                 snapshot_, checkpoint::parse_manifest(text, snapshot_ / checkpoint::kManifest, net::job_secret()),
                 checkpoint::Memory::of_file);
             return std::string();
           })
        .has_value();
  }

  const checkpoint::Metadata& metadata() const { return reader_->metadata(); }  // of what is open

  // Whether there are all files, in the sizes that they had.
  bool is_there() {
    const auto there = told([&] {
      std::string files;
      for (const auto& [file, sum, host] : reader_->shards()) {
        std::error_code error;
        const auto bytes = fs::file_size(snapshot_ / file, error);
        files += !error && bytes == sum.bytes ? '1' : '0';
      }
      return files + place_of(snapshot_);
    });
    if (!there) return false;
    owners_.assign(reader_->shards().size(), {});
    for (size_t shard = 0; shard < owners_.size(); ++shard) {
      std::set<std::string> places;  // a file that several ranks see is read by the first
      for (size_t worker = 0; worker < there->size(); ++worker) {
        const auto& text = (*there)[worker];
        if (text.at(shard) != '1' || !places.insert(text.substr(owners_.size())).second) continue;
        owners_[shard].push_back(static_cast<int>(worker));
      }
      if (owners_[shard].empty()) return pass_over_without(shard);
      // The manifest's own host has its own files, where the chief's has others of the same names and sizes.
      const auto own = std::ranges::find(owners_[shard], with_manifest_);
      const bool is_own = reader_->shards()[shard].host.empty() && own != owners_[shard].end();
      if (is_own && owners_[shard].front() != 0) std::rotate(owners_[shard].begin(), own, own + 1);
    }
    return true;
  }

  // Whether each of them, which are there, is good on some worker: the first one's is tried first. `keep`: what is read
  // stays in memory, for gather().
  bool is_good(bool keep) {
    std::vector<int> read(owners_.size(), -1);  // by whom, by shard
    std::map<size_t, std::string> reasons;      // of the first one that could not, by shard
    for (;;) {
      const auto problems = told_by_all(workers_, "load", [&] {
        for (size_t shard = 0; shard < owners_.size(); ++shard) {
          const auto owner = owners_[shard].front();
          if (owner != rank() || std::exchange(read[shard], owner) == owner) continue;
          try {
            auto tensors = reader_->read(shard);
            if (keep) tensors_.emplace(shard, std::move(tensors));
          } catch (const CheckpointError& error) {
            return std::to_string(shard) + ' ' + error.what();
          }
        }
        return std::string();
      });
      bool has_problem = false;
      for (size_t worker = 0; worker < problems.size(); ++worker) {
        if (problems[worker].empty()) continue;
        has_problem = true;
        const auto space = problems[worker].find(' ');
        const auto shard = std::stoul(problems[worker].substr(0, space));
        const auto& reason = reasons.emplace(shard, said_by(worker, problems[worker].substr(space + 1))).first->second;
        auto& owners = owners_.at(shard);
        owners.erase(owners.begin());
        if (!owners.empty()) continue;
        pass_over(reason);
        return false;
      }
      if (!has_problem) return true;
    }
  }

  // The whole on the chief, once it is good.
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
      if (rank() == 0) {
        whole = {reader_->rest(), snapshot_};
        checkpoint::copy_what_is_kept(whole->tensors);
      }
      return std::string();
    });
    return whole;
  }

 private:
  int rank() const { return workers_.rank(); }

  std::vector<size_t> shards_of(int owner) const {
    std::vector<size_t> shards;
    for (size_t shard = 0; shard < owners_.size(); ++shard) {
      if (owners_[shard].front() == owner) shards.push_back(shard);
    }
    return shards;
  }

  // By rank; nothing where the snapshot is damaged on any.
  std::optional<std::vector<std::string>> told(const std::function<std::string()>& act) {
    auto texts = told_by_all(workers_, "load", [&] { return usable(act); });
    for (size_t worker = 0; worker < texts.size(); ++worker) {
      const bool is_unusable = texts[worker].front() == kUnusable;
      texts[worker].erase(0, 1);
      if (!is_unusable) continue;
      pass_over(said_by(worker, texts[worker]));
      return std::nullopt;
    }
    return texts;
  }

  static std::string said_by(size_t worker, const std::string& reason) {
    return (worker == 0 ? "" : "on rank " + std::to_string(worker) + ", ") + reason;
  }

  bool pass_over_without(size_t shard) const {
    const auto& [file, sum, host] = reader_->shards()[shard];
    pass_over("no rank has its file '" + file + "' of " + std::to_string(sum.bytes) + " bytes" +
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
  const int with_manifest_;
  std::unique_ptr<SnapshotReader> reader_;
  std::vector<std::vector<int>> owners_;                // by shard: who has the file, in the order they are tried
  std::map<size_t, checkpoint::NamedTensors> tensors_;  // of this worker's shards
};

// Throws CheckpointError where nobody has anything of that one.
void leave_only(int64_t number, const fs::path& folder, OfferedSnapshots& offered) {
  std::set<int64_t> others;
  const auto is_other = [&](int64_t its_number) {
    if (its_number != number) others.insert(its_number);
    return its_number != number;
  };
  std::erase_if(offered.in_order, [&](const OfferedSnapshot& snapshot) { return is_other(snapshot.number); });
  std::erase_if(offered.parts, [&](const auto& part) { return is_other(part.first.first); });
  if (offered.in_order.empty() && offered.parts.empty()) {
    checkpoint::fail_without(folder / checkpoint::name_of(number), others);
  }
}

}  // namespace

std::optional<checkpoint::StoredSnapshot> read_asked_snapshot(comm::Communicator& workers, const fs::path& path) {
  checkpoint::AskedSnapshot asked;
  const auto names = told_by_all(workers, "load", [&] {
    asked = checkpoint::asked_snapshot(path);
    return asked.number ? "'" + checkpoint::name_of(*asked.number) + "'" : "the newest one";
  });
  for (size_t r = 1; r < names.size(); ++r) {
    if (names[r] == names.front()) continue;
    throw LayoutMismatch("rank 0 loads " + names.front() + " of a folder, and rank " + std::to_string(r) + ' ' +
                         names[r] + "; give load() the same on every rank");
  }
  const auto& folder = asked.folder;
  auto offered = offered_snapshots(workers, folder);
  if (asked.number) leave_only(*asked.number, folder, offered);
  const bool is_chief = workers.rank() == 0;
  for (const auto& snapshot : offered.in_order) {
    if (snapshot.is_foreign) continue;
    GatheredSnapshot gathered(workers, folder, snapshot);
    if (!gathered.open() || !gathered.is_there() || !gathered.is_good(true)) continue;
    if (is_chief) {
      note_known_good(folder, snapshot);
      warn_of_other_hosts(folder, offered, &snapshot);
    }
    return gathered.gather();
  }
  if (is_chief) warn_of_other_hosts(folder, offered, nullptr);
  if (asked.number) {
    throw CheckpointError("'" + path.string() + "' cannot be loaded; the chief's warnings say what is wrong with it");
  }
  if (!offered.in_order.empty()) checkpoint::fail_without_good(folder);
  return std::nullopt;
}

std::optional<KeptMetric> kept_metric(comm::Communicator& workers, const fs::path& folder) {
  const auto offered = offered_snapshots(workers, folder);
  for (const auto& snapshot : offered.in_order) {
    if (snapshot.is_foreign) continue;
    GatheredSnapshot gathered(workers, folder, snapshot);
    if (!gathered.open()) continue;
    const auto metric = metric_in(gathered.metadata(), folder);
    if (!metric || !gathered.is_there() || !(snapshot.is_known_good || gathered.is_good(false))) continue;
    if (workers.rank() == 0) note_known_good(folder, snapshot);
    return metric;
  }
  return std::nullopt;
}

}  // namespace muster
