// The control block of a group whose ranks share memory: heap memory for threads, a memfd for processes. Plain data
// and lock-free atomics at fixed offsets, no pointers; every member has one writer, named beside it, or is added to.
//
// Positions are keys: an epoch in the upper bits, a count in the lower. Epochs advance at every begin_scope and
// end_scope, on every rank alike, so that keys of all ranks compare although ranks issue different numbers of
// operations inside a scope.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "comm/communicator.h"
#include "comm/request.h"

namespace muster::comm::shared {

inline constexpr int kMaxRanks = 256;
inline constexpr uint32_t kRing = 64;         // operations in flight per rank; later ones queue at their rank
inline constexpr uint32_t kEpochs = 64;       // how far one rank may run ahead of another, in scope boundaries
inline constexpr size_t kInlineBytes = 4096;  // a payload up to this travels in its header: one synchronisation
inline constexpr size_t kReasonBytes = 1024;
inline constexpr uint32_t kStagingSlots = 4;  // chunks under way per rank
inline constexpr size_t kChunkBytes = 512 << 10;
inline constexpr size_t kStagingBytes = kStagingSlots * kChunkBytes;
inline constexpr uint64_t kPieceBytes = 256 << 10;  // of a shard: what a rank takes on at once

using Key = uint64_t;
inline constexpr int kCountBits = 36;  // 68 billion operations in an epoch, 134 million scopes in a group
inline constexpr Key make_key(uint64_t epoch, uint64_t count) { return (epoch << kCountBits) | count; }
inline constexpr uint64_t epoch_of(Key key) { return key >> kCountBits; }
inline constexpr uint64_t count_of(Key key) { return key & ((Key{1} << kCountBits) - 1); }

/// Where a rank's data lies: nowhere (it is not read by peers), in the header, at an address that peers can reach, or
/// in chunks of its staging slots.
enum class Placement : uint8_t { none, in_header, direct, staged };

/// What a rank asks for. Written by its rank before `posted` passes its key; valid until all ranks passed it.
struct Header {
  Placement placement;
  bool receive;      // the rank wants the result in its tensor
  uint64_t bytes;    // of the rank's data
  uint64_t address;  // for Placement::direct
  Request request;   // last: but for its sizes, a header fits into one cache line
};
inline constexpr size_t kShortHeaderBytes = offsetof(Header, request) + offsetof(Request, sizes);
static_assert(kShortHeaderBytes <= 64);

struct alignas(64) Entry {
  Header header;
  // The rank's shard of an operation whose data all ranks reach, in pieces. Zeroed by the rank before `posted` passes
  // the key; added to by every rank.
  alignas(64) std::atomic<uint32_t> claimed;  // by ranks that came for a piece; more than there are when all are taken
  std::atomic<uint32_t> reduced;
  alignas(64) std::byte payload[kInlineBytes];
};

/// How a rank ended an epoch. Written by its rank before `posted` passes the epoch.
struct EpochEnd {
  ScopeEnd end;
  uint64_t count;  // operations it issued
  char reason[kReasonBytes];
};

/// Why a group ended. Written once by its rank before ControlBlock::ended names the rank.
enum class FailureKind : uint32_t { none, aborted, lost, timeout, mismatch };
struct FailureRecord {
  FailureKind kind;
  int32_t worker;  // for FailureKind::lost
  char text[2 * kReasonBytes];
};

/// What a rank sleeps for. Room, where ranks have passed operations, wakes only those that wait for it.
using Sleep = uint32_t;
inline constexpr Sleep kAwake = 0;
inline constexpr Sleep kAsleep = 1;
inline constexpr Sleep kAsleepForRoom = 2;

struct RankSlot {
  // Written by the rank, read by all: what peers wait for, in one cache line, and the rest.
  alignas(64) std::atomic<Key> posted;  // operations whose header is visible
  std::atomic<Key> staged;              // ticks whose staged chunk is visible; see Operation
  std::atomic<Key> reduced;             // ticks for which it did its part
  std::atomic<uint32_t> left;           // 1 once it closed in good order
  alignas(64) std::atomic<Key> passed;  // operations whose headers it will not read again
  std::atomic<Key> at_work;             // 1 + the operation of which it reduces a piece; 0: none
  std::atomic<uint64_t> stores_begun;   // times it began to store into what peers read; see PeerMemory::begin_stores
  // The word a sleeping rank waits on, a Sleep: set by the rank, to kAwake by whoever wakes it.
  alignas(64) std::atomic<uint32_t> sleeping;
  alignas(64) FailureRecord failure;
  EpochEnd epochs[kEpochs];
  Entry ring[kRing];
};

struct ControlBlock {
  alignas(64) std::atomic<uint32_t> ended;  // 0, else 1 + the rank whose FailureRecord ended the group
  RankSlot slots[];                         // one per rank

  static constexpr size_t bytes_for(int size) {
    return sizeof(ControlBlock) + sizeof(RankSlot) * static_cast<size_t>(size);
  }
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);
static_assert(sizeof(ControlBlock) % 64 == 0);

}  // namespace muster::comm::shared
