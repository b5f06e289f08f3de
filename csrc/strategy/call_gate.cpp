#include "strategy/call_gate.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "muster/error.h"

namespace muster {

namespace {
constexpr auto kLookAround = std::chrono::milliseconds(100);
}  // namespace

CallGate::Pass::Pass(Pass&& other) noexcept : gate_(std::exchange(other.gate_, nullptr)), is_alone_(other.is_alone_) {}

CallGate::Pass::~Pass() {
  if (gate_ != nullptr) gate_->leave(is_alone_);
}

CallGate::CallGate() : process_(getpid()) {}

void CallGate::check_open() const {
  if (shut_) throw InvalidArgument("the strategy is closed; make a new one");
}

bool CallGate::is_inside() const {
  return std::find(inside_.begin(), inside_.end(), std::this_thread::get_id()) != inside_.end();
}

bool CallGate::is_occupied() const {
  const std::lock_guard lock(mutex_);
  return !inside_.empty();
}

CallGate::Pass CallGate::enter() {
  const std::lock_guard lock(mutex_);
  if (!is_inside()) check_open();  // what a call is made of goes on when another thread begins to close
  inside_.push_back(std::this_thread::get_id());
  return Pass(*this);
}

CallGate::Pass CallGate::enter_alone(const char* what) {
  const std::lock_guard lock(mutex_);
  check_open();
  const auto me = std::this_thread::get_id();
  if (alone_depth_ > 0 && alone_ != me) {
    throw InvalidArgument(std::string(what) +
                          "() was called while another thread is in step(), run() or flush() of the same strategy; one "
                          "thread prepares and steps: let the threads take turns, or call it from one alone");
  }
  inside_.push_back(me);
  alone_ = me;
  ++alone_depth_;
  Pass pass(*this);
  pass.is_alone_ = true;
  return pass;
}

void CallGate::leave(bool was_alone) noexcept {
  {
    const std::lock_guard lock(mutex_);
    inside_.erase(std::find(inside_.begin(), inside_.end(), std::this_thread::get_id()));
    if (was_alone) --alone_depth_;
  }
  left_.notify_all();
}

void CallGate::close(const std::function<void()>& last, const std::function<void()>& poll) {
  const bool is_child = getpid() != process_;
  std::unique_lock lock(mutex_);
  if (!is_child && is_inside()) {
    throw InvalidArgument(
        "close() was called inside a call of the strategy (by a step function, a hook or a signal handler); call "
        "stop() there, and close() after it");
  }
  shut_ = true;
  const auto is_mine = [&] { return is_closed_ || (inside_.empty() && !is_closing_); };
  while (!is_child && !left_.wait_for(lock, kLookAround, is_mine)) {
    lock.unlock();
    if (poll) poll();
    lock.lock();
  }
  if (is_closed_) return;
  is_closing_ = true;
  lock.unlock();
  const auto end = [&](bool is_closed) {
    lock.lock();
    is_closing_ = false;
    is_closed_ = is_closed;
    lock.unlock();
    left_.notify_all();
  };
  try {
    last();
  } catch (...) {
    end(false);
    throw;
  }
  end(true);
}

}  // namespace muster
