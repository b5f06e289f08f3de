// The threads that run this process's replicas.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace muster {

/// Runs one task on every local replica at once. With one replica the task runs on the caller's thread; with several,
/// replica i's tasks always run on the thread that serves i. Thread-safe: run() calls queue behind each other.
///
/// Threads are either the pool's own (start()) or foreign ones that call serve(i), so that in Python each is a Python
/// thread. Intra-op threads are a property of a thread: serve() sets `threads_per_replica`, for its own alone.
class ReplicaPool {
 public:
  using Task = std::function<void(int local_replica)>;

  ReplicaPool(int replicas, int threads_per_replica);
  ~ReplicaPool();
  ReplicaPool(const ReplicaPool&) = delete;
  ReplicaPool& operator=(const ReplicaPool&) = delete;

  int replicas() const noexcept { return replicas_; }
  /// One in a forked child, where OpenMP would wait for threads of its parent.
  int threads_per_replica() const noexcept;

  /// Starts the pool's own threads. No-op with one replica. Throws CommError where the system gives no more threads.
  void start();

  /// The body of replica i's thread: blocks until stop().
  void serve(int local_replica);

  /// Runs `task(i)` for every local replica, with the caller's torch ThreadLocalState and floating-point environment,
  /// and waits for all. A task must not throw: what it throws ends up in the result of the first replica that did.
  /// While waiting, `poll` is called about ten times a second; if it throws, `interrupt` is called once and the
  /// exception is rethrown once the tasks have ended, 0.8 s later at the latest (run() then refuses until they have).
  /// With one replica the task runs on the calling thread: its waits call `poll`, and nobody calls `interrupt`.
  /// Throws InvalidArgument in a forked child, where a pool of several replicas has no threads.
  void run(const Task& task, const std::function<void()>& poll = {}, const std::function<void()>& interrupt = {});

  /// Whether tasks that an interrupted run() left behind are still running.
  bool busy() const;

  /// Waits until no task runs, which may be one that an interrupted run() left behind; then ends the threads and waits
  /// for the pool's own. `poll` is called about ten times a second; if it throws, the pool goes on as it was.
  /// Idempotent. In a forked child, which has no threads, it does not wait.
  void stop(const std::function<void()>& poll = {});

  /// Ends each thread once it has ended its task, and waits for none.
  void release() noexcept;

 private:
  struct Sync {
    std::mutex run_mutex;  // serialises run()
    std::mutex mutex;
    std::condition_variable work;
    std::condition_variable done;
  };

  const pid_t process_;
  const int replicas_;
  const int threads_per_replica_;
  const int threads_elsewhere_;    // intra-op threads of the thread that made the pool
  std::unique_ptr<Sync> sync_;     // a forked child leaves it as it is: it counts threads that wait
  std::function<void(int)> task_;  // guarded by sync_->mutex, as what follows
  std::vector<std::exception_ptr> errors_;
  uint64_t generation_ = 0;
  int running_ = 0;
  bool stopping_ = false;

  std::vector<std::thread> threads_;
};

}  // namespace muster
