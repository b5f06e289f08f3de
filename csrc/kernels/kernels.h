// Torch-free kernels over raw pointers: the contract of the CPU functions below and of their CUDA versions in
// cuda/cuda_kernels.h, which take a stream and give the same bits. Arithmetic of one element is + - * / sqrt only
// (math.h) and compiled without contraction, so that every instruction set gives the same bits. Nothing here throws,
// allocates or synchronises.
#pragma once

#include <cstddef>
#include <cstdint>

namespace muster::kernels {

enum class DType : uint8_t { f32, f64, bf16, f16, i64, i32, i16, i8, u8, boolean };

enum class Reduction : uint8_t { sum, min, max };

size_t size_of(DType dtype) noexcept;

// --- reduction -----------------------------------------------------------------------------------------------------

/// destinations[d][i] = the reduction over sources s of sources[s][i], for i in [0, n). Sums follow the tree
/// ((0+1)+(2+3))+... over source indices; a null source is absent and its sibling passes unchanged. f64 is reduced in
/// f64, integers exactly (wrapping), bf16 and f16 in f32 with one rounding (to nearest even) at the end; min and max
/// propagate NaN; boolean sum is logical or. Destinations may alias sources of the same index range.
void tree_reduce(DType dtype, Reduction reduction, const void* const* sources, int num_sources,
                 void* const* destinations, int num_destinations, size_t n) noexcept;

// --- pack ----------------------------------------------------------------------------------------------------------

/// One gradient on its way into a bucket.
struct PackItem {
  const void* source;  ///< n elements of `source_dtype` in slot order, or null: contributes zeros
  DType source_dtype;  ///< f32, f64, bf16 or f16
  void* destination;   ///< n elements of f64 when source_dtype is f64, else of f32
  size_t n;
};

/// destination = (accumulate ? destination : 0) + factor * float(source), in the destination's dtype; a null source
/// leaves an accumulated destination unchanged and zeroes one that is overwritten. A factor of 1 changes no bit.
void pack(const PackItem* items, size_t count, bool accumulate, double factor = 1) noexcept;

/// destination = source in `dtype`, bf16 or f16, rounded to nearest even.
void narrow(DType dtype, void* destination, const float* source, size_t n) noexcept;

// --- statistics ----------------------------------------------------------------------------------------------------

/// Tiles of this many elements of one parameter carry one fp64 partial each, so that a norm depends on no layout,
/// thread, grid or shard.
inline constexpr size_t kTile = 4096;
/// Element i of a tile adds its square to lane i % kLanes, in ascending order; lanes then fold in halves: lane l gets
/// lane l + 16 for l < 16, then l + 8 for l < 8, and so on.
inline constexpr size_t kLanes = 32;

inline constexpr size_t num_tiles(size_t n) noexcept { return (n + kTile - 1) / kTile; }

/// A run of one parameter's summed gradient that starts at a tile.
struct StatsSegment {
  const void* gradient;  ///< n elements of `dtype`
  double* partials;      ///< num_tiles(n) of them
  size_t n;
  DType dtype;  ///< f32 or f64

  bool operator==(const StatsSegment&) const = default;
};

/// partials[t] = the sum of squares of tile t in fp64, or with another `norm_type` p the sum of |x|^p, with infinity
/// the maximum of |x|. A partial is not finite when a value of its tile is not finite (a finite f32 square cannot
/// overflow fp64; an f64 one may, and high powers).
void grad_stats(const StatsSegment* segments, size_t count, double norm_type = 2) noexcept;

// The first fields of a window's tail: sums over all replicas.
inline constexpr int kWeight = 0;         ///< of the losses' weights
inline constexpr int kWeightedLoss = 1;   ///< of weight * loss
inline constexpr int kContributions = 2;  ///< losses with a positive weight
inline constexpr int kFailures = 3;
inline constexpr int kStops = 4;
inline constexpr int kMetrics = 5;
inline constexpr int kMeanLosses = 6;  ///< losses that are means
inline constexpr int kSumLosses = 7;   ///< losses that are sums: then gradients are not divided by the weight
inline constexpr int kTailFields = 8;
/// A metric's first field in a tail: the sum of weight * metric over the losses that bring it; the next is the sum of
/// these losses' weights.
inline constexpr size_t metric_field(uint32_t slot) noexcept { return kTailFields + 2 * size_t{slot}; }
/// The number of fields in a tail with this many metrics.
inline constexpr size_t tail_size(uint32_t num_slots) noexcept { return metric_field(num_slots); }

/// The scale that a loss is multiplied by, and how many steps in a row were finite; torch.amp.GradScaler's state.
struct LossScaleState {
  float scale;
  int32_t growth_tracker;
};

/// What a window's end found, in the device's memory: optimizer kernels read it there.
struct StepScalars {
  double divisor;         ///< what turns the summed gradient into the mean
  double clip;            ///< what the mean is multiplied by: 1 unless clipping bites
  double norm;            ///< of the mean gradient, before clipping
  double unit;            ///< of weights: what gradients of the next window are multiplied by is weight / unit
  int32_t finite;         ///< 0: the optimizers change nothing
  int32_t dropped;        ///< 1: the window's weight is 0, or it has failures; nothing changes, the loss scale included
  double clip_value = 0;  ///< bound of the magnitude of each element of the mean; 0: none

