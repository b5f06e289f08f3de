// Batches of a pass over a loader, which server 0 deals to workers.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "server/protocol/messages/bounds.h"
#include "server/protocol/wire.h"

namespace muster::server {

inline constexpr size_t kMaxBatches = size_t{1} << 16;
inline constexpr size_t kMaxLoaders = 4096;
inline constexpr size_t kMaxPasses = 256;

/// A pass over the job's `loader`-th prepared loader.
struct PassId {
  uint32_t loader = 0;
  uint64_t epoch = 0;

  static constexpr auto kFields = fields(&PassId::loader, &PassId::epoch);

  bool operator==(const PassId&) const = default;
};

/// A batch of a pass over the job's `loader`-th prepared loader.
struct BatchId {
  uint32_t loader = 0;
  uint64_t epoch = 0;
  uint64_t batch = 0;

  static constexpr auto kFields = fields(&BatchId::loader, &BatchId::epoch, &BatchId::batch);

  auto operator<=>(const BatchId&) const = default;
};

/// Asks server 0 for a batch of a pass.
struct Deal {
  static constexpr uint16_t kType = 26;
  uint64_t request = 0;  ///< ascends; a repeated one is answered as before
  uint32_t loader = 0;
  uint64_t epoch = 0;
  uint64_t batches = 0;  ///< of the pass
  bool ends = false;     ///< the worker leaves the pass: what it was dealt and has not finished goes to others
  std::vector<uint64_t> finished;  ///< of the pass, without a step

  static constexpr auto kFields = fields(&Deal::request, &Deal::loader, &Deal::epoch, &Deal::batches, &Deal::ends,
                                         bounded(&Deal::finished, kMaxNumbers));
};

struct Dealt {
  static constexpr uint16_t kType = 27;
  enum class State : uint8_t {
    dealt,  ///< `batch` is the worker's
    none,   ///< all are dealt, but not finished; ask again
    ended   ///< all are finished
  };
  State state = State::ended;
  uint64_t batch = 0;

  static constexpr auto kFields = fields(&Dealt::state, &Dealt::batch);
};
template <>
struct LastOf<Dealt::State> {
  static constexpr auto kValue = Dealt::State::ended;
};

/// How far a pass is: the batches below `next` are finished, but for those `undone`.
struct PassProgress {
  uint32_t loader = 0;
  uint64_t epoch = 0;
  uint64_t batches = 0;  ///< of the pass; 0: not known
  uint64_t next = 0;
  std::vector<uint64_t> undone = {};  ///< ascending

  static constexpr auto kFields = fields(&PassProgress::loader, &PassProgress::epoch, &PassProgress::batches,
                                         &PassProgress::next, bounded(&PassProgress::undone, kMaxNumbers));

  bool operator==(const PassProgress&) const = default;
};

/// Asks server 0 for the passes that it knows. What is in no step yet counts as undone.
struct AskPasses {
  static constexpr uint16_t kType = 42;
  static constexpr auto kFields = fields();
};

struct Passes {
  static constexpr uint16_t kType = 43;
  std::vector<PassProgress> passes;

  static constexpr auto kFields = fields(bounded(&Passes::passes, kMaxPasses));
};

}  // namespace muster::server
