#include <algorithm>

#include "cpp/catch.h"
#include "cpp/kernels/support.h"
#include "kernels/math.h"

using namespace muster::kernels;
using namespace muster::kernels::testing;

namespace {

/// One window's end, with a mean loss of weight 8 from 4 contributions, seeds in units of 2, and gradients of norm 12.
struct Window {
  std::vector<double> partials{100, 44};
  std::vector<double> tail = std::vector<double>(kTailFields);
  std::vector<double> used{1, 0, 3};
  std::vector<float> steps{5, 6, 0};
  WindowOptions options{0, 1, 2, 0.5F, 2};
  StepScalars scalars{};
  LossScaleState scale{16, 0};

  Window() {
    tail[kWeight] = 8;
    tail[kContributions] = 4;
    tail[kMeanLosses] = 4;
    scalars.unit = 2;
  }

  void finish(bool has_scale = false) {
    finish_window(partials.data(), partials.size(), tail.data(), used.data(), steps.data(), steps.size(), options,
                  &scalars, has_scale ? &scale : nullptr);
  }
};

}  // namespace

TEST_CASE("finish_window rounds the sum of the partials once", "[kernels]") {
  std::mt19937_64 random(1);
  for (const size_t n : {0UL, 1UL, 255UL, 256UL, 257UL, 1000UL, 70001UL}) {
    Window window;
    window.partials.resize(n);
    unsigned __int128 sum = 0;
    for (double& partial : window.partials) {
      const auto whole = (random() % 1000) << random() % 50;
      partial = static_cast<double>(whole);
      sum += whole;
    }
    window.finish();
    INFO("n " << n);
    CHECK(window.scalars.norm == std::sqrt(static_cast<double>(sum)) / 4);
  }
}

TEST_CASE("finish_window turns sums into means", "[kernels]") {
  Window window;
  window.finish();
  CHECK(window.scalars.divisor == 4);
  CHECK(window.scalars.norm == 3);
  CHECK(window.scalars.clip == 1);
  CHECK(window.scalars.finite == 1);
  CHECK(window.scalars.dropped == 0);
  CHECK(window.steps == std::vector<float>{6, 6, 1});

  SECTION("by the loss scale too") {
    window.options.loss_scale = 8;
    window.scalars.unit = 2;
    window.finish();
    CHECK(window.scalars.divisor == 32);
    window.scalars.unit = 2;
    window.finish(/*has_scale=*/true);
    CHECK(window.scalars.divisor == 64);
    CHECK(window.scalars.norm == 12.0 / 64);
  }
  SECTION("but not the sums of losses that are sums") {
    window.tail[kMeanLosses] = 0;
    window.tail[kSumLosses] = 4;
    window.options.loss_scale = 8;
    window.finish();
    CHECK(window.scalars.divisor == 8);
  }
}

TEST_CASE("finish_window takes norms of other types", "[kernels]") {
  Window window;
  window.partials = {100, 44, 72};
  window.options.clip_norm = 1;
  double norm = 0;
  SECTION("1") {
    window.options.norm_type = 1;
    norm = 216;
  }
  SECTION("3") {
    window.options.norm_type = 3;
    norm = 6;
  }
  SECTION("the maximum") {
    window.options.norm_type = kInfinity;
    norm = 100;
  }
  window.finish();
  CHECK(std::abs(window.scalars.norm - norm / 4) < 1e-12 * norm);
  CHECK(window.scalars.clip == 1 / (window.scalars.norm + 1e-6));
  CHECK(window.scalars.clip_value == 0);
  window.partials[1] = kNaN;
  window.scalars.unit = 2;
  window.finish();
  CHECK(window.scalars.finite == 0);
}

TEST_CASE("finish_window clips as torch.nn.utils.clip_grad_norm_", "[kernels]") {
  Window window;
  const double boundary = 3 + 1e-6;
  window.options.clip_norm = boundary;
  window.finish();
  CHECK(window.scalars.clip == 1);

  window.scalars.unit = 2;
  window.options.clip_norm = 5;
  window.finish();
  CHECK(window.scalars.clip == 1);

  window.scalars.unit = 2;
  window.options.clip_norm = std::nextafter(boundary, 0.0);
  window.finish();
  CHECK(window.scalars.clip == window.options.clip_norm / boundary);
  CHECK(window.scalars.clip < 1);

  window.scalars.unit = 2;
  window.options.clip_norm = 0.75;
  window.finish();
  CHECK(window.scalars.clip == 0.75 / boundary);
  CHECK(window.scalars.norm == 3);
}

