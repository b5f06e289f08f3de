#include "core/address.h"

#include <charconv>

#include "muster/error.h"

namespace muster {
namespace {

[[noreturn]] void refuse(std::string_view text, const char* why) {
  throw InvalidArgument("'" + std::string(text) + "' is no address: " + why +
                        "; write \"host:port\" or \"[IPv6]:port\", such as \"node1:29500\"");
}

}  // namespace

Address parse_address(std::string_view text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) refuse(text, "it has no port");
  std::string_view host = text.substr(0, colon);
  const std::string_view port = text.substr(colon + 1);
  if (host.starts_with('[') && host.ends_with(']')) {
    host = host.substr(1, host.size() - 2);
  } else if (host.find_first_of(":[]") != std::string_view::npos) {
    refuse(text, "an IPv6 literal needs brackets");
  }
  if (host.empty()) refuse(text, "it has no host");
  uint16_t number = 0;
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
  if (error != std::errc() || end != port.data() + port.size() || number == 0) {
    refuse(text, "its port is not a number in [1, 65535]");
  }
  return {std::string(host), number};
}

std::string to_string(const Address& address) {
  const bool literal = address.host.find(':') != std::string::npos;
  return (literal ? "[" + address.host + "]" : address.host) + ":" + std::to_string(address.port);
}

}  // namespace muster
