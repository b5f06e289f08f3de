#include "kernels/loss_math.h"

#include <limits>
#include <vector>

#include "cpp/catch.h"
#include "cpp/kernels/support.h"

using namespace muster::kernels;
using namespace muster::kernels::testing;

namespace {

/// A replica of a window with two metric slots; its weights are in units of 4, its seeds scaled by 8.
struct Replica {
  float loss = 3;
  int32_t weight = 2;
  double metric = 10;
  LossTerms terms{};
  StepScalars scalars{.divisor = 1, .clip = 1, .norm = 0, .unit = 4, .finite = 1, .dropped = 0};
  LossScaleState scale{8, 0};
  std::vector<double> tail = std::vector<double>(tail_size(2), 100.0);
  double gate = -1;
  float seed = -1;
  struct {
    WindowReport head;
    double metrics[2];
  } report{};

  Replica() {
    terms.loss = &loss;
    terms.weight = &weight;
    terms.weight_dtype = DType::i32;
    terms.rows = 7;
    terms.is_mean = true;
    terms.first = true;
    terms.num_slots = 2;
    terms.num_metrics = 1;
    terms.metrics[0] = {&metric, DType::f64, 1};
  }
  Replica(const Replica&) = delete;
  Replica& operator=(const Replica&) = delete;

  void note(bool has_scale = true) {
    note_loss(terms, &scalars, has_scale ? &scale : nullptr, tail.data(), &gate,
              terms.loss == nullptr ? nullptr : &seed, &report.head);
    terms.first = false;
  }
};

/// The value of dtype T nearest to `value`, ties to even, found by trying.
template <class T>
uint16_t nearest_bits(double value) {
  const uint16_t guess = narrow<T>(static_cast<float>(value)).bits;
  uint16_t best = guess;
  long double distance = kInfinity;
  for (const int step : {-1, 0, 1}) {
    const auto bits = static_cast<uint16_t>(guess + step);
    const long double away = static_cast<long double>(value) - static_cast<long double>(widen(T{bits}));
    const long double size = away < 0 ? -away : away;
    if (size < distance || (size == distance && bits % 2 == 0)) {
      best = bits;
      distance = size;
    }
  }
  return best;
}

template <class T>
void check_rounding(DType dtype) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 20000; ++i) {
    // A tie of T's, or of a float's, and often a little beside it.
    const double tie = static_cast<double>(widen(T{static_cast<uint16_t>(0x3400 + random() % 0x400)})) +
                       std::exp2(-static_cast<double>(random() % 32));
    const double value =
        tie + (static_cast<double>(random() % 3) - 1) * std::exp2(-static_cast<double>(random() % 20) - 30);
    T rounded{};
    write_number(&rounded, dtype, value);
    INFO(value);
    REQUIRE(rounded.bits == nearest_bits<T>(value));
    write_number(&rounded, dtype, -value);
    REQUIRE(rounded.bits == (nearest_bits<T>(value) | 0x8000));
  }
}

}  // namespace

TEST_CASE("note_loss adds a mean by its weight", "[kernels]") {
  Replica replica;
  replica.note();
  CHECK(replica.tail == std::vector<double>{2, 6, 1, 0, 0, 0, 1, 0, 0, 0, 20, 2});
  CHECK(replica.gate == 2.0 / 4);
  CHECK(replica.seed == 8);
  CHECK(replica.report.head.loss == 3);
  CHECK(replica.report.head.weight == 2);
  CHECK(std::isnan(replica.report.head.grad_norm));
  CHECK(replica.report.head.loss_scale == 8);
  CHECK(replica.report.head.skipped == 0);
  CHECK(replica.report.head.dropped == 0);
  CHECK(std::isnan(replica.report.metrics[0]));
  CHECK(replica.report.metrics[1] == 10);

  replica.terms.weight = nullptr;
  replica.loss = 12;
  replica.note(/*has_scale=*/false);
  CHECK(replica.tail == std::vector<double>{9, 90, 2, 0, 0, 0, 2, 0, 0, 0, 90, 9});
  CHECK(replica.gate == 7.0 / 4);
  CHECK(replica.seed == 1);
  CHECK(replica.report.head.loss == 10);
  CHECK(replica.report.head.loss_scale == 1);
}

