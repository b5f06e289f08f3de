#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "comm/shared/group.h"
#include "device/kernel_dtype.h"

namespace muster::comm::shared {
namespace {

constexpr uint64_t kShardAlignment = 64;
constexpr uint64_t kAloneBytes = 1 << 20;  // of all ranks together

at::ScalarType dtype_of(const Operation& op) { return static_cast<at::ScalarType>(op.header.request.dtype); }

uint64_t rounds_for(uint64_t bytes) { return std::max<uint64_t>(1, (bytes + kChunkBytes - 1) / kChunkBytes); }

struct Range {
  uint64_t first = 0;
  uint64_t last = 0;
  bool empty() const { return first >= last; }
};

// The bytes of a rank's data that round `round` moves. Data that need not be staged may be larger than the chunks of
// all rounds; the last round takes the rest.
Range range_of(const Operation& op, uint64_t bytes, uint32_t round) {
  const bool is_last = round + 1 == op.rounds;
  return {std::min<uint64_t>(bytes, round * kChunkBytes),
          is_last ? bytes : std::min<uint64_t>(bytes, (round + 1) * kChunkBytes)};
}

// Rank number `part` of `parts` reduces this of a range of elements of the given size.
Range shard_of(Range range, uint64_t element, uint64_t part, uint64_t parts) {
  const uint64_t unit = std::max(kShardAlignment, element);
  const uint64_t units = (range.last - range.first + unit - 1) / unit;
  return {std::min(range.last, range.first + units * part / parts * unit),
          std::min(range.last, range.first + units * (part + 1) / parts * unit)};
}

Range shard_of(const Operation& op, size_t part) {
  return shard_of({0, op.header.bytes}, c10::elementSize(dtype_of(op)), part, op.present.size());
}

uint32_t pieces_of(Range shard) {
  return static_cast<uint32_t>((shard.last - shard.first + kPieceBytes - 1) / kPieceBytes);
}

size_t part_of(const Operation& op, int rank) {
  return static_cast<size_t>(std::find(op.present.begin(), op.present.end(), rank) - op.present.begin());
}

std::byte* bytes_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); }

}  // namespace

// --- posting and matching ------------------------------------------------------------------------------------------

// `left` is read first: what a rank posted before it left is then visible.
Group::PeerState Group::state_of(int peer, Key key) noexcept {
  RankSlot& other = slot(peer);
  const bool has_left = other.left.load() != 0;
  const Key posted = other.posted.load();
  if (epoch_of(posted) <= epoch_of(key)) {
    if (posted > key) return PeerState::posted;
    return has_left ? PeerState::left : PeerState::missing;
  }
  const EpochEnd& record = other.epochs[epoch_of(key) % kEpochs];
  if (record.count > count_of(key)) return PeerState::posted;
  switch (record.end) {
    case ScopeEnd::absent:
      return PeerState::absent;
    case ScopeEnd::failed:
      return PeerState::failed;
    default:
      return PeerState::finished;
  }
}

bool Group::post(Operation& op) {
  const uint64_t place = count_of(op.key) % kRing;
  const Key occupant = ring_occupants_[place];
  if (occupant != 0 && !all_passed(occupant)) return false;
  ring_occupants_[place] = op.key + 1;
  Entry& entry = mine().ring[place];
  std::memcpy(&entry.header, &op.header,
              kShortHeaderBytes + static_cast<size_t>(op.header.request.ndim) * sizeof(int64_t));
  entry.claimed.store(0, std::memory_order_relaxed);
  entry.reduced.store(0, std::memory_order_relaxed);
  if (op.header.placement == Placement::in_header && op.header.bytes > 0) {
    std::memcpy(entry.payload, op.tensor.const_data_ptr(), op.header.bytes);
  }
  op.state = Operation::State::posted;
  mine().posted.store(op.key + 1);
  op.is_last = all_posted(op.key);  // of ranks that post at once, one at least sees the others
  return true;
}

