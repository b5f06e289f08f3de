// The groups of a job, by how its processes reach one another.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/c10d/communicator.h"
#include "comm/shared/host_mesh.h"
#include "job/topology.h"
#include "muster/cluster.h"
#include "muster/parameter_server.h"
#include "net/rendezvous.h"

namespace muster {

/// One process that holds all replicas, one a device.
Groups groups_in_process(const std::vector<c10::Device>& devices, comm::Milliseconds timeout);

/// Collective over the cluster, whose workers are on one host. Needs the topology's workers and devices, and places its
/// replicas.
Groups groups_on_host(const Cluster& cluster, Topology& topology, comm::Milliseconds timeout);

/// Collective over the cluster: likewise over the user's process group. Throws InvalidArgument where that has another
/// rank or size than the cluster.
Groups groups_over(const comm::ProcessGroupPtr& process_group, const Cluster& cluster, Topology& topology,
                   comm::Milliseconds timeout);

/// The hosts of a cluster's workers, and process groups between these, over all workers: each for collectives that
/// follow one another. Those of gradients, results and step serve what replicas on GPUs tell one another instead.
struct SeveralHosts {
  std::vector<std::string> hosts;         ///< by worker: the same text where processes share memory
  comm::ProcessGroupPtr workers;          ///< outside of steps
  comm::ProcessGroupPtr workers_results;  ///< outside of steps, of sums on their way back
  comm::ProcessGroupPtr step;             ///< that user code issues inside a step
  comm::ProcessGroupPtr gradients;        ///< on their way to be summed
  comm::ProcessGroupPtr results;          ///< on their way back
  net::StorePtr store = {};               ///< that the workers meet through, for this alone; null: the cluster's
  bool may_abort = false;                 ///< nobody else uses the groups: what fails here may end them
};

/// Collective over the cluster, before there are groups: every worker's `text`, by rank.
std::vector<std::string> tell_workers(const Cluster& cluster, const std::string& text, comm::Milliseconds timeout);

/// Collective over the cluster: connections between its hosts, where the program has no process groups; none where all
/// workers are on one. Throws InvalidArgument, on all workers, where any reaches the rendezvous by its loopback.
std::optional<SeveralHosts> connect_hosts(const Cluster& cluster, comm::Milliseconds timeout);

/// Collective over the cluster: as groups_on_host, where the workers are on several hosts. On the CPU they give the
/// same bits; gradients of GPUs go through NCCL.
Groups groups_over_hosts(const SeveralHosts& several, const Cluster& cluster, Topology& topology,
                         comm::Milliseconds timeout);

/// Collective over the cluster, unless its servers already serve a job on which other workers train: the groups then
/// join it (Groups::joins). Needs the topology's workers and devices, and places its replicas. `options`: the words of
/// in_words, to which those of the servers are added; throws InvalidArgument where ranks differ in them, or the worker
/// that this one replaces had another number of replicas.
Groups groups_with_servers(const Cluster& cluster, const ServerOptions& server_options, Topology& topology,
                           const std::string& options, comm::Milliseconds timeout);

/// What the local replicas have in the place of a group with other workers'.
std::vector<comm::CommunicatorPtr> refusing_replicas(const Topology& topology, const std::string& reason);

/// Collective over the cluster: the mesh of its workers, each with `replicas` ranks. `prefix` is the meeting's in the
/// store, one a mesh.
std::shared_ptr<comm::HostMesh> connect_workers(const net::StorePtr& store, const std::string& prefix,
                                                const Topology& topology, int replicas, comm::Milliseconds timeout);

}  // namespace muster
