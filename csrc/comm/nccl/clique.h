// The NCCL communicators of one process in one group: what may be called when, and how they end.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/nccl/api.h"

namespace muster::comm::nccl {

using Clock = std::chrono::steady_clock;

/// Called about every millisecond by whoever waits, with the deadline of the wait: sleeps a little and runs the
/// thread's WaitHook. False at the deadline.
class Pause {
 public:
  explicit Pause(Clock::time_point deadline) : deadline_(deadline) {}
  bool operator()();

 private:
  const Clock::time_point deadline_;
  Clock::time_point next_hook_ = Clock::now() + Milliseconds(50);
  int turns_ = 0;
};

/// One communicator per rank of this process, in these states, all of them together:
///   starting  until every communicator has left ncclInProgress
///   ready     calls go in one group, and the next one only after each communicator has left ncclInProgress
///   failed    the first error, kept and thrown by everything from then on; the communicators were aborted
/// With Options::blocking they are split, once they are ready, into communicators whose calls are through when they
/// return, which costs NCCL no thread a call; the abort ends a call that waits for a peer.
/// Thread-safe. The destructor finalizes and destroys, bounded by the timeout; after a failure there is nothing left to
/// destroy, and windows must not be deregistered. NCCL ends no communicator while a CUDA graph holds calls of it: then
/// that goes on in a thread of its own, and a warning says so.
class Clique {
 public:
  struct Options {
    int first_rank = 0;
    int size = 1;
    std::vector<int> devices;  ///< one per rank of this process
    Milliseconds timeout{600'000};
    bool blocking = false;             ///< where NcclApi::split is there
    Milliseconds graph_limit{10'000};  ///< of the end, where a CUDA graph may hold calls
  };

  /// Collective over the group. Throws Timeout or CommError.
  Clique(const NcclApi& nccl, const DeviceApi& device, const UniqueId& id, Options options);
  ~Clique();
  Clique(const Clique&) = delete;
  Clique& operator=(const Clique&) = delete;

  const NcclApi& nccl() const noexcept { return nccl_; }
  const DeviceApi& device() const noexcept { return device_; }
  const Options& options() const noexcept { return options_; }
  int local_ranks() const noexcept { return static_cast<int>(options_.devices.size()); }

  using Each = std::function<Status(int local, Comm comm)>;
  /// each(i, comm) for every rank of this process, on its device, in one group; then waits on the host until none is in
  /// progress (for collectives: until they are on their streams). `what` names it in errors.
  void call(const std::string& what, const Each& each);

  /// Throws what ended the group: an earlier failure, an asynchronous error of NCCL, or a call that takes longer than
  /// the timeout.
  void check();

  /// A call is captured in a CUDA graph.
  void note_captured() noexcept { may_be_in_graph_ = true; }

  /// Ends the group with this error, unless it has ended. Aborts the communicators, calls on them included; does not
  /// wait for peers.
  void fail(std::exception_ptr error) noexcept;
  bool has_failed() noexcept;

  /// On rank `local` alone, unless the group has failed: returns false then.
  bool call_unless_failed(int local, const Each& call) noexcept;

  /// "rank 3" or "ranks 4-7".
  std::string name() const;

 private:
  struct UnderWay {
    std::string what;
    Clock::time_point since;
  };

  void split();
  std::vector<Comm> begin_call(const std::string& what);
  std::exception_ptr make_calls(const std::string& what, const Each& each);
  void wait_until_ready(const std::string& what, Clock::time_point deadline);
  std::exception_ptr find_error_locked(const std::string& what, bool& is_pending);  // mutex_ held
  std::exception_ptr error_of(const std::string& what, Status status, Comm comm) const;
  std::exception_ptr late(const std::string& what) const;
  [[noreturn]] void fail_and_throw(std::exception_ptr error);
  bool end_apart(std::vector<Comm> comms, bool aborts, Milliseconds limit) noexcept;
  void close() noexcept;

  const NcclApi nccl_;
  const DeviceApi device_;
  const Options options_;
  std::atomic<bool> may_be_in_graph_ = false;
  std::timed_mutex calling_;           // held in calls on communicators; taken before mutex_
  std::mutex mutex_;                   // never held in a call that may block
  std::vector<Comm> comms_;            // guarded by mutex_; null once aborted
  std::vector<Comm> children_;         // written by NCCL until the split is through
  bool is_blocking_ = false;           // guarded by mutex_; once split
  std::optional<UnderWay> under_way_;  // guarded by mutex_
  std::exception_ptr failure_;         // guarded by mutex_
};

}  // namespace muster::comm::nccl