bool Group::resolve(Operation& op) {
  bool is_complete = true;
  for (int p = 0; p < size_; ++p) {
    if (p == rank_) continue;
    switch (const PeerState state = state_of(p, op.key)) {
      case PeerState::posted:
      case PeerState::absent:
        break;
      case PeerState::missing:
        is_complete = false;
        break;
      default:
        return fail_unmatched(op, p, state);
    }
  }
  if (!is_complete) return false;
  op.entries.assign(size_, nullptr);
  for (int p = 0; p < size_; ++p) {
    if (p != rank_ && state_of(p, op.key) == PeerState::absent) continue;
    op.entries[p] = &slot(p).ring[count_of(op.key) % kRing];
    op.present.push_back(p);
  }
  const int first = op.present.front();
  for (const int p : op.present) {
    const std::string mismatch =
        describe_mismatch(first, op.entries[first]->header.request, p, op.entries[p]->header.request);
    if (mismatch.empty()) continue;
    // All that take part see it alike, and move no data.
    if (op.header.request.scope != 0) {
      scope_.error = std::make_exception_ptr(LayoutMismatch(mismatch));
      fail_alone(op, scope_.error);
    } else {
      fail(FailureKind::mismatch, -1, mismatch);
    }
    return true;
  }
  start(op);
  return true;
}

// Within a scope the operation alone fails; outside, the ranks have lost step.
bool Group::fail_unmatched(Operation& op, int peer, PeerState state) {
  const std::string what = describe(op.header.request);
  if (state == PeerState::left) {
    fail_left(op, peer);
  } else if (state == PeerState::failed) {
    const std::string reason = slot(peer).epochs[epoch_of(op.key) % kEpochs].reason;
    fail_alone(op, failed_in_scope(space_->worker_of(peer), peer, describe_peer(peer), what, reason));
  } else {
    const std::string text = describe_peer(peer) + " did not take part in " + what + ", which rank " +
                             std::to_string(space_->name_of(rank_)) + " issued as number " +
                             std::to_string(count_of(op.key)) +
                             "; all ranks must issue the same collectives in the same order";
    if (op.header.request.scope == 0) {
      fail(FailureKind::mismatch, -1, text);
    } else {
      fail_alone(op, std::make_exception_ptr(LayoutMismatch(text)));
    }
  }
  return true;
}

// The group goes on.
void Group::fail_alone(Operation& op, std::exception_ptr error) {
  if (op.staged > 0) staging_uses_[count_of(op.first_tick) % kStagingSlots].holds_result = false;
  op.error = std::move(error);
  op.state = Operation::State::finished;
}

void Group::fail_left(const Operation& op, int peer) {
  const int worker = space_->worker_of(peer);
  fail(FailureKind::lost, worker,
       describe_peer(peer) + " left while rank " + std::to_string(space_->name_of(rank_)) + " waited for it in " +
           describe(op.header.request) +
           ": it closed its strategy, or shut down, before the call that this rank waits in, or after an error, which "
           "its log then shows. All workers must make the same steps and calls before they close");
}

void Group::start(Operation& op) {
  op.state = Operation::State::running;
  bool all_inline = true;
  op.is_shared = op.header.request.kind == OpKind::all_reduce;
  op.rounds = 1;
  for (const int p : op.present) {
    const Header& header = op.entries[p]->header;
    if (header.placement == Placement::direct || header.placement == Placement::staged) all_inline = false;
    if (header.placement != Placement::direct) op.is_shared = false;
    if (header.placement == Placement::staged) {
      op.rounds = std::max(op.rounds, static_cast<uint32_t>(rounds_for(header.bytes)));
    }
  }
  if (op.header.request.kind == OpKind::all_gather) {
    op.gathered.resize(size_);
    for (const int p : op.present) {
      const Request& request = op.entries[p]->header.request;
      op.gathered[p] = at::empty(at::IntArrayRef(request.sizes, request.ndim), op.tensor.options());
    }
  }
  if (all_inline) {
    run_round(op, 0);
    op.rounds = 0;
    op.state = Operation::State::finished;
  }
  if (op.is_shared) op.rounds = 0;
  ticks_.count += op.rounds;
}

// --- moving data ---------------------------------------------------------------------------------------------------

const std::byte* Group::data_of(const Operation& op, int peer, uint32_t round, uint64_t byte) const noexcept {
  const Entry& entry = *op.entries[peer];
  switch (entry.header.placement) {
    case Placement::in_header:
      return entry.payload + byte;
    case Placement::direct:
      return space_->at(peer, entry.header.address) + byte;
    default: {
      const uint64_t place = count_of(op.first_tick + round) % kStagingSlots;
      return space_->staging(peer) + place * kChunkBytes + (byte - round * kChunkBytes);
    }
  }
}

