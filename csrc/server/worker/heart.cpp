#include "server/worker/heart.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>

#include "core/make_thread.h"

namespace muster::server {

namespace {

constexpr std::chrono::milliseconds kAfterFailure{10};

std::atomic<Heart*> heart_of_process{nullptr};

}  // namespace

// Without the descriptor the thread notices what is new when the next pulse is due.
Heart::Heart(Heart* parent)
    : process_(::getpid()), parent_(parent), awakening_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

// A child's copy of its parent's is left as it is: its thread is not there, and its mutexes may be locked for ever.
Heart& Heart::of_process() {
  Heart* known = heart_of_process.load();
  while (known == nullptr || known->process_ != ::getpid()) {
    auto own = std::unique_ptr<Heart>(new Heart(known));
    if (heart_of_process.compare_exchange_strong(known, own.get())) return *own.release();
  }
  return *known;
}

void Heart::start(Pulse& pulse) {
  const std::lock_guard lifecycle(lifecycle_mutex_);
  {
    const std::lock_guard lock(mutex_);
    pulses_[&pulse] = Kept{};
  }
  wake();
  if (thread_.joinable()) return;
  try {
    thread_ = make_thread("gives signs of life", [this] { beat(); });
    ::pthread_setname_np(thread_.native_handle(), "muster-heart");
  } catch (...) {
    const std::lock_guard lock(mutex_);
    pulses_.erase(&pulse);
    throw;
  }
}

void Heart::stop(Pulse& pulse) noexcept {
  const std::lock_guard lifecycle(lifecycle_mutex_);
  {
    std::unique_lock lock(mutex_);
    ticked_.wait(lock, [&] { return ticking_ != &pulse; });
    if (pulses_.erase(&pulse) == 0 || !pulses_.empty()) return;
  }
  wake();
  thread_.join();
}

void Heart::wake() noexcept { ::eventfd_write(awakening_.get(), 1); }

void Heart::beat() noexcept {
  std::unique_lock lock(mutex_);
  while (!pulses_.empty()) {
    tick_some(lock);
    wait(lock);
  }
}

void Heart::tick_some(std::unique_lock<std::mutex>& lock) noexcept {
  const auto now = Surroundings::Clock::now();
  // Others may come and go meanwhile, but not the one that is ticked.
  for (auto at = pulses_.begin(); at != pulses_.end(); ++at) {
    auto& [pulse, kept] = *at;
    if (!kept.is_readable && kept.due > now) continue;
    ticking_ = pulse;
    lock.unlock();
    const auto next = pulse->tick(Surroundings::Clock::now());
    lock.lock();
    kept = {next.due, next.descriptor, false};
    ticking_ = nullptr;
    ticked_.notify_all();
  }
}

void Heart::wait(std::unique_lock<std::mutex>& lock) noexcept {
  if (pulses_.empty()) return;
  std::vector<pollfd> polled{{awakening_.get(), POLLIN, 0}};
  std::vector<Pulse*> pulses{nullptr};
  auto due = Pulse::TimePoint::max();
  for (const auto& [pulse, kept] : pulses_) {
    due = std::min(due, kept.due);
    polled.push_back({kept.descriptor, POLLIN, 0});
    pulses.push_back(pulse);
  }
  lock.unlock();
  try {
    net::poll_until(polled, due);
  } catch (const CommError&) {  // too many descriptors: all are looked at when they are due
    std::this_thread::sleep_for(kAfterFailure);
  }
  eventfd_t count = 0;
  ::eventfd_read(awakening_.get(), &count);
  lock.lock();
  for (size_t i = 1; i < polled.size(); ++i) {
    const auto at = pulses_.find(pulses[i]);
    if (at != pulses_.end() && polled[i].revents != 0) at->second.is_readable = true;
  }
}

}  // namespace muster::server
