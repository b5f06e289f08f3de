// The CUDA versions of kernels.h: the same meaning and the same bits (of a NaN, only that it is one). Every function
// enqueues on a stream of the current device, waits for nothing, allocates nothing, throws nothing and can be captured
// in a graph. Tables and scalars lie in the device's memory and stay there until the stream has passed the launch;
// what changes between replays of a graph (hyperparameters, steps, scalars) is read from there.
// Where muster was built without CUDA every function returns not_built (no_cuda.cpp).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"
#include "kernels/norm_sum.h"

struct CUstream_st;

namespace muster::kernels::cuda {

/// A cudaStream_t.
using Stream = CUstream_st*;

/// How an enqueuing ended.
struct [[nodiscard]] Status {
  enum class Code : uint8_t {
    ok,
    not_built,  ///< this build has no CUDA
    invalid,    ///< an argument is out of range
    failed      ///< the machine refused the launch
  };

  Code code = Code::ok;
  const char* problem = nullptr;  ///< what is wrong, in static storage; null when ok

  bool ok() const noexcept { return code == Code::ok; }
};

/// Whether this build can launch anything.
bool is_built() noexcept;

/// Ok where this build has code for the current device, whose compute capability is found (90 for 9.0); not_built where
/// it has none.
Status check_code(int& capability) noexcept;

/// Whether what is enqueued on the stream is captured into a graph.
bool is_capturing(Stream stream) noexcept;

// --- tables --------------------------------------------------------------------------------------------------------

/// kTile elements of one item (a pack slot or a segment), the last one's fewer: what one block or warp works on at a
/// time. A chunk table lists the chunks of all items, item by item.
struct Chunk {
  uint32_t item;
  uint32_t index;  ///< within the item

  bool operator==(const Chunk&) const = default;
};

/// Writes the num_tiles(n) chunks of one item; returns the end.
inline Chunk* list_chunks(Chunk* out, uint32_t item, size_t n) noexcept {
  for (uint32_t i = 0; i < num_tiles(n); ++i) *out++ = {item, i};
  return out;
}

// --- pack ----------------------------------------------------------------------------------------------------------

/// Sources that travel in the parameters of one launch.
inline constexpr uint32_t kMaxPackSources = 3800;

/// Where a gradient goes.
struct PackSlot {
  uint64_t offset;     ///< in elements, from the start of the bucket
  uint64_t n;          ///< elements
  DType source_dtype;  ///< f64 for a bucket of f64; else f32, bf16 or f16

  bool operator==(const PackSlot&) const = default;
};

/// The shape of a bucket. Slots and chunks lie in the device's memory.
struct PackPlan {
  const PackSlot* slots;
  uint32_t num_slots;
  const Chunk* chunks;  ///< of all slots
  uint32_t num_chunks;
  DType bucket_dtype;  ///< f32 or f64; bf16, rounded once, for the wire
};

/// See kernels.h. `sources` is host memory, one device pointer or null for each slot, and free for reuse on return.
/// Sources are multiplied by factor * *gate, in the device's memory; where that gate is 0, every source counts as null:
/// not even a NaN leaves a trace. A null gate is 1. One launch for up to kMaxPackSources slots. Fastest where sources
/// and slots lie on 16 bytes.
Status pack(const PackPlan& plan, const void* const* sources, void* bucket, bool accumulate, double factor,
            const double* gate, Stream stream) noexcept;

// --- reduction -----------------------------------------------------------------------------------------------------

/// What may take part in a reduction on the device.
inline constexpr int kMaxPeers = 8;

/// tree_reduce's sum of f32, f64 or bf16 buffers of one device or its peers, on 16 bytes each, by this device alone;
/// the pointer arrays are host memory. At least one source and destination, at most kMaxPeers; no source is null.
Status tree_sum(DType dtype, const void* const* sources, int num_sources, void* const* destinations,
                int num_destinations, size_t n, Stream stream) noexcept;

// --- statistics ----------------------------------------------------------------------------------------------------

/// See kernels.h; segments, chunks (of all segments) and everything they point to in the device's memory.
Status grad_stats(const StatsSegment* segments, const Chunk* chunks, uint32_t num_chunks, double norm_type,
                  Stream stream) noexcept;

/// Up to so many partials one block adds up in less time than a launch takes.
inline constexpr size_t kFewPartials = 4096;
/// Blocks that add up more.
inline constexpr unsigned kNormSums = 64;

/// See kernels.h; all pointers in the device's memory. `sums`: room for kNormSums, which more than kFewPartials are
/// added up in first, by a launch of its own; null: one block adds up all of them.
Status finish_window(const double* partials, size_t num_partials, NormSum* sums, const double* tail, const double* used,
                     float* steps, size_t num_parameters, const WindowOptions& options, StepScalars* scalars,
                     LossScaleState* scale, WindowReport* report, uint32_t num_slots, Stream stream) noexcept;

/// See kernels.h; all pointers in the device's memory.
Status count_steps(float* steps, const double* used, size_t n, const StepScalars* scalars, Stream stream) noexcept;

/// See kernels.h; segments, chunks (of all segments) and everything they point to in the device's memory. Fastest where
/// values lie on 16 bytes, and low ones on 8.
Status apply_means(const MeanSegment* segments, const Chunk* chunks, uint32_t num_chunks, const StepScalars* scalars,
                   bool clips, Stream stream) noexcept;

// --- buffers -------------------------------------------------------------------------------------------------------
// The merge over replicas of what their modules keep beside parameters (batch norm's running statistics, say): each
// replica gathers, all add up what they gathered, each scatters the result. Averaged elements become the mean by weight
// where a replica wrote them, integers the largest; computed in fp64 and int64.

/// One buffer, or its real and imaginary parts.
struct BufferSegment {
  void* values;    ///< n elements
  uint64_t n;      ///< elements
  uint64_t place;  ///< of the first among all averaged ones, or among all integers
  DType dtype;     ///< f32, f64, bf16, f16: averaged; i64, i32, i16, i8, u8, boolean: integers

