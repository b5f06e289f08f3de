#include "cpp/cuda/emulated.h"

namespace muster::kernels::cuda {
namespace {

template <class T>
void compare_stats(DType dtype, bool has_specials, uint32_t seed, double norm_type) {
  const std::vector<size_t> sizes = odd_sizes();
  const std::vector<Chunk> chunks = chunks_of(sizes);
  std::vector<Buffer<T>> gradients;
  std::vector<Buffer<double>> partials, expected;
  std::vector<StatsSegment> segments, on_cpu;
  Values values(seed, has_specials);
  for (size_t i = 0; i < sizes.size(); ++i) {
    gradients.emplace_back(sizes[i], i % 3 == 2 ? 1 : 0);
    values.fill(gradients.back());
    partials.emplace_back(num_tiles(sizes[i]));
    expected.emplace_back(num_tiles(sizes[i]));
    segments.push_back({gradients[i].data(), partials[i].data(), sizes[i], dtype});
    on_cpu.push_back({gradients[i].data(), expected[i].data(), sizes[i], dtype});
  }
  kernels::grad_stats(on_cpu.data(), on_cpu.size(), norm_type);
  check_ok(grad_stats(segments.data(), chunks.data(), static_cast<uint32_t>(chunks.size()), norm_type, nullptr));
  for (size_t i = 0; i < sizes.size(); ++i) {
    CAPTURE(sizes[i]);
    CHECK(first_difference(partials[i], expected[i]) == -1);
    CHECK(partials[i].is_intact());
  }
}

TEST_CASE("grad_stats adds in the CPU's order", "[cuda]") {
  for (const uint32_t seed : kSeeds) {
    CAPTURE(seed);
    const Schedule schedule(seed);
    for (const bool has_specials : {false, true}) {
      for (const double norm_type : {2.0, 1.0, 1.5, double{INFINITY}}) {
        compare_stats<float>(DType::f32, has_specials, 1, norm_type);
        compare_stats<double>(DType::f64, has_specials, 2, norm_type);
      }
    }
  }
}

TEST_CASE("grad_stats of nothing launches nothing", "[cuda]") { check_ok(grad_stats(nullptr, nullptr, 0, 2, nullptr)); }

// --- the end of a window ---------------------------------------------------------------------------------------------

struct Window {
  std::vector<double> partials;
  std::vector<double> tail = {24, 31.5, 3, 0, 0, 0, 3, 0, 7, 24, -2.5, 3, NAN, 0};
  std::vector<double> used;
  std::vector<float> steps;
  WindowOptions options{0.5, 4.0, 2.1, 0.7, 3};
  StepScalars scalars{-1, -1, -1, 8, -1, -1};
  LossScaleState scale{1024, 1};
  bool has_scale = true;

  explicit Window(size_t num_partials) : partials(num_partials) {
    Values values(static_cast<uint32_t>(num_partials) + 1);
    for (double& partial : partials) partial = std::abs(values.next());
    for (int p = 0; p < 300; ++p) {
      used.push_back(p % 7 == 3 ? 0 : 2);
      steps.push_back(static_cast<float>(p));
    }
  }

  /// Ends it in both ways and compares what they wrote, in one level and in two.
  void compare() const {
    compare_with(nullptr);
    std::vector<NormSum> sums(kNormSums);
    for (NormSum& sum : sums) sum.special = NAN;  // of whoever had the memory before
    compare_with(sums.data());
  }

