// Optimizer steps: the bits of math.h on every instruction set, and the formulas of torch.optim's documentation.
#include <algorithm>
#include <string>
#include <variant>

#include "cpp/catch.h"
#include "cpp/kernels/support.h"
#include "kernels/step_math.h"

using namespace muster::kernels;
using namespace muster::kernels::testing;

namespace {

using Group = std::variant<AdamGroup, SgdGroup, AdagradGroup>;

std::vector<Group> all_groups() {
  std::vector<Group> groups;
  for (int bits = 0; bits < 16; ++bits) {
    const bool decoupled = bits & 1, amsgrad = bits & 2, maximize = bits & 4;
    groups.push_back(AdamGroup{0.01, 0.9, 0.99, 1e-8, bits & 8 ? 0.1 : 0.0, decoupled, amsgrad, maximize});
  }
  for (int bits = 0; bits < 32; ++bits) {
    const double momentum = bits & 1 ? 0.9 : 0.0, dampening = bits & 2 ? 0.3 : 0.0;
    groups.push_back(SgdGroup{0.05, momentum, dampening, bits & 4 ? 0.1 : 0.0, (bits & 8) != 0, (bits & 16) != 0});
  }
  for (int bits = 0; bits < 8; ++bits) {
    groups.push_back(AdagradGroup{0.1, bits & 1 ? 0.2 : 0.0, 1e-10, bits & 2 ? 0.1 : 0.0, (bits & 4) != 0});
  }
  return groups;
}

std::string name_of(const Group& group) {
  std::ostringstream text;
  if (const auto* adam = std::get_if<AdamGroup>(&group)) {
    text << "adam decay " << adam->weight_decay << " decoupled " << adam->decoupled << " amsgrad " << adam->amsgrad
         << " maximize " << adam->maximize;
  } else if (const auto* sgd = std::get_if<SgdGroup>(&group)) {
    text << "sgd momentum " << sgd->momentum << " dampening " << sgd->dampening << " decay " << sgd->weight_decay
         << " nesterov " << sgd->nesterov << " maximize " << sgd->maximize;
  } else {
    const auto& adagrad = std::get<AdagradGroup>(group);
    text << "adagrad lr_decay " << adagrad.lr_decay << " decay " << adagrad.weight_decay << " maximize "
         << adagrad.maximize;
  }
  return text.str();
}

bool maximizes(const Group& group) {
  return std::visit([](const auto& g) { return g.maximize; }, group);
}

void run(const NamedTable& isa, const StepArguments& arguments, const Group& group) {
  if (const auto* adam = std::get_if<AdamGroup>(&group)) {
    isa.steps->adam(arguments, adam);
  } else if (const auto* sgd = std::get_if<SgdGroup>(&group)) {
    isa.steps->sgd(arguments, sgd);
  } else {
    isa.steps->adagrad(arguments, &std::get<AdagradGroup>(group));
  }
}

template <class T>
uint16_t rounded(T value, DType low_dtype) {
  const auto single = static_cast<float>(value);
  return low_dtype == DType::bf16 ? c10::BFloat16(single).x : c10::Half(single).x;
}

template <class T>
T widened(uint16_t bits, DType low_dtype) {
  return static_cast<T>(low_dtype == DType::bf16 ? static_cast<float>(c10::BFloat16(bits, c10::BFloat16::from_bits()))
                                                 : static_cast<float>(c10::Half(bits, c10::Half::from_bits())));
}

// One parameter; its elements start off the vector's alignment.
template <class T>
struct Parameter {
  std::vector<T> gradient, value, state[3];
  std::vector<uint16_t> low;
  float step = 1;
  double used = 1;

  explicit Parameter(size_t n) : gradient(n), value(n), low(n + 1) {
    for (auto& s : state) s.resize(n);
  }