  bool operator==(const BufferSegment&) const = default;
};

/// A replica's buffers. Segments and chunks (of all segments) lie in the device's memory.
struct BufferPlan {
  const BufferSegment* segments;
  const Chunk* chunks;
  uint32_t num_chunks;
  uint64_t num_integers;  ///< of all segments
};

/// What a replica gathers, in the device's memory; by averaged element, or by integer.
struct BufferSums {
  double* noted;      ///< not added up: as the last scatter left the elements; NaN before it
  double* sums;       ///< value times weight
  double* writers;    ///< 1 where the replica wrote since `noted`
  double* words;      ///< of each rank every integer's upper and lower half, zeros but for its own; or null
  int64_t* integers;  ///< where `words` is null: values, of which not the sum is taken but the largest, or rank 0's
};

/// Writes what this rank of `size` adds. The weight is share * *weight, without a pointer `share`; above 0, or nothing
/// is added. Integers are added where `share` is not 0.
Status gather_buffers(const BufferPlan& plan, const BufferSums& sums, const double* weight, double share, int rank,
                      int size, Stream stream) noexcept;

/// Writes the result: averaged elements that a rank wrote become sums / *total_weight (`is_mean` false: sums), integers
/// the largest of all ranks (likewise: rank 0's). Where *total_weight is not above 0, elements keep their values. Then
/// notes all averaged ones.
Status scatter_buffers(const BufferPlan& plan, const BufferSums& sums, const double* total_weight, bool is_mean,
                       int size, Stream stream) noexcept;

// --- losses --------------------------------------------------------------------------------------------------------

/// See kernels.h; `terms` is host memory, free for reuse on return, and what it points to lies in the device's memory,
/// as all else does. One launch of one block.
Status note_loss(const LossTerms& terms, const StepScalars* scalars, const LossScaleState* scale, double* tail,
                 double* gate, void* seed, WindowReport* report, Stream stream) noexcept;

// --- optimizer steps -----------------------------------------------------------------------------------------------

/// One launch steps all its segments. Segments, chunks, scalars and groups lie in the device's memory.
struct StepPlan {
  DType dtype;  ///< accumulation dtype of all segments: f32 or f64
  const StepSegment* segments;
  const Chunk* chunks;  ///< of all segments
  uint32_t num_chunks;
  const StepScalars* scalars;
  bool keep_gradient;
  /// For each segment num_copies places, on devices whose memory this one writes: what a step stores in `low`, where
  /// there is one, else in `parameter`, it stores there, too. In the device's memory; null without copies.
  void* const* copies = nullptr;
  uint32_t num_copies = 0;
};

/// See kernels.h. Fastest where everything a segment and its copies point to lies on 16 bytes.
Status adam_step(const StepPlan& plan, const AdamGroup* groups, Stream stream) noexcept;
Status sgd_step(const StepPlan& plan, const SgdGroup* groups, Stream stream) noexcept;
Status adagrad_step(const StepPlan& plan, const AdagradGroup* groups, Stream stream) noexcept;

// --- copies --------------------------------------------------------------------------------------------------------
// Copies of tensors on other devices, compared by a digest of each chunk: each device takes the digests of its own
// memory, and where they differ the copy is mended. Two chunks of other bytes have the same digest with a probability
// of about 2^-64.

inline constexpr size_t kCopyUnit = 16;

/// A tensor's memory on one device.
struct CopySegment {
  void* values;
  uint64_t n;         ///< units of kCopyUnit bytes, the last of which may be cut
  uint64_t bytes;     ///< more than n - 1 units of them
  uint64_t* digests;  ///< one for each chunk
  /// Of a copy: the tensor that it is one of, and the digests of that, on a device whose memory this one reads.
  const void* source;
  const uint64_t* source_digests;

