#include "window/host_numbers.h"

#include <ATen/ops/scalar_tensor.h>

#include <cmath>
#include <string_view>
#include <utility>

#include "core/lines.h"
#include "core/log.h"
#include "core/plain_text.h"
#include "kernels/step_math.h"

namespace muster {

HostNumbers::HostNumbers(size_t local_replicas, const StrategyOptions& options)
    : replicas_(local_replicas), scale_(options) {}

void HostNumbers::open() {
  replicas_.assign(replicas_.size(), {});
  for (auto& replica : replicas_) replica.unit = scale_.scalars.unit;
}

NotedPart HostNumbers::note(const ReplicaPart& part) {
  if (part.loss == nullptr) return {};
  const auto& loss = *part.loss;
  const double weight = weight_on_host(part);
  auto& replica = replicas_[static_cast<size_t>(part.local_replica)];
  const bool contributes = weight > 0;
  const bool is_mean = loss.reduction == Reduction::mean;
  if (contributes) {
    replica.weight += weight;
    replica.weighted_loss += (is_mean ? weight : 1.0) * loss.value.item<double>();
    replica.losses.add(loss.reduction);
    for (const auto& [name, metric] : loss.metrics) {
      check_metric(name, metric);
      replica.metrics[name].add({weight * metric.item<double>(), weight});
    }
  }
  if (!contributes && part.crosses && !std::isfinite(loss.value.item<double>()) && !warned_of_nan_.exchange(true)) {
    log(LogLevel::warning,
        "a part of weight 0 has a loss that is not finite, and so has gradients that are not, which reach other "
        "replicas through the step's collectives: the window is skipped. Let such a loss be finite: divide by at least "
        "1, say (clamp)");
  }
  const double share = contributes && is_mean ? weight / replica.unit : 1.0;
  const double seed = contributes ? (part.crosses ? share : 1.0) * static_cast<double>(scale_.on_host().scale) : 0.0;
  return {.seed = at::scalar_tensor(seed, loss.value.options().requires_grad(false)),
          .contributes = contributes || part.crosses,
          .factor = part.crosses ? 1.0 : share};
}

void HostNumbers::fill(const Tail& tail, size_t r) const {
  const auto& replica = replicas_[r];
  tail[Tail::weight] = replica.weight;
  tail[Tail::weighted_loss] = replica.weighted_loss;
  tail[Tail::metrics] = replica.metrics.empty() ? 0 : 1;
}

std::string HostNumbers::metric_text(size_t replica) const {
  TextWriter text;
  for (const auto& [name, metric] : replicas_[replica].metrics) {
    text << exact_text(metric.sum) << ' ' << exact_text(metric.weight) << ' ' << name << '\n';
  }
  return text.str();
}

void HostNumbers::set_metric_texts(size_t replica, std::vector<std::string> texts) {
  replicas_[replica].metric_texts = std::move(texts);
}

void HostNumbers::read(const Tail& tail, WindowSums& sums) {
  note_unit();
  const bool is_sum = tail[Tail::sum_losses] > 0;
  sums.loss = is_sum ? tail[Tail::weighted_loss] : tail[Tail::weighted_loss] / sums.weight;
  // Added in replica order: equal on all ranks.
  std::map<std::string, Metric> totals;
  for (const auto& text : replicas_.front().metric_texts) {
    for (const auto& line : lines_of(text)) {
      std::string_view rest(line);
      const double sum = take_number(rest);
      rest.remove_prefix(1);
      const double weight = take_number(rest);
      totals[std::string(rest.substr(1))].add({sum, weight});
    }
  }
  for (const auto& [name, total] : totals) sums.metrics[name] = total.sum / total.weight;
}

double HostNumbers::divisor(const Tail& tail) const {
  const bool is_sum = tail[Tail::sum_losses] > 0;
  return (is_sum ? 1.0 : tail[Tail::weight] / scale_.scalars.unit) * static_cast<double>(scale_.on_host().scale);
}

void HostNumbers::end(const Tail& tail, bool finite) {
  scale_.scalars.unit = kernels::next_unit(scale_.scalars.unit, tail[Tail::weight] / tail[Tail::contributions]);
  scale_.update(finite);
}

WindowSums HostNumbers::so_far() const {
  WindowSums sums;
  double mean_losses = 0;
  std::map<std::string, Metric> metrics;
  for (const auto& replica : replicas_) {
    sums.weight += replica.weight;
    sums.loss += replica.weighted_loss;
    mean_losses += replica.losses.mean_losses;
    for (const auto& [name, metric] : replica.metrics) metrics[name].add(metric);
  }
  for (const auto& [name, metric] : metrics) sums.metrics[name] = metric.sum / metric.weight;
  if (mean_losses > 0) sums.loss /= sums.weight;
  return sums;
}

}  // namespace muster
