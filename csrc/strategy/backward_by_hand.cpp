#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include <vector>

#include "core/plain_memory.h"
#include "muster/error.h"
#include "strategy/strategy_core.h"

namespace muster {

namespace {

// The dtype of a gradient on its way, real and imaginary parts apart.
at::ScalarType travels_in(const at::Tensor& parameter) {
  return accumulation_dtype(c10::toRealValueType(parameter.scalar_type()));
}

std::vector<int64_t> real_sizes(const at::Tensor& parameter) {
  auto sizes = parameter.sizes().vec();
  if (parameter.is_complex()) sizes.push_back(2);
  return sizes;
}

}  // namespace

void StrategyCore::average_gradients(int module) {
  const auto pass = enter();
  gradients_are_applied_ = false;
  if (groups_.servers) {
    throw InvalidArgument(
        "backward() by hand does not reach parameter servers; return the loss from strategy.step(fn, ...)");
  }
  if (options_.precision == Precision::fp16 || options_.loss_scale) {
    throw InvalidArgument(
        "backward() by hand does not know the loss scale; return the loss from strategy.step(fn, ...)");
  }
  if (topology_.local_replicas() > 1) {
    throw InvalidArgument(
        "backward by hand needs one replica per process; write the step as a function that returns the "
        "loss and call strategy.step(fn, ...)");
  }
  if (topology_.num_workers == 1) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> parameters;
  for (int p : registry_.parameters_of(module)) {
    const auto& parameter = registry_.parameter(0, static_cast<size_t>(p));
    if (parameter.requires_grad()) parameters.push_back(parameter);
  }
  const auto device = topology_.devices.front();
  auto used = at::zeros({static_cast<int64_t>(parameters.size())}, at::kDouble);
  for (size_t p = 0; p < parameters.size(); ++p) used.data_ptr<double>()[p] = parameters[p].grad().defined() ? 1 : 0;
  groups_.control_of(0)->all_reduce(used, ReduceOp::sum).wait();
  for (auto dtype : {at::kFloat, at::kDouble}) {
    std::vector<at::Tensor> flat;
    for (size_t p = 0; p < parameters.size(); ++p) {
      if (travels_in(parameters[p]) != dtype) continue;
      const auto& gradient = parameters[p].grad();
      flat.push_back(gradient.defined() ? as_real(gradient.to_dense()).to(dtype).reshape(-1)
                                        : at::zeros({c10::multiply_integers(real_sizes(parameters[p]))},
                                                    at::TensorOptions(dtype).device(device)));
    }
    if (flat.empty()) continue;
    const auto sums = at::cat(flat);
    groups_.gradients[0]->all_reduce(sums, ReduceOp::sum).wait();
    sums.div_(topology_.num_workers);
    int64_t offset = 0;
    for (size_t p = 0; p < parameters.size(); ++p) {
      if (travels_in(parameters[p]) != dtype) continue;
      auto& gradient = parameters[p].mutable_grad();
      const auto sizes = real_sizes(parameters[p]);
      const int64_t count = c10::multiply_integers(sizes);
      const auto values = sums.narrow(0, offset, count).view(sizes);
      const auto mean = parameters[p].is_complex() ? at::view_as_complex(values.clone()) : values;
      offset += count;
      if (used.const_data_ptr<double>()[p] == 0) continue;
      if (gradient.defined() && gradient.layout() == at::kStrided) {
        gradient.copy_(mean);
      } else {
        gradient = mean.to(parameters[p].scalar_type()).clone();
      }
    }
  }
}

}  // namespace muster
