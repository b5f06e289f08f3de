// What a worker pushed and servers may still ask for again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "net/shared_segment.h"
#include "server/plan.h"
#include "server/protocol.h"

namespace muster::server {

/// A bounded number of steps, each in a slab of its own that holds every chunk's gradients. Externally synchronised.
class PushLog {
 public:
  struct Entry {
    uint64_t step = 0;
    std::byte* slab = nullptr;
    std::vector<bool> pushed;  ///< by chunk
    std::optional<Apply> command;
  };

  /// Slabs are in `memory`, or in the heap where that is null. `max_bytes` is rounded up to two slabs.
  PushLog(const std::vector<Chunk>& chunks, std::shared_ptr<net::Arena> memory, uint64_t max_bytes);
  ~PushLog();
  PushLog(const PushLog&) = delete;
  PushLog& operator=(const PushLog&) = delete;

  /// What a log of so many bytes takes of a shared arena.
  static uint64_t memory_needed(const std::vector<Chunk>& chunks, uint64_t max_bytes);

  /// The entry of a step that is not below the newest; null where the log is full.
  Entry* open(uint64_t step);
  Entry* find(uint64_t step);
  std::span<std::byte> of_chunk(const Entry& entry, uint32_t chunk) const;

  /// Forgets steps up to `step`.
  void release(uint64_t step);

  /// Ascending.
  std::deque<Entry>& entries() noexcept { return entries_; }
  size_t capacity() const noexcept { return capacity_; }

 private:
  static uint64_t slab_bytes(const std::vector<Chunk>& chunks);
  static size_t slabs_of(const std::vector<Chunk>& chunks, uint64_t max_bytes);

  std::shared_ptr<net::Arena> memory_;
  size_t capacity_;
  uint64_t slab_bytes_;
  std::vector<std::unique_ptr<std::byte[]>> heap_;
  std::vector<std::byte*> slabs_;  // all
  std::vector<std::byte*> free_;
  std::vector<uint64_t> offsets_;  // by chunk
  std::vector<uint64_t> sizes_;    // by chunk
  std::deque<Entry> entries_;
};

}  // namespace muster::server
