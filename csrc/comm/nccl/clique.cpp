#include "comm/nccl/clique.h"

#include <algorithm>
#include <condition_variable>
#include <thread>
#include <utility>

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

namespace {

// How long an abort waits for a call to return by itself before it ends that.
constexpr Milliseconds kGrace{200};

/// What a thread of its own does to the communicators, and whether it is through.
struct Ending {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_over = false;      // guarded by mutex
  std::exception_ptr error;  // guarded by mutex
};

void expect_success(const NcclApi& nccl, const char* what, Status status) {
  if (status == kSuccess || status == kInProgress) return;
  throw CommError(std::string(what) + " failed: " + nccl.describe(status, nullptr));
}

/// Blocks until they are gone.
void end_now(const NcclApi& nccl, const DeviceApi& device, const std::vector<int>& devices,
             const std::vector<Comm>& comms, bool aborts) {
  const auto for_each = [&](const char* what, const std::function<Status(Comm)>& call) {
    for (size_t i = 0; i < comms.size(); ++i) {
      if (comms[i] == nullptr) continue;
      const DeviceScope scope(device, devices[i]);
      expect_success(nccl, what, call(comms[i]));
    }
  };
  if (aborts) {
    for_each("ncclCommAbort", nccl.abort);
    return;
  }
  expect_success(nccl, "ncclGroupStart", nccl.group_start());
  for_each("ncclCommFinalize", nccl.finalize);
  expect_success(nccl, "ncclGroupEnd", nccl.group_end());
  for (const Comm comm : comms) {
    for (Status state = kInProgress; state == kInProgress;) {
      expect_success(nccl, "ncclCommGetAsyncError", nccl.async_error(comm, &state));
      expect_success(nccl, "ncclCommFinalize", state);
      if (state == kInProgress) std::this_thread::sleep_for(Milliseconds(1));
    }
  }
  for_each("ncclCommDestroy", nccl.destroy);
}

}  // namespace

Clique::Clique(const NcclApi& nccl, const DeviceApi& device, const UniqueId& id, Options options)
    : nccl_(nccl),
      device_(device),
      options_(std::move(options)),
      comms_(options_.devices.size()),
      children_(options_.devices.size()) {
  try {
    const bool splits = options_.blocking && nccl_.split;
    const int max_ctas = splits ? 1 : 0;  // of what does nothing but split
    call("ncclCommInitRankConfig", [&](int local, Comm) {
      return nccl_.start(&comms_[static_cast<size_t>(local)], options_.size, id, options_.first_rank + local, max_ctas);
    });
    if (splits) split();
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

std::exception_ptr Clique::late(const std::string& what) const {
  return std::make_exception_ptr(
      Timeout(name() + " waited " + std::to_string(options_.timeout.count()) + " ms for " + what +
              ". See whether all " + std::to_string(options_.size) +
              " ranks run and reach each other (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME); if they are only slow, raise "
              "`timeout`"));
}

void Clique::split() {
  call("ncclCommSplit", [&](int local, Comm comm) {
    return nccl_.split(comm, options_.first_rank + local, &children_[static_cast<size_t>(local)]);
  });
  std::vector<Comm> parents;
  {
    const std::lock_guard lock(mutex_);
    parents = std::exchange(comms_, children_);
    is_blocking_ = true;
  }
  for (size_t i = 0; i < parents.size(); ++i) {
    const DeviceScope scope(device_, options_.devices[i]);
    expect_success(nccl_, "ncclCommDestroy", nccl_.destroy(parents[i]));
  }
}

// --- calls ---------------------------------------------------------------------------------------------------------

std::vector<Comm> Clique::begin_call(const std::string& what) {
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  under_way_ = {what, Clock::now()};
  return comms_;
}

// calling_ held. Null, or what went wrong.
std::exception_ptr Clique::make_calls(const std::string& what, const Each& each) {
  const std::vector<Comm> comms = begin_call(what);
  std::exception_ptr error;
  const auto note = [&](Status status, Comm comm) {
    if (error || status == kSuccess || status == kInProgress) return;
    const std::lock_guard lock(mutex_);
    error = failure_ ? failure_ : error_of(what, status, comm);  // what was aborted is not asked
  };
  note(nccl_.group_start(), nullptr);
  for (int i = 0; i < local_ranks() && !error; ++i) {
    try {
      const DeviceScope scope(device_, options_.devices[static_cast<size_t>(i)]);
      note(each(i, comms[static_cast<size_t>(i)]), comms[static_cast<size_t>(i)]);
    } catch (...) {
      error = std::current_exception();
    }
  }
  // A group that was opened is closed, whatever happened within.
  try {
    note(nccl_.group_end(), nullptr);
  } catch (...) {
    if (!error) error = std::current_exception();
  }
  const std::lock_guard lock(mutex_);
  under_way_.reset();
  return failure_ ? failure_ : error;
}

void Clique::call(const std::string& what, const Each& each) {
  std::exception_ptr error;
  {
    const std::lock_guard calling(calling_);
    error = make_calls(what, each);
  }
  if (error) fail_and_throw(error);
  wait_until_ready(what, Clock::now() + options_.timeout);
}

bool Clique::call_unless_failed(int local, const Each& call) noexcept {
  std::exception_ptr error;
  try {
    const std::lock_guard calling(calling_);
    Comm comm = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (failure_) return false;
      comm = comms_[static_cast<size_t>(local)];
    }
    const DeviceScope scope(device_, options_.devices[static_cast<size_t>(local)]);
    const Status status = call(local, comm);
    const std::lock_guard lock(mutex_);
    if (!failure_ && status != kSuccess && status != kInProgress) error = error_of("a call", status, comm);
  } catch (...) {
    error = std::current_exception();
  }
  if (error) fail(error);
  return true;
}

void Clique::wait_until_ready(const std::string& what, Clock::time_point deadline) {
  for (Pause pause(deadline);;) {
    std::exception_ptr error;
    bool is_pending = false;
    {
      const std::lock_guard lock(mutex_);
      error = find_error_locked(what, is_pending);
    }
    if (error) fail_and_throw(error);
    if (!is_pending) return;
    bool is_early = true;
    try {
      is_early = pause();
    } catch (...) {
      fail(std::make_exception_ptr(CommError(name() + " was interrupted during " + what)));
      throw;
    }
    if (!is_early) fail_and_throw(late(what));
  }
}

// --- errors --------------------------------------------------------------------------------------------------------

std::exception_ptr Clique::find_error_locked(const std::string& what, bool& is_pending) {
  if (failure_) return failure_;
  for (const Comm comm : comms_) {
    Status state = kSuccess;
    const Status status = nccl_.async_error(comm, &state);
    const Status worst = status != kSuccess ? status : state;
    if (worst == kInProgress) {
      is_pending = true;
    } else if (worst != kSuccess) {
      return error_of(what, worst, comm);
    }
  }
  return nullptr;
}

void Clique::check() {
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    bool is_pending = false;
    error = find_error_locked("an operation under way", is_pending);
    if (!error && under_way_ && Clock::now() - under_way_->since > options_.timeout) error = late(under_way_->what);
  }
  if (error) fail_and_throw(error);
}

