#include "checkpoint/joint_snapshot.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iterator>
#include <limits>
#include <map>
#include <random>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "checkpoint/file.h"
#include "checkpoint/snapshot_folder.h"
#include "checkpoint/snapshot_names.h"
#include "core/flat_layout.h"
#include "core/log.h"
#include "muster/error.h"

namespace muster::checkpoint {

namespace {

namespace fs = std::filesystem;
using Milliseconds = std::chrono::milliseconds;

constexpr int64_t kLeastCut = int64_t{1} << 18;  // bytes of a tensor that several ranks write
constexpr int64_t kCutElements = 1024;           // cuts are at multiples of so many

// Another one in each snapshot: what a rank still writes of an earlier one, or of a job that is dead, is no part of it.
std::string random_token() {
  char text[9];
  std::snprintf(text, sizeof(text), "%08x", std::random_device()());
  return text;
}

std::string name_of(size_t rank, const std::string& token) { return "worker-" + std::to_string(rank) + '-' + token; }

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

// That of the oldest one, where as many are there as are to stay.
int64_t oldest_kept(const fs::path& folder, const std::optional<int>& keep) {
  const auto found = in_folder(folder, [&] { return snapshots_in(folder); });
  return keep && std::ssize(found) >= *keep ? found.begin()->first : 0;
}

int64_t number_in(const std::string& text) {
  int64_t number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
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

NextRuns one_by_one(const std::vector<Run>& runs) {
  return [&runs, next = size_t{0}]() mutable {
    return next == runs.size() ? std::vector<Run>() : std::vector<Run>{runs[next++]};
  };
}

// What a rank's thread does.
struct PartTask {
  fs::path draft;
  std::string writer;
  std::vector<Run> runs;
  SnapshotOptions options;
  std::shared_ptr<const PartLock> lock;
  net::StorePtr store;               // where it is on another host than the chief's
  std::vector<AwaitedPart> others;   // who write to the same draft
  std::vector<std::string> distant;  // who write on other hosts

  NextRuns next_runs() const {
    auto next = one_by_one(runs);
    if (!store) return next;
    return [next, word = WordOfPart(store, writer), count = uint64_t{0}]() mutable {
      word.tell_progress(++count);
      return next();
    };
  }

  void write() const {
    try {
      write_part(draft, writer, next_runs(), options);
    } catch (const std::exception& error) {
      fail_part(draft, writer, error.what());
      throw;
    }
  }

  std::vector<std::string> writers() const {
    std::vector<std::string> names{writer};
    for (const auto& other : others) names.push_back(other.writer);
    return names;
  }

  // The chief's: returns the snapshot's folder.
  fs::path write_and_finish(const Metadata& metadata, Milliseconds patience, const net::StorePtr& words) const {
    auto names = writers();
    auto awaited = others;
    std::map<std::string, std::string> hosts;
    for (const auto& name : distant) {
      names.push_back(name);
      awaited.push_back(WordOfPart(words, name).awaited(draft, hosts));
    }
    const auto await_others = [&] { return await_parts(draft, awaited, patience); };
    const auto snapshot =
        checkpoint::write_and_finish(draft, writer, next_runs(), await_others, names, metadata, options, {}, hosts);
    for (const auto& name : distant) WordOfPart(words, name).forget();
    return snapshot;
  }

  // That of a host's first rank: it tells the chief of all of them.
  void write_and_place(Milliseconds patience) const {
    try {
      std::exception_ptr failure;
      try {
        write_part(draft, writer, next_runs(), options);
      } catch (...) {
        failure = std::current_exception();
      }
      const auto theirs = await_parts(draft, others, patience);  // also then: see checkpoint::write_and_finish
      if (failure) std::rethrow_exception(failure);
      if (theirs) {
        tell_of(theirs);
        return;
      }
      std::map<std::string, std::string> texts;
      for (const auto& name : writers()) texts.emplace(name, part_text(draft, name));
      place_parts(draft, writers());
      for (const auto& [name, text] : texts) WordOfPart(store, name).tell_part(text);
    } catch (...) {
      tell_of(std::current_exception());
      throw;
    }
  }

  // Why there will be no parts of this host; never throws.
  void tell_of(const std::exception_ptr& failure) const {
    drop_draft(draft);
    try {
      std::rethrow_exception(failure);
    } catch (const std::exception& error) {
      tell_failure(error.what());
    }
  }

  void tell_failure(const std::string& reason) const noexcept {
    try {
      for (const auto& name : writers()) WordOfPart(store, name).tell_failure(reason);
    } catch (const std::exception& error) {
      log(LogLevel::warning, std::string("the chief waits in vain for a checkpoint's part: ") + error.what());
    }
  }
};

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
  std::istringstream words(text);
  words >> digest >> has_lock >> chiefs_bytes >> number;
  place = static_cast<Place>(number);
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

std::string JointSnapshot::announce() {
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
         std::to_string(oldest_kept(writer_.folder(), writer_.options().keep));
}

std::string JointSnapshot::look(const std::vector<std::string>& announced, JointContent content) {
  if (!is_chief()) content.chiefs.clear();
  for (const auto* const tensors : {&content.chiefs, &content.alike}) {
    for (const auto& [name, tensor] : *tensors) check_copy_storable(name, tensor);
  }
  for (const auto& run : content.divided) check_copy_storable(run.name, run.elements);
  content_ = std::move(content);
  find_place(announced);
  if (!is_chief() && place_ != Place::nowhere) {
    if (place_ == Place::away && !store_) return "";
    lock_ = std::make_shared<const PartLock>(draft_, name());
    if (!lock_->has_file()) return "";  // where it may not write
  }
  const bool has_lock = lock_ && lock_->is_held();
  return std::to_string(digest_of(content_.alike)) + (has_lock ? " 1 " : " 0 ") +
         std::to_string(bytes_of(content_.chiefs)) + ' ' + std::to_string(static_cast<int>(place_));
}

void JointSnapshot::find_place(const std::vector<std::string>& announced) {
  std::istringstream lines(announced.front());
  std::string oldest;
  std::getline(lines, announced_.draft);
  std::getline(lines, token_);
  std::getline(lines, oldest);
  announced_.oldest = number_in(oldest);
  const auto first = kDraftPrefix.size();
  const auto random = announced_.draft.rfind('-');
  auto number = number_in(announced_.draft.substr(first, random - first));
  for (size_t rank = 1; rank < announced.size(); ++rank) number = std::max(number, number_in(announced[rank]) + 1);
  announced_.agreed = std::string(kDraftPrefix) + padded(number, random - first) + announced_.draft.substr(random);
  if (is_chief()) return;
  draft_ = writer_.folder() / announced_.draft;
  if (sees(draft_, token_file(draft_, token_))) return;
  place_ = content_.divided.empty() ? Place::nowhere : Place::away;
  if (place_ == Place::nowhere || !store_) return;
  draft_ = writer_.folder() / announced_.agreed;
  is_draft_own_ = true;
  try {
    make_folder(writer_.folder());
    if (!fs::exists(draft_)) make_folder_in(writer_.folder(), announced_.agreed);
  } catch (const std::exception&) {  // another rank of this host has made it meanwhile, or look() finds that it may not
  }
}

bool JointSnapshot::copy(const std::vector<std::string>& texts) {
  const std::vector<Looked> looked(texts.begin(), texts.end());
  const auto is_as_chief = [&](const Looked& its) { return its.digest == looked.front().digest; };
  if (!std::ranges::all_of(looked, is_as_chief)) {
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
}

void JointSnapshot::lead_host(const std::vector<Looked>& looked) {
  const auto is_of_host = [&](size_t rank) {
    return looked[rank].place == Place::away && has_lock_file(draft_, name_of(rank, token_));
  };
  is_draft_own_ = true;
  for (size_t rank = 0; rank < static_cast<size_t>(rank_); ++rank) is_draft_own_ = is_draft_own_ && !is_of_host(rank);
  if (!is_draft_own_) return;
  note_others(looked, is_of_host);
  writer_.claim();
  remove_leftovers(writer_.folder(), announced_.agreed);
  try {
    for (const auto& [number, path] : snapshots_in(writer_.folder())) {
      if (number < announced_.oldest) remove_snapshot(path);
    }
  } catch (const std::exception& error) {
    log(LogLevel::warning, "old snapshots in '" + writer_.folder().string() + "' stay: " + error.what());
  }
}

// Some file systems keep locks from other hosts: who waits may not see what the other one says that it has.
void JointSnapshot::note_others(const std::vector<Looked>& looked, const std::function<bool(size_t)>& is_noted) {
  for (size_t rank = 0; rank < looked.size(); ++rank) {
    if (rank == static_cast<size_t>(rank_) || looked[rank].place == Place::nowhere || !is_noted(rank)) continue;
    auto name = name_of(rank, token_);
    if (looked[rank].place == place_) {
      const bool has_lock = looked[rank].has_lock && !is_unlocked(draft_, name);
      others_.push_back({std::move(name), has_lock});
    } else {
      distant_.push_back(std::move(name));
    }
  }
}

std::string JointSnapshot::name() const { return name_of(static_cast<size_t>(rank_), token_); }

void JointSnapshot::start(const Metadata& metadata, Milliseconds patience) {
  if (place_ == Place::nowhere) return;
  const bool is_away = place_ == Place::away;
  PartTask task{draft_,
                name(),
                std::exchange(runs_, {}),
                writer_.options(),
                std::exchange(lock_, nullptr),
                is_away ? store_ : nullptr,
                others_,
                distant_};
  try {
    writer_.begin([task, metadata, patience, words = store_, is_chief = is_chief(), leads = is_draft_own_] {
      if (is_chief) return task.write_and_finish(metadata, patience, words);
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
    throw;
  }
}

}  // namespace muster::checkpoint
