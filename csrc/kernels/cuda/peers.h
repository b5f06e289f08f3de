// What one block of one rank does in peer_reduce and reduce_step; tests run several rounds of it in one launch.
// Nothing here may be read through the read-only cache: peers write what the same kernel reads.
#pragma once

#include "kernels/cuda/step_chunk.h"
#include "kernels/cuda/sums.h"

namespace muster::kernels::cuda {

inline constexpr unsigned kPeerThreads = 256;
static_assert(kPeerThreads == kWindowThreads && kPeerThreads == kStepThreads);

// --- barriers ------------------------------------------------------------------------------------------------------

/// One block's place among the peers, and how many barriers it has passed.
struct Place {
  int rank;
  unsigned block;
  uint32_t passed;
};

/// Of a block: whether it has given up. Set by any of its threads, once.
MUSTER_DEVICE uint32_t& given_up() {
  MUSTER_SHARED uint32_t flag;
  return flag;
}

MUSTER_DEVICE Place enter_peers(const Peers& peers) {
  if (threadIdx.x == 0) given_up() = 0;  // no thread looks before its first barrier
  Place place;
  place.rank = peers.rank == kAllRanks ? static_cast<int>(blockIdx.x / peers.blocks) : peers.rank;
  place.block = blockIdx.x % peers.blocks;
  place.passed = peers.signals[place.rank]->passed[place.block];
  return place;
}

/// For the next launch, whatever its number of blocks.
MUSTER_DEVICE void leave_peers(const Peers& peers, const Place& place) {
  for (unsigned b = place.block + threadIdx.x * peers.blocks; b < kMaxPeerBlocks; b += kPeerThreads * peers.blocks) {
    peers.signals[place.rank]->passed[b] = place.passed;
  }
}

enum class Meeting { same_block, all_blocks };

/// What blocks wrote before it, those that they meet (the same block of every rank, or all blocks of all) read after.
/// False, for all threads of the block, where this rank is to stop.
template <Meeting kMeeting>
MUSTER_DEVICE bool peer_barrier(const Peers& peers, Place& place) {
  ++place.passed;
  __syncthreads();
  const unsigned size = static_cast<unsigned>(peers.size);
  if (threadIdx.x < size) {
    uint32_t* flag = &peers.signals[threadIdx.x]->arrived[place.block][place.rank];
    MUSTER_MUTATE(peer_relaxed_release, store_release_system(flag, place.passed),
                  store_relaxed_system(flag, place.passed));
  }
  const unsigned first = kMeeting == Meeting::same_block ? place.block : 0;
  const unsigned last = kMeeting == Meeting::same_block ? place.block + 1 : peers.blocks;
  for (unsigned i = first * size + threadIdx.x; i < last * size; i += kPeerThreads) {
    uint32_t* flag = &peers.signals[place.rank]->arrived[i / size][i % size];
    while (
        static_cast<int32_t>(MUSTER_MUTATE(peer_relaxed_acquire, load_acquire_system(flag), load_relaxed_system(flag)) -
                             place.passed) < 0) {
      if (load_acquire_system(&peers.signals[place.rank]->stop) != 0) {
        given_up() = 1;
        break;
      }
      spin_pause();
    }
  }
  MUSTER_MUTATE(peer_barrier_awaited_by_few, __syncthreads(), void());
  return given_up() == 0;
}

// --- the sum over peers ----------------------------------------------------------------------------------------------

/// ((0+1)+(2+3))+..., kernels.h's tree.
template <int kCount, class T>
MUSTER_DEVICE T tree_sum(T (&x)[kCount]) {
  MUSTER_UNROLL
  for (int width = 1; width < kCount; width *= 2) {
    MUSTER_UNROLL
    for (int i = 0; i + width < kCount; i += 2 * width) x[i] = x[i] + x[i + width];
  }
  return x[0];
}

/// Elements [i, i + kN) of all sources, into all destinations.
template <int kCount, int kN, class S>
MUSTER_DEVICE void sum_pack(S* const* sources, S* const* destinations, int num_destinations, uint64_t i) {
  Pack<S, kN> x[kCount];
  MUSTER_UNROLL
  for (int r = 0; r < kCount; ++r) x[r] = load<kN>(sources[r] + i);
  MUSTER_UNROLL
  for (int k = 0; k < kN; ++k) {
    decltype(widen(S{})) wide[kCount];
    MUSTER_UNROLL
    for (int r = 0; r < kCount; ++r) wide[r] = widen(x[r].v[k]);
    x[0].v[k] = kCount == 1 ? x[0].v[k] : narrow<S>(tree_sum(wide));
  }
  for (int r = 0; r < num_destinations; ++r) store(destinations[r] + i, x[0]);
}

/// The vectors first, first + stride, ... of n elements.
template <int kCount, class S>
MUSTER_DEVICE void sum_vectors(S* const* sources, S* const* destinations, int num_destinations, uint64_t n,
                               uint64_t first, uint64_t stride) {
  constexpr int kN = static_cast<int>(kVectorBytes / sizeof(S));
  uint64_t i = first * kN;
  for (; i + kN <= n; i += stride * kN) sum_pack<kCount, kN>(sources, destinations, num_destinations, i);
  const uint64_t end = MUSTER_MUTATE(peer_short_tail, n, n % kN == 0 ? n : n - 1);
  for (; i < end; ++i) sum_pack<kCount, 1>(sources, destinations, num_destinations, i);
}

template <class S>
struct PeerReduction {
  Peers peers;
  S* buffers[kMaxPeers];
  uint64_t n;
};

/// One reduction. Block b of rank r adds every vector of its own, for all; after it block b of any rank may read or
/// write what block b of any rank added.
template <int kCount, class S>
MUSTER_DEVICE void peer_reduce_round(const PeerReduction<S>& a, Place& place) {
  if (!peer_barrier<Meeting::same_block>(a.peers, place)) return;
  const uint64_t first = (uint64_t{place.block} * kCount + place.rank) * kPeerThreads + threadIdx.x;
  sum_vectors<kCount>(a.buffers, a.buffers, kCount, a.n, first, uint64_t{a.peers.blocks} * kCount * kPeerThreads);
  MUSTER_MUTATE(peer_no_closing_barrier, peer_barrier<Meeting::same_block>(a.peers, place), true);
}

// --- reduce_step -----------------------------------------------------------------------------------------------------

struct PeerStep {
  Peers peers;
  ReduceStep step;
};

/// A chunk of a segment: its first element, and how many.
struct Extent {
  uint64_t first;
  uint32_t n;
};

MUSTER_DEVICE Extent extent_of(const PeerSegment& segment, uint32_t index) {
  const uint64_t first = uint64_t{index} * kTile;
  return {first, static_cast<uint32_t>(segment.n - first < kTile ? segment.n - first : kTile)};
}

/// Sums the gradients of this rank's tiles, a warp a tile, and gives every rank their partials.
template <int kCount, class T>
MUSTER_DEVICE void reduce_tiles(const PeerStep& a, const Place& place) {
  constexpr unsigned kWarps = kPeerThreads / kLanes;
  const PeerState& state = a.step.state[place.rank];
  const unsigned stride = a.peers.blocks * kWarps;
  for (uint32_t c = place.block * kWarps + threadIdx.x / kLanes; c < state.num_chunks; c += stride) {
    const Chunk chunk = state.chunks[c];
    const PeerSegment& segment = state.segments[chunk.item];
    const Extent extent = extent_of(segment, chunk.index);
    const uint64_t first = segment.gradient + extent.first;
    T* own = static_cast<T*>(a.step.buffers[place.rank].gradients) + first;
    const double sum = tile_squares(extent.n, [&](uint32_t i) {
      T x[kCount];
      MUSTER_UNROLL
      for (int r = 0; r < kCount; ++r) x[r] = static_cast<const T*>(a.step.buffers[r].gradients)[first + i];
      return own[i] = tree_sum(x);
    });
    if (threadIdx.x % kLanes != 0) continue;
    for (int r = 0; r < kCount; ++r) a.step.buffers[r].partials[segment.partial + chunk.index] = sum;
  }
}

template <int kCount>
MUSTER_DEVICE void reduce_tail(const PeerStep& a, const Place& place) {
  const uint64_t stride = uint64_t{a.peers.blocks} * kPeerThreads;
  for (uint64_t i = uint64_t{place.block} * kPeerThreads + threadIdx.x; i < a.step.tail_size; i += stride) {
    double x[kCount];
    MUSTER_UNROLL
    for (int r = 0; r < kCount; ++r) x[r] = a.step.buffers[r].tail[i];
    a.step.buffers[place.rank].tail_sum[i] = tree_sum(x);
  }
}

template <int kCount, class T>
MUSTER_DEVICE void reduce_all(const PeerStep& a, const Place& place) {
  reduce_tiles<kCount, T>(a, place);
  reduce_tail<kCount>(a, place);
}

/// Calls the version for this number of ranks: a count known to the compiler keeps sums in registers.
template <class T>
MUSTER_DEVICE void reduce_all(const PeerStep& a, const Place& place) {
  switch (a.peers.size) {
    case 1:
      return reduce_all<1, T>(a, place);
    case 2:
      return reduce_all<2, T>(a, place);
    case 3:
      return reduce_all<3, T>(a, place);
    case 4:
      return reduce_all<4, T>(a, place);
    case 5:
      return reduce_all<5, T>(a, place);
    case 6:
      return reduce_all<6, T>(a, place);
    case 7:
      return reduce_all<7, T>(a, place);
    default:
      return reduce_all<8, T>(a, place);
  }
}

/// Read from this rank and stored to every one: the parameter, or, beside the master copy of this rank, the one of low
/// precision.
template <class T>
struct PeersParameter {
  const PeerStep& a;
  int rank;
  T* master;  // the chunk's first element, or null
  uint64_t first;
  DType dtype;

