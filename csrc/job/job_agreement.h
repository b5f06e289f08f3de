// The words and numbers that all ranks of a job agree on before its first step: options, threads, seed, replicas.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "job/topology.h"
#include "muster/options.h"

namespace muster {

/// The deadline of a group's collectives.
comm::Milliseconds timeout_of(const StrategyOptions& options);

/// The options as words "name=value" with a space between, equal where the options are.
std::string in_words(const StrategyOptions& options);

/// Throws InvalidArgument with the words that differ, where `first` has `its_options` and `second` has `options`.
void compare_options(const std::string& first, const std::string& its_options, const std::string& second,
                     const std::string& options);

/// Collective over workers. Throws InvalidArgument, on all alike, where a rank's words are not those of rank 0.
void compare_options(const std::string& options, comm::Communicator& workers);

/// Collective over workers: rank 0's number.
int64_t broadcast_number(comm::Communicator& workers, int64_t number);

/// Collective over workers: fills the topology's replicas_of_worker, first_replica, num_replicas and access from the
/// devices that each worker has.
void place_replicas(Topology& topology, comm::Communicator& workers);

/// Intra-op threads of a replica: the cores that the workers on rank 0's host may use together, over the replicas
/// there, so that workers which are bound to cores of their own have as many as workers which share all. Where control
/// groups limit the CPU time of all of them, no more cores than that. By rank: its host, its cores as words with
/// "limit=CORES@GROUP" where there is such a limit, how many replicas it has.
int threads_of_replica(const std::vector<std::string>& hosts, const std::vector<std::string>& cores,
                       const std::vector<int>& replicas);

/// Collective over workers: the chief's option, or threads_of_replica.
int agree_on_threads(const StrategyOptions& options, const Topology& topology, comm::Communicator& workers);

/// Collective over workers: the chief's option, or the seed of its default generator.
uint64_t agree_on_seed(const StrategyOptions& options, comm::Communicator& workers);

}  // namespace muster
