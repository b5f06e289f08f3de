// The memory that this process may use.
#pragma once

#include <cstdint>
#include <filesystem>

namespace muster {

/// Bytes: the least of the machine's memory and the limits of this process's control group and those above it, of
/// cgroup v2 (memory.max) and v1 (memory.limit_in_bytes), as containers have. What cannot be read does not limit.
/// `proc` and `cgroup` are where the system's folders are.
int64_t memory_limit(const std::filesystem::path& proc = "/proc",
                     const std::filesystem::path& cgroup = "/sys/fs/cgroup");

}  // namespace muster
