#include "job/devices.h"

#include "cpp/catch.h"

namespace muster {

TEST_CASE("a worker has the GPU of its local rank, or the only one that its process sees", "[job]") {
  using Names = std::vector<std::string>;
  CHECK(device_of_worker(3, 8) == Names{"cuda:3"});
  CHECK(device_of_worker(3, 1) == Names{"cuda:0"});
  CHECK(device_of_worker(0, 1) == Names{"cuda:0"});
  CHECK(device_of_worker(3, 2) == Names{"cuda:3"});  // which is not there: an error says so
  CHECK(device_of_worker(3, 0).empty());
}

}  // namespace muster