  StepSegment segment(DType low_dtype = DType::bf16) {
    const size_t n = value.size() - 1;
    return {gradient.data() + 1,
            value.data() + 1,
            low.data() + 2,
            {state[0].data() + 1, state[1].data() + 1, state[2].data() + 1},
            &step,
            &used,
            n,
            0,
            low_dtype};
  }
};

template <class T>
Parameter<T> draw_parameter(size_t n, std::mt19937_64& random, bool special, DType low_dtype = DType::bf16) {
  Parameter<T> parameter(n + 1);
  for (auto& low : parameter.low) low = static_cast<uint16_t>(random());  // subnormal, infinite and NaN ones among them
  for (size_t i = 0; i <= n; ++i) {
    parameter.gradient[i] = special ? draw_special<T>(random) : draw<T>(random);
    parameter.value[i] = special ? draw_special<T>(random) : draw<T>(random);
    parameter.state[0][i] = std::abs(draw<T>(random));  // Adagrad's is a sum of squares
    parameter.state[1][i] = std::abs(draw<T>(random));
    parameter.state[2][i] = std::abs(draw<T>(random));
    if (i > 0 && random() % 3 != 0) parameter.low[i + 1] = rounded(parameter.value[i], low_dtype);  // else written
  }
  return parameter;
}

template <class T>
bool same(const Parameter<T>& a, const Parameter<T>& b) {
  bool equal = same_values(a.gradient, b.gradient) && same_values(a.value, b.value) && a.low == b.low;
  for (int s = 0; s < 3; ++s) equal = equal && same_values(a.state[s], b.state[s]);
  return equal;
}

// The elements one by one, by math.h. A `low_dtype` of f32: there is no copy.
template <class T>
void expect_step(Parameter<T>& parameter, const Group& group, const StepScalars& scalars, bool keep_gradient,
                 DType low_dtype) {
  const auto t = static_cast<uint64_t>(parameter.step);
  for (size_t i = 1; i < parameter.value.size(); ++i) {
    const T mean = parameter.gradient[i] / static_cast<T>(scalars.divisor);
    if (keep_gradient) parameter.gradient[i] = mean;
    const auto bound = static_cast<T>(scalars.clip_value);
    const T by_norm = (maximizes(group) ? -mean : mean) * static_cast<T>(scalars.clip);
    const T g = bound == 0 || std::isnan(by_norm) ? by_norm : std::clamp(by_norm, -bound, bound);
    T& p = parameter.value[i];
    const bool has_low = low_dtype != DType::f32;
    uint16_t& low = parameter.low[i + 1];
    if (has_low && rounded(p, low_dtype) != low) p = widened<T>(low, low_dtype);
    T* state[3] = {&parameter.state[0][i], &parameter.state[1][i], &parameter.state[2][i]};
    if (const auto* adam = std::get_if<AdamGroup>(&group)) {
      const auto f = adam_factors<T>(*adam, t);
      if (adam->decoupled) {
        adam->amsgrad ? adam_element<true, true>(p, *state[0], *state[1], *state[2], g, f)
                      : adam_element<true, false>(p, *state[0], *state[1], *state[2], g, f);
      } else {
        adam->amsgrad ? adam_element<false, true>(p, *state[0], *state[1], *state[2], g, f)
                      : adam_element<false, false>(p, *state[0], *state[1], *state[2], g, f);
      }
    } else if (const auto* sgd = std::get_if<SgdGroup>(&group)) {
      const auto f = sgd_factors<T>(*sgd, t);
      if (sgd->momentum == 0) {
        sgd_element<false, false>(p, *state[0], g, f);
      } else {
        sgd->nesterov ? sgd_element<true, true>(p, *state[0], g, f) : sgd_element<true, false>(p, *state[0], g, f);
      }
    } else {
      adagrad_element(p, *state[0], g, adagrad_factors<T>(std::get<AdagradGroup>(group), t));
    }
    if (has_low) low = rounded(p, low_dtype);
  }
}

// NaN in a low-precision copy may have any payload.
void unify_nan(std::vector<uint16_t>& low, DType dtype) {
  for (uint16_t& bits : low) {
    const uint16_t infinity = dtype == DType::bf16 ? 0x7f80 : 0x7c00;
    if ((bits & 0x7fff) > infinity) bits = 0x7fff;
  }
}

// torch.optim's documentation, in double, for one element.
struct Reference {
  Group group;
  double p = 0, first = 0, second = 0, second_max = 0;
  int t = 0;

  void step(double g) {
    ++t;
    if (maximizes(group)) g = -g;
    if (const auto* adam = std::get_if<AdamGroup>(&group)) {
      if (adam->decoupled) {
        p -= adam->lr * adam->weight_decay * p;
      } else {
        g += adam->weight_decay * p;
      }
      first = adam->beta1 * first + (1 - adam->beta1) * g;
      second = adam->beta2 * second + (1 - adam->beta2) * g * g;
      second_max = std::max(second_max, second);
      const double m_hat = first / (1 - std::pow(adam->beta1, t));
      const double v_hat = (adam->amsgrad ? second_max : second) / (1 - std::pow(adam->beta2, t));
      p -= adam->lr * m_hat / (std::sqrt(v_hat) + adam->eps);
    } else if (const auto* sgd = std::get_if<SgdGroup>(&group)) {
      g += sgd->weight_decay * p;
      if (sgd->momentum != 0) {
        first = t > 1 ? sgd->momentum * first + (1 - sgd->dampening) * g : g;
        g = sgd->nesterov ? g + sgd->momentum * first : first;
      }
      p -= sgd->lr * g;
    } else {
      const auto& adagrad = std::get<AdagradGroup>(group);
      g += adagrad.weight_decay * p;
      first += g * g;
      p -= adagrad.lr / (1 + (t - 1) * adagrad.lr_decay) * g / (std::sqrt(first) + adagrad.eps);
    }
  }
};

}  // namespace

