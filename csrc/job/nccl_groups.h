// Groups whose gradients NCCL carries, and whose replicas tell one another the rest on the host.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "comm/nccl/nccl.h"
#include "job/topology.h"
#include "net/rendezvous.h"

namespace muster {

/// Whether one replica communicates over NCCL too, where it has nobody to communicate with: for tests and benchmarks
/// of that path on a machine with one GPU. False at first; read when groups are made.
bool& uses_nccl_alone() noexcept;

/// For tests: makes a group of replicas on the CPU that play devices (device/device.h), one for each element; empty:
/// they communicate through the memory of this process. Read when groups are made.
using PlayedGroup = std::function<std::vector<comm::CommunicatorPtr>(const std::vector<comm::NcclOptions>& options)>;
PlayedGroup& played_group() noexcept;

/// The options of an NCCL group whose rank i agrees over `control[i]`.
std::vector<comm::NcclOptions> with_control(const std::vector<comm::CommunicatorPtr>& control,
                                            comm::Milliseconds timeout);

/// Makes `step` other handles of the ranks of `gradients`, which share its order, that agree over `control`.
void share_order(Groups& groups, const std::vector<comm::CommunicatorPtr>& control);

/// Sets gradients and step to NCCL, control to a group on the host, and stages `workers`. Collective over replicas.
/// `make_control(name)` gives a group on the host over all replicas, a handle a local one.
void use_nccl(Groups& groups, const net::StorePtr& store, const Topology& topology,
              const std::function<std::vector<comm::CommunicatorPtr>(const std::string& name)>& make_control,
              comm::Milliseconds timeout);

}  // namespace muster
