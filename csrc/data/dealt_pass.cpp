#include "data/dealt_pass.h"

#include <chrono>
#include <thread>
#include <utility>

#include "core/wait_hook.h"
#include "muster/error.h"

namespace muster::detail {

namespace {
constexpr std::chrono::milliseconds kBetweenAsks{20};
}

DealtPass::DealtPass(std::shared_ptr<Members> members, server::PassId pass, int64_t batches, double timeout)
    : members_(std::move(members)), pass_(pass), batches_(static_cast<uint64_t>(batches)), timeout_(timeout) {}

std::optional<int64_t> DealtPass::next() {
  if (waited_for_) return std::exchange(waited_for_, std::nullopt);
  return ended_ ? std::nullopt : ask();
}

void DealtPass::lost(int64_t number) { finished_.push_back(static_cast<uint64_t>(number)); }

void DealtPass::done() {
  if (current_) finished_.push_back(static_cast<uint64_t>(*current_));
  current_.reset();
}

std::optional<server::BatchId> DealtPass::begin_step() {
  if (!current_ || ended_) return std::nullopt;
  const auto number = static_cast<uint64_t>(*current_);
  stepping_ = std::exchange(current_, std::nullopt);
  return server::BatchId{pass_.loader, pass_.epoch, number};
}

void DealtPass::end_step(WindowEnd window, const std::vector<uint32_t>& /*members*/) {
  const auto stepped = std::exchange(stepping_, std::nullopt);
  if (stepped && window == WindowEnd::dropped) {
    current_ = stepped;
  } else if (stepped) {
    in_window_.push_back(static_cast<uint64_t>(*stepped));
  }
  if (window == WindowEnd::closed) in_window_.clear();
}

bool DealtPass::wait_for_more() {
  // Of a window that was dropped, or is still open: this worker would wait for itself.
  finished_.insert(finished_.end(), in_window_.begin(), in_window_.end());
  in_window_.clear();
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_);
  for (waited_for_ = next(); !waited_for_ && !ended_; waited_for_ = ask()) {
    if (Clock::now() > deadline) {
      throw Timeout("other workers did not finish their batches in time; look at their logs");
    }
    WaitHook::call();
    std::this_thread::sleep_for(kBetweenAsks);
  }
  return waited_for_.has_value();
}

void DealtPass::leave() {
  done();
  if (!ended_) members_->end_pass(pass_, batches_, finished_);
  ended_ = true;
}

std::optional<int64_t> DealtPass::ask() {
  const auto dealt = members_->deal(pass_, batches_, std::exchange(finished_, {}));
  ended_ = dealt.state == server::Dealt::State::ended;
  if (dealt.state != server::Dealt::State::dealt) return std::nullopt;
  return static_cast<int64_t>(dealt.batch);
}

}  // namespace muster::detail