TEMPLATE_TEST_CASE("steps: every instruction set gives the bits of math.h", "[kernels]", float, double) {
  using T = TestType;
  std::mt19937_64 random(13);
  const auto groups = all_groups();
  for (size_t k = 0; k < groups.size(); ++k) {
    for (const size_t n : kSizes) {
      const bool keep_gradient = random() % 2 == 0;
      const DType low_dtype = random() % 2 == 0 ? DType::bf16 : DType::f16;
      const double divisors[] = {1, 3, 64, 0.125, 48, 0x1p-130};
      const StepScalars scalars{divisors[random() % 6],       random() % 2 == 0 ? 1.0 : 0.3, 1, 1, 1, 0,
                                random() % 3 == 0 ? 0.2 : 0.0};
      const auto before = draw_parameter<T>(n, random, /*special=*/true, low_dtype);
      for (const float step : {1.0F, 7.0F}) {
        auto expected = before;
        expected.step = step;
        expect_step(expected, groups[k], scalars, keep_gradient, low_dtype);
        unify_nan(expected.low, low_dtype);
        for (const NamedTable& isa : tables()) {
          auto got = before;
          got.step = step;
          const StepSegment segment = got.segment(low_dtype);
          run(isa, {dtype_of<T>(), &segment, 1, &scalars, keep_gradient}, groups[k]);
          unify_nan(got.low, low_dtype);
          INFO(isa.name << " " << name_of(groups[k]) << " n " << n << " divisor " << scalars.divisor << " step " << step
                        << " keep " << keep_gradient);
          REQUIRE(same(got, expected));
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("steps: torch.optim's formulas", "[kernels]", float, double) {
  using T = TestType;
  const double tolerance = std::is_same_v<T, float> ? 2e-5 : 1e-12;
  const size_t n = 37;
  for (const Group& group : all_groups()) {
    for (const NamedTable& isa : tables()) {
      std::mt19937_64 random(17);
      auto parameter = draw_parameter<T>(n, random, /*special=*/false);
      std::vector<Reference> references(n + 1);
      for (size_t i = 0; i <= n; ++i) {
        for (auto& state : parameter.state) state[i] = 0;
        references[i].group = group;
        references[i].p = static_cast<double>(parameter.value[i]);
      }
      for (int t = 1; t <= 6; ++t) {
        const StepScalars scalars{t % 2 == 0 ? 4.0 : 3.0, t % 3 == 0 ? 0.5 : 1.0, 1, 1, 1, 0};
        for (size_t i = 1; i <= n; ++i) {
          parameter.gradient[i] = draw<T>(random);
          references[i].step(static_cast<double>(parameter.gradient[i]) / scalars.divisor * scalars.clip);
        }
        parameter.step = static_cast<float>(t);
        StepSegment segment = parameter.segment();
        segment.low = nullptr;
        run(isa, {dtype_of<T>(), &segment, 1, &scalars, false}, group);
        for (size_t i = 1; i <= n; ++i) {
          INFO(isa.name << " " << name_of(group) << " step " << t << " element " << i);
          REQUIRE(std::abs(static_cast<double>(parameter.value[i]) - references[i].p) <=
                  tolerance * (1 + std::abs(references[i].p)));
        }
      }
    }
  }
}

TEST_CASE("steps: what is skipped stays, and the mean is kept all the same", "[kernels]") {
  struct Case {
    const char* name;
    StepScalars scalars;
    double used;
  };
  const Case cases[] = {{"not finite", {2, 0.5, 1, 1, 0, 0}, 1},
                        {"dropped", {2, 0.5, 1, 1, 1, 1}, 1},
                        {"unused", {2, 0.5, 1, 1, 1, 0}, 0}};
  std::mt19937_64 random(19);
  for (const Group& group : all_groups()) {
    for (const Case& skipped : cases) {
      for (const bool keep_gradient : {false, true}) {
        auto before = draw_parameter<float>(1500, random, /*special=*/true);
        before.used = skipped.used;
        auto expected = before;
        if (keep_gradient) {
          for (size_t i = 1; i < expected.gradient.size(); ++i) expected.gradient[i] = before.gradient[i] / 2;
        }
        for (const NamedTable& isa : tables()) {
          auto got = before;
          const StepSegment segment = got.segment();
          run(isa, {DType::f32, &segment, 1, &skipped.scalars, keep_gradient}, group);
          INFO(isa.name << " " << name_of(group) << " " << skipped.name << " keep " << keep_gradient);
          REQUIRE(same(got, expected));
        }
      }
    }
  }
}

TEST_CASE("steps: many segments, each with its group, count and use", "[kernels]") {
  std::mt19937_64 random(23);
  const AdamGroup groups[] = {{0.01, 0.9, 0.99, 1e-8, 0.1, true, false, false},
                              {0.02, 0.8, 0.999, 1e-6, 0, false, true, true},
                              {0.03, 0.5, 0.9, 1e-7, 0.2, false, false, false}};
  const StepScalars scalars{3, 0.5, 1, 1, 1, 0};
  std::vector<Parameter<float>> before;
  for (size_t k = 0; k < 20; ++k) {
    before.push_back(draw_parameter<float>(random() % 3000, random, /*special=*/false, DType::f16));
    before.back().step = static_cast<float>(1 + k);
    before.back().used = k % 5 == 4 ? 0 : 1;
  }
  auto expected = before;
  for (size_t k = 0; k < expected.size(); ++k) {
    if (expected[k].used > 0) expect_step(expected[k], Group(groups[k % 3]), scalars, false, DType::f16);
  }
  for (const NamedTable& isa : tables()) {
    auto got = before;
    std::vector<StepSegment> segments;
    for (size_t k = 0; k < got.size(); ++k) {
      segments.push_back(got[k].segment(DType::f16));
      segments.back().group = static_cast<uint32_t>(k % 3);
    }
    isa.steps->adam({DType::f32, segments.data(), segments.size(), &scalars, false}, groups);
    for (size_t k = 0; k < got.size(); ++k) {
      INFO(isa.name << " segment " << k);
      CHECK(same(got[k], expected[k]));
    }
  }
}

TEST_CASE("steps: without a count it is the first, without a use count it is used, without a copy none is written",
          "[kernels]") {
  std::mt19937_64 random(29);
  const StepScalars scalars{2, 1, 1, 1, 1, 0};
  for (const Group& group : all_groups()) {
    const auto before = draw_parameter<float>(100, random, /*special=*/false);
    auto expected = before;
    expect_step(expected, group, scalars, false, DType::f32);
    for (const NamedTable& isa : tables()) {
      auto got = before;
      StepSegment segment = got.segment();
      segment.step = nullptr;
      segment.used = nullptr;
      segment.low = nullptr;
      const bool has_second = std::holds_alternative<AdamGroup>(group);
      if (!has_second) segment.state[1] = nullptr;
      if (!has_second || !std::get<AdamGroup>(group).amsgrad) segment.state[2] = nullptr;
      run(isa, {DType::f32, &segment, 1, &scalars, false}, group);
      INFO(isa.name << " " << name_of(group));
      REQUIRE(same(got, expected));
    }
  }
}

TEST_CASE("steps: no weight decay means no term, so infinite parameters make no NaN of the state", "[kernels]") {
  const float infinity = std::numeric_limits<float>::infinity();
  const StepScalars scalars{1, 1, 1, 1, 1, 0};
  const Group groups[] = {AdamGroup{0.1, 0.9, 0.99, 1e-8, 0, false, false, false},
                          AdamGroup{0.1, 0.9, 0.99, 1e-8, 0, true, false, false}, SgdGroup{0.1, 0.9, 0, 0, true, false},
                          AdagradGroup{0.1, 0, 1e-10, 0, false}};
  for (const Group& group : groups) {
    for (const NamedTable& isa : tables()) {
      Parameter<float> parameter(40);
      parameter.gradient.assign(40, 0.5F);
      parameter.value.assign(40, infinity);
      StepSegment segment = parameter.segment();
      segment.low = nullptr;
      run(isa, {DType::f32, &segment, 1, &scalars, false}, group);
      INFO(isa.name << " " << name_of(group));
      CHECK(parameter.value == std::vector<float>(40, infinity));
      for (const auto& state : parameter.state) {
        CHECK(std::all_of(state.begin(), state.end(), [](float value) { return std::isfinite(value); }));
      }
    }
  }
}
