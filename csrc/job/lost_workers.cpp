#include "job/lost_workers.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/first_line.h"
#include "core/log.h"
#include "core/make_thread.h"
#include "core/within.h"
#include "muster/error.h"

namespace muster {

namespace {

using Clock = std::chrono::steady_clock;
using comm::Milliseconds;

constexpr const char* kLost = "lost";
constexpr const char* kOver = "over";  // how many workers give no signs of life any more, of their own accord
constexpr Milliseconds kPatienceToTell{1000};
constexpr Milliseconds kPatienceToEnd{2000};
constexpr Milliseconds kLongestPause{1000};      // between signs of life
constexpr Milliseconds kLongestSilence{30'000};  // of a worker that lives

constexpr int kPausesOfSilence = 3;  // of a worker whose connection ended, and at most
constexpr int kPausesToBeFound = 7;  // until that is known

std::string key_of(int worker) { return "alive/" + std::to_string(worker); }

std::string listed(const std::vector<int>& workers) {
  std::string text;
  for (size_t i = 0; i < workers.size(); ++i) {
    const auto* const before = i == 0 ? "" : i + 1 == workers.size() ? " and " : ", ";
    text += before + ("worker " + std::to_string(workers[i]));
  }
  return text;
}

// The workers' signs of life: numbers that each counts up in the store, and that a thread of each looks at while
// somebody waits for others. A store whose host is silent does not answer, ever: the thread is left to itself then.
class SignsOfLife : public std::enable_shared_from_this<SignsOfLife> {
 public:
  SignsOfLife(net::StorePtr store, int rank, int num_workers, Milliseconds timeout)
      : store_(std::move(store)),
        rank_(rank),
        pause_(std::clamp(timeout / 8, Milliseconds(20), kLongestPause)),
        longest_silence_(std::min(timeout / 3, kLongestSilence)),
        others_(static_cast<size_t>(num_workers)) {
    for (int worker = 0; worker < num_workers; ++worker) keys_.push_back(key_of(worker));
  }

  void begin() {
    make_thread("gives signs of life to other hosts", [self = shared_from_this()] { self->run(); }).detach();
  }

  // Once: the job is over for this worker, and so for all. Waits for the thread, but for one that the store keeps.
  void end() noexcept {
    std::unique_lock lock(mutex_);
    is_ending_ = true;
    changed_.notify_all();
    changed_.wait_for(lock, kPatienceToEnd, [&] { return has_ended_; });
  }

  void note_begin_of_wait() noexcept { ++waits_begun_; }
  void note_end_of_wait() noexcept { ++waits_ended_; }

  // Whether it is worth asking the store something.
  bool store_answers() {
    const std::lock_guard lock(mutex_);
    return has_ended_ ? store_error_.empty() : Clock::now() - answered_ < kPausesOfSilence * pause_ + pause_;
  }

  std::optional<PeerLost> find_silent() {
    const std::lock_guard lock(mutex_);
    return find_silent_for(longest_silence_);
  }

  std::optional<PeerLost> find_ended() {
    note_begin_of_wait();
    std::optional<PeerLost> found;
    const auto deadline = Clock::now() + kPausesToBeFound * pause_;
    for (bool is_over = false; !found && !is_over && Clock::now() < deadline;) {
      std::this_thread::sleep_for(Milliseconds(10));
      const std::lock_guard lock(mutex_);
      found = find_silent_for(kPausesOfSilence * pause_);
      is_over = has_ended_;  // who ended of its own accord is not looked for
    }
    note_end_of_wait();
    return found;
  }

 private:
  struct Other {
    std::string number;
    Clock::time_point moved;
  };

  // Needs the mutex.
  std::optional<PeerLost> find_silent_for(Milliseconds silence) const {
    const std::string what_to_do = "; start the job again from the last checkpoint";
    if (!store_error_.empty()) {
      if (rank_ == 0) return std::nullopt;
      return PeerLost(0, "the rendezvous, on the host of worker 0, is gone (" + store_error_ +
                             "): that worker ended, or its host" + what_to_do);
    }
    if (has_ended_) return std::nullopt;
    const auto now = Clock::now();
    const auto seconds = [&](Clock::time_point since) {
      return std::to_string(std::chrono::round<std::chrono::seconds>(now - since).count()) + " s";
    };
    if (now - answered_ >= silence + pause_) {
      if (rank_ == 0) return std::nullopt;
      return PeerLost(0, "the rendezvous, on the host of worker 0, has not answered for " + seconds(answered_) +
                             ": that host is cut off, worker 0 stands still, or this host is cut off" + what_to_do);
    }
    if (!looking_since_) return std::nullopt;
    std::vector<int> silent;
    auto since = now;
    for (size_t worker = 0; worker < others_.size(); ++worker) {
      if (static_cast<int>(worker) == rank_ || now - others_[worker].moved < silence) continue;
      silent.push_back(static_cast<int>(worker));
      since = std::min(since, others_[worker].moved);
    }
    if (silent.empty()) return std::nullopt;
    const bool is_one = silent.size() == 1;
    return PeerLost(silent.front(), listed(silent) + (is_one ? " has" : " have") + " given no sign of life for " +
                                        seconds(since) + (is_one ? ": it ended or stands" : ": they ended or stand") +
                                        " still, or the host is cut off" + what_to_do);
  }

  void run() noexcept {
    try {
      uint64_t ended = 0;
      for (uint64_t beat = 0;; ++beat) {
        if (store_->add(kOver, 0) > 0) break;
        store_->set(keys_[static_cast<size_t>(rank_)], std::to_string(beat));
        // A wait that lasted from one sign of life to the next.
        const bool waits_long = waits_begun_ != waits_ended_ && waits_ended_ == ended;
        ended = waits_ended_;
        look(waits_long);
        std::unique_lock lock(mutex_);
        answered_ = Clock::now();
        if (changed_.wait_for(lock, pause_, [&] { return is_ending_; })) break;
      }
      await_others();
    } catch (const std::exception& error) {
      const std::lock_guard lock(mutex_);
      store_error_ = first_line(error);
    }
    const std::lock_guard lock(mutex_);
    has_ended_ = true;
    changed_.notify_all();
  }

  // Worker 0 often hosts the store: the others' threads would find it gone, which torch reports at length.
  void await_others() {
    const auto deadline = Clock::now() + kPatienceToEnd;
    const auto all = static_cast<int64_t>(others_.size());
    for (auto over = store_->add(kOver, 1); rank_ == 0 && over < all && Clock::now() < deadline;
         over = store_->add(kOver, 0)) {
      std::this_thread::sleep_for(Milliseconds(5));
    }
  }

  // At the workers' numbers; `waits_long` is false where nobody has waited for long.
  void look(bool waits_long) {
    {
      const std::lock_guard lock(mutex_);
      if (!waits_long) looking_since_.reset();
      if (!waits_long) return;
      if (!looking_since_) {
        looking_since_ = Clock::now();
        for (auto& other : others_) other = {"", *looking_since_};
      }
    }
    const bool have_all_begun = store_->check(keys_);
    const auto numbers = have_all_begun ? store_->multiGet(keys_) : std::vector<std::vector<uint8_t>>();
    const std::lock_guard lock(mutex_);
    if (!have_all_begun) {
      looking_since_.reset();
      return;
    }
    for (size_t worker = 0; worker < others_.size(); ++worker) {
      std::string number(numbers[worker].begin(), numbers[worker].end());
      if (number != others_[worker].number) others_[worker] = {std::move(number), Clock::now()};
    }
  }

  const net::StorePtr store_;
  const int rank_;
  const Milliseconds pause_;
  const Milliseconds longest_silence_;
  std::vector<std::string> keys_;  // by worker
  std::atomic<uint64_t> waits_begun_{0};
  std::atomic<uint64_t> waits_ended_{0};

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Other> others_;  // by worker, as it was looked at last
  std::optional<Clock::time_point> looking_since_;
  Clock::time_point answered_ = Clock::now();  // the store, last
  std::string store_error_;                    // that ended the thread; empty: none
  bool is_ending_ = false;
  bool has_ended_ = false;
};

// A store whose host is silent does not answer, ever: the thread that asks it is left to itself then, and no other
// asks.
class LostInStore final : public comm::LostWorkers {
 public:
  LostInStore(const net::StorePtr& store, int rank, int num_workers, Milliseconds timeout)
      : process_(::getpid()),
        store_(store),
        signs_(std::make_shared<SignsOfLife>(store->clone(), rank, num_workers, timeout)) {
    signs_->begin();
  }
  ~LostInStore() override { leave(); }
  LostInStore(const LostInStore&) = delete;
  LostInStore& operator=(const LostInStore&) = delete;

  void begin_wait() noexcept override { signs_->note_begin_of_wait(); }
  void end_wait() noexcept override { signs_->note_end_of_wait(); }
  std::optional<PeerLost> find_silent() noexcept override { return signs_->find_silent(); }
  std::optional<PeerLost> find_ended() noexcept override { return signs_->find_ended(); }
  void leave() noexcept override {
    if (::getpid() == process_) signs_->end();
  }
  void tell(const PeerLost& lost) noexcept override {
    if (lost.rank() < 0) return;  // somebody may know which
    {
      const std::lock_guard lock(told_mutex_);
      if (!told_) told_ = lost;
    }
    if (!signs_->store_answers()) return;
    asked(kPatienceToTell, [store = store_, text = std::to_string(lost.rank()) + " " + lost.what()] {
      store->compareSet(kLost, std::vector<uint8_t>(), std::vector<uint8_t>(text.begin(), text.end()));
      return std::optional<PeerLost>();
    });
  }
  bool knows() const noexcept override {
    const std::lock_guard lock(told_mutex_);
    return told_.has_value();
  }
  std::optional<PeerLost> ask(Milliseconds patience) noexcept override {
    {
      const std::lock_guard lock(told_mutex_);
      if (told_) return told_;
    }
    if (!signs_->store_answers()) return std::nullopt;
    const auto asking = std::make_shared<Asking>(is_asking_);
    if (asking->had_begun && patience.count() == 0) return std::nullopt;  // it will be asked again
    return asked(patience, [store = store_, asking, deadline = Clock::now() + patience] {
      while (!store->check({kLost})) {
        if (Clock::now() >= deadline) return std::optional<PeerLost>();
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
      const auto bytes = store->get(kLost);
      const std::string text(bytes.begin(), bytes.end());
      const size_t space = text.find(' ');
      return std::optional(PeerLost(std::stoi(text.substr(0, space)), text.substr(space + 1)));
    });
  }

 private:
  template <class F>
  std::optional<PeerLost> asked(Milliseconds patience, F call) noexcept {
    try {
      return within(patience + kPatienceToTell, "asks the store of other hosts", std::move(call))
          .value_or(std::nullopt);
    } catch (const std::exception& error) {
      log(LogLevel::info, "other hosts cannot be told of lost workers: " + first_line(error));
    }
    return std::nullopt;
  }

  // While a thread asks.
  struct Asking {
    explicit Asking(std::shared_ptr<std::atomic<bool>> shared)
        : flag(std::move(shared)), had_begun(flag->exchange(true)) {}
    ~Asking() {
      if (!had_begun) *flag = false;
    }
    Asking(const Asking&) = delete;
    Asking& operator=(const Asking&) = delete;
    const std::shared_ptr<std::atomic<bool>> flag;
    const bool had_begun;
  };

  const pid_t process_;
  const net::StorePtr store_;
  const std::shared_ptr<SignsOfLife> signs_;
  mutable std::mutex told_mutex_;
  std::optional<PeerLost> told_;  // first, by this worker
  const std::shared_ptr<std::atomic<bool>> is_asking_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace

std::shared_ptr<comm::LostWorkers> make_lost_workers(const net::StorePtr& store, int rank, int num_workers,
                                                     Milliseconds timeout) {
  return std::make_shared<LostInStore>(store, rank, num_workers, timeout);
}

}  // namespace muster
