#include "checkpoint/parts_elsewhere.h"

#include <unistd.h>

#include <chrono>
#include <memory>
#include <utility>

#include "muster/error.h"

namespace muster::checkpoint {

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPause{20};  // between two questions of one writer's part
constexpr size_t kMostBytes = size_t{1} << 20;   // of a value in the store
constexpr const char* kPart = "part";
constexpr const char* kProgress = "progress";
constexpr const char* kFailure = "failure";

// What is asked less often than its answer is wanted.
template <class Value>
class Paced {
 public:
  template <class Ask>
  Value get(const Ask& ask) {
    if (const auto now = Clock::now(); now >= next_) {
      next_ = now + kPause;
      value_ = ask();
    }
    return value_;
  }

 private:
  Clock::time_point next_;
  Value value_{};
};

template <class Call>
auto in_store(const std::string& writer, const Call& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    throw CheckpointError("of the part of " + writer + ", which is on another host than the chief's, nothing can be " +
                          "told: " + error.what());
  }
}

}  // namespace

std::string host_name() {
  char name[256] = {};
  if (::gethostname(name, sizeof(name) - 1) != 0 || name[0] == '\0') return "unknown";
  return name;
}

WordOfPart::WordOfPart(net::StorePtr store, std::string writer)
    : store_(std::move(store)), writer_(std::move(writer)) {}

void WordOfPart::tell(const std::string& what, const std::string& text) const {
  in_store(writer_, [&] { net::set_text(*store_, key(what), text); });
}

std::string WordOfPart::asked(const std::string& what) const {
  return in_store(writer_, [&] {
    if (!store_->check({key(what)})) return std::string();
    const auto bytes = store_->get(key(what));
    return std::string(bytes.begin(), bytes.end());
  });
}

void WordOfPart::tell_progress(uint64_t runs) const { tell(kProgress, std::to_string(runs)); }

void WordOfPart::tell_failure(const std::string& reason) const { tell(kFailure, reason.substr(0, kMostBytes)); }

// In values that every store takes; the number of them comes last.
void WordOfPart::tell_part(const std::string& manifest) const {
  size_t count = 0;
  for (size_t at = 0; at < manifest.size(); at += kMostBytes) {
    tell(kPart + std::to_string(count++), manifest.substr(at, kMostBytes));
  }
  tell(kPart, std::to_string(count) + ' ' + host_name());
}

AwaitedPart WordOfPart::awaited(const fs::path& draft, std::map<std::string, std::string>& hosts) const {
  const auto is_there = [*this, &draft, &hosts] {
    if (const auto reason = asked(kFailure); !reason.empty()) {
      throw CheckpointError(writer_ + " could not write its part: " + reason);
    }
    const auto told = asked(kPart);
    if (told.empty()) return false;
    const auto space = told.find(' ');
    std::string manifest;
    for (size_t i = 0; i < std::stoul(told.substr(0, space)); ++i) manifest += asked(kPart + std::to_string(i));
    hosts[writer_] = told.substr(space + 1);
    take_part(draft, writer_, manifest);
    return true;
  };
  const auto progress = [*this] {
    const auto runs = asked(kProgress);
    return runs.empty() ? uint64_t{0} : std::stoull(runs);
  };
  return {.writer = writer_,
          .is_there = [is_there, paced = Paced<bool>()]() mutable { return paced.get(is_there); },
          .progress = [progress, paced = Paced<uint64_t>()]() mutable { return paced.get(progress); }};
}

void WordOfPart::forget() const noexcept {
  try {
    const auto told = asked(kPart);
    const auto count = told.empty() ? 0 : std::stoul(told.substr(0, told.find(' ')));
    for (size_t i = 0; i < count; ++i) store_->deleteKey(key(kPart + std::to_string(i)));
    for (const auto* const what : {kPart, kProgress, kFailure}) store_->deleteKey(key(what));
  } catch (const std::exception&) {  // some stores cannot: they are as large as what was told
  }
}

}  // namespace muster::checkpoint