TEST_CASE("note_loss adds a sum as it is, and its metrics by weight", "[kernels]") {
  Replica replica;
  replica.terms.is_mean = false;
  replica.note();
  CHECK(replica.tail == std::vector<double>{2, 3, 1, 0, 0, 0, 0, 1, 0, 0, 20, 2});
  CHECK(replica.gate == 1);
  CHECK(replica.seed == 8);
  CHECK(replica.report.head.loss == 3);
  CHECK(replica.report.metrics[1] == 10);
}

TEST_CASE("a metric is averaged over the losses that bring it", "[kernels]") {
  Replica replica;
  replica.note();
  replica.terms.num_metrics = 0;
  replica.note();
  replica.terms.num_metrics = 1;
  replica.weight = 6;
  replica.metric = 2;
  replica.note();
  CHECK(replica.tail[kWeight] == 10);
  CHECK(replica.report.metrics[1] == (2 * 10 + 6 * 2) / 8.0);
}

TEST_CASE("a loss of weight 0 leaves no trace", "[kernels]") {
  Replica replica;
  replica.note();
  const std::vector<double> before = replica.tail;
  replica.weight = 0;
  replica.loss = static_cast<float>(kNaN);
  replica.metric = kInfinity;
  replica.note();
  CHECK(replica.tail == before);
  CHECK(replica.gate == 0);
  CHECK(replica.seed == 0);
  CHECK(replica.report.head.loss == 3);

  Replica alone;
  alone.weight = 0;
  alone.note();
  CHECK(alone.report.head.weight == 0);
  CHECK(std::isnan(alone.report.head.loss));
  CHECK(std::isnan(alone.report.metrics[1]));
}

TEST_CASE("a weight that is none drops the window", "[kernels]") {
  for (const double weight : {-1.0, kNaN, kInfinity, -kInfinity}) {
    Replica replica;
    replica.terms.weight = &weight;
    replica.terms.weight_dtype = DType::f64;
    replica.note();
    CHECK(replica.gate == 0);
    CHECK(replica.seed == 0);
    CHECK(replica.tail[kContributions] == 0);
    replica.terms.weight = nullptr;
    replica.note();
    WindowOptions options{};
    finish_window(nullptr, 0, replica.tail.data(), nullptr, nullptr, 0, options, &replica.scalars, nullptr);
    CHECK(replica.scalars.dropped == 1);
  }
}

TEST_CASE("a replica without a loss notes nothing", "[kernels]") {
  Replica replica;
  replica.terms.loss = nullptr;
  replica.note();
  CHECK(replica.tail == std::vector<double>(tail_size(2)));
  CHECK(replica.gate == 0);
  CHECK(replica.seed == -1);
  CHECK(std::isnan(replica.report.head.loss));
}

TEST_CASE("weights may be of any dtype", "[kernels]") {
  const auto check = [](auto weight, DType dtype) {
    Replica replica;
    replica.terms.weight = &weight;
    replica.terms.weight_dtype = dtype;
    replica.note();
    CHECK(replica.tail[kWeight] == 3);
  };
  check(3.0F, DType::f32);
  check(3.0, DType::f64);
  check(BFloat16{0x4040}, DType::bf16);
  check(Half{0x4200}, DType::f16);
  check(int64_t{3}, DType::i64);
  check(int32_t{3}, DType::i32);
  check(int16_t{3}, DType::i16);
  check(int8_t{3}, DType::i8);
  check(uint8_t{3}, DType::u8);
  const bool one = true;
  CHECK(read_number(&one, DType::boolean) == 1);
  const int8_t negative = -3;
  CHECK(read_number(&negative, DType::i8) == -3);
}

TEST_CASE("seeds are rounded once", "[kernels]") {
  check_rounding<BFloat16>(DType::bf16);
  check_rounding<Half>(DType::f16);
  uint16_t bits = 0;
  const auto rounded = [&](DType dtype, double value) {
    write_number(&bits, dtype, value);
    return bits;
  };
  CHECK(rounded(DType::bf16, 0x1.01p0 + 0x1p-40) == 0x3f81);  // a float would make it a tie, to 0x3f80
  CHECK(rounded(DType::f16, 0x1.002p0 + 0x1p-40) == 0x3c01);
  CHECK(rounded(DType::bf16, 1e300) == 0x7f80);
  CHECK(rounded(DType::f16, -1e300) == 0xfc00);
  CHECK(rounded(DType::f16, 0x1p-25) == 0);
  CHECK(rounded(DType::f16, 0x1p-25 + 0x1p-70) == 1);
  CHECK(rounded(DType::bf16, -1e-300) == 0x8000);
  CHECK((rounded(DType::bf16, kNaN) & 0x7fff) > 0x7f80);
}
