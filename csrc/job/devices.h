// The devices of a process's replicas, from their names.
#pragma once

#include <c10/core/Device.h>

#include <string>
#include <vector>

#include "muster/cluster.h"

namespace muster {

/// Throws NotBuilt where this build's kernels have no code for a CUDA device. Looks once at each.
void check_code(c10::Device device);

/// A device a name, all on the CPU or all on CUDA; no name: one on the CPU. CUDA devices have an index. Throws
/// InvalidArgument for a name that does not parse or a device that is not there, NotBuilt for one that this build
/// cannot use.
std::vector<c10::Device> parse_devices(const std::vector<std::string>& names);

/// The names of all CUDA devices; none where this build has no CUDA.
std::vector<std::string> all_cuda_devices();

/// The name of the CUDA device of the worker's local rank, or of the only one where its process sees one; none where
/// there is no CUDA.
std::vector<std::string> device_of_worker(const Cluster& cluster);
/// Likewise, of a process that sees so many.
std::vector<std::string> device_of_worker(int local_rank, int num_visible);

}  // namespace muster