  bool operator==(const StepScalars&) const = default;
};

/// What the end of a window depends on.
struct WindowOptions {
  double clip_norm;        ///< upper bound of the norm; 0: none
  double loss_scale;       ///< of the window's seeds, when `scale` is null
  double growth, backoff;  ///< of the loss scale
  int32_t interval;
  double norm_type = 2;   ///< that of the partials; infinity: the maximum norm
  double clip_value = 0;  ///< bound of the magnitude of each element; 0: none
};

/// What a window's user reads. The metrics, one double a slot, follow directly: report_bytes in all, on 8 bytes. Each
/// field is an element in memory that a 0-dim tensor can be a view of, at these offsets in bytes.
struct WindowReport {
  double loss;        ///< 0: the mean by weight, or the sum of losses that are sums; NaN where the weight is 0
  double weight;      ///< 8: 0 where dropped
  double grad_norm;   ///< 16: StepScalars' norm; NaN while the window is open
  double loss_scale;  ///< 24: of the next seeds
  uint8_t skipped;    ///< 32: 1: not finite, and not dropped
  uint8_t dropped;    ///< 33
};
static_assert(sizeof(WindowReport) == 40, "the offset of the metrics");

inline constexpr size_t report_bytes(uint32_t num_slots) noexcept {
  return sizeof(WindowReport) + num_slots * sizeof(double);
}

/// Joins the partials, in any order (norm_sum.h), and writes `scalars`, whose `unit` on entry is that of the window's
/// weights: divisor = weight / unit * scale, or scale alone for sums and where dropped; unit = next_unit of the mean
/// weight (step_math.h); norm = the root of the sum / divisor, or the maximum / divisor; finite = the sum is finite,
/// and keeps_digits(divisor); clip = clip_norm / (norm + 1e-6) where that is below 1, as
/// torch.nn.utils.clip_grad_norm_. A window is dropped whose weight is not above 0 (NaN: a loss's weight was none) or
/// that has failures; it keeps `unit`. Then steps[p] += 1 for each of the `num_parameters` whose used[p] > 0, unless
/// skipped or dropped; then, with a `scale`, loss_scale_update. Last, with a `report`, that of the closed window, whose
/// metrics are means over the losses that brought them: NaN where none did, and where dropped.
void finish_window(const double* partials, size_t num_partials, const double* tail, const double* used, float* steps,
                   size_t num_parameters, const WindowOptions& options, StepScalars* scalars, LossScaleState* scale,
                   WindowReport* report = nullptr, uint32_t num_slots = 0) noexcept;

/// torch.amp.GradScaler's rule: a non-finite step multiplies the scale by `backoff`; `interval` finite ones in a row
/// multiply it by `growth`, unless that overflows. The product is taken in double and rounded once.
void loss_scale_update(LossScaleState* scale, bool finite, double growth, double backoff, int32_t interval) noexcept;

/// values[i] = values[i] / divisor (exact when divisor is a power of two), and partials[t] = the sum of squares of
/// tile t of the divided values, as grad_stats. `dtype` is f32 or f64.
void divide_with_stats(DType dtype, void* values, size_t n, double divisor, double* partials) noexcept;

/// steps[p] += 1 for each p in [0, n) with used[p] > 0 (null: all), unless skipped or dropped, for optimizers whose
/// steps finish_window does not count.
void count_steps(float* steps, const double* used, size_t n, const StepScalars* scalars) noexcept;

/// A run of one parameter's summed gradient.
struct MeanSegment {
  void* values;  ///< n elements of `dtype`
  void* low;     ///< n elements of `low_dtype` that receive the rounded result, or null
  size_t n;
  DType dtype;      ///< f32 or f64
  DType low_dtype;  ///< bf16 or f16

