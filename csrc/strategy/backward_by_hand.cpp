#include "strategy/backward_by_hand.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/div.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "core/plain_memory.h"
#include "core/replica_context.h"
#include "device/kernel_dtype.h"
#include "kernels/kernels.h"
#include "muster/error.h"
#include "strategy/sigterm.h"
#include "window/loss_scale.h"

namespace muster {

namespace {

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble};
constexpr int64_t kLarge = 32'768;  // elements: torch copies so many in several threads; peers average them in place

// The dtype of a gradient on its way, real and imaginary parts apart.
at::ScalarType travels_in(const at::Tensor& parameter) {
  return accumulation_dtype(c10::toRealValueType(parameter.scalar_type()));
}

std::vector<int64_t> real_sizes(const at::Tensor& parameter) {
  auto sizes = parameter.sizes().vec();
  if (parameter.is_complex()) sizes.push_back(2);
  return sizes;
}

/// Where a parameter's gradient travels.
struct GradientSlot {
  size_t parameter;
  int64_t offset;  // elements
};

// Whether its values stand in the memory of this host one after the other.
bool is_plain(const at::Tensor& gradient) {
  return gradient.layout() == at::kStrided && gradient.is_cpu() && !gradient.is_complex() && !is_lazy(gradient) &&
         gradient.is_contiguous();
}

// Whether a kernel may copy it from or to `sums`; a call into torch costs more than the work on a small one.
bool is_small_and_plain(const at::Tensor& gradient, const at::Tensor& sums) {
  return gradient.numel() < kLarge && sums.is_cpu() && is_plain(gradient) &&
         accumulation_dtype(gradient.scalar_type()) == sums.scalar_type();
}

template <class T>
void divide(const void* sums, void* means, int64_t n, T divisor) {
  for (int64_t i = 0; i < n; ++i) static_cast<T*>(means)[i] = static_cast<const T*>(sums)[i] / divisor;
}

/// Gradients and the places of their sums: kernels copy what is small and plain, torch the rest at once.
class GradientCopies {
 public:
  void add(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& sums, int64_t offset) {
    const int64_t n = num_reals(parameter);
    const bool is_small = !gradient.defined() || is_small_and_plain(gradient, sums);
    if (!is_small || !sums.is_cpu()) {
      const auto to = sums.narrow(0, offset, n);
      if (!gradient.defined()) {
        to.zero_();
        return;
      }
      to_.push_back(to.view(real_sizes(parameter)));
      from_.push_back(as_real(gradient.to_dense()));
      return;
    }
    const void* const source = gradient.defined() ? gradient.const_data_ptr() : nullptr;
    const auto dtype = gradient.defined() ? gradient.scalar_type() : sums.scalar_type();
    small_.push_back({source, kernel_dtype(dtype),
                      static_cast<std::byte*>(sums.mutable_data_ptr()) + offset * sums.itemsize(),
                      static_cast<size_t>(n)});
  }

  void run() const {
    kernels::pack(small_.data(), small_.size(), /*accumulate=*/false);
    if (!to_.empty()) at::_foreach_copy_(to_, from_);
  }

 private:
  std::vector<kernels::PackItem> small_;
  std::vector<at::Tensor> to_, from_;
};

// Whether a worker has a gradient of each.
at::Tensor presence(const std::vector<at::Tensor>& parameters, bool has_gradients) {
  auto present = at::zeros({static_cast<int64_t>(parameters.size())}, at::kDouble);
  if (!has_gradients) return present;
  for (size_t p = 0; p < parameters.size(); ++p) present.data_ptr<double>()[p] = parameters[p].grad().defined() ? 1 : 0;
  return present;
}

/// The way back, divided.
class Means {
 public:
  Means(const at::Tensor& sums, int64_t divisor) : sums_(sums), divisor_(divisor) {
    if (!sums_.is_cpu()) sums_.div_(divisor_);  // one kernel for all
  }

