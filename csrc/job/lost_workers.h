// Who of a job's workers is lost, as its hosts tell one another through the rendezvous.
#pragma once

#include <memory>

#include "comm/hosts/communicator.h"
#include "net/rendezvous.h"

namespace muster {

/// Of the worker `rank`, which gives signs of life in the store from here on, while it runs: some within each
/// `timeout`, from a thread of its own, and over a connection of its own where the store can make one. A forked child
/// gives none.
std::shared_ptr<comm::LostWorkers> make_lost_workers(const net::StorePtr& store, int rank, int num_workers,
                                                     comm::Milliseconds timeout);

}  // namespace muster