  bool operator==(const MeanSegment&) const = default;
};

/// values = values / divisor, computed in the dtype as the steps below do, and then, where `clips` and the window is
/// finite, values * clip, and no further from 0 than clip_value. Nothing changes where dropped.
void apply_means(const MeanSegment* segments, size_t count, const StepScalars* scalars, bool clips) noexcept;

// --- losses --------------------------------------------------------------------------------------------------------

/// Metrics of one note_loss.
inline constexpr uint32_t kMaxMetrics = 64;

/// A number that a loss brings along, to be averaged by weight.
struct LossMetric {
  const void* value;  ///< one element of `dtype`
  DType dtype;
  uint32_t slot;  ///< see metric_field; no two metrics of a loss share one
};

/// One micro-batch's loss.
struct LossTerms {
  const void* loss;    ///< one element, or null: this replica's part is empty
  DType loss_dtype;    ///< f32, f64, bf16 or f16
  const void* weight;  ///< one element, or null: `rows`
  DType weight_dtype;
  double rows;
  bool is_mean;          ///< else the loss is a sum
  bool first;            ///< of the window: tail[0 .. tail_size(num_slots)) starts from zeros
  uint32_t num_slots;    ///< of the tail
  uint32_t num_metrics;  ///< at most kMaxMetrics
  LossMetric metrics[kMaxMetrics];
};

/// What a loss adds to its replica's tail, and the seed of its backward. It contributes where its weight w is finite
/// and above 0: then weight += w, weighted loss += (w for a mean, 1 for a sum) * loss, contributions and mean or sum
/// losses += 1, and each metric's fields += w * metric and w. Otherwise no loss and no metric leaves a trace, whatever
/// they are, and a w that is negative or not finite makes the tail's weight NaN: every rank drops the window.
/// *gate = what pack multiplies the gradient by: w / scalars->unit for a mean, 1 for a sum, 0 where the loss does not
/// contribute. *seed, one element of `loss_dtype` or null without a loss, = the scale (1 for a null `scale`), rounded
/// once; 0 where the loss does not contribute. With a `report`, that of the window so far, of this replica alone:
/// neither skipped nor dropped, with NaN for the means of a weight that is not above 0.
void note_loss(const LossTerms& terms, const StepScalars* scalars, const LossScaleState* scale, double* tail,
               double* gate, void* seed, WindowReport* report) noexcept;

// --- optimizer steps -----------------------------------------------------------------------------------------------

/// A run of one parameter's elements. All pointers are to n elements of the accumulation dtype (f32 or f64), unless
/// said otherwise; none overlaps another. Elements of `low` that are not `parameter` rounded were written since the
/// last step, which then begins with them; they receive the rounded result.
struct StepSegment {
  void* gradient;      ///< the sum over replicas
  void* parameter;     ///< the parameter, or the master copy of a low-precision one
  void* low;           ///< n elements of `low_dtype`, or null: the parameter, whose master copy is `parameter`
  void* state[3];      ///< by optimizer; see there
  const float* step;   ///< the parameter's step count, this step included; null: it is the first
  const double* used;  ///< how many replicas had a gradient: where 0, nothing changes; null: used
  size_t n;
  uint32_t group;   ///< index into the hyperparameters
  DType low_dtype;  ///< bf16 or f16

