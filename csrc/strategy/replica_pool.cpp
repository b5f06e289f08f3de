#include "strategy/replica_pool.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <unistd.h>

#include <cfenv>
#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "core/intra_op_threads.h"
#include "core/log.h"
#include "core/make_thread.h"
#include "core/wait_hook.h"
#include "muster/error.h"

namespace muster {

namespace {
constexpr auto kPollInterval = std::chrono::milliseconds(100);
constexpr auto kInterruptGrace = std::chrono::milliseconds(800);
constexpr auto kPatience = std::chrono::seconds(2);
}  // namespace

ReplicaPool::ReplicaPool(int replicas, int threads_per_replica)
    : process_(getpid()),
      replicas_(replicas),
      threads_per_replica_(threads_per_replica),
      threads_elsewhere_(at::get_num_threads()),
      sync_(std::make_unique<Sync>()),
      errors_(static_cast<size_t>(replicas)) {}

ReplicaPool::~ReplicaPool() {
  stop();
  if (getpid() == process_) return;
  [[maybe_unused]] const auto* const left = sync_.release();  // its end would wait for threads of the parent
}

int ReplicaPool::threads_per_replica() const noexcept { return getpid() == process_ ? threads_per_replica_ : 1; }

void ReplicaPool::start() {
  if (replicas_ == 1) return;
  for (int i = 0; i < replicas_; ++i) threads_.push_back(make_thread("runs a replica", [this, i] { serve(i); }));
}

void ReplicaPool::serve(int local_replica) {
  set_intra_op_threads_here(threads_per_replica_, threads_elsewhere_);
  uint64_t seen = 0;
  std::unique_lock lock(sync_->mutex);
  for (;;) {
    sync_->work.wait(lock, [&] { return stopping_ || generation_ != seen; });
    if (stopping_) return;
    seen = generation_;
    auto task = task_;
    lock.unlock();
    std::exception_ptr error;
    try {
      task(local_replica);
    } catch (...) {
      error = std::current_exception();
    }
    // What a task owns may need the GIL to be destroyed, whose holder may be waiting for the mutex.
    task = nullptr;
    std::function<void(int)> last_task;
    lock.lock();
    if (!errors_.empty()) std::swap(errors_[static_cast<size_t>(local_replica)], error);
    if (--running_ == 0) {
      last_task = std::move(task_);
      task_ = nullptr;
      sync_->done.notify_all();
    }
    lock.unlock();
    last_task = nullptr;
    error = nullptr;
    lock.lock();
  }
}

void ReplicaPool::run(const Task& task, const std::function<void()>& poll, const std::function<void()>& interrupt) {
  if (replicas_ == 1) {
    const IntraOpThreads threads(threads_per_replica());
    const WaitHook hook(poll);
    task(0);
    return;
  }
  if (getpid() != process_) {
    throw InvalidArgument("a forked child has no threads of its parent's replicas; make a strategy of its own there");
  }
  const std::lock_guard serial(sync_->run_mutex);
  auto state = std::make_shared<at::ThreadLocalState>();
  auto environment = std::make_shared<std::fenv_t>();
  std::fegetenv(environment.get());
  const auto autocast_dtype = at::autocast::get_autocast_dtype(c10::kCPU);  // not in the ThreadLocalState
  const auto cuda_autocast_dtype = at::autocast::get_autocast_dtype(c10::kCUDA);
  const bool autocast_caches = at::autocast::is_autocast_cache_enabled();

  std::vector<std::exception_ptr> earlier_errors(static_cast<size_t>(replicas_));  // outlives the lock; see serve()
  std::unique_lock lock(sync_->mutex);
  if (stopping_) throw InvalidArgument("the strategy is closed; make a new one");
  if (running_ > 0) throw CommError("a step that was interrupted is still running in a replica; wait for it, or exit");
  task_ = [state, environment, autocast_dtype, cuda_autocast_dtype, autocast_caches, task](int local_replica) {
    const at::ThreadLocalStateGuard guard(*state);
    std::fesetenv(environment.get());
    at::autocast::set_autocast_dtype(c10::kCPU, autocast_dtype);
    at::autocast::set_autocast_dtype(c10::kCUDA, cuda_autocast_dtype);
    at::autocast::set_autocast_cache_enabled(autocast_caches);
    task(local_replica);
  };
  errors_.swap(earlier_errors);
  running_ = replicas_;
  ++generation_;
  sync_->work.notify_all();

  const auto finished = [&] { return running_ == 0; };
  while (!sync_->done.wait_for(lock, kPollInterval, finished)) {
    if (!poll) continue;
    lock.unlock();
    try {
      poll();
    } catch (...) {
      if (interrupt) interrupt();
      lock.lock();
      sync_->done.wait_for(lock, kInterruptGrace, finished);
      // Nobody will ask: an error may refer, through its traceback, to what owns this pool.
      earlier_errors.swap(errors_);
      errors_.clear();
      lock.unlock();
      throw;
    }
    lock.lock();
  }
  for (auto& error : errors_) {
    if (error) std::rethrow_exception(std::exchange(error, nullptr));
  }
}

bool ReplicaPool::busy() const {
  const std::lock_guard lock(sync_->mutex);
  return running_ > 0;
}

void ReplicaPool::stop(const std::function<void()>& poll) {
  if (getpid() != process_) {
    for (auto& thread : threads_) thread.detach();
    threads_.clear();
    return;
  }
  {
    std::unique_lock lock(sync_->mutex);
    const auto started = std::chrono::steady_clock::now();
    bool has_told = false;
    while (!sync_->done.wait_for(lock, kPollInterval, [&] { return running_ == 0; })) {
      lock.unlock();
      if (!has_told && std::chrono::steady_clock::now() - started > kPatience) {
        has_told = true;
        log(LogLevel::warning, "close() waits for a replica that is still in a step which was interrupted");
      }
      if (poll) poll();
      lock.lock();
    }
    stopping_ = true;
  }
  sync_->work.notify_all();
  for (auto& thread : threads_) thread.join();
  threads_.clear();
}

void ReplicaPool::release() noexcept {
  {
    const std::lock_guard lock(sync_->mutex);
    stopping_ = true;
  }
  sync_->work.notify_all();
}

}  // namespace muster
