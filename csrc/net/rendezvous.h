// The rendezvous of a job's workers: a c10d::Store that all of them can reach.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>
#include <vector>

#include "muster/cluster.h"

namespace muster::net {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// Collective. A store under a prefix of its own for each call (by `cluster.meeting`, and counted for each of these,
/// process and restart), at `cluster.address`: rank 0 hosts it, on that address's interface alone, unless
/// `cluster.store_is_hosted` or torch.distributed hosts one there in the same process, which is shared. The hosted
/// store lives until the process ends. A world of one gets a store in its own memory. Throws InvalidArgument on every
/// worker that has not yet returned when workers disagree about num_workers or two claim one rank, or when the address
/// cannot be resolved or listened on; Timeout naming the ranks that are missing. Thread-safe.
StorePtr open_store(const Cluster& cluster, std::chrono::milliseconds timeout);

/// Makes sure that workers agree about the size of the job and that each rank is there once, over a fresh prefix of a
/// store; open_store calls it. Throws as open_store does.
void join(c10d::Store& store, int rank, int num_workers, std::chrono::milliseconds timeout);

/// Sets a key. Throws CommError when the store is gone.
void set_text(c10d::Store& store, const std::string& key, const std::string& value);

/// The values of all keys, waiting until they are there. Throws Timeout naming `who` of each missing key, CommError
/// when the store is gone.
std::vector<std::string> get_texts(c10d::Store& store, const std::vector<std::string>& keys,
                                   const std::vector<std::string>& who, std::chrono::milliseconds timeout);

}  // namespace muster::net