  bool operator==(const CopySegment&) const = default;
};

/// Takes the digests. Segments, chunks (of all segments) and everything they point to in the device's memory, but for
/// sources. Fastest where values lie on 16 bytes.
Status digest_copies(const CopySegment* segments, const Chunk* chunks, uint32_t num_chunks, Stream stream) noexcept;

/// Behind digest_copies on both devices: each chunk of a copy whose digest is not the source's becomes the source's.
Status mend_copies(const CopySegment* segments, const Chunk* chunks, uint32_t num_chunks, Stream stream) noexcept;

// --- peers ---------------------------------------------------------------------------------------------------------
// Ranks whose devices read and write one another's memory. Each rank launches the same kernels in the same order with
// the same shapes, from one host thread or several, and nothing between two launches of one kernel may block on the
// other ranks' devices. Or one launch plays all ranks on one device ("virtual ranks"). Collective.

/// Blocks of one rank.
inline constexpr unsigned kMaxPeerBlocks = 64;

/// A rank's side of the barriers, in memory that all peers can write; zeros once, before any use. Counters only grow,
/// and differences wrap: there is nothing to reset after a launch.
struct PeerSignals {
  uint32_t arrived[kMaxPeerBlocks][kMaxPeers];  ///< barriers that a block of a peer has reached, written by that peer
  uint32_t passed[kMaxPeerBlocks];              ///< barriers of this rank's blocks
  /// Not 0: launches of this rank wait for no peer any more and end, whatever they have done by then. Set by whoever
  /// knows that a peer is lost, on another stream than those launches, once and for all.
  uint32_t stop;
};

/// Who takes part, and whom a launch plays.
struct Peers {
  int size;                         ///< ranks, 1 to kMaxPeers
  int rank;                         ///< whom this launch plays; kAllRanks: all of them, on one device
  unsigned blocks;                  ///< of each rank, 1 to kMaxPeerBlocks; all must fit on the device at once
  PeerSignals* signals[kMaxPeers];  ///< of every rank, as this rank's device sees them
};

inline constexpr int kAllRanks = -1;

/// Replaces every rank's buffer by the sum of all, added along kernels.h's tree. `buffers` (host memory) holds every
/// rank's, as this rank's device sees them, each on 16 bytes; `dtype` is f32, f64 or bf16.
Status peer_reduce(const Peers& peers, DType dtype, void* const* buffers, size_t n, Stream stream) noexcept;

/// A run of one parameter's elements, starting at a tile, that one rank steps.
struct PeerSegment {
  uint64_t gradient;      ///< first element in every rank's gradients
  uint64_t parameter;     ///< first element in every rank's parameters of `parameter_dtype`
  void* master;           ///< n elements in this rank's memory, for a parameter of low precision; else null
  void* state[3];         ///< n elements each, of this rank, as in StepSegment
  uint64_t n;             ///< elements
  uint32_t partial;       ///< first tile's index in every rank's partials
  uint32_t index;         ///< of the parameter, in steps and used
  uint32_t group;         ///< index into the hyperparameters
  DType parameter_dtype;  ///< the accumulation dtype; bf16 or f16 with a master

  bool operator==(const PeerSegment&) const = default;
};

/// What reduce_step reads and writes in one rank's memory. Buffers lie on 16 bytes.
struct PeerBuffers {
  void* gradients;     ///< of the accumulation dtype; this rank's segments receive the sum
  void* parameters;    ///< of the accumulation dtype: receive every rank's stepped elements; null if there are none
  void* low[2];        ///< likewise of bf16 and of f16
  double* partials;    ///< num_partials; receive all tiles'
  const double* tail;  ///< this rank's own, `tail_size` long, starting with kTailFields fields
  double* tail_sum;    ///< receives the sum over ranks; not `tail`
};

/// What only its own rank reads and writes.
struct PeerState {
  const PeerSegment* segments;  ///< all ranks' segments together are every parameter once, if it is to be stepped
  const Chunk* chunks;          ///< of all segments
  uint32_t num_chunks;
  float* steps;  ///< num_parameters
  StepScalars* scalars;
  LossScaleState* scale;  ///< or null
  const void* groups;     ///< AdamGroup, SgdGroup or AdagradGroup
};

/// One window's end in one launch.
struct ReduceStep {
  DType dtype;  ///< accumulation dtype: f32 or f64
  uint64_t num_partials;
  uint64_t num_parameters;
  uint64_t tail_size;
  uint64_t used;  ///< where the tail holds one count a parameter
  WindowOptions options;
  bool keep_gradient;              ///< writes the mean gradient over the sum of this rank's segments
  PeerBuffers buffers[kMaxPeers];  ///< of every rank, as this rank's device sees them
  PeerState state[kMaxPeers];      ///< of the ranks that this launch plays
};

/// All-reduce, statistics, finish_window and optimizer in one launch: each rank sums its segments of all ranks'
/// gradients and gives every rank the tiles' partials; then each finishes the window from the same numbers, steps its
/// segments and stores the parameters to every rank. Equal to the sum (tree_reduce), grad_stats, finish_window and the
/// step of each segment, which is also why segments start at tiles.
Status reduce_adam_step(const Peers& peers, const ReduceStep& arguments, Stream stream) noexcept;
Status reduce_sgd_step(const Peers& peers, const ReduceStep& arguments, Stream stream) noexcept;
Status reduce_adagrad_step(const Peers& peers, const ReduceStep& arguments, Stream stream) noexcept;

}  // namespace muster::kernels::cuda
