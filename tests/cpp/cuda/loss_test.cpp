#include <algorithm>

#include "cpp/cuda/emulated.h"

namespace muster::kernels::cuda {
namespace {

/// One element of any dtype.
struct Number {
  DType dtype;
  alignas(8) unsigned char bytes[8] = {};

  Number(DType type, double value) : dtype(type) { write(value); }

 private:
  void write(double value) {
    const auto put = [&](auto typed) { memcpy(bytes, &typed, sizeof(typed)); };
    if (dtype == DType::f64) return put(value);
    if (dtype == DType::f32) return put(static_cast<float>(value));
    if (dtype == DType::bf16) return put(narrow<BFloat16>(static_cast<float>(value)));
    if (dtype == DType::f16) return put(narrow<Half>(static_cast<float>(value)));
    const auto integer = static_cast<int64_t>(value);
    if (dtype == DType::i64) return put(integer);
    if (dtype == DType::i32) return put(static_cast<int32_t>(integer));
    if (dtype == DType::i16) return put(static_cast<int16_t>(integer));
    if (dtype == DType::boolean) return put(static_cast<uint8_t>(integer != 0));
    put(static_cast<uint8_t>(integer));  // i8's bits are the same
  }
};

constexpr DType kFloating[] = {DType::f32, DType::f64, DType::bf16, DType::f16};
constexpr DType kAll[] = {DType::f32, DType::f64, DType::bf16, DType::f16, DType::i64,
                          DType::i32, DType::i16, DType::i8,   DType::u8,  DType::boolean};
constexpr uint32_t kSlots = 300;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// A replica's window, noted in both ways at once.
class Windows {
 public:
  StepScalars scalars{1, 1, 1, 0.75, 1, 0};  // a unit whose quotients are rounded
  LossScaleState scale{1024, 0};
  bool has_scale = true;
  bool has_report = true;

  void note(const LossTerms& terms) {
    const LossScaleState* scaling = has_scale ? &scale : nullptr;
    Report report_a(kSlots), report_b(kSlots);
    Buffer<unsigned char> seeds(16);
    kernels::note_loss(terms, &scalars, scaling, tail_a_.data(), &gate_a_, terms.loss == nullptr ? nullptr : &seeds[0],
                       has_report ? report_a.get() : nullptr);
    check_ok(note_loss(terms, &scalars, scaling, tail_b_.data(), &gate_b_, terms.loss == nullptr ? nullptr : &seeds[8],
                       has_report ? report_b.get() : nullptr, nullptr));
    CHECK(first_difference(tail_b_, tail_a_) == -1);
    CHECK(gate_a_ == gate_b_);
    CHECK(is_same(terms.loss_dtype, &seeds[0], &seeds[8]));
    report_b.compare(report_a);
    CHECK((tail_a_.is_intact() && tail_b_.is_intact() && seeds.is_intact()));
  }

  Buffer<double>& tail() { return tail_b_; }
  double gate() const { return gate_b_; }

 private:
  Buffer<double> tail_a_ = filled(), tail_b_ = filled();
  double gate_a_ = -1, gate_b_ = -2;

