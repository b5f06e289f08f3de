#include "data/balance.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/log.h"
#include "core/plain_text.h"
#include "muster/batch.h"

namespace muster {

namespace {

constexpr double kShortestPart = 1e-9;  // seconds: clocks tick

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

int64_t sum(const std::vector<int64_t>& rows) { return std::accumulate(rows.begin(), rows.end(), int64_t{0}); }

double rate(int64_t rows, double seconds) { return static_cast<double>(rows) / std::max(seconds, kShortestPart); }

}  // namespace

Balancer::Balancer(int replicas)
    : capacities_(static_cast<size_t>(replicas), 1.0 / replicas), replicas_(static_cast<size_t>(replicas)) {}

std::vector<double> Balancer::capacities() const {
  const std::lock_guard lock(mutex_);
  return capacities_;
}

void Balancer::set_capacities(std::vector<double> capacities) {
  log(LogLevel::info, "replicas take " + in_words(capacities) + " of each batch that is divided from now on");
  const std::lock_guard lock(mutex_);
  capacities_ = std::move(capacities);
}

bool Balancer::note(const std::vector<int64_t>& rows, const std::vector<double>& seconds) {
  const int64_t total = sum(rows);
  const bool is_short = 2 * total < std::exchange(last_rows_, total);
  if (total <= 0 || is_short || rows != detail::part_sizes(total, static_cast<int>(rows.size()), capacities_)) {
    return false;
  }
  if (!std::exchange(is_warm_, true)) return false;
  window_.push_back({rows, seconds});
  if (window_.size() < window_length_) return false;
  const bool changed = look();
  window_.clear();
  is_warm_ = !changed;
  return changed;
}

void Balancer::note_when_known(std::vector<int64_t> rows, std::vector<std::shared_ptr<const PartTimer>> timers) {
  pending_.push_back({std::move(rows), std::move(timers)});
  const auto is_known = [](const auto& timer) { return timer->is_known(); };
  while (!pending_.empty() && std::all_of(pending_.front().timers.begin(), pending_.front().timers.end(), is_known)) {
    std::vector<double> seconds;
    for (const auto& timer : pending_.front().timers) seconds.push_back(timer->seconds());
    note(pending_.front().rows, seconds);
    pending_.pop_front();
  }
}

// At a window's end: whether other capacities are better.
bool Balancer::look() {
  measure();
  std::vector<double> times;
  for (const auto& step : window_) times.push_back(slowest_part(step));
  const double step_seconds = median(times);
  const bool tries = try_idle_replicas(step_seconds);
  window_length_ = tries ? kFirstWindow : std::min(2 * window_length_, kLongestWindow);

  double total_speed = 0;
  for (const auto& replica : replicas_) {
    if (replica.speed == 0) return false;
    total_speed += replica.speed;
  }
  std::vector<double> candidate;
  for (const auto& replica : replicas_) candidate.push_back(replica.speed / total_speed);
  std::vector<double> expected;
  for (const auto& step : window_) expected.push_back(slowest_part_with(candidate, step));
  if (!tries && median(expected) >= kWorthwhile * step_seconds) return false;
  set_capacities(std::move(candidate));
  return true;
}

void Balancer::measure() {
  for (size_t r = 0; r < replicas_.size(); ++r) {
    std::vector<double> speeds;
    for (const auto& step : window_) {
      if (step.rows[r] > 0) speeds.push_back(rate(step.rows[r], step.seconds[r]));
    }
    auto& replica = replicas_[r];
    replica.is_idle = speeds.empty();
    if (!speeds.empty()) replica.speed = median(std::move(speeds));
  }
}

// Whether a replica without rows is to be tried: it then counts as fast enough for one.
bool Balancer::try_idle_replicas(double step_seconds) {
  bool tries = false;
  for (auto& replica : replicas_) {
    if (!replica.is_idle || replica.speed == 0) {
      replica.idle_steps = 0;
      // It was worth its rows throughout a longer window than a trial's.
      if (window_length_ > kFirstWindow) replica.patience = kFirstPatience;
      continue;
    }
    replica.idle_steps += window_.size();
    if (replica.idle_steps < replica.patience) continue;
    replica.idle_steps = 0;
    replica.patience *= 2;
    replica.speed = 2 / std::max(step_seconds, kShortestPart);
    tries = true;
  }
  return tries;
}

double Balancer::slowest_part(const Step& step) const {
  double slowest = 0;
  for (size_t r = 0; r < replicas_.size(); ++r) {
    if (step.rows[r] > 0) slowest = std::max(slowest, step.seconds[r]);
  }
  return slowest;
}

// What the step would have taken: every replica at the speed it had in it, so that noise is in both times alike.
double Balancer::slowest_part_with(const std::vector<double>& capacities, const Step& step) const {
  const auto sizes = detail::part_sizes(sum(step.rows), static_cast<int>(replicas_.size()), capacities);
  double slowest = 0;
  for (size_t r = 0; r < replicas_.size(); ++r) {
    const double speed = step.rows[r] > 0 ? rate(step.rows[r], step.seconds[r]) : replicas_[r].speed;
    if (sizes[r] > 0) slowest = std::max(slowest, static_cast<double>(sizes[r]) / speed);
  }
  return slowest;
}

std::string in_words(const std::vector<double>& capacities) {
  TextWriter out;
  out.precision(3);
  for (size_t r = 0; r < capacities.size(); ++r) out << (r == 0 ? "" : ", ") << capacities[r];
  return out.str();
}

}  // namespace muster