  void compare_with(NormSum* sums) const {
    Window a = *this, b = *this;
    const auto num_slots = static_cast<uint32_t>((tail.size() - kTailFields) / 2);
    Report report_a(num_slots), report_b(num_slots);
    kernels::finish_window(a.partials.data(), a.partials.size(), a.tail.data(), a.used.data(), a.steps.data(),
                           a.steps.size(), a.options, &a.scalars, has_scale ? &a.scale : nullptr, report_a.get(),
                           num_slots);
    check_ok(finish_window(b.partials.data(), b.partials.size(), sums, b.tail.data(), b.used.data(), b.steps.data(),
                           b.steps.size(), b.options, &b.scalars, has_scale ? &b.scale : nullptr, report_b.get(),
                           num_slots, nullptr));
    report_b.compare(report_a);
    CHECK(is_same(a.scalars.divisor, b.scalars.divisor));
    CHECK(is_same(a.scalars.clip, b.scalars.clip));
    CHECK(is_same(a.scalars.norm, b.scalars.norm));
    CHECK(is_same(a.scalars.unit, b.scalars.unit));
    CHECK(a.scalars.finite == b.scalars.finite);
    CHECK(a.scalars.dropped == b.scalars.dropped);
    CHECK(a.steps == b.steps);
    CHECK(is_same(a.scale.scale, b.scale.scale));
    CHECK(a.scale.growth_tracker == b.scale.growth_tracker);
  }
};

TEST_CASE("finish_window equals the CPU's", "[cuda]") {
  for (const uint32_t seed : {0u, 1u, 5u, 7u}) {
    CAPTURE(seed);
    const Schedule schedule(seed);
    for (const size_t num_partials : {0, 1, 255, 256, 257, 5000}) {
      CAPTURE(num_partials);
      Window(num_partials).compare();
    }
    for (const double norm_type : {2.0, 3.5, double{INFINITY}}) {
      CAPTURE(norm_type);
      for (const size_t num_partials : {kFewPartials, kFewPartials + 1, 2 * kFewPartials + 3}) {
        Window many(num_partials);
        many.options.norm_type = norm_type;
        many.compare();
        many.partials.back() = NAN;
        many.compare();
      }
    }
    Window window(300);
    window.has_scale = false;
    window.compare();
    window.has_scale = true;
    window.scale.growth_tracker = 2;
    window.compare();
    window.tail[kSumLosses] = 1;
    window.compare();
    window.partials[77] = INFINITY;
    window.compare();
    window.partials[77] = NAN;
    window.compare();
    window.tail[kWeight] = 0;
    window.compare();
    window.partials[77] = 1;
    window.compare();
    window.tail[kWeight] = NAN;
    window.compare();
    window.tail[kWeight] = 5;
    window.tail[kFailures] = 1;
    window.compare();
  }
}

TEST_CASE("finish_window needs no report", "[cuda]") {
  Window window(5);
  check_ok(finish_window(window.partials.data(), 5, nullptr, window.tail.data(), window.used.data(),
                         window.steps.data(), window.steps.size(), window.options, &window.scalars, &window.scale,
                         nullptr, 0, nullptr));
  CHECK(window.scalars.finite == 1);
}

TEST_CASE("count_steps equals the CPU's", "[cuda]") {
  const StepScalars closed[] = {{1, 1, 1, 1, 1, 0}, {1, 1, INFINITY, 1, 0, 0}, {1, 1, 0, 1, 1, 1}};
  for (const uint32_t seed : kSeeds) {
    const Schedule schedule(seed);
    for (const StepScalars& scalars : closed) {
      for (const size_t n : {0, 1, 255, 257, 5000}) {
        CAPTURE(seed, scalars.finite, scalars.dropped, n);
        std::vector<double> used;
        std::vector<float> expected;
        for (size_t p = 0; p < n; ++p) {
          used.push_back(p % 3 == 1 ? 0 : 2);
          expected.push_back(static_cast<float>(p));
        }
        std::vector<float> steps = expected;
        for (const double* counts : {static_cast<const double*>(used.data()), static_cast<const double*>(nullptr)}) {
          kernels::count_steps(expected.data(), counts, n, &scalars);
          check_ok(count_steps(steps.data(), counts, n, &scalars, nullptr));
          CHECK(steps == expected);
        }
      }
    }
  }
}

}  // namespace
}  // namespace muster::kernels::cuda
