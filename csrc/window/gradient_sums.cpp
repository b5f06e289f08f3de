#include "window/gradient_sums.h"

#include <ATen/ops/eq.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>

#include "core/plain_memory.h"
#include "gradient/gradient_dtype.h"
#include "muster/error.h"
#include "optimizer/gradient_norm.h"
#include "optimizer/shards.h"
#include "window/device_shares.h"
#include "window/server_push.h"

namespace muster {

GradientSums::GradientSums(ParameterRegistry& registry, const Topology& topology, const Groups& groups,
                           const StrategyOptions& options, const void* strategy)
    : registry_(registry), topology_(topology), groups_(groups), options_(options), strategy_(strategy) {}

bool GradientSums::begin_window(const std::vector<int>& parameters) {
  of_window_ = parameters;
  if (engines_.empty()) return true;
  const auto& specs = engines_.front()->parameters();
  size_t next = 0;
  for (int p : parameters) {
    const auto& parameter = registry_.parameter(0, static_cast<size_t>(p));
    if (!parameter.requires_grad()) continue;
    if (next == trainable_.size() || trainable_[next] != p) return true;
    const auto& slot = engines_.front()->slot(next);
    if (!specs[next].tensor.is_same(parameter) || !engines_.front()->watches(next)) return true;
    // A step reads sums in the parameter's memory order. Rows have none: servers make a stub of their weight.
    const auto& [sizes, strides] = shapes_[next];
    const bool is_alike =
        parameter.sizes() == at::IntArrayRef(sizes) && parameter.strides() == at::IntArrayRef(strides);
    if (!specs[next].has_rows && !is_alike) return true;
    if (slot.defined() && (slot.is_complex() != parameter.is_complex() ||
                           c10::toRealValueType(slot.scalar_type()) !=
                               accumulation_dtype(c10::toRealValueType(parameter.scalar_type())))) {
      return true;
    }
    ++next;
  }
  return next != trainable_.size();
}

int GradientSums::first_untrained() const {
  for (const int p : of_window_) {
    if (index_of(p) < 0 && registry_.parameter(0, static_cast<size_t>(p)).requires_grad()) return p;
  }
  return -1;
}

void GradientSums::build(const std::vector<int>& parameters, const Deliver& deliver) {
  const auto num_replicas = topology_.devices.size();
  trainable_.clear();
  shapes_.clear();
  for (int p : parameters) {
    const auto& parameter = registry_.parameter(0, static_cast<size_t>(p));
    if (!parameter.requires_grad()) continue;
    trainable_.push_back(p);
    shapes_.push_back({parameter.sizes().vec(), parameter.strides().vec()});
  }
  if (trainable_.empty()) {
    throw InvalidArgument("none of the parameters to train has requires_grad; unfreeze one before step()");
  }
  trainable_index_.assign(registry_.num_parameters(), -1);
  for (size_t p = 0; p < trainable_.size(); ++p)
    trainable_index_[static_cast<size_t>(trainable_[p])] = static_cast<int>(p);
  engines_.clear();
  const bool all_step = devices_divide(topology_, options_);
  for (size_t r = 0; r < num_replicas; ++r) {
    std::vector<NamedParameter> named;
    for (int p : trainable_) {
      const auto index = static_cast<size_t>(p);
      const bool has_rows = groups_.servers && registry_.rows_of(index) != nullptr;
      named.push_back({registry_.name(index), registry_.parameter(r, index), has_rows});
    }
    GradientEngineOptions options;
    options.bucket_bytes = groups_.buckets.usual;
    options.first_bucket_bytes = groups_.buckets.first;
    options.last_bucket_bytes = groups_.buckets.last;
    if (options_.wire == Wire::bf16 && topology_.num_replicas > 1) options.wire = at::kBFloat16;
    options.overlap = groups_.overlap;
    options.norm_type = options_.clip_norm_type;
    options.receive = topology_.num_workers == 1 ? Receive::first : r == 0 || all_step ? Receive::yes : Receive::no;
    options.control = groups_.control_of(r);
    if (deliver) {
      options.keeps_sparse_slots = true;
      options.make_reduction = [deliver, group = groups_.gradients[r]](const Buckets& buckets) {
        return std::make_unique<ServerPush>(*group, buckets, deliver);
      };
    }
    options.strategy = strategy_;
    options.replica = topology_.first_replica + static_cast<int>(r);
    options.has_neighbours = topology_.local_replicas() > 1;
    engines_.push_back(std::make_unique<GradientEngine>(std::move(named), groups_.gradients[r], options));
  }
}

const at::Tensor& GradientSums::sum_of(const Tail& tail, size_t parameter) const {
  static const at::Tensor none;
  const auto& engine = *engines_.front();
  if (engine.sparse_sum(parameter).defined()) return engine.sparse_sum(parameter);
  return tail.counts()[parameter] > 0 ? engine.slot(parameter) : none;
}

std::vector<at::Tensor> GradientSums::used(const Tail& tail) const {
  std::vector<at::Tensor> sums;
  for (size_t p = 0; p < trainable_.size(); ++p) {
    const auto& values = sum_of(tail, p);
    if (values.defined()) sums.push_back(values);
  }
  return sums;
}

std::vector<at::Tensor> GradientSums::dense(const Tail& tail, size_t local_replica) const {
  std::vector<at::Tensor> sums;
  for (size_t p = 0; p < trainable_.size(); ++p) {
    const auto& sum = sum_of(tail, p);
    if (sum.defined()) sums.push_back(dense_values(sum.is_sparse() ? sum : engines_[local_replica]->slot(p)));
  }
  return sums;
}

std::vector<Run> GradientSums::runs_in(const std::vector<Run>& shard, const Tail& tail, bool has_rows) const {
  std::vector<Run> runs;
  for (size_t p = 0; p < trainable_.size(); ++p) {
    const auto& sum = sum_of(tail, p);
    if (!sum.defined()) continue;
    runs.push_back(sum.is_sparse() ? Run{0, has_rows ? dense_values(sum).numel() : 0} : shard[p]);
  }
  return runs;
}

void GradientSums::make_whole() {
  const auto shards = std::exchange(division_, {}).receivers;
  if (!shards) return;
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    std::vector<std::vector<at::Tensor>> sums(engines_.size());
    std::vector<std::vector<Run>> runs(shards->size());
    for (size_t p = 0; p < trainable_.size(); ++p) {
      const auto& slot = engines_.front()->slot(p);
      if (!slot.defined() || as_real(slot).scalar_type() != dtype) continue;
      for (size_t r = 0; r < engines_.size(); ++r) {
        const auto values = as_real(engines_[r]->slot(p));
        sums[r].push_back(elements_of(values, {0, values.numel()}));
      }
      for (size_t r = 0; r < runs.size(); ++r) runs[r].push_back((*shards)[r][p]);
    }
    broadcast_runs(sums, runs, groups_.gradients);
  }
}

