#include "comm/nccl/launcher.h"

#include <algorithm>

#include "core/log.h"
#include "core/make_thread.h"
#include "core/wait_hook.h"
#include "muster/error.h"

namespace muster::comm::nccl {
namespace {

constexpr Milliseconds kSlice{50};
constexpr Milliseconds kWatch{250};

/// What a profiler shows while it lives.
class Range {
 public:
  Range(const DeviceApi& api, const std::string& name) : api_(api) { api_.push_range(name.c_str()); }
  ~Range() { api_.pop_range(); }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  const DeviceApi& api_;
};

std::string text_of(Milliseconds timeout) { return std::to_string(timeout.count()) + " ms"; }

}  // namespace

Launcher::Launcher(std::shared_ptr<Clique> clique)
    : clique_(std::move(clique)),
      nccl_(clique_->nccl()),
      device_(clique_->device()),
      ranks_(clique_->options().devices.size()) {
  for (int i = 0; i < clique_->local_ranks(); ++i) {
    const DeviceScope scope(device_, device_of(i));
    ranks_[static_cast<size_t>(i)].stream = device_.create_stream();
    ranks_[static_cast<size_t>(i)].events = std::make_shared<EventPool>(device_);
  }
  watching_ = make_thread("watches NCCL's operations", [this] { watch(); });
  if (clique_->local_ranks() == 1) return;
  try {
    launching_ = make_thread("launches NCCL's operations", [this] { run(); });
  } catch (...) {
    end_watch();
    throw;
  }
}

Launcher::~Launcher() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  if (launching_.joinable()) launching_.join();
  const auto is_idle = [this] {
    const std::lock_guard lock(mutex_);
    return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.under_way.empty(); });
  };
  // The watching thread bounds this: a part that takes too long ends the clique.
  while (!is_idle() && !clique_->has_failed()) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    try {
      reap();
    } catch (...) {
      clique_->fail(std::current_exception());
    }
  }
  end_watch();
  for (size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = ranks_[i];
    try {
      const DeviceScope scope(device_, device_of(static_cast<int>(i)));
      device_.destroy_stream(rank.stream);
    } catch (const std::exception& error) {
      log(LogLevel::warning, std::string("an NCCL stream did not end in good order: ") + error.what());
    }
  }
}

void Launcher::end_watch() {
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  changed_.notify_all();
  watching_.join();
}

// --- posting -------------------------------------------------------------------------------------------------------

LaunchPtr Launcher::post(int local, LaunchPart part) {
  clique_->check();
  const DeviceScope scope(device_, device_of(local));
  const Stream current = device_.current_stream(device_of(local));
  auto launch = std::make_shared<Launch>();
  launch->part = std::move(part);
  launch->posted = Clock::now();
  launch->is_captured = device_.is_capturing(current);
  if (launch->is_captured && ranks_.size() > 1) {
    throw InvalidArgument(
        "a group with several GPUs in one process cannot be captured in a CUDA graph; run one process "
        "per GPU");
  }
  if (launch->is_captured) {
    clique_->note_captured();
  } else {
    reap();
  }
  {
    const std::lock_guard lock(mutex_);
    check_left();
    Rank& rank = ranks_[static_cast<size_t>(local)];
    launch->ready = rank.events->take();
    launch->finished = rank.events->take();
    device_.record(launch->ready.get(), current);
    if (ranks_.size() > 1) rank.posted.push_back(launch);
  }
  if (ranks_.size() == 1) {
    this->launch({launch});
  } else {
    changed_.notify_all();
  }
  return launch;
}

void Launcher::check_left() {
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (!ranks_[i].has_left) continue;
    throw CommError(name_of(static_cast<int>(i)) +
                    ", of this process, has left the group; make a new one over the ranks that go on");
  }
}

std::vector<LaunchPtr> Launcher::take_complete() {
  for (const Rank& any : ranks_) {
    if (any.posted.empty()) continue;
    const std::vector<bool> takes_part = any.posted.front()->part.takes_part;
    const auto takes = [&](size_t i) { return takes_part.empty() || takes_part[i]; };
    bool is_complete = true;
    for (size_t i = 0; i < ranks_.size() && is_complete; ++i) {
      const auto& posted = ranks_[i].posted;
      is_complete = !takes(i) || (!posted.empty() && posted.front()->part.takes_part == takes_part);
    }
    if (!is_complete) continue;
    std::vector<LaunchPtr> parts(ranks_.size());
    for (size_t i = 0; i < ranks_.size(); ++i) {
      if (!takes(i)) continue;
      parts[i] = std::move(ranks_[i].posted.front());
      ranks_[i].posted.pop_front();
    }
    return parts;
  }
  return {};
}

