#include "job/call_watch.h"

#include <unistd.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "comm/noting_communicator.h"
#include "core/make_thread.h"
#include "job/job_agreement.h"

namespace muster {

namespace {

constexpr comm::Milliseconds kLongestPauseOfCalls{3000};
constexpr comm::Milliseconds kPatienceOfEnd{2000};
constexpr comm::Milliseconds kBetweenLooks{10};
constexpr const char* kDisagreement = "disagreement";
constexpr const char* kKnow = "know";  // how many workers know of it

std::string key_of_calls(int worker) { return "call/" + std::to_string(worker); }

}  // namespace

std::string CallPlace::text() const { return std::to_string(windows) + ' ' + std::to_string(operations) + ' ' + call; }

CallPlace CallPlace::of(const std::string& text) {
  const size_t first = text.find(' ');
  const size_t second = text.find(' ', first + 1);
  return {std::stoull(text.substr(0, first)), std::stoull(text.substr(first + 1, second - first - 1)),
          text.substr(second + 1)};
}

bool CallPlace::contradicts(const CallPlace& other) const noexcept {
  return (windows < other.windows && operations > other.operations) ||
         (windows > other.windows && operations < other.operations);
}

class CallWatch::Watcher : public std::enable_shared_from_this<Watcher> {
 public:
  Watcher(const net::StorePtr& store, int rank, int num_workers, comm::Milliseconds pause)
      : process_(::getpid()), jobs_(store), rank_(rank), num_workers_(num_workers), pause_(pause) {}

  void begin(std::function<bool()> is_in_call, std::function<void(const std::string&)> fail) noexcept {
    {
      const std::lock_guard lock(mutex_);
      is_in_call_ = std::move(is_in_call);
      fail_ = std::move(fail);
      runs_ = true;
    }
    try {
      make_thread("looks whether workers make the same calls", [self = shared_from_this()] { self->run(); }).detach();
    } catch (const std::exception&) {
      note_over();
    }
  }

  void end() noexcept {
    if (::getpid() != process_) return;
    std::unique_lock lock(mutex_);
    is_in_call_ = nullptr;
    fail_ = nullptr;
    is_ending_ = true;
    changed_.notify_all();
    changed_.wait_for(lock, kPatienceOfEnd, [&] { return !runs_; });
  }

  void give_up() noexcept {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
    changed_.notify_all();
  }

  void note_call(std::string_view call) {
    const std::lock_guard lock(mutex_);
    const auto me = std::this_thread::get_id();
    if (caller_ == std::thread::id()) caller_ = me;
    is_in_order_ = is_in_order_ && caller_ == me;
    place_.call = call;
  }
  void note_window() {
    const std::lock_guard lock(mutex_);
    ++place_.windows;
  }
  void note_operation() {
    const std::lock_guard lock(mutex_);
    ++place_.operations;
  }

 private:
  void run() noexcept {
    try {
      watch();
    } catch (const std::exception&) {
      return note_over();
    }
    note_over();
  }

  void watch() {
    std::optional<CallPlace> last;
    while (const auto place = next_place()) {
      const bool stays = last && last->windows == place->windows && last->operations == place->operations;
      last = place;
      if (!stays || !waits(*place)) continue;
      if (!store_) store_ = jobs_->clone();
      tell(*place);
      if (look(*place)) break;
    }
  }

  void note_over() noexcept {
    const std::lock_guard lock(mutex_);
    runs_ = false;
    changed_.notify_all();
  }