bool GradientSums::has_sparse(const Tail& tail) const {
  for (size_t p = 0; p < trainable_.size(); ++p) {
    if (sum_of(tail, p).defined() && sum_of(tail, p).is_sparse()) return true;
  }
  return false;
}

bool GradientSums::are_finite(const Tail& tail) const {
  for (size_t p = 0; p < trainable_.size(); ++p) {
    const auto& values = sum_of(tail, p);
    if (!values.defined()) continue;
    if (!at::isfinite(dense_values(values)).all().item<bool>()) return false;
  }
  return true;
}

const Run& GradientSums::owned_run(size_t parameter, size_t local_replica) const {
  return engines_[local_replica]->owners()->run(parameter, topology_.first_replica + static_cast<int>(local_replica));
}

bool GradientSums::owned_are_finite(const Tail& tail) const {
  for (size_t p = 0; p < trainable_.size(); ++p) {
    const auto& values = sum_of(tail, p);
    if (!values.defined()) continue;
    if (values.is_sparse()) {
      if (!at::isfinite(dense_values(values)).all().item<bool>()) return false;
      continue;
    }
    for (size_t r = 0; r < engines_.size(); ++r) {
      const auto own = elements_of(engines_[r]->slot(p), owned_run(p, r));
      if (!at::isfinite(own).all().item<bool>()) return false;
    }
  }
  return true;
}

std::vector<FlatGradient> GradientSums::gradients_of(const Tail& tail, const std::vector<int>& parameters,
                                                     size_t local_replica) const {
  std::vector<FlatGradient> gradients(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const int p = index_of(parameters[i]);
    if (p < 0) continue;
    const auto& values = sum_of(tail, static_cast<size_t>(p));
    if (!values.defined()) continue;
    if (values.is_sparse()) {
      gradients[i].sparse = values;
    } else {
      gradients[i].dense = engines_[local_replica]->slot(static_cast<size_t>(p));
    }
  }
  return gradients;
}

void GradientSums::edit(const Tail& tail, const std::function<void()>& edit) const {
  const auto& parameters = engines_.front()->parameters();
  for (size_t p = 0; p < trainable_.size(); ++p) {
    const auto& mean = sum_of(tail, p);
    auto& shown = parameters[p].tensor.mutable_grad();
    shown = mean.defined() ? mean.to(gradient_dtype(parameters[p].tensor)) : at::Tensor();
  }
  edit();
  for (size_t p = 0; p < trainable_.size(); ++p) {
    const auto& mean = sum_of(tail, p);
    const auto& edited = parameters[p].tensor.grad();
    if (edited.is_same(mean)) continue;
    if (!mean.defined()) {
      throw InvalidArgument("a hook gave a gradient to '" + parameters[p].name +
                            "', which has none in this window and is not stepped; use the parameter in the step, or "
                            "pass fuse=False");
    }
    if (!edited.defined()) {
      throw InvalidArgument("a hook took the gradient of '" + parameters[p].name +
                            "' away, which is to be stepped from; set requires_grad to false before the step, or "
                            "zero the gradient in place");
    }
    if (edited.layout() != mean.layout() || edited.sizes() != mean.sizes()) {
      throw InvalidArgument("a hook replaced the gradient of '" + parameters[p].name +
                            "' by one of another layout or shape; change it in place");
    }
    if (mean.is_sparse() || edited.scalar_type() == mean.scalar_type()) {
      mean.copy_(edited);
      continue;
    }
    // What was rounded to be shown, and left as it is, keeps its digits.
    const auto is_left = edited.eq(mean.to(edited.scalar_type()));
    mean.copy_(at::where(is_left, mean, edited.to(mean.scalar_type())));
  }
}

void GradientSums::show(const std::vector<FlatGradient>& gradients, const std::vector<int>& parameters) const {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& mean = gradients[i].sparse.defined() ? gradients[i].sparse : gradients[i].dense;
    if (!mean.defined()) continue;
    const auto& parameter = registry_.parameter(0, static_cast<size_t>(parameters[i]));
    parameter.mutable_grad() = mean.to(gradient_dtype(parameter));
  }
}

void GradientSums::set_ignored(bool ignored, const std::vector<int>& shared) {
  std::vector<size_t> left;
  for (const int p : shared) {
    if (index_of(p) >= 0) left.push_back(static_cast<size_t>(index_of(p)));
  }
  for (auto& engine : engines_) engine->set_ignored(ignored, left);
}

void GradientSums::clear() noexcept {
  for (auto& engine : engines_) engine->clear_gradients();
}

}  // namespace muster
