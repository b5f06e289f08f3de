#include "server/protocol/address.h"

#include <unistd.h>

#include <array>
#include <string>

#include "cpp/catch.h"
#include "muster/error.h"
#include "server/shard/server.h"

using namespace muster;
using namespace muster::server;

namespace {

std::string this_host() {
  std::array<char, 256> name{};
  REQUIRE(::gethostname(name.data(), name.size() - 1) == 0);
  return name.data();
}

}  // namespace

TEST_CASE("a server of this host has a name by its port", "[server][address]") {
  const std::string host = this_host();
  const std::string label = host.substr(0, host.find('.'));
  for (const std::string& here :
       {std::string("localhost"), std::string("LocalHost"), std::string("127.0.0.1"), std::string("127.1.2.3"),
        std::string("[::1]"), std::string("[0:0:0:0:0:0:0:1]"), host, label}) {
    INFO(here);
    CHECK(channel_name(here + ":29600") == "muster-server-29600");
    CHECK(channel_name(here + ":1") == "muster-server-1");
  }
  CHECK(address_of("muster-server-29600") == "localhost:29600");
  for (const char* name : {"muster-server-", "muster-server-8f3a", "another"}) CHECK(address_of(name) == name);
}

TEST_CASE("other hosts are not there yet", "[server][address]") {
  for (const char* address : {"10.0.0.1:5000", "128.0.0.1:5000", "0.0.0.0:5000", "[::2]:5000", "[fe80::1]:5000",
                              "localhost.example.com:5000", "127.0.0.1.example.com:5000", " localhost:5000"}) {
    INFO(address);
    CHECK_THROWS_AS(channel_name(address), NotBuilt);
    CHECK_THROWS_WITH(channel_name(address), ContainsSubstring(address) && ContainsSubstring("on other hosts") &&
                                                 ContainsSubstring("write localhost:5000"));
  }
  CHECK_THROWS_AS(channel_name("not-" + this_host() + ":5000"), NotBuilt);
  CHECK_THROWS_AS(channel_name(this_host() + "-2:5000"), NotBuilt);
}

TEST_CASE("a free address can be listened at", "[server][address]") {
  const std::string first = free_address();
  const ParameterServer server({.name = channel_name(first)});
  const std::string second = free_address();
  CHECK(second != first);
  CHECK_NOTHROW(ParameterServer({.name = channel_name(second)}));
  CHECK_THROWS_WITH(ParameterServer({.name = channel_name(first)}),
                    ContainsSubstring(channel_name(first)) && ContainsSubstring("is taken"));
}

TEST_CASE("what is no address has no name", "[server][address]") {
  for (const char* bad : {"", "localhost", "localhost:", "localhost:0", "::1:5000", ":5000"}) {
    INFO(bad);
    CHECK_THROWS_AS(channel_name(bad), InvalidArgument);
  }
}