void Launcher::leave(int local) noexcept {
  {
    const std::lock_guard lock(mutex_);
    ranks_[static_cast<size_t>(local)].has_left = true;
  }
  changed_.notify_all();
}

// --- launching -----------------------------------------------------------------------------------------------------

void Launcher::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    std::vector<LaunchPtr> parts;
    changed_.wait(lock, [&] {
      parts = take_complete();
      return stops_ || !parts.empty();
    });
    if (parts.empty()) return;
    lock.unlock();
    try {
      launch(parts);
    } catch (...) {
      clique_->fail(std::current_exception());
      changed_.notify_all();
    }
    parts.clear();
    lock.lock();
  }
}

void Launcher::check_agreement(const std::vector<LaunchPtr>& parts) const {
  int first = -1;
  for (int i = 0; i < static_cast<int>(parts.size()); ++i) {
    const LaunchPtr& part = parts[static_cast<size_t>(i)];
    if (!part) continue;
    if (first < 0) first = i;
    const int base = clique_->options().first_rank;
    const std::string mismatch =
        describe_mismatch(base + first, parts[static_cast<size_t>(first)]->part.request, base + i, part->part.request);
    if (!mismatch.empty()) throw LayoutMismatch(mismatch);
  }
}

void Launcher::launch(const std::vector<LaunchPtr>& parts) {
  const auto for_each = [&](const auto& call) {
    for (size_t i = 0; i < parts.size(); ++i) {
      if (!parts[i]) continue;
      const DeviceScope scope(device_, device_of(static_cast<int>(i)));
      call(*parts[i], ranks_[i].stream);
    }
  };
  try {
    check_agreement(parts);
    for_each([&](Launch& launch, Stream stream) { device_.stream_wait(stream, launch.ready.get()); });
    const auto any = std::find_if(parts.begin(), parts.end(), [](const LaunchPtr& part) { return part != nullptr; });
    if ((*any)->part.encode) {
      const std::string what = describe((*any)->part.request);
      const Range range(device_, "muster " + what);
      clique_->call(what, [&](int local, Comm comm) {
        const auto i = static_cast<size_t>(local);
        return parts[i] ? parts[i]->part.encode(comm, ranks_[i].stream) : kSuccess;
      });
    }
    // Only here are the operations on their streams.
    for_each([&](Launch& launch, Stream stream) { device_.record(launch.finished.get(), stream); });
  } catch (...) {
    clique_->fail(std::current_exception());
    clique_->check();
  }
  {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < parts.size(); ++i) {
      if (!parts[i]) continue;
      Rank& rank = ranks_[i];
      Launch& launch = *parts[i];
      launch.is_launched = true;
      launch.ready.reset();
      // What is captured runs whenever its graph does.
      if (!launch.is_captured) rank.under_way.push_back(parts[i]);
    }
  }
  changed_.notify_all();
}

// --- the end of a part ---------------------------------------------------------------------------------------------

void Launcher::time_out(const std::string& message) {
  clique_->fail(std::make_exception_ptr(Timeout(message)));
  clique_->check();
  throw Timeout(message);
}

void Launcher::await_launched(int local, Launch& launch, Milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  std::unique_lock lock(mutex_);
  while (!launch.is_launched) {
    changed_.wait_for(lock, kSlice, [&] { return launch.is_launched || stops_; });
    if (launch.is_launched) return;
    std::string missing;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      const auto& takes_part = launch.part.takes_part;
      if (!takes_part.empty() && !takes_part[i]) continue;
      if (ranks_[i].posted.empty()) missing += (missing.empty() ? "" : ", ") + name_of(static_cast<int>(i));
    }
    if (!missing.empty()) check_left();
    lock.unlock();
    clique_->check();
    if (Clock::now() >= deadline) {
      time_out(name_of(local) + " waited " + text_of(timeout) + " for " + describe(launch.part.request) +
               "; late: " + missing + ", in this process. Look at what it does; if it is only slow, raise `timeout`");
    }
    try {
      WaitHook::call();
    } catch (...) {
      clique_->fail(std::make_exception_ptr(
          CommError(name_of(local) + " was interrupted while it waited for " + describe(launch.part.request))));
      throw;
    }
    lock.lock();
  }
}

