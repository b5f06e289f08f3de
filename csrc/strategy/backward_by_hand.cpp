#include "strategy/backward_by_hand.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include <vector>

#include "core/plain_memory.h"
#include "muster/error.h"
#include "strategy/sigterm.h"

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

void average_gradients(Session& session, int module) {
  const auto pass = session.enter();
  const auto& topology = session.topology();
  const auto& groups = session.groups();
  const auto& options = session.options();
  if (groups.servers) {
    throw InvalidArgument(
        "backward() by hand does not reach parameter servers; return the loss from strategy.step(fn, ...)");
  }
  if (options.precision == Precision::fp16 || options.loss_scale) {
    throw InvalidArgument(
        "backward() by hand does not know the loss scale; return the loss from strategy.step(fn, ...)");
  }
  if (topology.local_replicas() > 1) {
    throw InvalidArgument(
        "backward by hand needs one replica per process; write the step as a function that returns the "
        "loss and call strategy.step(fn, ...)");
  }
  SigtermWatch::note_step();
  if (topology.num_workers == 1) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> parameters;
  for (int p : session.registry().parameters_of(module)) {
    const auto& parameter = session.registry().parameter(0, static_cast<size_t>(p));
    if (parameter.requires_grad()) parameters.push_back(parameter);
  }
  const auto device = topology.devices.front();
  auto used = at::zeros({static_cast<int64_t>(parameters.size())}, at::kDouble);
  for (size_t p = 0; p < parameters.size(); ++p) used.data_ptr<double>()[p] = parameters[p].grad().defined() ? 1 : 0;
  groups.control_of(0)->all_reduce(used, ReduceOp::sum).wait();
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
    groups.gradients[0]->all_reduce(sums, ReduceOp::sum).wait();
    sums.div_(topology.num_workers);
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
