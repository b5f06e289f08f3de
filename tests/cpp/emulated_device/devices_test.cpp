// Devices that a build has kernels for.
#include "job/devices.h"

#include "cpp/catch.h"
#include "kernels/cuda/cuda_kernels.h"
#include "muster/error.h"
#include "support/cuda_emulation.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::testing;

TEST_CASE("a build without code for a GPU is refused, and says what it lacks", "[device]") {
  auto& played = kernels::cuda::emulation::options;
  const auto before = played;
  played.has_code = false;
  played.capability = 86;
  for (int i = 0; i < 2; ++i) {
    const auto message = message_of<NotBuilt>([] { check_code(c10::kCPU); });
    CHECK(contains(message, "compute capability 8.6"));
    CHECK(contains(message, "-DCMAKE_CUDA_ARCHITECTURES=86"));
  }
  played.has_code = true;
  check_code(c10::kCPU);
  played.has_code = false;
  check_code(c10::kCPU);  // looked at once
  played = before;
}
