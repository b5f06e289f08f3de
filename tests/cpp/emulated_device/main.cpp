#if !__has_include(<catch2/catch_all.hpp>)
#define CATCH_CONFIG_RUNNER
#endif
#include "cpp/catch.h"

#include <iostream>

#include "device/device.h"
#include "kernels/cuda/cuda_kernels.h"

int main(int argc, char** argv) {
  muster::play_streams_on_cpu(true);
  return Catch::Session().run(argc, argv);
}

TEST_CASE("the library calls the emulated kernels", "[device]") {
  // A step would throw NotBuilt otherwise.
  REQUIRE(muster::kernels::cuda::is_built());
}
