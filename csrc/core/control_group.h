// What this process may use of the machine: the limits of its control group and those above it, as containers have.
// Of cgroup v2 and v1; what cannot be read does not limit. `proc` and `cgroup` are where the system's folders are.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace muster {

/// Bytes: the least of the machine's memory and the limits (memory.max, memory.limit_in_bytes).
int64_t memory_limit(const std::filesystem::path& proc = "/proc",
                     const std::filesystem::path& cgroup = "/sys/fs/cgroup");

struct CpuLimit {
  double cores = 0;   ///< CPU time per time, of all processes of the group together
  std::string group;  ///< what tells the group from others of the machine
};

/// The least one (cpu.max, cpu.cfs_quota_us); empty where the CPU time is not limited.
std::optional<CpuLimit> cpu_limit(const std::filesystem::path& proc = "/proc",
                                  const std::filesystem::path& cgroup = "/sys/fs/cgroup");

}  // namespace muster
