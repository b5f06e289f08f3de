// The memory that the ranks of a SharedGroup share, seen from one process. `local` has one address space; `host` maps
// segments of other processes.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/shared/control.h"

namespace muster::comm::shared {

/// A worker that is gone, and how.
struct LostWorker {
  int worker = -1;
  std::string how;
};

/// Thread-safe: the ranks of one process share a space.
class SharedSpace {
 public:
  virtual ~SharedSpace() = default;
  SharedSpace(const SharedSpace&) = delete;
  SharedSpace& operator=(const SharedSpace&) = delete;

  /// Ranks.
  int size() const noexcept { return size_; }
  /// False where all ranks are threads of this process.
  bool crosses_processes() const noexcept { return crosses_processes_; }
  /// Keeps `memory` as long as the space: after a failure peers may still touch it.
  void keep(std::shared_ptr<const void> memory) {
    const std::lock_guard lock(mutex_);
    kept_.push_back(std::move(memory));
  }

  virtual ControlBlock& control() noexcept = 0;

  /// For messages and errors: the worker that rank `rank` lives in, and what the rank is called.
  virtual int worker_of(int rank) const noexcept = 0;
  virtual int name_of(int rank) const noexcept { return rank; }

  /// Zeroed, 64-byte aligned memory in rank `rank`'s part of the space; kept by the tensor. Throws CommError when
  /// there is no memory left.
  virtual at::Tensor allocate(int rank, int64_t numel, at::ScalarType dtype) = 0;

  /// Collective over processes, blocking. Zeroed memory that is one and the same for all of them, kept by the tensor
  /// (uint8) and by those of the others.
  virtual at::Tensor allocate_common(int64_t bytes) = 0;

  /// The address by which peers find rank `rank`'s bytes, or none when they cannot.
  virtual std::optional<uint64_t> address_of(int rank, const void* data, size_t bytes) const noexcept = 0;

  /// Where address `address` of rank `rank` lies in this process. It was published by that rank.
  virtual std::byte* at(int rank, uint64_t address) const noexcept = 0;

  /// Rank `rank`'s staging slots (kStagingBytes), or null where every address can be reached.
  virtual std::byte* staging(int rank) const noexcept = 0;

  /// Looks for workers that are gone. Does not block.
  virtual std::optional<LostWorker> find_lost() = 0;

 protected:
  SharedSpace(int size, bool crosses_processes) : size_(size), crosses_processes_(crosses_processes) {}

 private:
  const int size_;
  const bool crosses_processes_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<const void>> kept_;  // guarded by mutex_
};

}  // namespace muster::comm::shared