  MUSTER_MEMBER T* parameter_of(int r) const { return static_cast<T*>(a.step.buffers[r].parameters) + first; }
  MUSTER_MEMBER void* low_of(int r) const { return a.step.buffers[r].low[dtype == DType::bf16 ? 0 : 1]; }

  template <int kN>
  MUSTER_MEMBER bool is_aligned() const {
    return first % kN == 0 && cuda::is_aligned<T, kN>(master != nullptr ? master : parameter_of(rank));
  }

  template <int kN>
  MUSTER_MEMBER Pack<T, kN> load(uint32_t i) const {
    if (master == nullptr) return cuda::load<kN>(parameter_of(rank) + i);
    if (MUSTER_MUTATE(peers_read_the_copy_alone, false, true)) return cuda::load<kN>(master + i);
    return load_master<kN>(master + i, dtype, low_of(rank), first + i);
  }

  template <int kN>
  MUSTER_MEMBER void store(uint32_t i, const Pack<T, kN>& values) const {
    if (master != nullptr) {
      cuda::store(master + i, values);
      for (int r = 0; r < a.peers.size; ++r) store_low(dtype, low_of(r), first + i, values);
    } else {
      for (int r = 0; r < a.peers.size; ++r) cuda::store(parameter_of(r) + i, values);
    }
  }
};

/// Steps this rank's segments; a block takes a run of chunks.
template <class Optimizer, class T>
MUSTER_DEVICE void step_tiles(const PeerStep& a, const Place& place, const StepScalars& closed) {
  MUSTER_SHARED SegmentFactors<Optimizer, T> factors;
  const PeerState& state = a.step.state[place.rank];
  const PeerBuffers& own = a.step.buffers[place.rank];
  const auto* groups = static_cast<const typename Optimizer::Group*>(state.groups);
  const uint32_t begin = static_cast<uint32_t>(uint64_t{state.num_chunks} * place.block / a.peers.blocks);
  const uint32_t end = static_cast<uint32_t>(uint64_t{state.num_chunks} * (place.block + 1) / a.peers.blocks);
  for (uint32_t c = begin; c < end; ++c) {
    const Chunk chunk = state.chunks[c];
    const PeerSegment& segment = state.segments[chunk.item];
    if (c == begin || chunk.item != state.chunks[c - 1].item) {
      share_factors<Optimizer, T>(factors, closed, own.tail_sum + a.step.used + segment.index, groups[segment.group],
                                  [&] { return static_cast<uint64_t>(state.steps[segment.index] + 1); });
    }
    const Extent extent = extent_of(segment, chunk.index);
    T* master = segment.master == nullptr ? nullptr : static_cast<T*>(segment.master) + extent.first;
    const uint64_t first = segment.parameter + extent.first;
    ChunkElements<T> elements;
    elements.n = extent.n;
    elements.gradient = static_cast<T*>(own.gradients) + segment.gradient + extent.first;
    for (int k = 0; k < 3; ++k) {
      elements.state[k] = segment.state[k] == nullptr ? nullptr : static_cast<T*>(segment.state[k]) + extent.first;
    }
    step_chunk<Optimizer>(elements, factors, a.step.keep_gradient,
                          PeersParameter<T>{a, place.rank, master, first, segment.parameter_dtype});
  }
}

/// One window. Its scalars and step counts change at the very end, when no block reads them any more.
template <class Optimizer, class T>
MUSTER_DEVICE void reduce_step_round(const PeerStep& a, Place& place) {
  const PeerState& state = a.step.state[place.rank];
  const PeerBuffers& own = a.step.buffers[place.rank];
  if (!peer_barrier<Meeting::all_blocks>(a.peers, place)) return;
  reduce_all<T>(a, place);
  if (!MUSTER_MUTATE(reduce_step_no_middle_barrier, peer_barrier<Meeting::all_blocks>(a.peers, place), true)) return;
  const double total = add_partials(own.partials, a.step.num_partials, a.step.options.norm_type);
  const StepScalars closed = close_window(total, own.tail_sum, a.step.options, state.scalars, state.scale);
  step_tiles<Optimizer, T>(a, place, closed);
  if (!MUSTER_MUTATE(reduce_step_no_closing_barrier, peer_barrier<Meeting::all_blocks>(a.peers, place), true)) return;
  if (place.block != 0) return;
  advance_window(closed, own.tail_sum + a.step.used, state.steps, a.step.num_parameters, a.step.options, state.scalars,
                 state.scale);
}

}  // namespace muster::kernels::cuda