TEST_CASE("finish_window picks the unit of the next window's weights", "[kernels]") {
  const auto unit_of = [](double weight, double contributions, double unit = 2) {
    Window window;
    window.scalars.unit = unit;
    window.tail[kWeight] = weight;
    window.tail[kContributions] = contributions;
    window.finish();
    return window.scalars.unit;
  };
  CHECK(unit_of(8, 4) == 2);
  CHECK(unit_of(1, 1) == 1);
  CHECK(unit_of(1.41, 1) == 1);
  CHECK(unit_of(1.42, 1) == 2);
  CHECK(unit_of(3, 1) == 4);
  CHECK(unit_of(36, 3, 12) == 12);
  CHECK(unit_of(5, 1, 12) == 6);
  CHECK(unit_of(100, 1, 12) == 96);
  CHECK(unit_of(1, 3) == 0.25);
  std::mt19937_64 random(2);
  for (int i = 0; i < 1000; ++i) {
    const double weight = std::exp(static_cast<double>(random() % 100000) / 5000.0 - 10.0);
    REQUIRE(unit_of(weight, 1) == std::exp2(std::round(std::log2(weight))));
  }
}

TEST_CASE("a window that is not finite changes nothing but the loss scale", "[kernels]") {
  for (const double bad : {kNaN, kInfinity}) {
    Window window;
    window.partials[1] = bad;
    window.options.clip_norm = 1;
    window.finish(/*has_scale=*/true);
    CHECK(window.scalars.finite == 0);
    CHECK(window.scalars.dropped == 0);
    CHECK_FALSE(std::isfinite(window.scalars.norm));
    CHECK(window.steps == std::vector<float>{5, 6, 0});
    CHECK(window.scale.scale == 8);
    CHECK(window.scale.growth_tracker == 0);
  }
}

TEST_CASE("a window of weight 0 changes nothing, the loss scale included", "[kernels]") {
  Window window;
  window.partials = {0, 0};
  window.tail[kWeight] = window.tail[kContributions] = window.tail[kMeanLosses] = 0;
  window.scale.growth_tracker = 1;
  window.finish(/*has_scale=*/true);
  CHECK(window.scalars.dropped == 1);
  CHECK(window.scalars.divisor == 16);
  CHECK(window.scalars.norm == 0);
  CHECK(window.scalars.clip == 1);
  CHECK(window.scalars.unit == 2);
  CHECK(window.steps == std::vector<float>{5, 6, 0});
  CHECK(window.scale.scale == 16);
  CHECK(window.scale.growth_tracker == 1);
}

TEST_CASE("a window with failures or a weight that is none is dropped", "[kernels]") {
  Window window;
  SECTION("failures") { window.tail[kFailures] = 1; }
  SECTION("weight") { window.tail[kWeight] = kNaN; }
  window.finish(/*has_scale=*/true);
  CHECK(window.scalars.dropped == 1);
  CHECK(window.scalars.divisor == 16);
  CHECK(window.scalars.unit == 2);
  CHECK(window.steps == std::vector<float>{5, 6, 0});
  CHECK(window.scale.scale == 16);
  CHECK(window.scale.growth_tracker == 0);
}

TEST_CASE("finish_window reports the closed window", "[kernels]") {
  Window window;
  window.tail[kWeightedLoss] = 20;
  window.tail.insert(window.tail.end(), {4, 8, -6, 8});
  window.scale = {16, 1};
  window.options.clip_norm = 0.5;
  struct {
    WindowReport head;
    double metrics[2];
  } report{};
  static_assert(sizeof(report) == report_bytes(2));
  const auto finish = [&](bool has_scale) {
    finish_window(window.partials.data(), window.partials.size(), window.tail.data(), window.used.data(),
                  window.steps.data(), window.steps.size(), window.options, &window.scalars,
                  has_scale ? &window.scale : nullptr, &report.head, 2);
  };
  SECTION("with means") {
    finish(false);
    CHECK(report.head.loss == 2.5);
    CHECK(report.head.weight == 8);
    CHECK(report.head.grad_norm == 3);
    CHECK(report.head.loss_scale == 1);
    CHECK(report.head.skipped == 0);
    CHECK(report.head.dropped == 0);
    CHECK(report.metrics[0] == 0.5);
    CHECK(report.metrics[1] == -0.75);
  }
  SECTION("with the sums of losses that are sums") {
    window.tail[kMeanLosses] = 0;
    window.tail[kSumLosses] = 4;
    finish(false);
    CHECK(report.head.loss == 20);
    CHECK(report.metrics[0] == 0.5);
  }
  SECTION("with the loss scale after its update") {
    finish(true);
    CHECK(report.head.loss_scale == 32);
  }
  SECTION("when it is skipped") {
    window.partials[0] = kInfinity;
    finish(true);
    CHECK(report.head.loss == 2.5);
    CHECK(report.head.loss_scale == 8);
    CHECK(report.head.skipped == 1);
    CHECK(report.head.dropped == 0);
  }
  SECTION("when it is dropped, without numbers") {
    window.partials[0] = kInfinity;
    window.tail[kFailures] = 2;
    finish(true);
    CHECK(std::isnan(report.head.loss));
    CHECK(report.head.weight == 0);
    CHECK(report.head.loss_scale == 16);
    CHECK(report.head.skipped == 0);
    CHECK(report.head.dropped == 1);
    CHECK(std::isnan(report.metrics[0]));
    CHECK(std::isnan(report.metrics[1]));
  }
}

