// Losses and metrics that stay in a device's memory.
#include "window/device_numbers.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>

#include <cmath>
#include <limits>
#include <string>

#include "cpp/catch.h"
#include "cpp/emulated_device/device_job.h"
#include "muster/error.h"

using namespace muster;
using namespace muster::testing;

namespace {

struct OneDevice {
  Loss loss(double value, double weight, double metric) {
    Loss loss(at::scalar_tensor(value, at::kFloat));
    loss.weight = at::scalar_tensor(weight, at::kDouble);
    loss.metrics["m"] = at::scalar_tensor(metric, at::kDouble);
    return loss;
  }
  double field(int64_t index) const { return numbers.tail()[index].item<double>(); }

  c10::Device device{c10::kCPU};
  std::shared_ptr<DeviceScalars> scalars =
      std::make_shared<DeviceScalars>(device, kernels::LossScaleState{.scale = 8, .growth_tracker = 0});
  DeviceNumbers numbers{device, scalars};
};

}  // namespace

TEST_CASE("a loss adds to the tail, and its seed and gate are what gradients are scaled by", "[window]") {
  OneDevice on;
  on.scalars->set_unit(2);
  CHECK(on.numbers.note(on.loss(5, 3, 7), 1, /*first=*/true).item<double>() == 8);
  CHECK(*on.numbers.gate() == 1.5);
  on.numbers.note(on.loss(1, 1, 3), 1, /*first=*/false);
  CHECK(on.field(kernels::kWeight) == 4);
  CHECK(on.field(kernels::kWeightedLoss) == 16);
  CHECK(on.numbers.report().loss().item<double>() == 4);
  CHECK(on.numbers.report().metric(on.numbers.noted().at("m")).item<double>() == 6);
  CHECK(std::isnan(on.numbers.report().grad_norm().item<double>()));
  on.numbers.note_absence(/*first=*/true);
  CHECK(on.field(kernels::kWeight) == 0);
  CHECK(on.numbers.noted().empty());
}

TEST_CASE("a loss without weight leaves no trace on its device, whatever it is", "[window]") {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  OneDevice on;
  on.numbers.note(on.loss(5, 3, 7), 1, /*first=*/true);
  CHECK(on.numbers.note(on.loss(kNan, 0, kNan), 1, /*first=*/false).item<double>() == 0);
  CHECK(*on.numbers.gate() == 0);
  CHECK(on.numbers.report().loss().item<double>() == 5);
  CHECK(on.numbers.report().metric(0).item<double>() == 7);
}

TEST_CASE("names that replicas agree on move what was noted to their slots", "[window]") {
  OneDevice on;
  on.numbers.note(on.loss(5, 3, 7), 1, /*first=*/true);
  CHECK(on.numbers.has_new_names());
  on.numbers.agree({"of another", "m"});
  CHECK_FALSE(on.numbers.has_new_names());
  CHECK(on.numbers.noted() == std::map<std::string, size_t>{{"m", 1}});
  CHECK(metric_sums(on.numbers.tail(), 0)[1].item<double>() == 0);
  CHECK(metric_sums(on.numbers.tail(), 1)[0].item<double>() == 21);
  CHECK(metric_sums(on.numbers.tail(), 1)[1].item<double>() == 3);
}

TEST_CASE("metrics of too many names, or of more than a number, are refused", "[window]") {
  OneDevice on;
  auto loss = on.loss(1, 1, 1);
  for (uint32_t i = 1; i < DeviceNumbers::kSlots; ++i) loss.metrics["m" + std::to_string(i)] = at::ones({});
  on.numbers.note(loss, 1, /*first=*/true);
  auto other = on.loss(1, 1, 1);
  other.metrics["one too many"] = at::ones({});
  CHECK_THROWS_AS(on.numbers.note(other, 1, /*first=*/false), InvalidArgument);
  CHECK_THROWS_AS(check_metric("pair", at::ones({2})), InvalidArgument);
}

TEST_CASE("scalars are read as they were set", "[window]") {
  OneDevice on;
  on.scalars->set_unit(3);
  on.scalars->set_divisor(5);
  CHECK(on.scalars->read_scalars().unit == 3);
  CHECK(on.scalars->read_scalars().divisor == 5);
  CHECK(on.scalars->read_scale().scale == 8);
  on.scalars->set_scale({.scale = 4, .growth_tracker = 2});
  CHECK(on.scalars->read_scale().scale == 4);
  CHECK(on.scalars->read_scale().growth_tracker == 2);
  CHECK(on.scalars->read_scalars().unit == 3);
}

TEST_CASE("a metric of one replica alone is its own", "[device]") {
  Job job;
  job.step = [](Net& net, const at::Tensor& x, int step) -> Loss {
    Loss loss(plain_loss(net, x, step).value);
    if (x.size(0) == 5) loss.metrics["alone"] = at::scalar_tensor(3, at::kLong);
    return loss;
  };
  job.rows = {9};
  for (const bool on_device : {false, true}) CHECK(run(job, on_device).metrics.front().at("alone") == 3);
}
