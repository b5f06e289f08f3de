#include "window/device_shares.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "device/device.h"
#include "device/peer_access.h"

namespace muster {

bool devices_divide(const Topology& topology, const StrategyOptions& options) {
  const auto& devices = topology.devices;
  const bool have_shards = options.shard_optimizer && topology.num_workers > 1;
  return options.fuse && !options.keep_gradients && !have_shards && devices.size() > 1 &&
         is_streamed(devices.front()) && !share_memory(devices) && enable_peer_access(devices);
}

std::vector<DeviceNorm::Part> DeviceShares::parts(const Tail& tail) const {
  const auto& devices = context_.topology.devices;
  std::vector<DeviceNorm::Part> parts;
  for (size_t r = 0; r < devices.size(); ++r) {
    const auto& shard = context_.sums.division().devices->at(r);
    parts.push_back({devices[r], context_.sums.dense(tail, r), context_.sums.runs_in(shard, tail, r == 0)});
  }
  return parts;
}

// Rows are on the first device, which steps them.
DividedStep DeviceShares::divide(const Tail& tail, const std::vector<int>& parameters,
                                 const std::vector<const kernels::StepScalars*>& scalars) const {
  const auto& sums = context_.sums;
  DividedStep divided;
  for (size_t r = 0; r < scalars.size(); ++r) {
    StepShare share;
    share.gradients = sums.gradients_of(tail, parameters, r);
    share.scalars = scalars[r];
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& parameter = context_.registry.parameter(r, static_cast<size_t>(parameters[i]));
      share.parameters.push_back(parameter);
      const int p = sums.index_of(parameters[i]);
      if (share.gradients[i].sparse.defined()) {
        share.runs.push_back({0, r == 0 ? parameter.numel() : 0});
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
  if (!std::all_of(parameters.begin(), parameters.end(), are_alike)) return false;
  check_.mend(context_.registry.parameters(), parameters);
  return true;
}

// All devices wait for all.
void DeviceShares::join() const {
  const auto& devices = context_.topology.devices;
  for (const auto device : devices) order_devices(device, devices.front());
  for (const auto device : devices) order_devices(devices.front(), device);
}

void DeviceShares::step(FlatOptimizer& optimizer, const Tail& tail, const std::vector<int>& parameters,
                        const FlatGroups& groups, const std::vector<const kernels::StepScalars*>& scalars) {
  const auto divided = divide(tail, parameters, scalars);
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
  std::vector<int> stepped;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (divided.shares.front().gradients[i].defined()) stepped.push_back(parameters[i]);
  }
  context_.registry.note_copied(stepped);
}

}  // namespace muster
