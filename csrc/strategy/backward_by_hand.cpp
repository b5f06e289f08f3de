#include "strategy/backward_by_hand.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/div.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include <cstddef>

#include "core/plain_memory.h"
#include "device/kernel_dtype.h"
#include "kernels/kernels.h"
#include "muster/error.h"
#include "strategy/sigterm.h"

namespace muster {

namespace {

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble};
constexpr int64_t kSmall = 32'768;  // elements: torch copies more than that in several threads

// The dtype of a gradient on its way, real and imaginary parts apart.
at::ScalarType travels_in(const at::Tensor& parameter) {
  return accumulation_dtype(c10::toRealValueType(parameter.scalar_type()));
}

std::vector<int64_t> real_sizes(const at::Tensor& parameter) {
  auto sizes = parameter.sizes().vec();
  if (parameter.is_complex()) sizes.push_back(2);
  return sizes;
}

int64_t real_numel(const at::Tensor& parameter) { return parameter.numel() * (parameter.is_complex() ? 2 : 1); }

// Whether a kernel may go through its memory; a call into torch costs more than the work on a small one.
bool is_small_and_plain(const at::Tensor& gradient) {
  return gradient.layout() == at::kStrided && gradient.is_cpu() && gradient.numel() < kSmall &&
         !gradient.is_complex() && !is_lazy(gradient) && gradient.is_contiguous();
}

template <class T>
void divide(const void* sums, void* means, int64_t n, T divisor) {
  for (int64_t i = 0; i < n; ++i) static_cast<T*>(means)[i] = static_cast<const T*>(sums)[i] / divisor;
}

// What small and plain gradients need, and what is left to torch.
struct Copies {
  std::vector<kernels::PackItem> small;
  std::vector<at::Tensor> to, from;

  void add(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& sums, int64_t offset) {
    const int64_t n = real_numel(parameter);
    auto* const destination = static_cast<std::byte*>(sums.mutable_data_ptr()) + offset * sums.itemsize();
    if (gradient.defined() && !is_small_and_plain(gradient)) {
      to.push_back(sums.narrow(0, offset, n).view(real_sizes(parameter)));
      from.push_back(as_real(gradient.to_dense()));
    } else if (gradient.defined()) {
      small.push_back(
          {gradient.const_data_ptr(), kernel_dtype(gradient.scalar_type()), destination, static_cast<size_t>(n)});
    } else if (sums.is_cpu()) {
      small.push_back({nullptr, kernel_dtype(sums.scalar_type()), destination, static_cast<size_t>(n)});
    } else {
      sums.narrow(0, offset, n).zero_();
    }
  }

  void run() const {
    kernels::pack(small.data(), small.size(), /*accumulate=*/false);
    if (!to.empty()) at::_foreach_copy_(to, from);
  }
};

// Whether a worker has a gradient of each.
at::Tensor presence(const std::vector<at::Tensor>& parameters, bool has_gradients) {
  auto present = at::zeros({static_cast<int64_t>(parameters.size())}, at::kDouble);
  if (!has_gradients) return present;
  for (size_t p = 0; p < parameters.size(); ++p) present.data_ptr<double>()[p] = parameters[p].grad().defined() ? 1 : 0;
  return present;
}

void take_mean(const at::Tensor& parameter, const at::Tensor& sums, int64_t offset, int64_t workers) {
  auto& gradient = parameter.mutable_grad();
  const int64_t n = real_numel(parameter);
  if (gradient.defined() && is_small_and_plain(gradient) && gradient.scalar_type() == sums.scalar_type()) {
    const auto* const from = static_cast<const std::byte*>(sums.const_data_ptr()) + offset * sums.itemsize();
    if (sums.scalar_type() == at::kDouble) return divide(from, gradient.mutable_data_ptr(), n, double(workers));
    return divide(from, gradient.mutable_data_ptr(), n, static_cast<float>(workers));
  }
  const auto sum = sums.narrow(0, offset, n).view(real_sizes(parameter));
  const bool is_strided = gradient.defined() && gradient.layout() == at::kStrided;
  if (is_strided && !is_lazy(gradient) && gradient.scalar_type() == sum.scalar_type()) {
    at::div_out(gradient, sum, at::Scalar(workers));
    return;
  }
  auto mean = at::div(sum, at::Scalar(workers));
  if (parameter.is_complex()) mean = at::view_as_complex(mean);
  if (is_strided) {
    gradient.copy_(mean);
  } else {
    gradient = mean.to(parameter.scalar_type());
  }
}

}  // namespace

void GradientAverage::check() const {
  const auto& options = session_.options();
  if (session_.groups().servers) {
    throw InvalidArgument(
        "backward() by hand does not reach parameter servers; return the loss from strategy.step(fn, ...)");
  }
  if (options.precision == Precision::fp16 || options.loss_scale) {
    throw InvalidArgument(
        "backward() by hand does not know the loss scale; return the loss from strategy.step(fn, ...)");
  }
  if (session_.topology().local_replicas() > 1) {
    throw InvalidArgument(
        "backward by hand needs one replica per process; write the step as a function that returns the "
        "loss and call strategy.step(fn, ...)");
  }
}

at::Tensor GradientAverage::buffer(int64_t numel, at::ScalarType dtype) {
  auto& memory = buffers_[dtype == at::kDouble ? 1 : 0];
  if (!memory.defined() || memory.numel() < numel) memory = session_.groups().gradients[0]->allocate(numel, dtype);
  return memory.narrow(0, 0, numel);
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
  for (const auto dtype : kDtypes) {
    std::vector<at::Tensor> travelling;
    int64_t numel = 0;
    for (const auto& parameter : parameters) {
      if (travels_in(parameter) == dtype) numel += real_numel(parameter);
    }
    if (numel == 0) continue;
    const auto sums = buffer(numel, dtype);
    Copies copies;
    int64_t offset = 0;
    for (const auto& parameter : parameters) {
      if (travels_in(parameter) != dtype) continue;
      copies.add(parameter, has_gradients ? parameter.grad() : at::Tensor(), sums, offset);
      offset += real_numel(parameter);
    }
    copies.run();
    groups.gradients[0]->all_reduce(sums, ReduceOp::sum).wait();
    present_anywhere.wait();
    if (!has_gradients) continue;
    offset = 0;
    for (size_t p = 0; p < parameters.size(); ++p) {
      if (travels_in(parameters[p]) != dtype) continue;
      if (present.const_data_ptr<double>()[p] != 0) take_mean(parameters[p], sums, offset, workers);
      offset += real_numel(parameters[p]);
    }
  }
}

void GradientAverage::average(const std::vector<at::Tensor>& parameters) { reduce(parameters, true); }

void GradientAverage::add_nothing(const std::vector<at::Tensor>& parameters) { reduce(parameters, false); }

void GradientAverage::average_module(int module) {
  std::vector<at::Tensor> parameters;
  for (int p : session_.registry().parameters_of(module)) {
    const auto& parameter = session_.registry().parameter(0, static_cast<size_t>(p));
    if (parameter.requires_grad()) parameters.push_back(parameter);
  }
  average(parameters);
}

}  // namespace muster
