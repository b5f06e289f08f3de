#include "device/peer_access.h"

#include <ATen/ops/zeros.h>

#include <atomic>

#include "device/cuda_memory.h"
#include "device/device.h"

namespace muster {

namespace {

std::atomic<bool> cpu_plays_peer_access{true};

}  // namespace

void play_peer_access(bool plays) noexcept { cpu_plays_peer_access = plays; }

bool enable_peer_access(const std::vector<c10::Device>& devices) {
  return devices.front().is_cpu() ? cpu_plays_peer_access.load() : enable_cuda_peer_access(devices);
}

DeviceAccess access_between(const std::vector<c10::Device>& devices) {
  if (devices.size() == 1) return DeviceAccess::peer;
  if (share_memory(devices)) return DeviceAccess::common;
  return enable_peer_access(devices) ? DeviceAccess::peer : DeviceAccess::apart;
}

at::Tensor zeros_over(const std::vector<DevicePart>& parts, const std::vector<c10::Device>& devices) {
  if (!devices.front().is_cpu()) return cuda_zeros_over(parts, devices);
  int64_t bytes = 0;
  for (const auto& part : parts) bytes += part.bytes;
  return at::zeros({bytes}, at::kByte);
}

}  // namespace muster
