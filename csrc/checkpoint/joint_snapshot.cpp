#include "checkpoint/joint_snapshot.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iterator>
#include <random>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "checkpoint/file.h"
#include "checkpoint/snapshot_folder.h"
#include "core/flat_layout.h"
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

// What a rank has seen, in words.
struct Looked {
  std::string digest;  // of what all ranks should have alike; empty where it does not see what the chief has begun
  bool has_lock = false;
  uint64_t chiefs_bytes = 0;

  explicit Looked(const std::string& text) {
    std::istringstream words(text);
    words >> digest >> has_lock >> chiefs_bytes;
  }
};

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
  std::string token;
  std::string writer;
  std::vector<Run> runs;
  SnapshotOptions options;
  std::shared_ptr<const PartLock> lock;

  void write() const {
    try {
      write_part(draft, writer, one_by_one(runs), options);
    } catch (const std::exception& error) {
      fail_part(draft, writer, error.what());
      throw;
    }
  }

  // The chief's: returns the snapshot's folder.
  fs::path write_and_finish(const std::vector<bool>& has_lock, const Metadata& metadata, Milliseconds patience) const {
    std::vector<std::string> writers;
    std::vector<AwaitedPart> others;
    for (size_t rank = 0; rank < has_lock.size(); ++rank) {
      writers.push_back(name_of(rank, token));
      if (rank > 0) others.push_back({writers.back(), has_lock[rank]});
    }
    const auto await_others = [&] { return await_parts(draft, others, patience); };
    return checkpoint::write_and_finish(draft, writer, one_by_one(runs), await_others, writers, metadata, options);
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

JointSnapshot::JointSnapshot(SnapshotWriter& writer, int rank, int ranks)
    : writer_(writer), rank_(rank), ranks_(ranks), made_by_(::getpid()) {}

JointSnapshot::~JointSnapshot() { close(); }

void JointSnapshot::close() noexcept {
  if (::getpid() != made_by_) return;
  if (!is_started_ && is_chief() && !draft_.empty()) drop_draft(draft_);
  draft_.clear();
  lock_ = nullptr;
}

std::string JointSnapshot::announce() {
  if (!is_chief()) {
    writer_.wait();
    return "";
  }
  writer_.claim();
  token_ = random_token();
  draft_ = begin_draft(writer_.folder());
  FileWriter(token_file(draft_, token_)).finish();
  return draft_.filename().string() + '\n' + token_;
}

std::string JointSnapshot::look(const std::vector<std::string>& announced, JointContent content) {
  if (!is_chief()) content.chiefs.clear();
  for (const auto* const tensors : {&content.chiefs, &content.alike}) {
    for (const auto& [name, tensor] : *tensors) check_copy_storable(name, tensor);
  }
  for (const auto& run : content.divided) check_copy_storable(run.name, run.elements);
  content_ = std::move(content);
  if (!is_chief()) {
    const auto end = announced.front().find('\n');
    draft_ = writer_.folder() / announced.front().substr(0, end);
    token_ = announced.front().substr(end + 1);
    if (!sees(draft_, token_file(draft_, token_))) return "";
    lock_ = std::make_shared<const PartLock>(draft_, name());
    if (!lock_->has_file()) return "";  // where it may not write
  }
  const bool has_lock = lock_ && lock_->is_held();
  return std::to_string(digest_of(content_.alike)) + (has_lock ? " 1 " : " 0 ") +
         std::to_string(bytes_of(content_.chiefs));
}

bool JointSnapshot::copy(const std::vector<std::string>& looked) {
  const Looked chief(looked.front());
  has_lock_.clear();
  bool is_joint = true;
  for (size_t rank = 0; rank < looked.size(); ++rank) {
    const Looked its(looked[rank]);
    is_joint = is_joint && its.digest == chief.digest;
    // Some file systems keep locks from other hosts.
    has_lock_.push_back(is_chief() && its.has_lock && !is_unlocked(draft_, name_of(rank, token_)));
  }
  if (!is_joint) {
    close();
    return false;
  }
  std::vector<Run> runs;
  if (is_chief()) {
    std::error_code ignored;  // it does no harm
    fs::remove(token_file(draft_, token_), ignored);
    for (const auto& [name, tensor] : content_.chiefs) runs.push_back(Run::whole(name, tensor));
  }
  std::ranges::move(share_of(content_.alike, rank_, ranks_, chief.chiefs_bytes), std::back_inserter(runs));
  const auto has_elements = [](const Run& run) { return run.elements.numel() > 0; };
  std::ranges::copy_if(content_.divided, std::back_inserter(runs), has_elements);
  runs_ = writer_.copied(runs);
  content_ = {};
  return true;
}

std::string JointSnapshot::name() const { return name_of(static_cast<size_t>(rank_), token_); }

void JointSnapshot::start(const Metadata& metadata, Milliseconds patience) {
  PartTask task{draft_, token_, name(), std::exchange(runs_, {}), writer_.options(), std::exchange(lock_, nullptr)};
  try {
    if (is_chief()) {
      writer_.begin([task, has_lock = has_lock_, metadata, patience] {
        return task.write_and_finish(has_lock, metadata, patience);
      });
    } else {
      writer_.begin([task] {
        task.write();
        return fs::path();
      });
    }
    is_started_ = true;
  } catch (const CheckpointError& error) {
    if (!is_chief()) fail_part(draft_, task.writer, error.what());
    throw;
  }
}

}  // namespace muster::checkpoint