TEST_CASE("count_steps counts the steps of used parameters", "[kernels]") {
  const double used[] = {1, 0, 3};
  float steps[] = {5, 6, 0};
  StepScalars scalars{.divisor = 1, .clip = 1, .norm = 1, .unit = 1, .finite = 1, .dropped = 0};
  const auto are = [&](float a, float b, float c) { return steps[0] == a && steps[1] == b && steps[2] == c; };
  count_steps(steps, used, 3, &scalars);
  CHECK(are(6, 6, 1));
  count_steps(steps, nullptr, 3, &scalars);
  CHECK(are(7, 7, 2));
  scalars.finite = 0;
  count_steps(steps, used, 3, &scalars);
  scalars.finite = 1;
  scalars.dropped = 1;
  count_steps(steps, nullptr, 3, &scalars);
  CHECK(are(7, 7, 2));
}

TEST_CASE("apply_means divides, clips where asked to, and rounds for a low-precision copy", "[kernels]") {
  float values[] = {12, -3, 1};
  BFloat16 low[3] = {};
  double doubles[] = {1, 2};
  Half halves[2] = {};
  const MeanSegment segments[] = {{values, low, 3, DType::f32, DType::bf16},
                                  {doubles, halves, 2, DType::f64, DType::f16}};
  StepScalars scalars{.divisor = 3, .clip = 0.5, .norm = 1, .unit = 1, .finite = 1, .dropped = 0};
  SECTION("clipped") {
    apply_means(segments, 2, &scalars, /*clips=*/true);
    CHECK(values[0] == 2);
    CHECK(values[1] == -0.5F);
    CHECK(values[2] == 1.0F / 3 / 2);
    CHECK(low[2].bits == 0x3e2b);
    CHECK(doubles[1] == 2.0 / 3 / 2);
    CHECK(halves[1].bits == 0x3555);
  }
  SECTION("clipped by value") {
    scalars.clip = 1;
    scalars.clip_value = 0.75;
    apply_means(segments, 2, &scalars, /*clips=*/true);
    CHECK(values[0] == 0.75F);
    CHECK(values[1] == -0.75F);
    CHECK(values[2] == 1.0F / 3);
    CHECK(low[1].bits == 0xbf40);
    CHECK(doubles[1] == 2.0 / 3);
  }
  SECTION("the mean alone") {
    scalars.clip_value = 0.25;
    apply_means(segments, 2, &scalars, /*clips=*/false);
    CHECK(values[0] == 4);
    CHECK(doubles[0] == 1.0 / 3);
  }
  SECTION("the mean alone where it is not finite") {
    scalars.finite = 0;
    values[1] = static_cast<float>(-kInfinity);
    apply_means(segments, 2, &scalars, /*clips=*/true);
    CHECK(values[0] == 4);
    CHECK(values[1] == static_cast<float>(-kInfinity));
    CHECK(low[1].bits == 0xff80);
  }
  SECTION("nothing of a dropped window") {
    scalars.dropped = 1;
    apply_means(segments, 2, &scalars, /*clips=*/true);
    CHECK(values[0] == 12);
    CHECK(doubles[1] == 2);
    CHECK(low[0].bits == 0);
  }
}

TEST_CASE("the loss scale follows torch.amp.GradScaler", "[kernels]") {
  struct Event {
    bool finite;
    float scale;
    int32_t tracker;
  };
  // Grows after three finite steps in a row, backs off at once.
  const Event script[] = {{true, 64, 1},  {true, 64, 2}, {true, 128, 0}, {true, 128, 1}, {false, 64, 0},
                          {false, 32, 0}, {true, 32, 1}, {true, 32, 2},  {false, 16, 0}, {true, 16, 1},
                          {true, 16, 2},  {true, 32, 0}, {true, 32, 1},  {true, 32, 2},  {true, 64, 0}};
  LossScaleState state{64, 0};
  for (const Event& event : script) {
    loss_scale_update(&state, event.finite, 2, 0.5F, 3);
    CHECK(state.scale == event.scale);
    CHECK(state.growth_tracker == event.tracker);
  }
  SECTION("and does not grow into infinity") {
    LossScaleState high{0x1p127F, 2};
    loss_scale_update(&high, true, 2, 0.5F, 3);
    CHECK(high.scale == 0x1p127F);
    CHECK(high.growth_tracker == 0);
  }
  SECTION("and grows at each step of an interval of one") {
    LossScaleState eager{1, 0};
    loss_scale_update(&eager, true, 3, 0.25F, 1);
    loss_scale_update(&eager, true, 3, 0.25F, 1);
    CHECK(eager.scale == 9);
    loss_scale_update(&eager, false, 3, 0.25F, 1);
    CHECK(eager.scale == 2.25F);
  }
}
