// A log of a worker's pushes that servers may still ask for again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "net/shared_segment.h"
#include "server/protocol/plan.h"
#include "server/protocol/protocol.h"

namespace muster::server {

/// Where gradients and payloads begin in memory, in bytes.
inline constexpr uint64_t kPayloadAlignment = 64;

/// A bounded number of steps, each in a slab of its own that holds every chunk's gradients, and blocks that hold what
/// it has of tables. Externally synchronised.
class PushLog {
 public:
  /// A part of a push of rows, as it travels.
  struct Rows {
    uint32_t table = 0;
    uint32_t server = 0;
    uint32_t part = 0;
    uint32_t parts = 1;
    std::span<std::byte> payload;
  };

  struct Block {
    std::byte* data = nullptr;
    uint64_t bytes = 0;
  };

  /// A chunk's gradients where its worker has them.
  struct Lent {
    uint32_t chunk = 0;
    std::vector<Bytes> pieces;
    std::shared_ptr<const void> owner;  ///< keeps them
  };

  struct Entry {
    uint64_t step = 0;
    std::byte* slab = nullptr;
    std::vector<bool> pushed;  ///< by chunk
    std::vector<Lent> lent;    ///< chunks that are not copied yet
    std::vector<Rows> rows;    ///< of tables
    std::vector<Block> blocks;
    uint64_t block_left = 0;  ///< bytes at the end of the last block
    std::optional<Apply> command;
  };

  /// Slabs and blocks are in `memory`, or in the heap where that is null. `max_bytes` is rounded up to two steps.
  PushLog(const std::vector<Chunk>& chunks, std::shared_ptr<net::Arena> memory, uint64_t max_bytes);
  ~PushLog();
  PushLog(const PushLog&) = delete;
  PushLog& operator=(const PushLog&) = delete;

  /// What a log of so many bytes takes of a shared arena, for slabs and as much for blocks.
  static uint64_t memory_needed(const std::vector<Chunk>& chunks, uint64_t max_bytes);

  /// The entry of a step that is not below the newest; null where the log is full, unless it is to be had all the same.
  Entry* open(uint64_t step, bool beyond_bound = false);
  Entry* find(uint64_t step);
  /// Copies the pieces, together a chunk's gradient bytes, and marks the chunk as pushed. Throws InvalidArgument where
  /// they are fewer or more.
  void write(Entry& entry, uint32_t chunk, std::span<const Bytes> pieces) const;
  /// The same, but for the copy, which is made when take_lent() asks for it, from what `owner` keeps. Perhaps never:
  /// the step may be durable before.
  void lend(Entry& entry, uint32_t chunk, std::span<const Bytes> pieces, std::shared_ptr<const void> owner) const;
  void take_lent();
  /// The chunk's gradients in the log; it must have been written or taken back, not lent.
  Bytes of_chunk(const Entry& entry, uint32_t chunk) const;

  /// Memory for a part of an entry's push of rows, at a multiple of 64 bytes, until the entry is released; null where
  /// the log is full, unless that is to be had all the same.
  std::byte* room(Entry& entry, uint64_t bytes, bool beyond_bound = false);

  /// Forgets steps up to `step`.
  void release(uint64_t step);

  /// Ascending.
  std::deque<Entry>& entries() noexcept { return entries_; }
  /// The first step that is kept; where none is, the one after the newest that was.
  uint64_t first_step() const noexcept { return entries_.empty() ? newest_ + 1 : entries_.front().step; }
  /// The one after the newest that was kept.
  uint64_t first_step_after() const noexcept { return newest_ + 1; }
  bool is_half_full() const noexcept;
  /// Whether another step like the newest has no room.
  bool is_full() const noexcept;

 private:
  static uint64_t slab_bytes(const std::vector<Chunk>& chunks);
  void check_size(uint32_t chunk, std::span<const Bytes> pieces) const;
  static size_t slabs_of(const std::vector<Chunk>& chunks, uint64_t max_bytes);

  std::byte* allocate(uint64_t bytes);
  void free(const Block& block) noexcept;
  /// Bytes of entries with so many more.
  bool fits(uint64_t more) const noexcept;

  std::shared_ptr<net::Arena> memory_;
  size_t capacity_;  // in slabs
  uint64_t slab_bytes_;
  uint64_t max_bytes_;
  std::vector<std::byte*> slabs_;  // all
  std::vector<std::byte*> free_;
  std::vector<uint64_t> offsets_;  // by chunk
  std::vector<uint64_t> sizes_;    // by chunk
  uint64_t blocks_bytes_ = 0;      // of entries
  uint64_t spare_bytes_ = 0;       // of spare_
  std::vector<Block> spare_;       // free ones
  std::deque<Entry> entries_;
  uint64_t newest_ = 0;  // the last step that was opened
};

}  // namespace muster::server
