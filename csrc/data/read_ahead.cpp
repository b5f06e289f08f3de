#include "data/read_ahead.h"

#include <utility>

#include "core/intra_op_threads.h"
#include "core/make_thread.h"

namespace muster::detail {

namespace {
constexpr size_t kReadsPerThread = 2;  // how far ahead of the loop readers go
}

ReadAhead::ReadAhead(size_t threads, Read read) : read_(std::move(read)), window_(threads * kReadsPerThread + 1) {
  try {
    for (size_t thread = 0; thread < threads; ++thread) {
      threads_.push_back(make_thread("reads a loader's batches ahead", [this, thread] { serve(thread); }));
    }
  } catch (...) {
    end();
    throw;
  }
}

ReadAhead::~ReadAhead() { end(); }

void ReadAhead::end() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  given_.notify_all();
  for (auto& thread : threads_) thread.join();
}

bool ReadAhead::has_room() {
  const std::lock_guard lock(mutex_);
  return !data_ended_ && entries_.size() < window_;
}

void ReadAhead::give(int64_t number) {
  {
    const std::lock_guard lock(mutex_);
    if (data_ended_) return;
    entries_.emplace_back().batch.number = number;
  }
  given_.notify_one();
}

ReadAhead::Batch ReadAhead::take() {
  std::unique_lock lock(mutex_);
  if (entries_.empty()) return {};
  auto& first = entries_.front();
  if (threads_.empty()) {
    lock.unlock();
    read(first.batch, 0);
    lock.lock();
    data_ended_ = !first.batch.parts && !first.batch.error;
  } else {
    done_.wait(lock, [&] { return first.is_read; });
    --claimed_;
  }
  auto batch = std::move(first.batch);
  entries_.pop_front();
  return batch;
}

void ReadAhead::serve(size_t thread) {
  set_intra_op_threads(1);
  std::unique_lock lock(mutex_);
  for (;;) {
    given_.wait(lock, [&] { return stopping_ || claimed_ < entries_.size(); });
    if (stopping_) return;
    auto& entry = entries_[claimed_++];
    lock.unlock();
    read(entry.batch, thread);
    lock.lock();
    entry.is_read = true;
    if (!entry.batch.parts && !entry.batch.error) {
      data_ended_ = true;
      entries_.resize(claimed_);
    }
    done_.notify_one();
  }
}

void ReadAhead::read(Batch& batch, size_t thread) const {
  try {
    batch.parts = read_(thread, batch.number);
  } catch (...) {
    batch.error = std::current_exception();
  }
}

}  // namespace muster::detail
