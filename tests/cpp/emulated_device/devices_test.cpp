// Devices that a build has kernels for.
#include "job/devices.h"

#include <torch/nn/modules/linear.h>

#include "cpp/catch.h"
#include "kernels/cuda/cuda_kernels.h"
#include "muster/error.h"
#include "muster/mirrored.h"
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

TEST_CASE("between devices buckets are as large as DDP's, of one as small as they were", "[device]") {
  const auto explained = [](const std::vector<std::string>& devices, const StrategyOptions& options) {
    MirroredStrategy strategy(devices, options);
    strategy.prepare([] { return torch::nn::Linear(2, 2); });
    return strategy.explain();
  };
  CHECK(contains(explained({"cpu", "cpu"}, {}), "in buckets of up to 25 MiB"));
  CHECK(contains(explained({"cpu"}, {}), "in buckets of up to 8 MiB"));
  CHECK(contains(explained({"cpu", "cpu"}, {.bucket_bytes = 3 << 20}), "in buckets of up to 3 MiB"));
}
