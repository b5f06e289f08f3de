#include "window/device_shares.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "core/plain_memory.h"
#include "device/device.h"
#include "device/peer_access.h"

namespace muster {

bool devices_divide(const Topology& topology, const StrategyOptions& options) {
  const auto& devices = topology.devices;
  if (!options.fuse || options.keep_gradients || devices.size() == 1 || !is_streamed(devices.front())) return false;
  const bool have_shards = options.shard_optimizer && topology.num_workers > 1;
  return have_shards ? replicas_have_shards(topology, options) : access_between(devices) == DeviceAccess::peer;
}

bool replicas_have_shards(const Topology& topology, const StrategyOptions& options) {
  return options.shard_optimizer && !options.keep_gradients && topology.num_workers > 1 &&
         is_streamed(topology.devices.front()) && topology.access == DeviceAccess::peer;
}

// Rows are on the first device, which steps them.
DividedStep DeviceShares::divide(const FlatOptimizer& optimizer, const Tail& tail, const std::vector<int>& parameters,
                                 const std::vector<const kernels::StepScalars*>& scalars) const {
  const auto& sums = context_.sums;
  DividedStep divided;
  divided.stores_to_all = optimizer.shard().size == 1;
  for (size_t r = 0; r < scalars.size(); ++r) {
    StepShare share;
    share.gradients = sums.gradients_of(tail, parameters, r);
    share.scalars = scalars[r];
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& parameter = context_.registry.parameter(r, static_cast<size_t>(parameters[i]));
      share.parameters.push_back(parameter);
      const int p = sums.index_of(parameters[i]);
      if (share.gradients[i].sparse.defined()) {
        share.runs.push_back(r == 0 ? optimizer.state().entry(i).run : Run{});
      } else {
        share.runs.push_back(p < 0 ? Run{} : sums.division().devices->at(r)[static_cast<size_t>(p)]);
      }
    }
    divided.shares.push_back(std::move(share));
  }
  return divided;
}

void DeviceShares::place_state(FlatOptimizer& optimizer, const DividedStep& divided, const FlatGroups& groups) const {
  const auto& devices = context_.topology.devices;
  const auto parts = optimizer.common_parts(divided, groups, devices);
  if (!parts.empty()) optimizer.share_state(divided, groups, zeros_over(parts, devices));
}

bool DeviceShares::mend() {
  std::vector<size_t> parameters(context_.sums.trainable().begin(), context_.sums.trainable().end());
  const auto are_alike = [&](size_t p) { return context_.registry.are_alike(p); };
  if (!std::all_of(parameters.begin(), parameters.end(), are_alike)) {
    bring_sums_to_first();
    return false;
  }
  check_.mend(context_.registry.parameters(), parameters);
  return true;
}

// Nothing is left to do where all got all sums.
void DeviceShares::bring_sums_to_first() const {
  const auto& sums = context_.sums;
  const auto& division = sums.division();
  for (size_t p = 0; division.receivers && p < sums.trainable().size(); ++p) {
    const auto& first = sums.engine(0).slot(p);
    if (!first.defined()) continue;
    for (size_t r = 1; r < sums.num_engines(); ++r) {
      const auto& run = division.devices->at(r)[p];
      const auto values = elements_of(as_real(sums.engine(r).slot(p)), run);
      elements_of(as_real(first), run).copy_(values, /*non_blocking=*/true);
    }
  }
}

// All devices wait for all.
void DeviceShares::join() const {
  const auto& devices = context_.topology.devices;
  for (const auto device : devices) order_devices(device, devices.front());
  for (const auto device : devices) order_devices(devices.front(), device);
}

void DeviceShares::step(FlatOptimizer& optimizer, const Tail& tail, const std::vector<int>& parameters,
                        const FlatGroups& groups, const std::vector<const kernels::StepScalars*>& scalars) {
  const auto divided = divide(optimizer, tail, parameters, scalars);
  place_state(optimizer, divided, groups);
  auto plan = optimizer.begin(divided, groups, scalars.front(), /*keep=*/false);
  join();
  std::exception_ptr failure;
  try {
    for (size_t r = 0; r < plan.num_shares(); ++r) plan.run(r);
  } catch (...) {
    failure = std::current_exception();  // while others store what they stepped
  }
  join();
  if (failure) std::rethrow_exception(failure);
  plan.finish();
  if (!divided.stores_to_all) return;
  std::vector<int> stepped;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (divided.shares.front().gradients[i].defined()) stepped.push_back(parameters[i]);
  }
  context_.registry.note_copied(stepped);
}

}  // namespace muster
