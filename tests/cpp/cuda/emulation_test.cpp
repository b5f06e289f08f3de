// The emulator itself: what it computes, and that it finds the faults it promises to find.
#include "cpp/cuda/emulated.h"
#include "kernels/cuda/device.h"

namespace muster::kernels::cuda {
namespace {

void check_problem(const Status& status, const std::string& text) {
  REQUIRE(status.code == Status::Code::failed);
  CHECK_THAT(status.problem, ContainsSubstring(text));
}

MUSTER_KERNEL void shuffle_kernel(int* xored, int* down) {
  const int lane = static_cast<int>(threadIdx.x);
  xored[lane] = __shfl_xor_sync(0xffffffffu, lane, 5);
  down[lane] = __shfl_down_sync(0xffffffffu, lane, 3);
}

TEST_CASE("emulation: shuffles move values between the lanes of a warp", "[cuda]") {
  for (const uint32_t seed : {0u, 1u, 2u}) {
    const Schedule schedule(seed);
    std::vector<int> xored(64), down(64);
    check_ok(launch(shuffle_kernel, {1, 64}, nullptr, xored.data(), down.data()));
    for (int i = 0; i < 64; ++i) {
      CHECK(xored[i] == (i ^ 5));
      CHECK(down[i] == (i % 32 + 3 < 32 ? i + 3 : i));
    }
  }
}

MUSTER_KERNEL void reverse_kernel(int* values) {
  MUSTER_SHARED int shared[96];
  shared[threadIdx.x] = values[blockIdx.x * blockDim.x + threadIdx.x];
  __syncthreads();
  values[blockIdx.x * blockDim.x + threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

TEST_CASE("emulation: a block shares memory and meets at barriers", "[cuda]") {
  for (const bool cooperative : {false, true}) {
    std::vector<int> values(3 * 96);
    for (int i = 0; i < 3 * 96; ++i) values[i] = i;
    check_ok(launch(reverse_kernel, {3, 96, cooperative}, nullptr, values.data()));
    for (int i = 0; i < 3 * 96; ++i) CHECK(values[i] == i / 96 * 96 + 95 - i % 96);
  }
}

MUSTER_KERNEL void meet_kernel(uint32_t* arrived) {
  if (threadIdx.x != 0) return;
  store_release_system(&arrived[blockIdx.x], 1u);
  while (load_acquire_system(&arrived[1 - blockIdx.x]) == 0) spin_pause();
}

TEST_CASE("emulation: the blocks of a cooperative launch run at the same time", "[cuda]") {
  uint32_t arrived[2] = {};
  check_ok(launch(meet_kernel, {2, 32, true}, nullptr, static_cast<uint32_t*>(arrived)));
}

TEST_CASE("emulation: a block that waits for ever fails its launch, and the others' blocks end too", "[cuda]") {
  emulation::Options& options = emulation::options;
  const emulation::Options before = options;
  options.limit_s = 0.2;
  uint32_t arrived[2] = {};
  check_problem(launch(meet_kernel, {2, 32}, nullptr, static_cast<uint32_t*>(arrived)), "no progress");
  options = before;
}

MUSTER_KERNEL void early_return_kernel(int) {
  if (threadIdx.x == 40) return;
  __syncthreads();
}

MUSTER_KERNEL void two_barriers_kernel(int) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

MUSTER_KERNEL void half_a_warp_kernel(int* out) {
  if (threadIdx.x < 16) *out = __shfl_xor_sync(0xffffffffu, *out, 1);
  if (threadIdx.x >= 16) __syncthreads();
}

MUSTER_KERNEL void misaligned_kernel(float* values) { store(values + 1, load<4>(values)); }

TEST_CASE("emulation: faults end a launch with what and where, and the next launch is well", "[cuda]") {
  Buffer<float> values(8);
  int out = 0;
  for (const uint32_t seed : {0u, 1u}) {
    const Schedule schedule(seed);
    for (const bool cooperative : {false, true}) {
      check_problem(launch(early_return_kernel, {2, 64, cooperative}, nullptr, 0), "returned while others wait at");
      check_problem(launch(two_barriers_kernel, {2, 64, cooperative}, nullptr, 0), "different barriers");
      check_problem(launch(half_a_warp_kernel, {2, 32, cooperative}, nullptr, &out), "wait");
      check_problem(launch(misaligned_kernel, {2, 1, cooperative}, nullptr, values.data()), "misaligned");
      std::vector<int> xored(64), down(64);
      check_ok(launch(shuffle_kernel, {1, 64, cooperative}, nullptr, xored.data(), down.data()));
      CHECK(xored[0] == 5);
    }
  }
}

}  // namespace
}  // namespace muster::kernels::cuda
