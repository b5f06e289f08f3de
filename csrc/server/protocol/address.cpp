#include "server/protocol/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <random>
#include <string_view>

#include "core/address.h"
#include "muster/error.h"
#include "net/unix_socket.h"

namespace muster::server {
namespace {

constexpr std::string_view kPrefix = "muster-server-";
constexpr int kFirstPort = 49152, kLastPort = 65535;  // RFC 6335's dynamic ports
constexpr int kTries = 1000;

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "";
  return name.data();
}

bool equal(const std::string& a, const std::string& b) { return ::strcasecmp(a.c_str(), b.c_str()) == 0; }

bool is_loopback(const std::string& host) {
  in_addr v4{};
  if (::inet_pton(AF_INET, host.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == 127;
  in6_addr v6{};
  return ::inet_pton(AF_INET6, host.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

}  // namespace

std::string channel_name(const std::string& address) {
  const auto [host, port] = parse_address(address);
  const std::string here = host_name();
  if (!equal(host, "localhost") && !is_loopback(host) && !equal(host, here) &&
      !equal(host, here.substr(0, here.find('.')))) {
    throw NotBuilt("parameter server '" + address + "' is on another host than this one ('" + here +
                   "'), and servers on other hosts are not there yet; start workers and servers on one host, and write "
                   "localhost:" +
                   std::to_string(port));
  }
  return std::string(kPrefix) + std::to_string(port);
}

std::string address_of(const std::string& channel) {
  const std::string port = channel.starts_with(kPrefix) ? channel.substr(kPrefix.size()) : "";
  const bool is_port = !port.empty() && port.size() <= 5 && port.find_first_not_of("0123456789") == std::string::npos;
  return is_port ? "localhost:" + port : channel;
}

std::string name_of_server(size_t index, const std::string& channel) {
  return "parameter server " + std::to_string(index) + " (" + address_of(channel) + ")";
}

std::string free_address() {
  std::random_device random;
  std::uniform_int_distribution<int> ports(kFirstPort, kLastPort);
  std::string why;
  for (int i = 0; i < kTries; ++i) {
    const std::string address = "localhost:" + std::to_string(ports(random));
    try {
      net::listen_at(channel_name(address), SOCK_STREAM);
      return address;
    } catch (const CommError& error) {
      why = error.what();
    }
  }
  throw CommError("no free port was found for a parameter server: " + why);
}

}  // namespace muster::server