  bool operator==(const StepSegment&) const = default;
};

/// What all step kernels have in common.
struct StepArguments {
  DType dtype;  ///< accumulation dtype of all segments: f32 or f64
  const StepSegment* segments;
  size_t count;
  const StepScalars* scalars;
  bool keep_gradient;  ///< writes the mean gradient, before clipping, over the sum
};

/// state: exp_avg, exp_avg_sq, and max_exp_avg_sq with amsgrad.
struct AdamGroup {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled;  ///< AdamW: the parameter decays by lr * weight_decay, and the gradient is left alone
  bool amsgrad, maximize;

  bool operator==(const AdamGroup&) const = default;
};

/// state: momentum_buffer, with momentum.
struct SgdGroup {
  double lr, momentum, dampening, weight_decay;
  bool nesterov, maximize;

  bool operator==(const SgdGroup&) const = default;
};

/// state: sum.
struct AdagradGroup {
  double lr, lr_decay, eps, weight_decay;
  bool maximize;

  bool operator==(const AdagradGroup&) const = default;
};

/// state: one element a segment, the row's accumulator.
struct RowwiseAdagradGroup {
  double lr, lr_decay, eps;
  bool maximize;

  bool operator==(const RowwiseAdagradGroup&) const = default;
};

/// One optimizer step of each segment: g = gradient / divisor, then g * clip, no further from 0 than clip_value, then
/// torch.optim's formulas for fp32 or fp64 (math.h). Nothing changes where the step is not finite, dropped, or the
/// parameter unused; with keep_gradient the mean is written even then. To maximize, g is negated, but not the mean that
/// is kept. A weight decay or momentum of 0 leaves its term out, as in torch: an infinite parameter then makes no NaN
/// of the state.
void adam_step(const StepArguments& arguments, const AdamGroup* groups) noexcept;
void sgd_step(const StepArguments& arguments, const SgdGroup* groups) noexcept;
void adagrad_step(const StepArguments& arguments, const AdagradGroup* groups) noexcept;

/// The same of segments that are rows of an embedding: sum = sum + mean over the row of g * g, p = p - rate /
/// (sqrt(sum) + eps) * g, rate as adagrad_step's. Adagrad with one accumulator a row, FBGEMM's EXACT_ROWWISE_ADAGRAD
/// without weight decay and TorchRec's RowWiseAdagrad; the squares are added in fp64, element i of the row in lane i %
/// kLanes, lanes folded as in grad_stats. On the CPU alone.
void rowwise_adagrad_step(const StepArguments& arguments, const RowwiseAdagradGroup* groups) noexcept;

// --- all-reduce and step in two passes -----------------------------------------------------------------------------
// The CPU's reduce_step, for ranks that see one another's memory; each takes a share of the tiles of all parameters.
// First pass: reduce_stats on the own share. When all ranks have done that, each closes the window from all partials
// (finish_window). Second pass: a step of the own share, stored to every rank. Memory is read once in each.

/// A run of one parameter's elements, starting at a tile.
struct ReduceSegment {
  const void* const* gradients;  ///< n elements of every rank, in rank order; a null one is absent
  void* sum;                     ///< n elements: their sum along tree_reduce's tree; may be one of the same dtype
  double* partials;              ///< num_tiles(n), of the sum
  size_t n;
  const double* factors = nullptr;  ///< what pack would have multiplied each rank's by; null: 1. Of f32 and f64 alone
};

inline constexpr int kMaxReduceRanks = 64;

/// Equal to tree_reduce's sum and grad_stats of each segment. `dtype` is f32 or f64, or bf16 or f16, whose sums are not
/// rounded but left in f32; at most kMaxReduceRanks.
void reduce_stats(DType dtype, int num_ranks, const ReduceSegment* segments, size_t count,
                  double norm_type = 2) noexcept;

/// Byte offsets from this process's parameters to each peer's copy, which the step also writes.
struct StepCopies {
  const ptrdiff_t* displacements;
  int count;
};

/// The steps above; then each segment's `low`, where it has one, else its `parameter`, is copied to every displacement,
/// stepped or not.
void adam_step_with_copies(const StepArguments& arguments, const AdamGroup* groups, const StepCopies& copies) noexcept;
void sgd_step_with_copies(const StepArguments& arguments, const SgdGroup* groups, const StepCopies& copies) noexcept;
void adagrad_step_with_copies(const StepArguments& arguments, const AdagradGroup* groups,
                              const StepCopies& copies) noexcept;

}  // namespace muster::kernels