  static Buffer<double> filled() {
    Buffer<double> tail(tail_size(kSlots));
    for (double& value : tail) value = 5;
    return tail;
  }
};

LossTerms terms_of(const Number& loss, const Number* weight, bool is_mean, bool first) {
  LossTerms terms{};
  terms.loss = loss.bytes;
  terms.loss_dtype = loss.dtype;
  terms.weight = weight == nullptr ? nullptr : weight->bytes;
  terms.weight_dtype = weight == nullptr ? DType::f32 : weight->dtype;
  terms.rows = 6;
  terms.is_mean = is_mean;
  terms.first = first;
  terms.num_slots = kSlots;
  return terms;
}

void add_metrics(LossTerms& terms, const std::vector<Number>& values) {
  for (const Number& value : values) {
    const uint32_t m = terms.num_metrics++;
    terms.metrics[m] = {value.bytes, value.dtype, (m * 37 + 11) % kSlots};
  }
}

TEST_CASE("note_loss equals the CPU's for all dtypes, weights and reductions", "[cuda]") {
  std::vector<Number> metrics;
  for (uint32_t m = 0; m < kMaxMetrics; ++m) metrics.emplace_back(kAll[m % 10], 0.1 * m - 2);
  for (const uint32_t seed : kSeeds) {
    const Schedule schedule(seed);
    for (const DType loss_dtype : kFloating) {
      for (const DType weight_dtype : kAll) {
        for (const bool is_mean : {true, false}) {
          CAPTURE(seed, loss_dtype, weight_dtype, is_mean);
          const Number loss(loss_dtype, 0.3), weight(weight_dtype, 7.3);
          Windows windows;
          windows.scale.scale = 0.7F;
          LossTerms terms = terms_of(loss, &weight, is_mean, true);
          add_metrics(terms, metrics);
          windows.note(terms);
          terms.first = false;
          terms.weight = nullptr;
          windows.note(terms);
          CHECK(windows.tail()[kContributions] == 2);
        }
      }
    }
  }
}

TEST_CASE("note_loss equals the CPU's for numbers that are none", "[cuda]") {
  const std::vector<Number> metrics = {{DType::f64, kNaN}, {DType::f32, kInfinity}, {DType::bf16, 1e38}};
  for (const uint32_t seed : {0u, 1u, 5u, 7u}) {
    const Schedule schedule(seed);
    for (const double value : {0.0, 0.3, 1e300, -kInfinity, kNaN}) {
      for (const double w : {0.0, 5.0, 1e-300, 1e300, -1.0, kInfinity, kNaN}) {
        for (const DType dtype : kFloating) {
          CAPTURE(seed, value, w, dtype);
          const Number loss(dtype, value), weight(DType::f64, w);
          Windows windows;
          LossTerms terms = terms_of(loss, &weight, true, true);
          add_metrics(terms, metrics);
          windows.note(terms);
          terms.first = false;
          windows.has_scale = false;
          windows.note(terms);
          const bool is_added = w > 0 && std::isfinite(w);
          CHECK(windows.gate() == (is_added ? w / windows.scalars.unit : 0));
          CHECK(std::isnan(windows.tail()[kWeight]) == (w != 0 && !is_added));
          if (w == 0) CHECK(std::count(windows.tail().begin(), windows.tail().end(), 0) == tail_size(kSlots));
        }
      }
    }
  }
}

TEST_CASE("note_loss without a loss zeroes the window's first tail and leaves others alone", "[cuda]") {
  for (const uint32_t seed : {0u, 1u, 5u, 7u}) {
    CAPTURE(seed);
    const Schedule schedule(seed);
    LossTerms terms{};
    terms.rows = 3;
    terms.num_slots = kSlots;
    Windows windows;
    windows.note(terms);
    CHECK(windows.gate() == 0);
    CHECK(std::count(windows.tail().begin(), windows.tail().end(), 5) == tail_size(kSlots));
    terms.first = true;
    windows.has_report = false;
    windows.note(terms);
    CHECK(std::count(windows.tail().begin(), windows.tail().end(), 0) == tail_size(kSlots));
  }
}

TEST_CASE("note_loss refuses losses of integers and metrics without a slot", "[cuda]") {
  const Number loss(DType::i32, 3);
  const LossTerms of_integers = terms_of(loss, nullptr, true, true);
  LossTerms without_slot{};
  without_slot.num_metrics = 1;
  LossTerms too_many{};
  too_many.num_slots = 1;
  too_many.num_metrics = kMaxMetrics + 1;
  for (const LossTerms& terms : {of_integers, without_slot, too_many}) {
    const Status status = note_loss(terms, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr);
    CHECK(status.code == Status::Code::invalid);
  }
}

}  // namespace
}  // namespace muster::kernels::cuda
