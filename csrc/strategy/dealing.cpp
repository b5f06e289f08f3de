#include "strategy/dealing.h"

#include <chrono>
#include <thread>
#include <utility>

#include "core/wait_hook.h"
#include "muster/error.h"

namespace muster::detail {

namespace {
constexpr std::chrono::milliseconds kBetweenAsks{20};
}

Dealing::Dealing(std::shared_ptr<StrategyCore> core, int loader, int64_t epoch, int64_t batches)
    : core_(std::move(core)),
      loader_(static_cast<uint32_t>(loader)),
      epoch_(static_cast<uint64_t>(epoch)),
      batches_(static_cast<uint64_t>(batches)) {}

std::optional<int64_t> Dealing::next() {
  if (waited_for_) return std::exchange(waited_for_, std::nullopt);
  return ended_ ? std::nullopt : ask();
}

void Dealing::lost(int64_t number) { finished_.push_back(static_cast<uint64_t>(number)); }

void Dealing::done() {
  if (current_) finished_.push_back(static_cast<uint64_t>(*current_));
  current_.reset();
}

std::vector<server::BatchId> Dealing::current() const {
  if (!current_) return {};
  return {{loader_, epoch_, static_cast<uint64_t>(*current_)}};
}

void Dealing::stepped(bool ended) {
  if (current_) in_window_.push_back(static_cast<uint64_t>(*current_));
  current_.reset();
  if (ended) in_window_.clear();
}

bool Dealing::wait_for_more() {
  // Of a window that was dropped, or is still open: this worker would wait for itself.
  finished_.insert(finished_.end(), in_window_.begin(), in_window_.end());
  in_window_.clear();
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(core_->options().timeout);
  for (waited_for_ = next(); !waited_for_ && !ended_; waited_for_ = ask()) {
    if (Clock::now() > deadline) {
      throw Timeout("other workers did not finish their batches in time; look at their logs");
    }
    WaitHook::call();
    std::this_thread::sleep_for(kBetweenAsks);
  }
  return waited_for_.has_value();
}

void Dealing::leave() {
  done();
  if (!ended_) {
    const auto pass = core_->enter();
    if (core_->has_servers()) core_->servers().end_pass(loader_, epoch_, batches_, finished_);
  }
  ended_ = true;
}

std::optional<int64_t> Dealing::ask() {
  const auto pass = core_->enter();
  const auto dealt = core_->servers().deal(loader_, epoch_, batches_, std::exchange(finished_, {}));
  ended_ = dealt.state == server::Dealt::State::ended;
  if (dealt.state != server::Dealt::State::dealt) return std::nullopt;
  return static_cast<int64_t>(dealt.batch);
}

}  // namespace muster::detail