  void add(const at::Tensor& parameter, int64_t offset) {
    auto& gradient = parameter.mutable_grad();
    const int64_t n = num_reals(parameter);
    const bool is_strided = gradient.defined() && gradient.layout() == at::kStrided;
    if (is_strided && gradient.scalar_type() == sums_.scalar_type() && is_small_and_plain(gradient, sums_)) {
      divide_small(gradient, offset, n);
      return;
    }
    const auto sum = sums_.narrow(0, offset, n).view(real_sizes(parameter));
    if (is_strided && sums_.is_cpu() && !is_lazy(gradient) && gradient.scalar_type() == sum.scalar_type()) {
      at::div_out(gradient, sum, at::Scalar(divisor_));
      return;
    }
    auto mean = sums_.is_cpu() ? at::div(sum, at::Scalar(divisor_)) : sum;
    if (parameter.is_complex()) mean = at::view_as_complex(mean);
    if (is_strided) {
      to_.push_back(gradient);
      from_.push_back(mean);
    } else {
      gradient = mean.to(parameter.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    }
  }

  void run() const {
    if (!to_.empty()) at::_foreach_copy_(to_, from_);
  }

 private:
  void divide_small(const at::Tensor& gradient, int64_t offset, int64_t n) const {
    const auto* const from = static_cast<const std::byte*>(sums_.const_data_ptr()) + offset * sums_.itemsize();
    if (sums_.scalar_type() == at::kDouble) {
      divide(from, gradient.mutable_data_ptr(), n, static_cast<double>(divisor_));
    } else {
      divide(from, gradient.mutable_data_ptr(), n, static_cast<float>(divisor_));
    }
    gradient.unsafeGetTensorImpl()->bump_version();
  }

  const at::Tensor& sums_;
  const int64_t divisor_;
  std::vector<at::Tensor> to_, from_;
};

}  // namespace

void GradientAverage::check() const {
  const auto& options = session_.options();
  if (session_.groups().servers) {
    throw InvalidArgument(
        "backward() by hand does not reach parameter servers; return the loss from strategy.step(fn, ...)");
  }
  if (loss_scale_rule(options)) {
    throw InvalidArgument(
        "backward() by hand does not know the loss scale; return the loss from strategy.step(fn, ...)");
  }
  if (session_.topology().local_replicas() > 1) {
    const auto replica = current_replica();
    if (replica && replica->strategy != &session_) {
      throw InvalidArgument(
          "backward in a step of one strategy reached a model that another one has prepared; prepare it with the "
          "strategy that steps, or freeze its parameters");
    }
    throw InvalidArgument(
        "backward by hand needs one replica per process; write the step as a function that returns the "
        "loss and call strategy.step(fn, ...)");
  }
}

at::Tensor GradientAverage::buffer(int64_t numel, at::ScalarType dtype) {
  auto& memory = buffers_[dtype == at::kDouble ? 1 : 0];
  if (!memory.defined() || memory.numel() < numel) {
    memory.reset();  // before there is another
    memory = session_.groups().gradients[0]->allocate(numel, dtype);
  }
  return memory.narrow(0, 0, numel);
}

at::Tensor GradientAverage::slot(size_t number, int64_t numel, at::ScalarType dtype) {
  if (slots_.size() <= number) slots_.resize(number + 1);
  auto& memory = slots_[number];
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  if (!memory.defined() || memory.numel() < bytes) {
    memory.reset();  // before there is another
    memory = session_.groups().gradients[0]->allocate(bytes, at::kByte);
  }
  return memory.narrow(0, 0, bytes).view(dtype);
}

// All workers find the same ones.
std::vector<size_t> GradientAverage::large_ones(const std::vector<at::Tensor>& parameters) {
  std::vector<size_t> large;
  if (!peers_) peers_ = PeerAverage::over(*session_.groups().gradients[0]);
  for (size_t p = 0; p < parameters.size() && peers_; ++p) {
    if (num_reals(parameters[p]) >= kLarge) large.push_back(p);
  }
  return large;
}

// Gradients become their means where peers reach them. Of the others the means are in the slots that are returned.
std::vector<GradientAverage::Slot> GradientAverage::average_large(const std::vector<at::Tensor>& parameters,
                                                                  const std::vector<size_t>& large,
                                                                  bool has_gradients) {
  if (!peers_ || large.empty()) return {};
  PeerAverage& peers = *peers_;
  std::vector<at::Tensor> averaged;
  for (const size_t p : large) {
    const auto& gradient = parameters[p].grad();
    const bool is_alike = has_gradients && gradient.defined() && gradient.scalar_type() == travels_in(parameters[p]);
    averaged.push_back(is_alike && is_plain(gradient) ? gradient : at::Tensor());
  }
  const auto stays = peers.may_change(averaged);
  std::vector<Slot> slots;
  GradientCopies copies;
  for (size_t i = 0; i < large.size(); ++i) {
    if (stays[i]) continue;
    const auto& parameter = parameters[large[i]];
    averaged[i] = slot(i, num_reals(parameter), travels_in(parameter));
    copies.add(parameter, has_gradients ? parameter.grad() : at::Tensor(), averaged[i], 0);
    slots.push_back({large[i], averaged[i]});
  }
  copies.run();
  peers.average(averaged);
  for (size_t i = 0; i < large.size(); ++i) {
    if (stays[i]) averaged[i].unsafeGetTensorImpl()->bump_version();
  }
  return slots;
}

void GradientAverage::reduce(const std::vector<at::Tensor>& parameters, bool has_gradients) {
  const auto pass = session_.enter();
  check();
  SigtermWatch::note_step();
  const auto& groups = session_.groups();
  const int64_t workers = session_.topology().num_workers;
  if (workers == 1) return;
  const at::NoGradGuard no_grad;
  const auto present = presence(parameters, has_gradients);
  auto present_anywhere = groups.control_of(0)->all_reduce(present, ReduceOp::sum);
  const auto large = large_ones(parameters);
  for (const auto dtype : kDtypes) {
    std::vector<GradientSlot> slots;
    int64_t numel = 0;
    for (size_t p = 0; p < parameters.size(); ++p) {
      if (travels_in(parameters[p]) != dtype || std::binary_search(large.begin(), large.end(), p)) continue;
      slots.push_back({p, numel});
      numel += num_reals(parameters[p]);
    }
    if (numel == 0) continue;
    const auto sums = buffer(numel, dtype);
    GradientCopies copies;
    for (const auto& [p, offset] : slots) {
      copies.add(parameters[p], has_gradients ? parameters[p].grad() : at::Tensor(), sums, offset);
    }
    copies.run();
    groups.gradients[0]->all_reduce(sums, ReduceOp::sum).wait();
    present_anywhere.wait();
    if (!has_gradients) continue;
    Means means(sums, workers);
    for (const auto& [p, offset] : slots) {
      if (present.const_data_ptr<double>()[p] != 0) means.add(parameters[p], offset);
    }
    means.run();
  }
  const auto slots_of_large = average_large(parameters, large, has_gradients);
  present_anywhere.wait();  // where there was nothing to send, too
  for (const auto& [p, mean] : slots_of_large) {
    if (!has_gradients || present.const_data_ptr<double>()[p] == 0) continue;
    Means means(mean, 1);
    means.add(parameters[p], 0);
    means.run();
  }
}

void GradientAverage::average(const std::vector<at::Tensor>& parameters) { reduce(parameters, true); }

void GradientAverage::add_nothing(const std::vector<at::Tensor>& parameters) { reduce(parameters, false); }

std::shared_ptr<GradientMemory> GradientAverage::memory_for(const std::vector<at::Tensor>& parameters) {
  const auto& topology = session_.topology();
  if (session_.groups().servers || topology.num_workers == 1 || topology.local_replicas() > 1) return nullptr;
  std::vector<size_t> bytes;
  for (const size_t p : large_ones(parameters)) {
    if (travels_in(parameters[p]) == parameters[p].scalar_type()) bytes.push_back(parameters[p].nbytes());
  }
  if (bytes.empty()) return nullptr;
  auto memory = std::make_shared<GradientMemory>(session_.groups().gradients[0], bytes);
  std::erase_if(memories_, [](const auto& other) { return other.expired(); });
  memories_.push_back(memory);
  return memory;
}

void GradientAverage::release() noexcept {
  for (auto& memory : buffers_) memory.reset();
  slots_.clear();
  peers_.reset();
  for (const auto& memory : std::exchange(memories_, {})) {
    if (const auto kept = memory.lock()) kept->end();
  }
}

void GradientAverage::average_module(int module) {
  std::vector<at::Tensor> parameters;
  for (int p : session_.registry().parameters_of(module)) {
    const auto& parameter = session_.registry().parameter(0, static_cast<size_t>(p));
    if (parameter.requires_grad()) parameters.push_back(parameter);
  }
  average(parameters);
}

}  // namespace muster
