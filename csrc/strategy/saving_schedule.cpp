#include "strategy/saving_schedule.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <utility>

#include "muster/error.h"

namespace muster {

namespace {

constexpr double kLeastSeconds = 1e-6;  // between two questions

}  // namespace

SavingSchedule::SavingSchedule(Options options) : options_(std::move(options)) {
  if (options_.every && *options_.every < 1) {
    throw InvalidArgument("every=" + std::to_string(*options_.every) +
                          ": it must be at least 1, or empty, which leaves the number of steps out of it");
  }
  if (options_.seconds && !(*options_.seconds > 0 && std::isfinite(*options_.seconds))) {
    throw InvalidArgument("every_seconds=" + std::to_string(*options_.seconds) +
                          ": it must be a number of seconds above 0, or empty");
  }
  start_over();
}

double SavingSchedule::clock() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void SavingSchedule::note_step(int64_t steps) {
  const int64_t seen = steps_seen_.value_or(steps - 1);
  steps_seen_ = steps;
  if (options_.every && steps / *options_.every != seen / *options_.every) is_due_ = true;
  if (!is_due_ && options_.seconds) is_due_ = is_over();
}

void SavingSchedule::start_over() {
  is_due_ = false;
  steps_seen_.reset();
  if (!options_.seconds) return;
  began_ = asked_ = options_.now();
  since_asked_ = 0;
  ask_at_ = 1;  // the chief alone knows the pace
}

bool SavingSchedule::is_over() {
  ++since_asked_;
  const auto& number_of_chief = options_.number_of_chief;
  if (number_of_chief && since_asked_ < ask_at_) return false;
  const double now = options_.now();
  const double left = options_.seconds.value_or(0) - (now - began_);
  if (!number_of_chief) return left <= 0;
  longest_ = std::max(longest_, since_asked_);
  // In steps as long as those since the last question; the first steps of a job are slow, hence at most twice as many.
  const double half = left / 2 * static_cast<double>(since_asked_) / std::max(now - asked_, kLeastSeconds);
  const auto most = static_cast<double>(2 * longest_);
  asked_ = now;
  since_asked_ = 0;
  ask_at_ = number_of_chief(left <= 0 ? 0 : static_cast<int64_t>(std::clamp(half, 1.0, most)));
  return ask_at_ == 0;
}

}  // namespace muster
