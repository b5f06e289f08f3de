// "host:port", as users, launchers and stores write it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace muster {

struct Address {
  std::string host;  ///< without brackets
  uint16_t port = 0;

  bool operator==(const Address&) const = default;
};

/// Parses "host:port" or "[IPv6]:port". Throws InvalidArgument unless the host is non-empty, an IPv6 literal stands in
/// brackets and the port lies in [1, 65535].
Address parse_address(std::string_view text);

/// The inverse of parse_address.
std::string to_string(const Address& address);

}  // namespace muster
