// How the ranks of a group over TCP find one another.
#pragma once

#include <map>
#include <string>

#include "comm/hosts/tcp_group.h"
#include "net/unix_socket.h"

namespace muster::comm {

/// "worker 3".
std::string tcp_peer_name(int rank);

/// Connections, by peer, that do not block. Each rank calls the peers before it, and is called by those after it; as
/// make_tcp_group.
std::map<int, net::FileDescriptor> meet_over_tcp(c10d::Store& store, const TcpPlace& place, Milliseconds timeout);

}  // namespace muster::comm
