// A process group between the hosts of a job whose program has none: all-to-all over TCP.
#pragma once

#include <string>
#include <vector>

#include "comm/c10d/communicator.h"

namespace c10d {
class Store;
}

namespace muster::comm {

/// A rank of such a group.
struct TcpPlace {
  int rank = 0;
  int size = 1;
  std::vector<int> peers;  ///< ranks that this one sends to or has from, beside itself; it is a peer of each of them
  std::string address;     ///< a number: of the interface on which it listens
};

/// A group of which alltoall_base of dense CPU tensors is there, and nothing else. Exchanges run one after another, on
/// a thread of the group's own, and wait for no peer that nothing goes to and comes from. Neither encrypted nor
/// authenticated but by a word that the store gives to the peers. Ranks that disagree about an exchange, and a
/// connection that ends, are a CommError of its Work, and of all later ones; that of a connection says "closed by
/// peer". Backend::abort ends the connections. Collective over the group: ranks meet through `store`, which nothing
/// else uses. Throws Timeout naming who is missing, and CommError.
ProcessGroupPtr make_tcp_group(c10d::Store& store, const TcpPlace& place, Milliseconds timeout);

}  // namespace muster::comm