void Launcher::join(int local, Launch& launch) {
  EventPtr finished;
  {
    const std::lock_guard lock(mutex_);
    finished = launch.finished;
  }
  if (!finished) return;
  const DeviceScope scope(device_, device_of(local));
  device_.stream_wait(device_.current_stream(device_of(local)), finished.get());
}

bool Launcher::is_finished(int local, Launch& launch) {
  {
    const std::lock_guard lock(mutex_);
    if (launch.is_finished) return true;
    if (!launch.is_launched || launch.is_captured) return false;
    const DeviceScope scope(device_, device_of(local));
    if (!has_passed(launch)) return false;
  }
  reap();
  return true;
}

void Launcher::await_finished(int local, Launch& launch, Milliseconds timeout) {
  await_launched(local, launch, timeout);
  const auto deadline = Clock::now() + timeout;
  for (Pause pause(deadline); !is_finished(local, launch);) {
    clique_->check();
    bool is_early = true;
    try {
      is_early = pause();
    } catch (...) {
      clique_->fail(std::make_exception_ptr(
          CommError(name_of(local) + " was interrupted while it waited for " + describe(launch.part.request))));
      throw;
    }
    if (!is_early) {
      time_out(name_of(local) + " waited " + text_of(timeout) + " for " + describe(launch.part.request) +
               " to end. Look at what the other workers are doing; if they are only slow, raise `timeout`");
    }
  }
}

// Asked in this order: streams pass the events of operations that an abort ended, too.
bool Launcher::has_passed(const Launch& launch) {
  return device_.query(launch.finished.get()) && !clique_->has_failed();
}

std::vector<LaunchPtr> Launcher::collect_finished_locked() {
  std::vector<LaunchPtr> finished;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = ranks_[i];
    if (rank.under_way.empty()) continue;
    const DeviceScope scope(device_, device_of(static_cast<int>(i)));
    while (!rank.under_way.empty() && has_passed(*rank.under_way.front())) {
      Launch& launch = *rank.under_way.front();
      launch.is_finished = true;
      launch.finished.reset();
      finished.push_back(std::move(rank.under_way.front()));
      rank.under_way.pop_front();
    }
  }
  return finished;
}

// Tensors are released without the lock: that can run a destructor of Python, which waits for other threads.
void Launcher::reap() {
  std::vector<LaunchPtr> finished;
  std::vector<LaunchPart> parts;
  {
    const std::lock_guard lock(mutex_);
    finished = collect_finished_locked();
    for (const LaunchPtr& launch : finished) {
      LaunchPart& part = parts.emplace_back();
      std::swap(part.encode, launch->part.encode);
      std::swap(part.tensors, launch->part.tensors);
    }
  }
}

void Launcher::watch() {
  const Milliseconds timeout = clique_->options().timeout;
  try {
    device_.permit_during_capture();
    std::unique_lock lock(mutex_);
    while (!is_over_) {
      changed_.wait_for(lock, std::min(kWatch, timeout), [&] { return is_over_; });
      const auto limit = Clock::now() - timeout;
      LaunchPtr late;
      int rank = 0;
      lock.unlock();
      reap();
      clique_->check();
      lock.lock();
      for (size_t i = 0; i < ranks_.size() && !late; ++i) {
        if (ranks_[i].under_way.empty() || ranks_[i].under_way.front()->posted > limit) continue;
        late = ranks_[i].under_way.front();
        rank = static_cast<int>(i);
      }
      if (!late) continue;
      const std::string what = describe(late->part.request);
      lock.unlock();
      time_out(what + " at " + name_of(rank) + " did not end within " + text_of(timeout) +
               ". Look at what the other workers are doing; if they are only slow, raise `timeout`");
    }
  } catch (...) {
    clique_->fail(std::current_exception());
    changed_.notify_all();
  }
}

}  // namespace muster::comm::nccl
