#include <muster/version.h>

#include <string>

#include "cpp/catch.h"

TEST_CASE("the library's version is that of its headers", "[version]") {
  CHECK(std::string(muster::version()) == MUSTER_VERSION);
  CHECK(std::string(MUSTER_VERSION) == std::to_string(MUSTER_VERSION_MAJOR) + "." +
                                           std::to_string(MUSTER_VERSION_MINOR) + "." +
                                           std::to_string(MUSTER_VERSION_PATCH));
}
