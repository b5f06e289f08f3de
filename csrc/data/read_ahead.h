// Reading threads of a loader.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace muster::detail {

/// Reads numbered batches in the order in which they are given, ahead of the loop where there are threads. Owned by the
/// thread that iterates.
class ReadAhead {
 public:
  /// Called by reader thread `thread` (0, the caller of take(), without threads). Null: the data ended, and nothing is
  /// read afterwards.
  using Read = std::function<std::shared_ptr<void>(size_t thread, int64_t number)>;

  /// What came of a number.
  struct Batch {
    int64_t number = -1;
    std::shared_ptr<void> parts;
    std::exception_ptr error;
  };

  /// Throws CommError where the system gives no more threads.
  ReadAhead(size_t threads, Read read);
  /// Waits for what is being read.
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  /// Whether another number is to be given before take().
  bool has_room();
  void give(int64_t number);

  /// The batch of the number that was given first, which it waits for; empty where there is none.
  Batch take();

 private:
  struct Entry {
    Batch batch;
    bool is_read = false;
  };

  void end();
  void serve(size_t thread);
  void read(Batch& batch, size_t thread) const;

  const Read read_;
  const size_t window_;
  std::mutex mutex_;
  std::condition_variable given_;
  std::condition_variable done_;
  std::deque<Entry> entries_;  // guarded by mutex_, but for the batches that are being read
  size_t claimed_ = 0;         // of the entries; guarded by mutex_
  bool data_ended_ = false;    // guarded by mutex_
  bool stopping_ = false;      // guarded by mutex_
  std::vector<std::thread> threads_;
};

}  // namespace muster::detail
