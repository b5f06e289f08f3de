#include <algorithm>

#include "cpp/catch.h"
#include "cpp/kernels/support.h"

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

const double kNaN = std::numeric_limits<double>::quiet_NaN();
const double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

TEST_CASE("finish_window adds the partials lane by lane", "[kernels]") {
  std::mt19937_64 random(1);
  for (const size_t n : {0UL, 1UL, 255UL, 256UL, 257UL, 1000UL, 70001UL}) {
    Window window;
    window.partials.resize(n);
    for (double& partial : window.partials) {
      partial = std::exp2(static_cast<double>(random() % 60)) * static_cast<double>(random() % 1000);
    }
    std::vector<double> lanes(kPartialLanes);
    for (size_t lane = 0; lane < kPartialLanes; ++lane) {
      for (size_t i = lane; i < n; i += kPartialLanes) lanes[lane] += window.partials[i];
    }
    while (lanes.size() > 1) {
      const size_t half = lanes.size() / 2;
      for (size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[half + lane];
      lanes.resize(half);
    }
    window.finish();
    INFO("n " << n);
    CHECK(window.scalars.norm == std::sqrt(lanes[0]) / 4);
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

TEST_CASE("finish_window picks the unit of the next window's seeds", "[kernels]") {
  const auto unit_of = [](double weight, double contributions) {
    Window window;
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
