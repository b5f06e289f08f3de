#include "cpp/catch.h"
#include "cpp/catch_runner.h"
#include "device/device.h"
#include "kernels/cuda/cuda_kernels.h"

int main(int argc, char** argv) {
  muster::play_streams_on_cpu(true);
  return run_tests(argc, argv);
}

TEST_CASE("the library calls the emulated kernels", "[device]") {
  // A step would throw NotBuilt otherwise.
  REQUIRE(muster::kernels::cuda::is_built());
}
