#include "cpp/cuda/emulated.h"

namespace muster::kernels::cuda {
namespace {

/// Summed gradients of both dtypes, some with a copy of low precision, some not on a vector's boundary.
struct Gradients {
  std::vector<size_t> sizes;
  std::vector<Buffer<unsigned char>> values, low;
  std::vector<MeanSegment> segments;

  explicit Gradients(std::vector<size_t> counts) : sizes(std::move(counts)) {
    Values random(11, true);
    for (size_t i = 0; i < sizes.size(); ++i) {
      const DType dtype = i % 5 < 3 ? DType::f32 : DType::f64;
      values.emplace_back(sizes[i] * size_of(dtype), i % 9 == 2 ? size_of(dtype) : 0);
      low.emplace_back(sizes[i] * 2, i % 9 == 8 ? 2 : 0);
      void* data = values.back().data();
      if (dtype == DType::f32) random.fill(static_cast<float*>(data), sizes[i]);
      if (dtype == DType::f64) random.fill(static_cast<double*>(data), sizes[i]);
      segments.push_back(
          {data, i % 4 == 1 ? nullptr : low.back().data(), sizes[i], dtype, i % 8 < 4 ? DType::bf16 : DType::f16});
    }
  }

  void compare(const Gradients& other) const {
    for (size_t i = 0; i < sizes.size(); ++i) {
      CAPTURE(i, sizes[i]);
      CHECK(count_differences(segments[i].dtype, values[i], other.values[i]) == 0);
      CHECK(count_differences(segments[i].low_dtype, low[i], other.low[i]) == 0);
      CHECK((values[i].is_intact() && low[i].is_intact()));
    }
  }

 private:
  static size_t count_differences(DType dtype, const Buffer<unsigned char>& a, const Buffer<unsigned char>& b) {
    size_t count = 0;
    for (size_t i = 0; i < a.size(); i += size_of(dtype)) {
      if (!is_same(dtype, a.data() + i, b.data() + i)) ++count;
    }
    return count;
  }
};

TEST_CASE("apply_means equals the CPU's", "[cuda]") {
  const StepScalars closed[] = {
      {3, 1, 1, 1, 1, 0},           // a mean
      {1024, 0.3, 4, 1, 1, 0},      // clipped
      {7, 0.5, INFINITY, 1, 0, 0},  // not finite
      {7, 0.5, 0, 1, 1, 1},         // dropped
  };
  const std::vector<size_t> sizes = odd_sizes();
  const std::vector<Chunk> chunks = chunks_of(sizes);
  for (const uint32_t seed : kSeeds) {
    const Schedule schedule(seed);
    for (const StepScalars& scalars : closed) {
      for (const bool clips : {false, true}) {
        CAPTURE(seed, scalars.divisor, scalars.finite, scalars.dropped, clips);
        Gradients expected(sizes), means(sizes);
        kernels::apply_means(expected.segments.data(), sizes.size(), &scalars, clips);
        check_ok(apply_means(means.segments.data(), chunks.data(), static_cast<uint32_t>(chunks.size()), &scalars,
                             clips, nullptr));
        means.compare(expected);
      }
    }
  }
}

TEST_CASE("apply_means keeps the bits that a step keeps", "[cuda]") {
  const StepScalars scalars{3, 0.3, 4, 1, 0, 0};
  Buffer<float> stepped(5000), means(5000);
  Values(4).fill(stepped);
  memcpy(means.data(), stepped.data(), 5000 * sizeof(float));
  StepSegment step{};
  step.gradient = stepped.data();
  step.parameter = stepped.data();
  step.n = 5000;
  const SgdGroup group{};
  const MeanSegment mean{means.data(), nullptr, 5000, DType::f32, DType::bf16};
  const std::vector<Chunk> chunks = chunks_of({5000});
  check_ok(sgd_step({DType::f32, &step, chunks.data(), 2, &scalars, /*keep_gradient=*/true}, &group, nullptr));
  check_ok(apply_means(&mean, chunks.data(), 2, &scalars, /*clips=*/true, nullptr));
  CHECK(first_difference(means, stepped) == -1);
}

TEST_CASE("apply_means of nothing launches nothing", "[cuda]") {
  check_ok(apply_means(nullptr, nullptr, 0, nullptr, true, nullptr));
}

}  // namespace
}  // namespace muster::kernels::cuda
