// Memory of one process's devices that all of them read and write by its addresses.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

namespace muster {

/// What a process's replicas have of one another's devices, the least first.
enum class DeviceAccess : int64_t {
  common,  ///< some work on one device
  apart,   ///< each has a device of its own
  peer,    ///< and each reads and writes the memory of all; also that of one replica alone
};

/// Lets each of these devices, all different, read and write what torch allocates on every other one (CUDA's peer
/// access), and says whether they can, and memory can lie on several of them. Replicas on the CPU can, unless a test
/// withholds it.
bool enable_peer_access(const std::vector<c10::Device>& devices);

/// What replicas on these devices have, once peer access was enabled where it can be.
DeviceAccess access_between(const std::vector<c10::Device>& devices);

/// For tests: whether replicas on the CPU that play devices of their own (device/device.h) have peer access.
void play_peer_access(bool plays) noexcept;

/// So many bytes, on a device.
struct DevicePart {
  c10::Device device;
  int64_t bytes;  ///< not negative

  bool operator==(const DevicePart&) const = default;
};

/// Zeros, uint8, one range of addresses that `devices`, which have peer access, read and write; part after part lies in
/// the memory of its device, but for up to half a page (2 MiB of CUDA) at its ends. To torch they are on the first
/// device. Blocks; given back once all devices are through with them. Throws c10::OutOfMemoryError.
at::Tensor zeros_over(const std::vector<DevicePart>& parts, const std::vector<c10::Device>& devices);

}  // namespace muster