  // After a pause; nothing once the watch is over.
  std::optional<CallPlace> next_place() {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, pause_, [&] { return is_ending_; }) || !is_in_order_) return std::nullopt;
    return place_;
  }

  // What runs a function on this worker alone waits for nobody's calls.
  bool waits(const CallPlace& place) {
    const std::lock_guard lock(mutex_);
    return is_in_call_ && is_in_call_() && place.call != "run()";
  }

  void tell(const CallPlace& place) {
    auto text = place.text();
    if (text == told_) return;
    net::set_text(*store_, key_of_calls(rank_), text);
    told_ = std::move(text);
  }

  // Whether the watch is over, since workers wait for one another. Each looks at worker 0 and that one at all: two that
  // differ from one another differ from it, once it is as far.
  bool look(const CallPlace& mine) {
    auto found = read(kDisagreement);
    for (int worker = rank_ == 0 ? 1 : 0; !found && worker < (rank_ == 0 ? num_workers_ : 1); ++worker) {
      const auto text = read(key_of_calls(worker));
      if (!text) continue;
      const auto theirs = CallPlace::of(*text);
      if (!mine.contradicts(theirs)) continue;
      const auto told = rank_ < worker ? words(rank_, mine, worker, theirs) : words(worker, theirs, rank_, mine);
      const std::vector<uint8_t> bytes(told.begin(), told.end());
      const auto first = store_->compareSet(kDisagreement, std::vector<uint8_t>(), bytes);
      found.emplace(first.begin(), first.end());
    }
    if (!found) return false;
    await_all();
    fail(*found);
    return true;
  }

  std::optional<std::string> read(const std::string& key) {
    if (!store_->check({key})) return std::nullopt;
    const auto bytes = store_->get(key);
    return std::string(bytes.begin(), bytes.end());
  }

  // Until all workers know: the first that fails may end, and the others would hear of that alone.
  void await_all() {
    const auto deadline = std::chrono::steady_clock::now() + 4 * pause_;
    for (auto know = store_->add(kKnow, 1); know < num_workers_; know = store_->add(kKnow, 0)) {
      std::unique_lock lock(mutex_);
      const bool is_over = changed_.wait_for(lock, kBetweenLooks, [&] { return is_ending_; });
      if (is_over || std::chrono::steady_clock::now() >= deadline) return;
    }
  }

  static std::string words(int first, const CallPlace& its, int second, const CallPlace& other) {
    return "ranks disagree: rank " + std::to_string(first) + " is in " + its.call + " with " +
           std::to_string(its.windows) + " windows closed or closing, rank " + std::to_string(second) + " in " +
           other.call + " with " + std::to_string(other.windows) +
           ". Each waits for the other; call the same on all ranks, in the same order";
  }

  void fail(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    if (fail_) std::exchange(fail_, nullptr)(reason);
  }

  const pid_t process_;
  const net::StorePtr jobs_;
  net::StorePtr store_;  // the thread's, with a connection of its own, once it has something to tell
  const int rank_;
  const int num_workers_;
  const comm::Milliseconds pause_;
  std::string told_;  // of the thread

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<bool()> is_in_call_;
  std::function<void(const std::string&)> fail_;
  CallPlace place_{.call = "its first call"};
  std::thread::id caller_;
  bool is_in_order_ = true;
  bool is_ending_ = false;
  bool runs_ = false;
};

CallWatch::CallWatch(const net::StorePtr& store, int rank, int num_workers, comm::Milliseconds pause)
    : watcher_(std::make_shared<Watcher>(store, rank, num_workers, pause)) {}

CallWatch::~CallWatch() { end(); }

void CallWatch::begin(std::function<bool()> is_in_call, std::function<void(const std::string&)> fail) noexcept {
  watcher_->begin(std::move(is_in_call), std::move(fail));
}
void CallWatch::end() noexcept { watcher_->end(); }
void CallWatch::give_up() noexcept { watcher_->give_up(); }
void CallWatch::note_call(std::string_view call) { watcher_->note_call(call); }
void CallWatch::note_window() { watcher_->note_window(); }
void CallWatch::note_operation() { watcher_->note_operation(); }

std::shared_ptr<CallWatch> watch_calls(comm::CommunicatorPtr& workers, const net::StorePtr& store,
                                       comm::Milliseconds timeout) {
  if (workers->size() == 1 || !store) return nullptr;
  // A store of the program's may be that of earlier strategies.
  std::random_device random;
  const auto number = broadcast_number(*workers, (static_cast<int64_t>(random()) << 31) ^ random());
  const net::StorePtr own = c10::make_intrusive<c10d::PrefixStore>("calls/" + std::to_string(number), store);
  auto watch = std::make_shared<CallWatch>(own, workers->rank(), workers->size(),
                                           std::clamp(timeout / 8, comm::Milliseconds(50), kLongestPauseOfCalls));
  workers = comm::make_noting(std::move(workers), [watch] { watch->note_operation(); });
  return watch;
}

}  // namespace muster
