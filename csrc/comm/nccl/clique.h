// The NCCL communicators of one process in one group: what may be called when, and how they end.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
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
/// Thread-safe. The destructor finalizes and destroys, bounded by the timeout; after a failure there is nothing left to
/// destroy, and windows must not be deregistered.
class Clique {
 public:
  struct Options {
    int first_rank = 0;
    int size = 1;
    std::vector<int> devices;  ///< one per rank of this process
    Milliseconds timeout{600'000};
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

  /// Throws what ended the group: an earlier failure, or an asynchronous error of NCCL.
  void check();

  /// Ends the group with this error, unless it has ended. Aborts the communicators; does not wait for peers.
  void fail(std::exception_ptr error) noexcept;
  bool has_failed() noexcept;

  /// On rank `local` alone, unless the group has failed: returns false then.
  bool call_unless_failed(int local, const Each& call) noexcept;

  /// "rank 3" or "ranks 4-7".
  std::string name() const;

 private:
  void check_locked();
  void wait_until_ready(const std::string& what, Clock::time_point deadline);
  std::exception_ptr error_of(const std::string& what, Status status, Comm comm) const;
  void fail_locked(std::exception_ptr error) noexcept;
  void close() noexcept;

  const NcclApi nccl_;
  const DeviceApi device_;
  const Options options_;
  std::mutex mutex_;
  std::vector<Comm> comms_;     // guarded by mutex_; null once aborted
  std::exception_ptr failure_;  // guarded by mutex_
};

}  // namespace muster::comm::nccl
