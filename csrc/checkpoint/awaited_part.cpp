#include "checkpoint/awaited_part.h"

#include <sys/file.h>

#include <cerrno>
#include <cstdio>
#include <numeric>
#include <system_error>
#include <thread>
#include <utility>

#include "muster/error.h"

namespace muster::checkpoint {

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPoll{5};

fs::path lock_file(const fs::path& draft, const std::string& writer) { return draft / (writer + ".lock"); }

// Names that a client of a file server remembers as absent are asked for anew.
void refresh(const fs::path& folder) {
  std::error_code error;
  for (auto entry = fs::directory_iterator(folder, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
  }
}

// 0 where nobody can say.
uint64_t bytes_in(const fs::path& draft, const AwaitedPart& part) {
  try {
    return part.progress ? part.progress() : written_by(draft, part.writer);
  } catch (const CheckpointError&) {  // is_written says so, too
    return 0;
  }
}

// Throws CheckpointError where there will be none.
bool is_written(const fs::path& draft, const AwaitedPart& part) {
  if (part.is_there) return part.is_there();
  if (has_part(draft, part.writer)) return true;
  if (!part.has_lock || !is_unlocked(draft, part.writer)) return false;
  refresh(draft);
  if (has_part(draft, part.writer)) return true;
  throw CheckpointError(part.writer + " died before it had written its part");
}

std::string silence_of(const std::vector<AwaitedPart>& awaited, std::chrono::milliseconds patience) {
  std::string text = awaited.front().writer;
  for (size_t i = 1; i < awaited.size(); ++i) text += " and " + awaited[i].writer;
  const bool is_one = awaited.size() == 1;
  text += is_one ? " has written nothing of its part for " : " have written nothing of their parts for ";
  text += std::to_string(patience.count() / 1000) + " s (the strategy's timeout); look at ";
  return text + (is_one ? "its log, and at its disk" : "their logs, and at their disks");
}

}  // namespace

PartLock::PartLock(const fs::path& draft, const std::string& writer) : file_(draft / ('.' + writer + ".lock")) {
  const auto check = [&](bool is_done) {
    if (!is_done && !error_) error_ = {errno, std::generic_category()};
    return is_done;
  };
  if (!check(file_.get() >= 0)) return;
  is_held_ = check(::flock(file_.get(), LOCK_EX | LOCK_NB) == 0);
  // Nobody sees it unlocked before.
  has_file_ = check(std::rename((draft / ('.' + writer + ".lock")).c_str(), lock_file(draft, writer).c_str()) == 0);
}

bool is_unlocked(const fs::path& draft, const std::string& writer) noexcept {
  return is_unlocked(lock_file(draft, writer));
}

bool is_locked(const fs::path& draft, const std::string& writer) {
  return sees(draft, lock_file(draft, writer)) && !is_unlocked(draft, writer);
}

bool has_lock_file(const fs::path& draft, const std::string& writer) { return sees(draft, lock_file(draft, writer)); }

bool sees(const fs::path& draft, const fs::path& file) {
  std::error_code error;
  if (fs::exists(file, error)) return true;
  refresh(draft.parent_path());
  refresh(draft);
  return fs::exists(file, error);
}

std::exception_ptr await_parts(const fs::path& draft, std::vector<AwaitedPart> awaited,
                               std::chrono::milliseconds patience) {
  std::exception_ptr failure;
  const auto is_settled = [&](const AwaitedPart& part) {
    try {
      return is_written(draft, part);
    } catch (...) {
      if (!failure) failure = std::current_exception();
      return true;
    }
  };
  uint64_t bytes = 0;
  auto moved = Clock::now();
  for (;;) {
    if (std::erase_if(awaited, is_settled) > 0) moved = Clock::now();
    if (awaited.empty()) return failure;
    const auto add = [&](uint64_t sum, const AwaitedPart& part) { return sum + bytes_in(draft, part); };
    const auto now = Clock::now();
    if (const auto written = std::accumulate(awaited.begin(), awaited.end(), uint64_t{0}, add);
        written != std::exchange(bytes, written)) {
      moved = now;
    }
    if (now - moved >= patience) {
      if (failure) return failure;
      return std::make_exception_ptr(CheckpointError(silence_of(awaited, patience)));
    }
    std::this_thread::sleep_for(kPoll);
  }
}

fs::path write_and_finish(const fs::path& draft, const std::string& writer, const NextRuns& next,
                          const std::function<std::exception_ptr()>& await_others,
                          const std::vector<std::string>& writers, const Metadata& metadata,
                          const SnapshotOptions& options, const std::map<std::string, std::string>& names,
                          const std::map<std::string, std::string>& hosts) {
  std::exception_ptr failure;
  try {
    write_part(draft, writer, next, options);
  } catch (...) {
    failure = std::current_exception();
  }
  const auto theirs = await_others();
  try {
    if (failure) std::rethrow_exception(failure);
    if (theirs) std::rethrow_exception(theirs);
    return finish_draft(draft, writers, metadata, options, names, hosts);
  } catch (...) {
    drop_draft(draft);
    throw;
  }
}

}  // namespace muster::checkpoint
