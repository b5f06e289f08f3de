#include "checkpoint/parts_elsewhere.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <utility>

#include "core/first_line.h"
#include "core/make_thread.h"
#include "core/plain_text.h"
#include "core/within.h"
#include "muster/error.h"

namespace muster::checkpoint {

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kFirstPause{5};          // between two questions of one host's word; it doubles
constexpr milliseconds kMostPause{200};         // up to this, which is also that between two words of progress
constexpr size_t kMostBytes = size_t{1} << 20;  // of a value in the store
constexpr const char* kParts = "parts";
constexpr const char* kProgress = "progress";
constexpr const char* kFailure = "failure";
constexpr const char* kGivenUp = "given-up";

// What is asked less often than its answer is wanted.
template <class Value>
class Paced {
 public:
  template <class Ask>
  Value get(const Ask& ask) {
    if (const auto now = Clock::now(); now >= next_) {
      next_ = now + pause_;
      pause_ = std::min(2 * pause_, kMostPause);
      value_ = ask();
    }
    return value_;
  }

 private:
  Clock::time_point next_;
  milliseconds pause_ = kFirstPause;
  Value value_{};
};

template <class Call>
auto in_store(const std::string& leader, const Call& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    throw CheckpointError("of the parts of " + leader +
                          "'s host, which is another one than the chief's, nothing can be told: " + first_line(error));
  }
}

std::string key_of(const std::string& writer, size_t piece) {
  return std::string(kParts) + '/' + writer + '/' + std::to_string(piece);
}

// Calls `act` with each writer that was told of, and the number of pieces of its manifest; returns the host.
template <class Act>
std::string read_told(const std::string& told, const Act& act) {
  TextReader lines(told);
  std::string host;
  std::getline(lines, host);
  std::string writer;
  for (size_t pieces = 0; lines >> writer >> pieces;) act(writer, pieces);
  return host;
}

}  // namespace

std::string host_name() {
  char name[256] = {};
  if (::gethostname(name, sizeof(name) - 1) != 0 || !is_host_name(name)) return "unknown";
  return name;
}

net::StorePtr client_for_thread(const net::StorePtr& store) {
  try {
    return store->clone();
  } catch (const std::exception& error) {
    throw CheckpointError("the store that the job met in has no client for another thread: " + first_line(error));
  }
}

WordOfHost::WordOfHost(net::StorePtr store, std::string leader, milliseconds patience)
    : store_(std::move(store)), leader_(std::move(leader)), patience_(patience) {}

template <class Call>
void WordOfHost::in_time(Call call) const {
  const auto told = [call = std::move(call)] {
    call();
    return true;
  };
  if (within<CheckpointError>(patience_, "tells the chief of a checkpoint's part", told)) return;
  throw CheckpointError("the store that the job met in has not answered for " +
                        std::to_string(patience_.count() / 1000) + " s: the chief, or its host, stands still");
}

void WordOfHost::tell(const std::string& what, const std::string& text) const {
  in_store(leader_, [&] { net::set_text(*store_, key(what), text); });
}

std::string WordOfHost::asked(const std::string& what) const {
  return in_store(leader_, [&] {
    if (!store_->check({key(what)})) return std::string();
    const auto bytes = store_->get(key(what));
    return std::string(bytes.begin(), bytes.end());
  });
}

void WordOfHost::tell_progress(uint64_t bytes) const { tell(kProgress, std::to_string(bytes)); }

void WordOfHost::tell_failure(const std::string& reason) const {
  in_time([word = *this, text = ("on host '" + host_name() + "', " + reason).substr(0, kMostBytes)] {
    word.tell(kFailure, text);
    word.forget_where_given_up();
  });
}

void WordOfHost::tell_parts(std::map<std::string, std::string> manifests) const {
  in_time([word = *this, manifests = std::move(manifests)] { word.set_parts(manifests); });
}

// In values that every store takes; the list of them comes last.
void WordOfHost::set_parts(const std::map<std::string, std::string>& manifests) const {
  std::string told = host_name();
  for (const auto& [writer, manifest] : manifests) {
    size_t pieces = 0;
    for (size_t at = 0; at < manifest.size(); at += kMostBytes) {
      tell(key_of(writer, pieces++), manifest.substr(at, kMostBytes));
    }
    told += '\n' + writer + ' ' + std::to_string(pieces);
  }
  tell(kParts, told);
  forget_where_given_up();
}

void WordOfHost::take(const std::string& told, const fs::path& draft, std::map<std::string, std::string>& hosts) const {
  std::map<std::string, std::string> manifests;
  const auto host = read_told(told, [&](const std::string& writer, size_t pieces) {
    for (size_t i = 0; i < pieces; ++i) manifests[writer] += asked(key_of(writer, i));
  });
  if (!is_host_name(host)) throw CheckpointError(leader_ + " told what is no name of a host as that of its own");
  for (const auto& [writer, manifest] : manifests) {
    take_part(draft, writer, manifest);
    hosts[writer] = host;
  }
}

AwaitedPart WordOfHost::awaited(const fs::path& draft, std::map<std::string, std::string>& hosts) const {
  const auto is_there = [*this, &draft, &hosts] {
    if (const auto reason = asked(kFailure); !reason.empty()) throw CheckpointError(reason);
    const auto told = asked(kParts);
    if (!told.empty()) take(told, draft, hosts);
    return !told.empty();
  };
  const auto progress = [*this] {
    uint64_t bytes = 0;
    const auto text = asked(kProgress);
    std::from_chars(text.data(), text.data() + text.size(), bytes);
    return bytes;
  };
  return {.writer = leader_,
          .is_there = [is_there, paced = Paced<bool>()]() mutable { return paced.get(is_there); },
          .progress = [progress, paced = Paced<uint64_t>()]() mutable { return paced.get(progress); }};
}

void WordOfHost::forget() const noexcept {
  try {
    read_told(asked(kParts), [&](const std::string& writer, size_t pieces) {
      for (size_t i = 0; i < pieces; ++i) store_->deleteKey(key(key_of(writer, i)));
    });
    for (const auto* const what : {kParts, kProgress, kFailure, kGivenUp}) store_->deleteKey(key(what));
  } catch (const std::exception&) {
    return;  // some stores cannot: they are as large as what was told
  }
}

// Whichever of the two is done last sees what the other one has done, and removes both.
void WordOfHost::give_up() const noexcept {
  try {
    tell(kGivenUp, "1");
    if (!asked(kParts).empty() || !asked(kFailure).empty()) forget();
  } catch (const std::exception&) {
    return;  // the store is gone, and all that is in it
  }
}

void WordOfHost::forget_where_given_up() const {
  if (!asked(kGivenUp).empty()) forget();
}

ProgressTeller::ProgressTeller(WordOfHost word, std::function<uint64_t()> bytes)
    : word_(std::move(word)), bytes_(std::move(bytes)) {
  thread_ = make_thread<CheckpointError>("tells the chief how a checkpoint's part gets on", [this] { run(); });
}

ProgressTeller::~ProgressTeller() {
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  ends_.notify_all();
  thread_.join();
}

void ProgressTeller::run() noexcept {
  uint64_t told = 0;
  try {
    for (;;) {
      if (const auto bytes = bytes_(); bytes != told) word_.tell_progress(told = bytes);
      std::unique_lock lock(mutex_);
      if (ends_.wait_for(lock, kMostPause, [&] { return is_over_; })) return;
    }
  } catch (const std::exception&) {
    return;  // who tells of the parts at the end meets the same, and says so
  }
}

}  // namespace muster::checkpoint