bool Group::staging_is_free(Key tick) noexcept {
  const StagingUse& use = staging_uses_[count_of(tick) % kStagingSlots];
  if (!use.used) return true;
  if (use.holds_result) return false;
  for (int p = 0; p < size_; ++p) {
    if (p == rank_) continue;
    if (slot(p).reduced.load() <= use.tick && slot(p).passed.load() <= use.operation) return false;
  }
  return true;
}

// Before the operation is matched only its first chunk is known to be wanted.
bool Group::stage(Operation& op) {
  if (op.header.placement != Placement::staged) return false;
  const uint32_t limit = op.state == Operation::State::running ? op.rounds : 1;
  bool moved = false;
  while (op.staged < limit) {
    const Key tick = op.first_tick + op.staged;
    if (!staging_is_free(tick)) break;
    const uint64_t first = std::min<uint64_t>(op.header.bytes, op.staged * kChunkBytes);
    const uint64_t last = std::min<uint64_t>(op.header.bytes, (op.staged + 1) * kChunkBytes);
    const uint64_t place = count_of(tick) % kStagingSlots;
    std::memcpy(space_->staging(rank_) + place * kChunkBytes, bytes_of(op.tensor) + first, last - first);
    staging_uses_[place] = {op.key, tick, true, true};
    ++op.staged;
    mine().staged.store(tick + 1);
    wake_peers();
    moved = true;
  }
  return moved;
}

// One round, if its data are there.
bool Group::reduce(Operation& op) {
  if (op.reduced == op.rounds) return false;
  const Key tick = op.first_tick + op.reduced;
  for (const int p : op.present) {
    if (op.entries[p]->header.placement != Placement::staged) continue;
    const bool has_left = slot(p).left.load() != 0;
    if (slot(p).staged.load() > tick) continue;
    if (has_left) fail_left(op, p);
    return has_left;
  }
  run_round(op, op.reduced);
  ++op.reduced;
  mine().reduced.store(tick + 1);
  wake_peers();
  return true;
}

// Finishes rounds that all peers have done their part of.
bool Group::complete(Operation& op) {
  const bool is_read_by_peers =
      op.header.placement != Placement::none && op.header.request.kind != OpKind::visit;  // whose readers may be late
  const bool copies_out =
      op.header.placement == Placement::staged && op.header.receive && op.header.request.kind == OpKind::all_reduce;
  bool moved = false;
  while (op.completed < op.reduced) {
    const Key tick = op.first_tick + op.completed;
    for (const int p : op.present) {
      if (!is_read_by_peers || p == rank_) continue;
      const bool has_left = slot(p).left.load() != 0;
      if (slot(p).reduced.load() > tick) continue;
      if (has_left) fail_left(op, p);
      return moved || has_left;
    }
    if (copies_out) {
      const Range range = range_of(op, op.header.bytes, op.completed);
      std::memcpy(bytes_of(op.tensor) + range.first, data_of(op, rank_, op.completed, range.first),
                  range.last - range.first);
    }
    if (op.header.placement == Placement::staged) staging_uses_[count_of(tick) % kStagingSlots].holds_result = false;
    ++op.completed;
    moved = true;
  }
  if (op.completed == op.rounds) op.state = Operation::State::finished;
  return moved;
}

// --- sharing a reduction -------------------------------------------------------------------------------------------

// Less work than waking a rank and waiting for it.
bool Group::is_small(const Operation& op) const noexcept { return op.header.bytes * op.present.size() <= kAloneBytes; }

bool Group::takes_over(const Operation& op, int peer) noexcept {
  return is_idle_ || (is_small(op) && slot(peer).sleeping.load() != kAwake);
}

bool Group::share(Operation& op) {
  const size_t parts = op.present.size();
  const size_t own = part_of(op, rank_);
  bool moved = reduce_pieces(op, own);
  for (size_t part = (own + 1) % parts; part != own; part = (part + 1) % parts) {
    if (takes_over(op, op.present[part])) moved |= reduce_pieces(op, part);
  }
  for (size_t part = 0; part < parts; ++part) {
    if (op.entries[op.present[part]]->reduced.load() < pieces_of(shard_of(op, part))) return moved;
  }
  op.state = Operation::State::finished;
  if (moved) wake_peers();
  return true;
}

