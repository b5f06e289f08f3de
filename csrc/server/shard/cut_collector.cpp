#include "server/shard/cut_collector.h"

#include <algorithm>
#include <utility>

namespace muster::server {

namespace {

using std::chrono::seconds;

// Members that have not made its step still know of the cut: what they are part of is given up at once, and destroyed
// by the caller, without the lock that images end under.
std::vector<std::unique_ptr<Image>> lose(CutCollector::Cut* cut) {
  if (cut == nullptr) return {};
  cut->is_lost = true;
  return std::exchange(cut->images, {});
}

}  // namespace

CutCollector::CutCollector(std::chrono::milliseconds every, Timekeeper& time)
    : time_(time), every_(every), begun_(time.now()), ended_(begun_) {}

void CutCollector::arm(const std::vector<HeldSums*>& members, const std::shared_ptr<Cut>& cut, Take take) {
  cut->images.resize(members.size());
  cut->missing = members.size();
  for (size_t i = 0; i < members.size(); ++i) {
    auto* const member = members[i];
    const bool is_in_time = member->when_made(cut->step, [this, cut, i, member, take] {
      {
        const Lock lock(mutex_);
        if (cut->is_lost) return;
      }
      auto image = (member->*take)();
      const Lock lock(mutex_);
      if (cut->is_lost) return;
      cut->images[i] = std::move(image);
      if (--cut->missing == 0) changed_.notify_all();
    });
    if (is_in_time) continue;
    const Lock lock(mutex_);
    cut->is_lost = true;
    return;
  }
}

void CutCollector::begin(const std::vector<HeldSums*>& members, uint64_t step, uint64_t keep) {
  const Lock arming(arming_);
  const auto cut = std::make_shared<Cut>();
  {
    const Lock lock(mutex_);
    if (&members != members_ || begun_step_ >= step) return;
    begun_step_ = step;
    keep_ = std::max(keep_, keep);
  }
  cut->step = step;
  cut->keep = keep;
  arm(members, cut, &HeldSums::begin_image);
  std::vector<std::unique_ptr<Image>> lost;
  const Lock lock(mutex_);
  if (cut->is_lost || stops_ || &members != members_) {
    lost = lose(cut.get());
    return;
  }
  lost = lose(cut_.get());
  cut_ = cut;
  changed_.notify_all();
}

std::shared_ptr<CutCollector::Cut> CutCollector::gather(const std::vector<HeldSums*>& members, uint64_t step,
                                                        Time deadline, Take take) {
  const auto cut = std::make_shared<Cut>();
  cut->step = step;
  arm(members, cut, take);
  std::vector<std::unique_ptr<Image>> lost;
  Lock lock(mutex_);
  cut->keep = keep_;
  // Who gives up leaves no images that the next cut would wait for.
  const auto give_up = [&](CutCollector::Cut* given_up) {
    if (given_up->missing > 0) lost = lose(given_up);
  };
  const std::unique_ptr<Cut, decltype(give_up)> gives_up(cut.get(), give_up);
  time_.wait_until(lock, changed_, deadline, [&] { return cut->is_lost || cut->missing == 0 || stops_; });
  return cut->missing == 0 && !cut->is_lost ? cut : nullptr;
}

std::vector<std::unique_ptr<Image>> CutCollector::begin_with(const std::vector<HeldSums*>& members, bool are_together,
                                                             bool is_anew) {
  const Lock lock(mutex_);
  members_ = &members;
  only_cuts_ = are_together;
  begun_step_ = 0;
  if (is_anew) keep_ = went_on_after_ = 0;
  changed_.notify_all();
  return lose(std::exchange(cut_, nullptr).get());
}

void CutCollector::go_on_after(uint64_t step) {
  std::vector<std::unique_ptr<Image>> lost;
  const Lock lock(mutex_);
  begun_step_ = step;
  lost = lose(std::exchange(cut_, nullptr).get());
  keep_ = std::max(keep_, std::min(std::exchange(went_on_after_, step), step));
}

void CutCollector::note_kept(uint64_t step) {
  const Lock lock(mutex_);
  went_on_after_ = step;
}

void CutCollector::want() {
  const Lock lock(mutex_);
  is_wanted_ = true;
  changed_.notify_all();
}

void CutCollector::hurry() {
  const Lock lock(mutex_);
  is_urgent_ = true;
  changed_.notify_all();
}

void CutCollector::demand() {
  const Lock lock(mutex_);
  is_demanded_ = true;
  changed_.notify_all();
}

bool CutCollector::due(Time now) const {
  if (is_demanded_ || (cut_ && cut_->missing == 0)) return true;
  return !only_cuts_ && (is_urgent_ || now - begun_ >= every_ || (is_wanted_ && now - ended_ >= took_));
}

CutCollector::Time CutCollector::next_look(Time now) const {
  Time next = now + seconds(1);
  if (!only_cuts_) next = std::min(next, is_wanted_ ? std::min(begun_ + every_, ended_ + took_) : begun_ + every_);
  return next;
}

bool CutCollector::is_due() const {
  const Lock lock(mutex_);
  return due(time_.now());
}

bool CutCollector::wait_until_due() {
  Lock lock(mutex_);
  while (!stops_ && !due(time_.now())) time_.wait(lock, changed_, next_look(time_.now()));
  return !stops_;
}

std::shared_ptr<CutCollector::Cut> CutCollector::take() {
  const Lock lock(mutex_);
  begun_ = time_.now();
  if (cut_ && cut_->missing == 0) return std::exchange(cut_, nullptr);
  is_wanted_ = is_urgent_ = is_demanded_ = false;
  return nullptr;
}

void CutCollector::note_written() {
  const Lock lock(mutex_);
  ended_ = time_.now();
  took_ = ended_ - begun_;
  is_urgent_ = false;
}

bool CutCollector::pause(uint32_t failures) {
  constexpr uint32_t kDoublings = 5;  // 1, 2, 4 .. 30 s
  constexpr seconds kLongest{30};
  const auto until = time_.now() + std::min(kLongest, seconds(1U << std::min(failures - 1, kDoublings)));
  Lock lock(mutex_);
  return !time_.wait_until(lock, changed_, until, [&] { return stops_ || !retries_; });
}

void CutCollector::let_retry(bool retries) {
  const Lock lock(mutex_);
  retries_ = retries;
  changed_.notify_all();
}

void CutCollector::stop() {
  std::vector<std::unique_ptr<Image>> lost;
  const Lock lock(mutex_);
  stops_ = true;
  lost = lose(std::exchange(cut_, nullptr).get());
  changed_.notify_all();
}

}  // namespace muster::server
