#include "checkpoint/joint_snapshot.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iterator>
#include <limits>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <system_error>
#include <utility>

#include "checkpoint/file.h"
#include "checkpoint/folder_claim.h"
#include "checkpoint/parts_elsewhere.h"
#include "checkpoint/snapshot_folder.h"
#include "checkpoint/snapshot_names.h"
#include "core/flat_layout.h"
#include "core/log.h"
#include "core/plain_text.h"
#include "muster/error.h"

namespace muster::checkpoint {

namespace {

namespace fs = std::filesystem;
using Milliseconds = std::chrono::milliseconds;

constexpr int64_t kLeastCut = int64_t{1} << 18;  // bytes of a tensor that several ranks write
constexpr int64_t kCutElements = 1024;           // cuts are at multiples of so many
// What the name of a draft ends with on another host than the chief's: it is never the chief's own.
constexpr const char* kAway = "away";
constexpr const char* kNoClaim = "-";
constexpr const char* kStale =
    "it is the chief's own folder, of which this host's file system does not show what the chief has written; mount it "
    "with the options lookupcache=none and actimeo=0";

// Another one in each snapshot: what a rank still writes of an earlier one, or of a job that is dead, is no part of it.
std::string random_token() {
  char text[9];
  std::snprintf(text, sizeof(text), "%08x", std::random_device()());
  return text;
}

std::string name_of_writer(size_t rank, const std::string& token) {
  return "worker-" + std::to_string(rank) + '-' + token;
}

// What others look for.
fs::path token_file(const fs::path& draft, const std::string& token) { return draft / (".token-" + token); }

// The number of the newest snapshot in a folder, whole or not; 0 where there is none to be seen.
int64_t newest_in(const fs::path& folder) {
  try {
    const auto found = snapshots_in(folder);
    return found.empty() ? 0 : std::min(found.rbegin()->first, std::numeric_limits<int64_t>::max() - 1);
  } catch (const fs::filesystem_error&) {
    return 0;
  }
}

// That of the oldest one that is to stay before there is another: as many are known to be good from it on.
int64_t oldest_kept(const fs::path& folder, const std::optional<int>& keep) {
  if (!keep) return 0;
  return in_folder(folder, [&] {
    const auto found = snapshots_in(folder);
    int count = 0;
    for (auto it = found.rbegin(); it != found.rend(); ++it) {
      if (is_known_good(it->second) && ++count == *keep) return it->first;
    }
    return int64_t{0};
  });
}

// Folders of which a warning has said where what is saved there is written.
bool is_warned_of(const fs::path& folder) {
  static std::mutex mutex;
  static std::set<fs::path> folders;
  const std::lock_guard lock(mutex);
  return !folders.insert(fs::absolute(folder)).second;
}

int64_t number_in(const std::string& text) {
  int64_t number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

// False where it is there already. Throws CheckpointError.
bool has_made_folder(const fs::path& path) {
  try {
    make_folder_in(path.parent_path(), path.filename());
    return true;
  } catch (const CheckpointError&) {
    if (!sees(path.parent_path(), path)) throw;
    return false;
  }
}

uint64_t bytes_of(const NamedTensors& tensors) {
  uint64_t bytes = 0;
  for (const auto& [name, tensor] : tensors) bytes += tensor.nbytes();
  return bytes;
}

// Of every bit, by its place up to 4 KB: a tensor that one rank alone has written, if only in a row, differs.
uint64_t digest_of_bits(const at::Tensor& tensor, uint64_t hash) {
  const auto bits =
      tensor.is_non_overlapping_and_dense() ? tensor.as_strided({tensor.numel()}, {1}) : tensor.contiguous().view({-1});
  if (!bits.is_cpu()) {
    const auto sum = bits.view(at::kByte).sum(at::kLong).item<int64_t>();
    return stable_hash({reinterpret_cast<const char*>(&sum), sizeof(sum)}, hash);
  }
  constexpr size_t kBlock = 4096;
  const auto* next = static_cast<const char*>(bits.const_data_ptr());
  for (size_t rest = bits.nbytes(); rest > 0;) {
    const size_t size = std::min(rest, kBlock);
    uint64_t sum = 0;
    size_t place = 0;
    for (uint64_t word = 0; place + sizeof(word) <= size; place += sizeof(word)) {
      std::memcpy(&word, next + place, sizeof(word));
      sum += word;
    }
    for (; place < size; ++place) sum += static_cast<unsigned char>(next[place]);
    hash = (std::rotl(hash, 23) ^ sum) * 0x9e3779b97f4a7c15U;
    next += size;
    rest -= size;
  }
  return hash;
}

// Of what share_of depends on, of dtypes, and of all values.
uint64_t digest_of(const NamedTensors& alike) {
  uint64_t hash = stable_hash("");
  for (const auto& [name, tensor] : alike) {
    std::string text = name + '\0' + dtype_name(tensor.scalar_type()) + (tensor.is_contiguous() ? " " : " with gaps ");
    for (const auto size : tensor.sizes()) text += std::to_string(size) + ' ';
    hash = digest_of_bits(tensor, stable_hash(text, hash));
  }
  return hash;
}

}  // namespace

std::vector<Run> share_of(const NamedTensors& alike, int rank, int ranks, uint64_t chiefs_bytes) {
  const auto all = static_cast<int64_t>(bytes_of(alike));
  const auto besides = static_cast<int64_t>(chiefs_bytes);
  const int64_t of_chief = std::clamp<int64_t>((all + besides) / ranks - besides, 0, all);
  // The first byte of a rank's share.
  const auto bound = [&](int of) -> int64_t {
    if (of == 0) return 0;
    if (of == ranks) return all;
    return of_chief + (all - of_chief) / (ranks - 1) * (of - 1);
  };
  std::vector<Run> runs;
  int64_t place = 0;
  for (const auto& [name, tensor] : alike) {
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    if (bytes < kLeastCut || !tensor.is_contiguous()) {
      const bool is_last = rank == ranks - 1;
      if (bound(rank) <= place && (place < bound(rank + 1) || is_last)) runs.push_back(Run::whole(name, tensor));
    } else {
      const auto element_at = [&](int64_t byte) -> int64_t {
        if (byte >= place + bytes) return tensor.numel();
        return std::max<int64_t>(byte - place, 0) / tensor.element_size() / kCutElements * kCutElements;
      };
      const auto begin = element_at(bound(rank));
      const auto end = rank == ranks - 1 ? tensor.numel() : element_at(bound(rank + 1));
      if (begin < end) runs.push_back({name, tensor.sizes().vec(), begin, tensor.view({-1}).slice(0, begin, end)});
    }
    place += bytes;
  }
  return runs;
}

JointSnapshot::Looked::Looked(const std::string& text) {
  int number = 0;
  TextReader words(text);
  words >> digest >> has_lock >> chiefs_bytes >> number >> has_made >> has_claim >> claim;
  place = static_cast<Place>(number);
  std::getline(words >> std::ws, host);
}

bool JointSnapshot::Looked::leads() const {
  return place == Place::away && (has_claim || (has_made && claim == kNoClaim));
}

JointSnapshot::JointSnapshot(SnapshotWriter& writer, int rank, net::StorePtr store)
    : writer_(writer), rank_(rank), store_(std::move(store)), made_by_(::getpid()) {}

JointSnapshot::~JointSnapshot() { close(); }

void JointSnapshot::close() noexcept {
  if (::getpid() != made_by_) return;
  if (!is_started_ && is_draft_own_) drop_draft(draft_);
  is_draft_own_ = false;
  draft_.clear();
  lock_ = nullptr;
}

std::string JointSnapshot::announce(const std::string& lineage) {
  if (!is_chief()) {
    writer_.wait();
    return std::to_string(newest_in(writer_.folder()));
  }
  writer_.claim();
  token_ = random_token();
  draft_ = begin_draft(writer_.folder());
  is_draft_own_ = true;
  FileWriter(token_file(draft_, token_)).finish();
  return draft_.filename().string() + '\n' + token_ + '\n' +
         std::to_string(oldest_kept(writer_.folder(), writer_.options().keep)) + '\n' + lineage;
}

std::string JointSnapshot::look(const std::vector<std::string>& announced, JointContent content) {
  if (!is_chief()) content.chiefs.clear();
  for (const auto* const tensors : {&content.chiefs, &content.alike}) {
    for (const auto& [name, tensor] : *tensors) check_copy_storable(name, tensor);
  }
  for (const auto& run : content.divided) check_copy_storable(run.name, run.elements);
  content_ = std::move(content);
  read_announced(announced);
  if (!is_chief() && !can_write()) return "";
  const bool has_lock = lock_ && lock_->is_held();
  const auto claim = place_ == Place::away ? mark_of_claim(writer_.folder()) : std::string();
  TextWriter text;
  text << digest_of(content_.alike) << ' ' << has_lock << ' ' << bytes_of(content_.chiefs) << ' '
       << static_cast<int>(place_) << ' ' << has_made_ << ' ' << writer_.has_claim() << ' '
       << (claim.empty() ? kNoClaim : claim) << ' ' << host_name();
  return text.str();
}

void JointSnapshot::read_announced(const std::vector<std::string>& announced) {
  TextReader lines(announced.front());
  std::string oldest;
  std::getline(lines, announced_.draft);
  std::getline(lines, token_);
  std::getline(lines, oldest);
  std::getline(lines, announced_.lineage);
  announced_.oldest = number_in(oldest);
  const auto first = kDraftPrefix.size();
  const auto random = announced_.draft.rfind('-');
  announced_.number = number_in(announced_.draft.substr(first, random - first));
  for (size_t rank = 1; rank < announced.size(); ++rank) {
    announced_.number = std::max(announced_.number, number_in(announced[rank]) + 1);
  }
  announced_.agreed =
      std::string(kDraftPrefix) + padded(announced_.number, random - first) + announced_.draft.substr(random);
}

// Where it has nothing to write it can.
bool JointSnapshot::can_write() {
  draft_ = writer_.folder() / announced_.draft;
  if (!sees(draft_, token_file(draft_, token_))) {
    if (content_.divided.empty()) {
      place_ = Place::nowhere;
      return true;
    }
    place_ = Place::away;
    if (!begin_away()) return false;
  }
  lock_ = std::make_shared<const PartLock>(draft_, name());
  return lock_->has_file();
}

bool JointSnapshot::begin_away() {
  const auto fail = [&](const std::string& reason) {
    if (is_warned_of(writer_.folder())) return false;
    log(LogLevel::warning, "this rank does not write its part of checkpoints into '" + writer_.folder().string() +
                               "' of its host, and the chief writes all of them: " + reason);
    return false;
  };
  std::error_code ignored;  // what cannot be seen is not there
  // A host keeps parts where its folder was made for them: another host's disk may go with its container.
  if (!store_ || !fs::is_directory(writer_.folder(), ignored)) return false;
  try {
    if (writer_.has_claim()) writer_.claim();  // somebody else may have taken it over
    draft_ = writer_.folder() / (announced_.agreed + kAway);
    is_draft_own_ = true;
    has_made_ = has_made_folder(draft_);
    if (has_made_ || writer_.has_claim()) words_ = client_for_thread(store_);  // it may lead
  } catch (const std::exception& error) {
    return fail(error.what());
  }
  return is_chiefs_folder() ? fail(kStale) : true;
}

// Its own draft is in another folder there.
bool JointSnapshot::is_chiefs_folder() const {
  const auto& folder = writer_.folder();
  return sees(folder, folder / announced_.draft) || sees(folder, folder / announced_.agreed);
}

// The first rank of a host claims its folder, and keeps it.
bool JointSnapshot::is_claimed_by_others(const std::vector<Looked>& looked) const {
  const auto is_of_others = [&](const Looked& its) {
    if (its.place != Place::away || its.claim == kNoClaim) return false;
    const auto has_it = [&](const Looked& other) { return other.has_claim && other.claim == its.claim; };
    return std::ranges::none_of(looked, has_it);
  };
  const auto found = std::ranges::find_if(looked, is_of_others);
  if (found == looked.end()) return false;
  if (is_chief()) {
    log(LogLevel::warning, "another process uses the folder '" + writer_.folder().string() + "' on host '" +
                               found->host + "', so that the chief writes all of this checkpoint; end that one");
  }
  return true;
}

bool JointSnapshot::copy(const std::vector<std::string>& texts) {
  const std::vector<Looked> looked(texts.begin(), texts.end());
  const auto is_as_chief = [&](const Looked& its) { return its.digest == looked.front().digest; };
  if (!std::ranges::all_of(looked, is_as_chief) || is_claimed_by_others(looked)) {
    writer_.number_from(announced_.number);
    close();
    return false;
  }
  if (place_ == Place::home) lead(looked);
  if (place_ == Place::away) lead_host(looked);
  std::vector<Run> runs;
  if (is_chief()) {
    for (const auto& [name, tensor] : content_.chiefs) runs.push_back(Run::whole(name, tensor));
  }
  if (place_ == Place::home) {
    const auto is_home = [](const Looked& its) { return its.place == Place::home; };
    const auto before = std::ranges::count_if(looked.begin(), looked.begin() + rank_, is_home);
    const auto all = std::ranges::count_if(looked, is_home);
    std::ranges::move(
        share_of(content_.alike, static_cast<int>(before), static_cast<int>(all), looked.front().chiefs_bytes),
        std::back_inserter(runs));
  }
  const auto has_elements = [](const Run& run) { return run.elements.numel() > 0; };
  std::ranges::copy_if(content_.divided, std::back_inserter(runs), has_elements);
  runs_ = writer_.copied(runs);
  content_ = {};
  return true;
}

// On the chief, of its host and of all others.
void JointSnapshot::lead(const std::vector<Looked>& looked) {
  const auto agreed = writer_.folder() / announced_.agreed;
  if (!is_chief()) {
    draft_ = agreed;
    return;
  }
  std::error_code ignored;  // it does no harm
  fs::remove(token_file(draft_, token_), ignored);
  if (agreed != draft_) in_folder(draft_, [&] { return fs::rename(draft_, agreed), true; });
  draft_ = agreed;
  note_others(looked, [](size_t) { return true; });
  if (elsewhere_.empty()) return;
  words_ = client_for_thread(store_);
  if (!is_warned_of(writer_.folder())) warn_of_hosts(looked);
}

void JointSnapshot::warn_of_hosts(const std::vector<Looked>& looked) const {
  std::set<std::string> hosts;
  for (const auto& its : looked) {
    if (its.place == Place::away) hosts.insert("'" + its.host + "'");
  }
  std::string names;
  for (const auto& host : hosts) names += (names.empty() ? "" : ", ") + host;
  log(LogLevel::warning, "checkpoints in '" + writer_.folder().string() + "' have parts on the disks of other hosts (" +
                             names +
                             "): one that is lost, or a pod whose disk goes with it, takes its part of all of " +
                             "them with it. Give a folder on a file system that all hosts share, or a volume that " +
                             "outlives the pod, or copy the hosts' folders together");
}

void JointSnapshot::lead_host(const std::vector<Looked>& looked) {
  is_draft_own_ = looked[static_cast<size_t>(rank_)].leads();
  if (!is_draft_own_) return;
  if (is_chiefs_folder()) throw CheckpointError("'" + writer_.folder().string() + "': " + kStale);
  note_others(looked, [&](size_t rank) {
    return looked[rank].place == Place::away && has_lock_file(draft_, name_of_writer(rank, token_));
  });
  writer_.claim();
  remove_leftovers(writer_.folder(), draft_.filename());
}

// Some file systems keep locks from other hosts: who waits may not see what the other one says that it has.
void JointSnapshot::note_others(const std::vector<Looked>& looked, const std::function<bool(size_t)>& is_noted) {
  for (size_t rank = 0; rank < looked.size(); ++rank) {
    if (rank == static_cast<size_t>(rank_) || looked[rank].place == Place::nowhere || !is_noted(rank)) continue;
    auto name = name_of_writer(rank, token_);
    if (looked[rank].place == place_) {
      const bool has_lock = looked[rank].has_lock && !is_unlocked(draft_, name);
      others_.push_back({std::move(name), has_lock});
    } else {
      if (looked[rank].leads()) leaders_.push_back(name);
      elsewhere_.push_back(std::move(name));
    }
  }
}

std::string JointSnapshot::name() const { return name_of_writer(static_cast<size_t>(rank_), token_); }

void JointSnapshot::start(const Metadata& metadata, Milliseconds patience) {
  if (place_ == Place::nowhere) return;
  const bool is_away = place_ == Place::away;
  PartTask task{.draft = draft_,
                .writer = name(),
                .runs = std::exchange(runs_, {}),
                .options = writer_.options(),
                .lock = std::exchange(lock_, nullptr),
                .others = others_,
                .store = words_,
                .leaders = leaders_,
                .elsewhere = elsewhere_,
                .oldest = announced_.oldest,
                .lineage = announced_.lineage};
  if (is_away) task.labels = {{"draft", announced_.agreed}, {kLineageLabel, announced_.lineage}};
  try {
    writer_.begin([task, metadata, patience, is_chief = is_chief(), leads = is_draft_own_] {
      if (is_chief) return task.write_and_finish(metadata, patience);
      if (leads) {
        task.write_and_place(patience);
      } else {
        task.write();
      }
      return fs::path();
    });
    is_started_ = true;
  } catch (const CheckpointError& error) {
    if (is_away && is_draft_own_) task.tell_failure(error.what());
    if (!is_draft_own_) fail_part(draft_, task.writer, error.what());
    writer_.note_failure(std::current_exception());  // other ranks' calls return
  }
}

}  // namespace muster::checkpoint
