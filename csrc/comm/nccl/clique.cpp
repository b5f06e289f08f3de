#include "comm/nccl/clique.h"

#include <algorithm>
#include <thread>

#include "core/log.h"
#include "core/wait_hook.h"
#include "muster/error.h"

namespace muster::comm::nccl {

bool Pause::operator()() {
  const auto now = Clock::now();
  if (now >= deadline_) return false;
  if (now >= next_hook_) {
    WaitHook::call();
    next_hook_ = now + Milliseconds(50);
  }
  // NCCL's own thread usually needs some microseconds.
  if (turns_++ < 200) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(turns_ < 2000 ? 50 : 1000));
  }
  return true;
}

Clique::Clique(const NcclApi& nccl, const DeviceApi& device, const UniqueId& id, Options options)
    : nccl_(nccl), device_(device), options_(std::move(options)), comms_(options_.devices.size()) {
  try {
    call("ncclCommInitRankConfig", [&](int local, Comm) {
      return nccl_.start(&comms_[static_cast<size_t>(local)], options_.size, id, options_.first_rank + local);
    });
  } catch (...) {
    fail(std::current_exception());
    throw;
  }
}

Clique::~Clique() { close(); }

std::string Clique::name() const {
  const int first = options_.first_rank;
  if (local_ranks() == 1) return "rank " + std::to_string(first);
  return "ranks " + std::to_string(first) + "-" + std::to_string(first + local_ranks() - 1);
}

std::exception_ptr Clique::error_of(const std::string& what, Status status, Comm comm) const {
  std::string who = name();
  for (size_t i = 0; comm != nullptr && i < comms_.size(); ++i) {
    if (comms_[i] == comm) who = "rank " + std::to_string(options_.first_rank + static_cast<int>(i));
  }
  return std::make_exception_ptr(
      CommError(what + " failed at " + who + ": " + nccl_.describe(status, comm) +
                ". Look at the other workers' logs, and run with NCCL_DEBUG=INFO; the group cannot be used any more"));
}

void Clique::call(const std::string& what, const Each& each) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
    std::exception_ptr error;
    Status status = nccl_.group_start();
    if (status != kSuccess) error = error_of(what, status, nullptr);
    for (int i = 0; i < local_ranks() && !error; ++i) {
      try {
        const DeviceScope scope(device_, options_.devices[static_cast<size_t>(i)]);
        status = each(i, comms_[static_cast<size_t>(i)]);
        if (status != kSuccess && status != kInProgress) {
          error = error_of(what, status, comms_[static_cast<size_t>(i)]);
        }
      } catch (...) {
        error = std::current_exception();
      }
    }
    // A group that was opened is closed, whatever happened within.
    status = nccl_.group_end();
    if (!error && status != kSuccess && status != kInProgress) error = error_of(what, status, nullptr);
    if (error) {
      fail_locked(error);
      std::rethrow_exception(error);
    }
  }
  wait_until_ready(what, Clock::now() + options_.timeout);
}

void Clique::wait_until_ready(const std::string& what, Clock::time_point deadline) {
  for (Pause pause(deadline);;) {
    bool is_pending = false;
    {
      const std::lock_guard lock(mutex_);
      if (failure_) std::rethrow_exception(failure_);
      for (const Comm comm : comms_) {
        Status state = kSuccess;
        const Status status = nccl_.async_error(comm, &state);
        const Status worst = status != kSuccess ? status : state;
        if (worst == kInProgress) {
          is_pending = true;
        } else if (worst != kSuccess) {
          fail_locked(error_of(what, worst, comm));
          std::rethrow_exception(failure_);
        }
      }
    }
    if (!is_pending) return;
    bool is_early = true;
    try {
      is_early = pause();
    } catch (...) {
      fail(std::make_exception_ptr(CommError(name() + " was interrupted during " + what)));
      throw;
    }
    if (!is_early) {
      fail(std::make_exception_ptr(
          Timeout(name() + " waited " + std::to_string(options_.timeout.count()) + " ms for " + what +
                  ". See whether all " + std::to_string(options_.size) +
                  " ranks run and reach each other (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME); if they are only slow, raise "
                  "`timeout`")));
      check();
    }
  }
}

void Clique::check_locked() {
  if (failure_) std::rethrow_exception(failure_);
  for (const Comm comm : comms_) {
    Status state = kSuccess;
    const Status status = nccl_.async_error(comm, &state);
    const Status worst = status != kSuccess ? status : state;
    if (worst != kSuccess && worst != kInProgress) fail_locked(error_of("an operation under way", worst, comm));
  }
  if (failure_) std::rethrow_exception(failure_);
}

void Clique::check() {
  const std::lock_guard lock(mutex_);
  check_locked();
}

bool Clique::has_failed() noexcept {
  const std::lock_guard lock(mutex_);
  return failure_ != nullptr;
}

bool Clique::call_unless_failed(int local, const Each& call) noexcept {
  const std::lock_guard lock(mutex_);
  if (failure_) return false;
  try {
    const DeviceScope scope(device_, options_.devices[static_cast<size_t>(local)]);
    const Comm comm = comms_[static_cast<size_t>(local)];
    const Status status = call(local, comm);
    if (status != kSuccess && status != kInProgress) fail_locked(error_of("a call", status, comm));
  } catch (...) {
    fail_locked(std::current_exception());
  }
  return true;
}

void Clique::fail(std::exception_ptr error) noexcept {
  const std::lock_guard lock(mutex_);
  fail_locked(std::move(error));
}

void Clique::fail_locked(std::exception_ptr error) noexcept {
  if (failure_) return;
  failure_ = std::move(error);
  for (size_t i = 0; i < comms_.size(); ++i) {
    if (comms_[i] == nullptr) continue;
    try {
      const DeviceScope scope(device_, options_.devices[i]);
      nccl_.abort(comms_[i]);
    } catch (const std::exception& error) {  // the first error is the one to throw
      log(LogLevel::warning, std::string("an NCCL communicator could not be aborted: ") + error.what());
    }
    comms_[i] = nullptr;
  }
}

void Clique::close() noexcept {
  if (has_failed()) return;
  try {
    call("ncclCommFinalize", [&](int, Comm comm) { return nccl_.finalize(comm); });
    for (size_t i = 0; i < comms_.size(); ++i) {
      const DeviceScope scope(device_, options_.devices[i]);
      const Status status = nccl_.destroy(std::exchange(comms_[i], nullptr));
      if (status != kSuccess && status != kInProgress)
        std::rethrow_exception(error_of("ncclCommDestroy", status, nullptr));
    }
  } catch (const std::exception& error) {
    log(LogLevel::warning, std::string("an NCCL communicator did not end in good order: ") + error.what());
  }
}

}  // namespace muster::comm::nccl
