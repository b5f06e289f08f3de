// Options that all strategies share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "muster/precision.h"

namespace muster {

/// At a window's end: floating buffers averaged by weight and integer ones by maximum, or replica 0's for all.
enum class Buffers {
  mean,   ///< floating ones: mean over non-empty replicas by weight; integer ones: maximum
  chief,  ///< replica 0's
};

/// What gradients travel in from replica to replica.
enum class Wire {
  exact,  ///< as they are accumulated: fp32, or fp64
  /// fp32 ones as bf16, half the bytes. Each replica's gradient is rounded once, a relative error of up to 2^-9. On one
  /// host sums are fp32, and rounded once more only where all replicas need them (fuse=False, keep_gradients,
  /// shard_optimizer); NCCL and process groups round after every addition. Weights, losses, metrics and buffers stay
  /// exact, as do sparse rows and backward by hand.
  bf16,
};

/// A value. Every rank passes the same; `prepare` compares them.
struct StrategyOptions {
  /// What step functions compute in, by torch's autocast rules; fp32 leaves the caller's autocast as it is.
  Precision precision = Precision::fp32;
  /// Scaling of the loss; empty: LossScale() with fp16, else off.
  std::optional<LossScale> loss_scale = std::nullopt;
  /// Micro-batches (calls of step) per optimizer update.
  int accumulate = 1;
  /// Drop a window that a loader's end left short, instead of averaging what it holds.
  bool drop_incomplete = false;
  /// Upper bound of the gradient norm over all parameters of a set, applied after reduction; empty: no bound.
  std::optional<double> clip_norm = std::nullopt;
  /// p of that norm and of StepResult::grad_norm, above 0; infinity: the maximum. As norm_type of
  /// torch.nn.utils.clip_grad_norm_; other types than 2 are taken of real gradients alone.
  double clip_norm_type = 2.0;
  /// Upper bound of the magnitude of each element of the mean gradient, as torch.nn.utils.clip_grad_value_; of complex
  /// gradients it bounds both parts; empty: no bound. Not together with clip_norm.
  std::optional<double> clip_value = std::nullopt;
  /// Seed of the replicas' random streams and of shuffling; empty: the chief's torch.initial_seed().
  std::optional<uint64_t> seed = std::nullopt;
  /// At a window's end: floating buffers averaged by weight and integer ones by maximum, or replica 0's for all.
  Buffers buffers = Buffers::mean;
  /// Intra-op threads of each replica; empty: the cores that workers of the chief's host may use together (no more than
  /// a CPU limit of their container), over the replicas there, at least 1.
  std::optional<int> threads_per_replica = std::nullopt;
  /// Upper bound of a bucket in bytes, counted in fp32; empty: chosen from what `prepare` measures; see `explain`.
  std::optional<int64_t> bucket_bytes = std::nullopt;
  /// What gradients travel in from replica to replica.
  Wire wire = Wire::exact;
  /// Step AdamW, Adam, SGD and Adagrad straight from the reduced sums; false: every optimizer from `.grad`.
  bool fuse = true;
  /// With a flat optimizer, leave the mean gradient (before clipping) in `.grad` after a step.
  bool keep_gradients = false;
  /// Divide the state of flat optimizers over the workers (ZeRO stage 1); parameters are gathered after each step.
  bool shard_optimizer = false;
  /// Windows in a row that may be skipped for non-finite gradients before NonFinite is raised.
  int max_skipped = 20;
  /// Seconds that a live peer may be late.
  double timeout = 600.0;

  /// Throws InvalidArgument naming the option that is out of range.
  void validate() const;
};

}  // namespace muster
