// The name at which a parameter server listens, given the address that users write.
#pragma once

#include <cstddef>
#include <string>

namespace muster::server {

/// The abstract Unix name, "muster-server-<port>", of the server at "host:port". The host must mean this one:
/// localhost, a loopback literal, or this host's name, whole or without its domain. Throws InvalidArgument for what is
/// no address, NotBuilt for any other host: servers on other hosts are not there yet.
std::string channel_name(const std::string& address);

/// The address of such a name, "localhost:<port>"; any other name as it is.
std::string address_of(const std::string& channel);

/// For messages: "parameter server 2 (localhost:29500)".
std::string name_of_server(size_t index, const std::string& channel);

/// "localhost:<port>" where no server of this host listens: a random port from 49152 on. Throws CommError where none is
/// found.
std::string free_address();

}  // namespace muster::server