bool Clique::has_failed() noexcept {
  const std::lock_guard lock(mutex_);
  return failure_ != nullptr;
}

void Clique::fail_and_throw(std::exception_ptr error) {
  fail(std::move(error));
  const std::lock_guard lock(mutex_);
  std::rethrow_exception(failure_);  // the first
}

void Clique::fail(std::exception_ptr error) noexcept {
  std::vector<Comm> comms(options_.devices.size());
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = std::move(error);
    comms_.swap(comms);
  }
  // Aborting frees a communicator, so no call may be on its way into it. One that blocks in it ends by the abort alone.
  const std::unique_lock calling(calling_, kGrace);
  if (may_be_in_graph_) {
    end_apart(std::move(comms), /*aborts=*/true, std::min(options_.graph_limit, options_.timeout));
    return;
  }
  try {
    end_now(nccl_, device_, options_.devices, comms, /*aborts=*/true);
  } catch (const std::exception& error) {  // the first error is the one to throw
    log(LogLevel::warning, std::string("an NCCL communicator could not be aborted: ") + error.what());
  }
}

// --- the end -------------------------------------------------------------------------------------------------------

// False where it takes longer than `limit`: it goes on by itself.
bool Clique::end_apart(std::vector<Comm> comms, bool aborts, Milliseconds limit) noexcept {
  try {
    const auto ending = std::make_shared<Ending>();
    std::thread([ending, nccl = nccl_, device = device_, devices = options_.devices, comms = std::move(comms), aborts] {
      std::exception_ptr error;
      try {
        device.permit_during_capture();
        end_now(nccl, device, devices, comms, aborts);
      } catch (...) {
        error = std::current_exception();
      }
      const std::lock_guard lock(ending->mutex);
      ending->error = error;
      ending->is_over = true;
      ending->changed.notify_all();
    }).detach();
    std::unique_lock lock(ending->mutex);
    if (!ending->changed.wait_for(lock, limit, [&] { return ending->is_over; })) {
      log(LogLevel::warning,
          name() + ": NCCL has not ended its communicator within " + std::to_string(limit.count()) +
              " ms, and keeps what that holds on the device" +
              (may_be_in_graph_
                   ? ", since a CUDA graph holds operations of it; reset graphs (CUDAGraph.reset()) before "
                     "the strategy or communicator is closed"
                   : "; see whether all ranks close the group"));
      return false;
    }
    if (ending->error) std::rethrow_exception(ending->error);
  } catch (const std::exception& error) {
    log(LogLevel::warning, std::string("an NCCL communicator did not end in good order: ") + error.what());
  }
  return true;
}

void Clique::close() noexcept {
  std::vector<Comm> comms;
  bool may_block = may_be_in_graph_;
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    comms = comms_;
    may_block |= is_blocking_;
  }
  if (may_block) {
    end_apart(std::move(comms), /*aborts=*/false,
              may_be_in_graph_ ? std::min(options_.graph_limit, options_.timeout) : options_.timeout);
    return;
  }
  try {
    call("ncclCommFinalize", [&](int, Comm comm) { return nccl_.finalize(comm); });
    for (size_t i = 0; i < comms.size(); ++i) {
      const DeviceScope scope(device_, options_.devices[i]);
      expect_success(nccl_, "ncclCommDestroy", nccl_.destroy(comms[i]));
    }
  } catch (const std::exception& error) {
    log(LogLevel::warning, std::string("an NCCL communicator did not end in good order: ") + error.what());
  }
}

}  // namespace muster::comm::nccl
