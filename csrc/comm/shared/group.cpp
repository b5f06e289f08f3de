#include "comm/shared/group.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "comm/shared/futex.h"
#include "core/wait_hook.h"

namespace muster::comm::shared {
namespace {

constexpr std::chrono::microseconds kSpin{20};
constexpr uint32_t kSleepsPerTrial = 16;
constexpr std::chrono::milliseconds kSlice{50};

inline void pause_briefly() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Spinning only keeps the awaited rank off the core where ranks outnumber cores.
std::chrono::nanoseconds spin_for(int ranks) {
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  return ranks <= cores ? std::chrono::nanoseconds(kSpin) : std::chrono::nanoseconds(0);
}

void copy_text(char* to, size_t capacity, const std::string& text) noexcept {
  const size_t n = std::min(capacity - 1, text.size());
  std::memcpy(to, text.data(), n);
  to[n] = '\0';
}

std::exception_ptr make_failure(FailureKind kind, int worker, const std::string& text) {
  switch (kind) {
    case FailureKind::lost:
      return std::make_exception_ptr(PeerLost(worker, text));
    case FailureKind::timeout:
      return std::make_exception_ptr(Timeout(text));
    case FailureKind::mismatch:
      return std::make_exception_ptr(LayoutMismatch(text));
    default:
      return std::make_exception_ptr(CommError(text));
  }
}

}  // namespace

Group::Group(std::shared_ptr<SharedSpace> space, int rank, Milliseconds timeout)
    : space_(std::move(space)),
      control_(space_->control()),
      rank_(rank),
      size_(space_->size()),
      timeout_(timeout),
      owner_process_(getpid()),
      spin_{.longest = spin_for(size_)} {}

// --- issuing and advancing -----------------------------------------------------------------------------------------

Work Group::issue(std::shared_ptr<Operation> operation) {
  check();
  if (scope_.error) std::rethrow_exception(scope_.error);
  operation->group = shared_from_this();
  operation->key = make_key(epoch_, count_++);
  under_way_.push_back(operation);
  advance();
  return Work(std::move(operation));
}

bool Group::advance() {
  if (failure_) return false;
  if (control_.ended.load() != 0) {
    adopt_failure();
    return true;
  }
  bool moved = false;
  bool may_resolve = true, may_stage = true, may_reduce = true;
  for (size_t i = 0; i < under_way_.size(); ++i) {
    const std::shared_ptr<Operation> pinned = under_way_[i];  // a failure clears the list
    Operation& op = *pinned;
    if (op.state == Operation::State::queued) {
      if (!post(op)) break;
      moved = true;
    }
    if (op.state == Operation::State::posted && may_resolve) {
      if (ticks_.epoch != epoch_of(op.key)) {
        ticks_.epoch = epoch_of(op.key);
        ticks_.count = 0;
      }
      op.first_tick = make_key(ticks_.epoch, ticks_.count);
      if (may_stage && op.staged == 0) moved |= stage(op);
      moved |= resolve(op);
      if (failure_) return true;
    }
    if (op.is_last) {
      op.is_last = false;
      const bool goes_alone = op.state == Operation::State::running && op.is_shared && may_reduce && is_small(op);
      if (!goes_alone) wake_peers();
    }
    if (op.state == Operation::State::running) {
      moved |= run(op, may_stage, may_reduce);
      if (failure_) return true;
    }
    may_resolve = may_resolve && op.state != Operation::State::posted;
    may_stage =
        may_stage && may_resolve &&
        (op.state == Operation::State::finished || op.header.placement != Placement::staged || op.staged == op.rounds);
    may_reduce = may_reduce && may_resolve && (op.state == Operation::State::finished || op.reduced == op.rounds);
  }
  const size_t before = under_way_.size();
  while (!under_way_.empty() && under_way_.front()->state == Operation::State::finished) under_way_.pop_front();
  if (under_way_.size() != before) publish_passed();
  return moved;
}

// As many rounds as go without waiting.
bool Group::run(Operation& op, bool may_stage, bool may_reduce) {
  if (op.is_shared) return may_reduce && share(op);
  bool moved = false;
  for (bool again = true; again && op.state == Operation::State::running;) {
    const bool staged = may_stage && stage(op);
    const bool reduced = may_reduce && reduce(op);
    again = staged || reduced;
    if (op.state == Operation::State::running) again |= complete(op);
    moved |= again;
  }
  return moved;
}

void Group::publish_passed() {
  const Key key = under_way_.empty() ? make_key(epoch_, count_) : under_way_.front()->key;
  if (mine().passed.load(std::memory_order_relaxed) == key) return;
  mine().passed.store(key);
  wake_peers(kAsleepForRoom);
}

bool Group::all_passed(Key key) noexcept {
  if (passed_by_all_ < key) {
    passed_by_all_ = ~Key{0};
    for (int p = 0; p < size_; ++p) passed_by_all_ = std::min(passed_by_all_, slot(p).passed.load());
  }
  return passed_by_all_ >= key;
}

bool Group::all_posted(Key key) noexcept {
  for (int p = 0; p < size_; ++p) {
    if (slot(p).posted.load() <= key) return false;
  }
  return true;
}

// --- waiting -------------------------------------------------------------------------------------------------------

void Group::wake(RankSlot& sleeper) noexcept {
  if (sleeper.sleeping.load() != kAwake && sleeper.sleeping.exchange(kAwake) != kAwake) {
    futex_wake(sleeper.sleeping, space_->crosses_processes());
  }
}

void Group::wake_peers(Sleep least) noexcept {
  for (int p = 0; p < size_; ++p) {
    if (p != rank_ && slot(p).sleeping.load() >= least) wake(slot(p));
  }
}

bool Group::waits_for_room() const noexcept {
  return std::any_of(under_way_.begin(), under_way_.end(), [](const std::shared_ptr<Operation>& op) {
    return op->state == Operation::State::queued ||
           (op->header.placement == Placement::staged && op->staged < op->rounds);
  });
}

// Where others took a rank's core, spinning is in vain: the next is half as long, with a trial now and then.
void Group::learn_from_wait(bool has_slept) noexcept {
  if (!has_slept) {
    spin_.now = spin_.longest;
  } else if (spin_.now > std::chrono::microseconds(1)) {
    spin_.now /= 2;
  } else {
    spin_.now = ++spin_.sleeps % kSleepsPerTrial == 0 ? spin_.longest : std::chrono::nanoseconds(0);
  }
}

template <class Done>
void Group::wait_until(const Done& done, Milliseconds timeout, Sleep least) {
  struct Idle {
    explicit Idle(bool& is_idle) : is_idle_(is_idle) { is_idle_ = true; }
    ~Idle() { is_idle_ = false; }
    bool& is_idle_;
  } const idle(is_idle_);
  if (timeout.count() < 0) timeout = timeout_;
  const Clock::time_point start = Clock::now();
  Clock::time_point spin_end = start + spin_.now;
  bool has_spun = false;
  bool has_slept = false;
  Clock::time_point next_hook = start + kSlice;
  std::atomic<uint32_t>& sleeping = mine().sleeping;
  while (!done() && !failure_) {
    if (advance()) {
      spin_end = Clock::now() + spin_.now;
      continue;
    }
    if (done()) break;
    const Clock::time_point now = Clock::now();
    if (now < spin_end) {
      has_spun = true;
      pause_briefly();
      continue;
    }
    if (check_lost()) continue;
    if (now >= next_hook) {
      next_hook = now + kSlice;
      call_wait_hook();
    }
    if (now - start >= timeout) {
      time_out(timeout);
      break;
    }
    // A peer that publishes after the store sees it and wakes; what it published before, advance() sees.
    const Sleep sleep = waits_for_room() ? kAsleepForRoom : least;
    sleeping.store(sleep);
    if (!advance() && !done()) {
      has_slept = true;
      const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(start + timeout - now);
      futex_wait(sleeping, sleep, std::min<std::chrono::nanoseconds>(kSlice, left), space_->crosses_processes());
    }
    sleeping.store(kAwake);
  }
  if (has_spun || has_slept) learn_from_wait(has_slept);
}

void Group::call_wait_hook() {
  try {
    WaitHook::call();
  } catch (...) {
    fail(FailureKind::aborted, -1,
         "rank " + std::to_string(space_->name_of(rank_)) + " was interrupted while it waited for " + describe_wait());
    throw;
  }
}

void Group::wait(Operation& operation, Milliseconds timeout) {
  if (!is_done(operation)) {
    advance();
    wait_until([&] { return is_done(operation); }, timeout);
  }
  if (operation.error) std::rethrow_exception(operation.error);
}

bool Group::poll(Operation& operation) {
  if (!is_done(operation)) {
    advance();
    if (!is_done(operation)) check_lost();
  }
  if (operation.error) std::rethrow_exception(operation.error);
  return is_done(operation);
}

bool Group::is_done(const Operation& operation) const noexcept {
  if (operation.error) return true;
  return operation.state == Operation::State::finished &&
         (under_way_.empty() || under_way_.front()->key > operation.key);
}

// Looks at most once a slice; true when the group has failed. What a lost peer published before it died still counts,
// so everything is advanced once more before the loss is believed.
bool Group::check_lost() {
  const Clock::time_point now = Clock::now();
  if (now - last_lost_check_ < kSlice) return false;
  last_lost_check_ = now;
  const std::optional<LostWorker> lost = space_->find_lost();
  if (!lost) return false;
  if (advance()) return true;
  fail(FailureKind::lost, lost->worker,
       "worker " + std::to_string(lost->worker) + " " + lost->how + " while rank " +
           std::to_string(space_->name_of(rank_)) + " waited for " + describe_wait() +
           ". Look at that worker's log; start the job again from the last checkpoint");
  return true;
}

void Group::time_out(Milliseconds timeout) {
  std::string late;
  if (!under_way_.empty()) {
    const Operation& op = *under_way_.front();
    for (int p = 0; p < size_; ++p) {
      if (p == rank_) continue;
      if (is_late(op, p)) late += (late.empty() ? "" : ", ") + describe_peer(p);
    }
  }
  fail(FailureKind::timeout, -1,
       "rank " + std::to_string(space_->name_of(rank_)) + " waited " + std::to_string(timeout.count()) + " ms for " +
           describe_wait() + "; late: " + (late.empty() ? "unknown" : late) +
           ". Look at what the late ranks are doing; if they are only slow, raise `timeout`");
}

bool Group::is_late(const Operation& op, int peer) noexcept {
  if (op.state != Operation::State::running) return state_of(peer, op.key) == PeerState::missing;
  if (op.is_shared) return slot(peer).at_work.load() == op.key + 1;
  return op.entries[peer] != nullptr && slot(peer).reduced.load() < op.first_tick + op.rounds;
}

std::string Group::describe_wait() const {
  if (under_way_.empty()) return "the other ranks to leave earlier steps";
  const Operation& op = *under_way_.front();
  return describe(op.header.request) + " (operation " + std::to_string(count_of(op.key)) + ")";
}

std::string Group::describe_peer(int rank) const {
  const int worker = space_->worker_of(rank);
  const int name = space_->name_of(rank);
  std::string text = "rank " + std::to_string(name);
  if (worker != name) text += " (worker " + std::to_string(worker) + ")";
  return text;
}

// --- scopes --------------------------------------------------------------------------------------------------------

void Group::begin_scope(uint64_t scope) {
  check();
  if (scope_.id != 0) throw InvalidArgument("begin_scope inside a scope; call end_scope first");
  end_epoch(ScopeEnd::finished, {});
  scope_.id = scope + 1;
}

void Group::end_scope(ScopeEnd end, const std::string& reason) {
  if (scope_.id == 0) throw InvalidArgument("end_scope without begin_scope; call begin_scope first");
  if (end == ScopeEnd::absent && count_ != 0) {
    throw InvalidArgument(
        "a rank that issued collectives in a scope cannot be absent from it; end it as finished or failed");
  }
  scope_.id = 0;
  scope_.error = nullptr;
  if (!failure_) end_epoch(end, reason);
}

void Group::end_epoch(ScopeEnd end, const std::string& reason) {
  const auto may_end = [&] {
    const bool is_visible = under_way_.empty() || under_way_.back()->state != Operation::State::queued;
    return is_visible && (epoch_ < kEpochs || all_passed(make_key(epoch_ - kEpochs + 1, 0)));
  };
  wait_until(may_end, timeout_, kAsleepForRoom);
  check();
  EpochEnd& record = mine().epochs[epoch_ % kEpochs];
  record.end = end;
  record.count = count_;
  copy_text(record.reason, kReasonBytes, reason);
  ++epoch_;
  count_ = 0;
  mine().posted.store(make_key(epoch_, 0));
  wake_peers();
  publish_passed();
}

// --- failure -------------------------------------------------------------------------------------------------------

void Group::check() {
  if (!failure_ && control_.ended.load() != 0) adopt_failure();
  if (failure_) std::rethrow_exception(failure_);
}

// Who fails names itself in `ended` and looks at `stores_begun` afterwards: one of the two sees the other.
void Group::begin_stores() {
  check();
  mine().stores_begun.store(stores_ended_ + 1);
  try {
    check();
  } catch (...) {
    mine().stores_begun.store(stores_ended_);
    throw;
  }
}

bool Group::may_have_stores() noexcept {
  for (int p = 0; p < size_; ++p) {
    if (slot(p).stores_begun.load() > stores_ended_) return true;
  }
  return false;
}

void Group::fail(FailureKind kind, int worker, const std::string& text) {
  if (control_.ended.load() == 0) publish_failure(kind, worker, text);
  if (control_.ended.load() != 0) return adopt_failure();
  fail_with(make_failure(kind, worker, text));
}

void Group::fail_with(std::exception_ptr error) {
  failure_ = std::move(error);
  for (const std::shared_ptr<Operation>& op : under_way_) {
    if (op->state == Operation::State::finished) continue;
    op->error = failure_;
    op->state = Operation::State::finished;
    space_->keep(std::make_shared<const std::pair<at::Tensor, PeerMemory::Visit>>(op->tensor, op->visit));
  }
  under_way_.clear();
}

void Group::publish_failure(FailureKind kind, int worker, const std::string& text) noexcept {
  if (failure_published_.exchange(true)) return;
  FailureRecord& record = mine().failure;
  record.kind = kind;
  record.worker = worker;
  copy_text(record.text, sizeof(record.text), text);
  uint32_t expected = 0;
  control_.ended.compare_exchange_strong(expected, static_cast<uint32_t>(rank_) + 1);
  wake_peers();
  wake(mine());
}

void Group::adopt_failure() {
  const FailureRecord& record = slot(static_cast<int>(control_.ended.load()) - 1).failure;
  fail_with(make_failure(record.kind, record.worker, record.text));
}

void Group::abort(const std::string& reason) noexcept { publish_failure(FailureKind::aborted, -1, reason); }

void Group::end(const Error& error) noexcept {
  if (const auto* const lost = dynamic_cast<const PeerLost*>(&error)) {
    publish_failure(FailureKind::lost, lost->rank(), error.what());
  } else {
    const bool is_late = dynamic_cast<const Timeout*>(&error) != nullptr;
    publish_failure(is_late ? FailureKind::timeout : FailureKind::aborted, -1, error.what());
  }
}

void Group::close() noexcept {
  if (getpid() != owner_process_) return;  // a forked child's copy
  if (!failure_) {
    fail_with(std::make_exception_ptr(
        CommError("rank " + std::to_string(space_->name_of(rank_)) +
                  " closed its communicator with this operation under way; wait for it first")));
  }
  mine().left.store(1);
  mine().passed.store(~Key{0});
  wake_peers();
}

bool Operation::advance() { return group->poll(*this); }

void Operation::wait(Milliseconds timeout) { group->wait(*this, timeout); }

}  // namespace muster::comm::shared
