// Losses and metrics of a window's replicas where the host adds them up.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "muster/options.h"
#include "window/closing.h"
#include "window/loss_scale.h"
#include "window/outcome.h"
#include "window/tail.h"
#include "window/window.h"

namespace muster {

/// By local replica. Functions that take a replica are called by its thread in a step, all others by the stepping
/// thread while no replica is in one.
class HostNumbers {
 public:
  HostNumbers(size_t local_replicas, const StrategyOptions& options);

  /// Begins a window with nothing in it.
  void open();

  /// Whether the weights' unit is known, from an earlier window or otherwise.
  bool has_unit() const noexcept { return scale_.has_unit; }
  void note_unit() noexcept { scale_.has_unit = true; }
  double unit(size_t replica) const noexcept { return replicas_[replica].unit; }
  void set_unit(size_t replica, double unit) noexcept { replicas_[replica].unit = unit; }

  /// Adds a part; see Window::note.
  NotedPart note(const ReplicaPart& part);

  /// Of this replica's losses with a positive weight.
  const LossCounts& losses(size_t replica) const noexcept { return replicas_[replica].losses; }
  double weight(size_t replica) const noexcept { return replicas_[replica].weight; }
  /// Weight, loss, and whether there are metrics.
  void fill(const Tail& tail, size_t replica) const;
  /// A line a metric: its sum and its weight (hexadecimal), its name.
  std::string metric_text(size_t replica) const;
  /// All replicas' metrics, in their order, for finish(). Texts are kept by the replica that received them.
  void set_metric_texts(size_t replica, std::vector<std::string> texts);
  /// Those; none before, in a window.
  const std::vector<std::string>& metric_texts(size_t replica) const noexcept {
    return replicas_[replica].metric_texts;
  }

  /// Takes over the window's unit, before anything else of its end.
  void take_unit() noexcept { scale_.scalars.unit = replicas_.front().unit; }
  /// A window that was not dropped: fills loss and metrics of `sums`.
  void read(const Tail& tail, WindowSums& sums);
  /// What makes the mean of a sum: the weight in units, times the loss scale.
  double divisor(const Tail& tail) const;
  /// After norm and means: the next window's unit and loss scale.
  void end(const Tail& tail, bool finite);

  /// Loss, metrics and weight of the local replicas so far.
  WindowSums so_far() const;

  kernels::StepScalars& scalars() noexcept { return scale_.scalars; }
  WindowScale& scale() noexcept { return scale_; }

 private:
  struct Scale : WindowScale {
    explicit Scale(const StrategyOptions& options) : WindowScale(options) {}

    std::optional<double> unit() const override { return has_unit ? std::optional(scalars.unit) : std::nullopt; }
    void set_unit(double unit) override {
      scalars.unit = unit;
      has_unit = true;
    }

    // Of the last window. Gradients are multiplied by weight / unit, so that sums stay near them.
    kernels::StepScalars scalars{.divisor = 1, .clip = 1, .norm = 0, .unit = 1, .finite = 1, .dropped = 0};
    bool has_unit = false;
  };

  struct Metric {
    double sum = 0;     // of weight * value
    double weight = 0;  // of the losses that brought it
    void add(const Metric& other) {
      sum += other.sum;
      weight += other.weight;
    }
  };

  struct Replica {
    double unit = 1;  // of its weights
    double weight = 0;
    double weighted_loss = 0;
    LossCounts losses;
    std::map<std::string, Metric> metrics;
    std::vector<std::string> metric_texts;
  };

  std::vector<Replica> replicas_;
  Scale scale_;
  std::atomic<bool> warned_of_nan_{false};  // by the replicas' threads
};

}  // namespace muster