// Pieces of a shard until all are taken.
bool Group::reduce_pieces(Operation& op, size_t part) {
  const Range shard = shard_of(op, part);
  const uint32_t pieces = pieces_of(shard);
  Entry& entry = *op.entries[op.present[part]];
  bool moved = false;
  while (entry.claimed.load(std::memory_order_relaxed) < pieces) {
    const uint32_t piece = entry.claimed.fetch_add(1, std::memory_order_relaxed);
    if (piece >= pieces) break;
    mine().at_work.store(op.key + 1, std::memory_order_relaxed);
    const uint64_t first = shard.first + piece * kPieceBytes;
    reduce_range(op, 0, first, std::min(first + kPieceBytes, shard.last), 0);
    entry.reduced.fetch_add(1);
    moved = true;
  }
  if (moved) mine().at_work.store(0, std::memory_order_relaxed);
  return moved;
}

// --- rounds --------------------------------------------------------------------------------------------------------

// This rank's part of a round.
void Group::run_round(Operation& op, uint32_t round) {
  const Request& request = op.header.request;
  const uint64_t element = c10::elementSize(dtype_of(op));
  const Range range = range_of(op, op.header.bytes, round);
  switch (request.kind) {
    case OpKind::all_reduce: {
      const bool is_inline = op.header.placement == Placement::in_header;
      const Range shard = is_inline ? range : shard_of(range, element, part_of(op, rank_), op.present.size());
      reduce_range(op, round, shard.first, shard.last, 0);
      break;
    }
    case OpKind::reduce_scatter: {
      const uint64_t part = op.output.nbytes();
      const uint64_t origin = part * static_cast<uint64_t>(rank_);
      reduce_range(op, round, std::max(range.first, origin), std::min(range.last, origin + part), origin);
      break;
    }
    case OpKind::broadcast: {
      if (request.source == rank_ || op.entries[request.source] == nullptr || range.empty()) break;
      std::memcpy(bytes_of(op.tensor) + range.first, data_of(op, request.source, round, range.first),
                  range.last - range.first);
      break;
    }
    case OpKind::all_gather:
      for (const int p : op.present) {
        const Range theirs = range_of(op, op.entries[p]->header.bytes, round);
        if (theirs.empty()) continue;
        std::memcpy(bytes_of(op.gathered[p]) + theirs.first, data_of(op, p, round, theirs.first),
                    theirs.last - theirs.first);
      }
      break;
    case OpKind::visit: {
      std::array<void*, kMaxRanks> data{};
      for (const int p : op.present) data[p] = const_cast<std::byte*>(data_of(op, p, round, 0));
      op.visit(data.data());
      break;
    }
    case OpKind::barrier:
      break;
  }
}

// Reduces the bytes [first, last) of all ranks' data: into every receiver's data (all_reduce; a payload in the header
// into this rank's tensor alone), or into `output`, which begins at byte `origin` (reduce_scatter).
void Group::reduce_range(Operation& op, uint32_t round, uint64_t first, uint64_t last, uint64_t origin) {
  if (first >= last) return;
  std::array<const void*, kMaxRanks> sources;
  std::array<void*, kMaxRanks> destinations;
  int num_destinations = 0;
  std::fill_n(sources.begin(), size_, nullptr);
  const bool is_all_reduce = op.header.request.kind == OpKind::all_reduce;
  const bool is_inline = op.header.placement == Placement::in_header;
  for (const int p : op.present) {
    const std::byte* data = data_of(op, p, round, first);
    sources[p] = data;
    if (is_all_reduce && !is_inline && op.entries[p]->header.receive)
      destinations[num_destinations++] = const_cast<std::byte*>(data);
  }
  if (!is_all_reduce) {
    destinations[num_destinations++] = bytes_of(op.output) + (first - origin);
  } else if (is_inline && op.header.receive) {
    destinations[num_destinations++] = bytes_of(op.tensor) + first;
  }
  const auto reduction = static_cast<ReduceOp>(op.header.request.reduction);
  const kernels::Reduction kind = reduction == ReduceOp::min   ? kernels::Reduction::min
                                  : reduction == ReduceOp::max ? kernels::Reduction::max
                                                               : kernels::Reduction::sum;
  kernels::tree_reduce(kernel_dtype(dtype_of(op)), kind, sources.data(), size_, destinations.data(), num_destinations,
                       (last - first) / c10::elementSize(dtype_of(op)));
}

}  // namespace muster::comm::shared
