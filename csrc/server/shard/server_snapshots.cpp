#include "server/shard/server_snapshots.h"

#include <algorithm>
#include <limits>

#include "core/log.h"
#include "muster/error.h"
#include "server/protocol/protocol.h"

namespace muster::server {

namespace {

using Lock = std::unique_lock<std::mutex>;

// Metadata of the manifest.
constexpr const char* kKind = "kind";
constexpr const char* kKindValue = "muster parameter server";
constexpr const char* kLayout = "layout";
constexpr const char* kStep = "step";
constexpr const char* kLife = "life";
constexpr const char* kIsFirst = "first";  // where it is one of a job: what was written before is of another
constexpr const char* kOrigin = "origin";  // see Content: a number of 64 bits, as text
constexpr int64_t kLayoutVersion = 4;
constexpr size_t kKeep = 2;

template <class T>
const T* find(const checkpoint::Metadata& metadata, const char* key) {
  const auto found = metadata.find(key);
  return found == metadata.end() ? nullptr : std::get_if<T>(&found->second);
}

// Throws CheckpointError for what no server of this version wrote.
uint64_t step_of(const checkpoint::Metadata& metadata) {
  const auto* const kind = find<std::string>(metadata, kKind);
  const auto* const layout = find<int64_t>(metadata, kLayout);
  const auto* const step = find<int64_t>(metadata, kStep);
  if (kind == nullptr || *kind != kKindValue) {
    throw CheckpointError("it is not a parameter server's; give the server a folder of its own");
  }
  if (layout == nullptr || *layout != kLayoutVersion || step == nullptr || *step < 0) {
    throw CheckpointError("it has the layout of another version of Muster; read it with that one");
  }
  return static_cast<uint64_t>(*step);
}

// By rank, its incarnation and its last step that all chunks and tables hold.
std::map<uint32_t, std::pair<uint64_t, uint64_t>> all_applied(const std::vector<Image::Facts>& images) {
  std::map<uint32_t, std::pair<uint64_t, uint64_t>> all;
  for (const auto& image : images) {
    const auto& record = image.made;
    std::map<uint32_t, std::pair<uint64_t, uint64_t>> both;
    for (size_t i = 0; i < record.ranks.size(); ++i) {
      const std::pair mark(record.incarnations[i], record.applied[i]);
      const auto before = all.find(record.ranks[i]);
      if (&image == images.data()) {
        both[record.ranks[i]] = mark;
      } else if (before != all.end()) {
        both[record.ranks[i]] = std::min(mark, before->second);
      }
    }
    all = std::move(both);
  }
  return all;
}

}  // namespace

ServerSnapshots::ServerSnapshots(std::unique_ptr<SnapshotStore> store) : store_(std::move(store)) {
  if (!store_) return;
  for (const auto& entry : store_->list()) {
    if (entry.metadata.contains(kIsFirst)) {
      for (auto& kept : std::exchange(kept_, {})) former_.push_back(std::move(kept.name));
    }
    try {
      kept_.push_back({entry.name, step_of(entry.metadata), {}});
    } catch (const CheckpointError& error) {
      throw CheckpointError("snapshot '" + entry.name + "' in " + store_->where() + ": " + error.what());
    }
  }
  // A newer one of an earlier step: the job went back, and what is of later steps did not happen.
  uint64_t least = std::numeric_limits<uint64_t>::max();
  for (auto kept = kept_.end(); kept != kept_.begin();) {
    --kept;
    least = std::min(least, kept->step);
    if (kept->step > least) kept = kept_.erase(kept);
  }
}

std::vector<uint64_t> ServerSnapshots::steps() const {
  const Lock lock(mutex_);
  std::vector<uint64_t> steps;
  for (const auto& kept : kept_) steps.push_back(kept.step);
  std::sort(steps.begin(), steps.end());
  steps.erase(std::unique(steps.begin(), steps.end()), steps.end());
  return steps;
}

void ServerSnapshots::read_one(const Kept& kept, const Restore& restore) {
  const Lock reading(store_mutex_);
  restore([&](const std::function<void(const checkpoint::NamedTensors&)>& take) {
    store_->read(kept.name, [&](const checkpoint::NamedTensors& tensors, uint64_t done, uint64_t total) {
      {
        const Lock lock(mutex_);
        progress_ = {done, total};
      }
      take(tensors);
    });
  });
}

bool ServerSnapshots::read_newest(const Restore& restore) {
  if (!store_) return false;
  std::vector<Kept> all;
  {
    const Lock lock(mutex_);
    all = kept_;
  }
  while (!all.empty()) {
    const auto forget = [&](const std::exception& error) {
      log(LogLevel::warning,
          "snapshot '" + all.back().name + "' in " + store_->where() + " is passed over: " + error.what());
      all.pop_back();
    };
    try {
      read_one(all.back(), restore);
      const Lock lock(mutex_);
      kept_ = std::move(all);
      return true;
    } catch (const CheckpointError& error) {
      forget(error);
    } catch (const CommError& error) {
      forget(error);
    }
  }
  if (store_->list().empty()) return false;
  throw CheckpointError("no snapshot in " + store_->where() +
                        " is good; the warnings say what is wrong with each. Move them away to begin anew");
}

void ServerSnapshots::read(uint64_t step, const Restore& restore) {
  std::optional<Kept> wanted;
  {
    const Lock lock(mutex_);
    for (const auto& kept : kept_) {
      if (kept.step == step) wanted = kept;
    }
  }
  if (!wanted) throw CheckpointError("this parameter server has no snapshot of step " + std::to_string(step));
  read_one(*wanted, restore);
}

void ServerSnapshots::remove_after(uint64_t step) {
  if (!store_) return;
  const Lock writing(store_mutex_);
  {
    const Lock lock(mutex_);
    std::erase_if(kept_, [&](const Kept& kept) { return kept.step > step; });
  }
  for (const auto& entry : store_->list()) {
    if (step_of(entry.metadata) <= step) continue;
    store_->remove(entry.name);
    const Lock lock(mutex_);
    std::erase(former_, entry.name);
  }
}

void ServerSnapshots::forget_trouble() {
  const Lock lock(mutex_);
  trouble_ = {};
}

void ServerSnapshots::begin_anew() {
  const Lock lock(mutex_);
  trouble_ = {};
  for (auto& kept : std::exchange(kept_, {})) former_.push_back(std::move(kept.name));
  ++jobs_;
}

std::pair<uint64_t, uint64_t> ServerSnapshots::progress() const {
  const Lock lock(mutex_);
  return progress_;
}

void ServerSnapshots::write(const Content& content, uint64_t step, uint64_t keep, const Pause& pause) {
  const Lock writing(store_mutex_);
  checkpoint::Metadata metadata = {{kKind, std::string(kKindValue)},
                                   {kLayout, kLayoutVersion},
                                   {kStep, static_cast<int64_t>(step)},
                                   {kLife, static_cast<int64_t>(store_->life())},
                                   {kOrigin, std::to_string(content.origin)}};
  uint64_t job = 0;
  {
    const Lock lock(mutex_);
    if (kept_.empty()) metadata[kIsFirst] = int64_t{1};
    job = jobs_;
  }
  const auto note_failure = [&](const Error& error) {
    const Lock lock(mutex_);
    trouble_ = {error.what(), trouble_.failures + 1};
    return trouble_.failures;
  };
  checkpoint::SnapshotOptions options;
  options.shard_bytes = content.file_bytes;
  options.try_again = [&](const Error& error) {
    const auto failures = note_failure(error);
    log(LogLevel::error, std::string("a snapshot cannot be written, and is tried again: ") + error.what());
    return pause(failures);
  };
  note_written({store_->write(metadata, content.next, options), step, all_applied(content.images)}, job);
  remove_surplus(keep);
}

void ServerSnapshots::note_written(Kept written, uint64_t job) {
  std::vector<std::string> former;
  {
    const Lock lock(mutex_);
    trouble_ = {};
    if (job != jobs_) return former_.push_back(std::move(written.name));  // another began anew meanwhile
    kept_.push_back(std::move(written));
    former.swap(former_);
  }
  std::erase_if(former, [&](const std::string& name) { return remove(name); });
  const Lock lock(mutex_);
  former_.insert(former_.end(), former.begin(), former.end());
}

bool ServerSnapshots::remove(const std::string& name) {
  try {
    store_->remove(name);
    return true;
  } catch (const CheckpointError& error) {
    log(LogLevel::warning, "snapshot '" + name + "' is not needed any more, and stays: " + error.what());
  }
  try {
    const auto left = store_->list();
    return std::none_of(left.begin(), left.end(), [&](const auto& entry) { return entry.name == name; });
  } catch (const CheckpointError&) {
    return false;
  }
}

void ServerSnapshots::remove_surplus(uint64_t keep) {
  for (;;) {
    std::string oldest;
    {
      const Lock lock(mutex_);
      // The first one stays as long as former ones do: it says that they are.
      const size_t first = former_.empty() ? 0 : 1;
      if (kept_.size() <= kKeep + first) return;
      if (kept_[first].step >= keep && kept_[first].step != kept_[first + 1].step) return;
      oldest = kept_[first].name;
      kept_.erase(kept_.begin() + static_cast<std::ptrdiff_t>(first));
    }
    remove(oldest);
  }
}

Durable ServerSnapshots::durable() const {
  const Lock lock(mutex_);
  if (kept_.empty()) return {};
  const auto& newest = kept_.back();
  return {kept_.size() > 1 ? std::min(kept_[kept_.size() - 2].step, newest.step) : newest.step, newest.step};
}

Durable ServerSnapshots::durable(uint32_t rank, uint64_t incarnation) const {
  const Lock lock(mutex_);
  const auto step_in = [&](const Kept& kept) -> uint64_t {
    const auto found = kept.marks.find(rank);
    return found != kept.marks.end() && found->second.first == incarnation ? found->second.second : 0;
  };
  if (kept_.empty()) return {};
  const auto& newest = kept_.back();
  return {step_in(kept_.size() > 1 ? kept_[kept_.size() - 2] : newest), step_in(newest)};
}

ServerSnapshots::Trouble ServerSnapshots::trouble() const {
  const Lock lock(mutex_);
  return trouble_;
}

void ServerSnapshots::give_up(uint64_t step, const std::string& why) {
  const Lock lock(mutex_);
  if (!kept_.empty() && kept_.back().step >= step) return;
  trouble_ = {why, std::max(trouble_.failures + 1, Beaten::kTooMany)};
}

}  // namespace muster::server
