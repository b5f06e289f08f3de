#include "cpp/cuda/emulated.h"

namespace muster::kernels::cuda {
namespace {

/// What a step reads and writes for some parameters.
template <class T>
struct Parameters {
  std::vector<size_t> sizes;
  std::vector<Buffer<T>> gradients, values, states[3];
  std::vector<Buffer<uint16_t>> low;
  std::vector<float> steps;
  std::vector<double> used;

  Parameters(std::vector<size_t> counts, uint32_t seed, bool has_specials) : sizes(std::move(counts)) {
    Values random(seed, has_specials);
    for (size_t i = 0; i < sizes.size(); ++i) {
      const auto offset = [&](size_t which) -> size_t { return i % 9 == which ? 1 : 0; };
      gradients.emplace_back(sizes[i], offset(2));
      values.emplace_back(sizes[i], offset(4));
      for (size_t s = 0; s < 3; ++s) states[s].emplace_back(sizes[i], offset(5 + s));
      low.emplace_back(sizes[i], offset(8));
      random.fill(gradients[i]);
      random.fill(values[i]);
      if (is_bf16(i)) {
        write_thirds(values[i], reinterpret_cast<BFloat16*>(low[i].data()));
      } else {
        write_thirds(values[i], reinterpret_cast<Half*>(low[i].data()));
      }
      for (auto& state : states) {
        random.fill(state[i]);
        for (T& value : state[i]) value = std::abs(value);
      }
      steps.push_back(static_cast<float>(i == 0 ? 1 : i * i));
      used.push_back(i % 10 == 7 ? 0 : 1);
    }
  }

  std::vector<StepSegment> segments(uint32_t num_groups) {
    std::vector<StepSegment> list;
    for (uint32_t i = 0; i < sizes.size(); ++i) {
      StepSegment segment{};
      segment.gradient = gradients[i].data();
      segment.parameter = values[i].data();
      segment.low = i % 4 == 1 ? nullptr : low[i].data();
      for (int s = 0; s < 3; ++s) segment.state[s] = states[s][i].data();
      segment.step = i % 13 == 0 ? nullptr : &steps[i];
      segment.used = i % 13 == 1 ? nullptr : &used[i];
      segment.n = sizes[i];
      segment.group = i % num_groups;
      segment.low_dtype = is_bf16(i) ? DType::bf16 : DType::f16;
      list.push_back(segment);
    }
    return list;
  }

  void compare(const Parameters& other) const {
    for (size_t i = 0; i < sizes.size(); ++i) {
      CAPTURE(i, sizes[i]);
      CHECK(first_difference(gradients[i], other.gradients[i]) == -1);
      CHECK(first_difference(values[i], other.values[i]) == -1);
      for (int s = 0; s < 3; ++s) CHECK(first_difference(states[s][i], other.states[s][i]) == -1);
      compare_low(i, other);
      CHECK((gradients[i].is_intact() && values[i].is_intact() && low[i].is_intact()));
      CHECK((states[0][i].is_intact() && states[1][i].is_intact() && states[2][i].is_intact()));
    }
  }

 private:
  static bool is_bf16(size_t i) { return i % 8 < 4; }

  void compare_low(size_t i, const Parameters& other) const {
    long difference = -1;
    for (size_t k = 0; k < sizes[i] && difference < 0; ++k) {
      const uint16_t a = low[i][k], b = other.low[i][k];
      const bool is_equal = is_bf16(i) ? is_same(BFloat16{a}, BFloat16{b}) : is_same(Half{a}, Half{b});
      if (!is_equal) difference = static_cast<long>(k);
    }
    CHECK(difference == -1);
  }
};

const StepScalars kScalars[] = {
    {3, 1, 1, 1, 1, 0},         // a mean
    {1024, 0.25, 4, 1, 1, 0},   // clipped by norm
    {3, 1, 4, 1, 1, 0, 0.125},  // and by value
    {7, 1, INFINITY, 1, 0, 0},  // not finite
    {1, 1, 0, 1, 1, 1},         // dropped
};

template <class T, class Group, class OnCpu, class OnDevice>
void compare_steps(DType dtype, const std::vector<Group>& groups, const OnCpu& on_cpu, const OnDevice& on_device,
                   size_t small) {
  const std::vector<size_t> sizes = odd_sizes(small);
  const std::vector<Chunk> chunks = chunks_of(sizes);
  for (const StepScalars& scalars : kScalars) {
    for (const bool keep_gradient : {false, true}) {
      CAPTURE(scalars.divisor, scalars.finite, scalars.dropped, keep_gradient);
      // The buffers' places, and so the paths taken, come from making them alike; copying would realign them.
      const bool has_specials = scalars.clip != 1;
      Parameters<T> expected(sizes, 11, has_specials), stepped(sizes, 11, has_specials);
      const auto num_groups = static_cast<uint32_t>(groups.size());
      const std::vector<StepSegment> a = expected.segments(num_groups), b = stepped.segments(num_groups);
      on_cpu(StepArguments{dtype, a.data(), a.size(), &scalars, keep_gradient}, groups.data());
      check_ok(on_device(
          StepPlan{dtype, b.data(), chunks.data(), static_cast<uint32_t>(chunks.size()), &scalars, keep_gradient},
          groups.data(), nullptr));
      stepped.compare(expected);
    }
  }
}

/// Where a step stores its parameters on other devices: two for each, some not on a vector's boundary.
template <class T>
struct Copies {
  std::vector<Buffer<T>> wide;
  std::vector<Buffer<uint16_t>> low;
  std::vector<void*> places;

  explicit Copies(const std::vector<StepSegment>& segments) {
    for (size_t i = 0; i < segments.size(); ++i) {
      const auto& segment = segments[i];
      for (size_t k = 0; k < 2; ++k) {
        const size_t offset = i % 7 == 3 + k ? 1 : 0;
        wide.emplace_back(segment.n, offset);
        low.emplace_back(segment.n, offset);
        memcpy(wide.back().data(), segment.parameter, segment.n * sizeof(T));
        if (segment.low != nullptr) memcpy(low.back().data(), segment.low, segment.n * 2);
        places.push_back(segment.low != nullptr ? static_cast<void*>(low.back().data()) : wide.back().data());
      }
    }
  }

  void compare(const std::vector<StepSegment>& segments) const {
    for (size_t c = 0; c < places.size(); ++c) {
      const auto& segment = segments[c / 2];
      const bool is_low = segment.low != nullptr;
      CAPTURE(c, segment.n, is_low);
      CHECK(memcmp(places[c], is_low ? segment.low : segment.parameter, segment.n * (is_low ? 2 : sizeof(T))) == 0);
      CHECK((wide[c].is_intact() && low[c].is_intact()));
    }
  }
};

template <class T>
void check_copies(DType dtype) {
  const std::vector<AdamGroup> groups = {{1e-3, 0.9, 0.999, 1e-8, 0.01, true, false, false}};
  const std::vector<size_t> sizes = odd_sizes(kSmallSizes);
  const std::vector<Chunk> chunks = chunks_of(sizes);
  for (const StepScalars& scalars : kScalars) {
    CAPTURE(scalars.finite, scalars.dropped);
    Parameters<T> expected(sizes, 11, false), stepped(sizes, 11, false);
    const std::vector<StepSegment> a = expected.segments(1), b = stepped.segments(1);
    const Copies<T> copies(b);
    kernels::adam_step(StepArguments{dtype, a.data(), a.size(), &scalars, false}, groups.data());
    StepPlan plan{dtype, b.data(), chunks.data(), static_cast<uint32_t>(chunks.size()), &scalars, false};
    plan.copies = copies.places.data();
    plan.num_copies = 2;
    check_ok(adam_step(plan, groups.data(), nullptr));
    stepped.compare(expected);
    copies.compare(b);  // where nothing was stepped, they are as they were
  }
}

/// In f32 with every seed, in f64 with one.
template <class Group, class OnCpu, class OnDevice>
void compare_both(const std::vector<Group>& groups, const OnCpu& on_cpu, const OnDevice& on_device) {
  for (const uint32_t seed : kSeeds) {
    CAPTURE(seed);
    const Schedule schedule(seed);
    compare_steps<float>(DType::f32, groups, on_cpu, on_device, kSmallSizes);
    if (seed == kSeeds[0]) compare_steps<double>(DType::f64, groups, on_cpu, on_device, 20);
  }
}

TEST_CASE("adam_step equals the CPU's", "[cuda]") {
  std::vector<AdamGroup> groups;
  for (int i = 0; i < 8; ++i) {
    groups.push_back(
        {1e-3 * (i + 1), 0.9, 0.999 - 0.01 * i, 1e-8, i % 3 * 0.01, i % 2 == 1, i / 2 % 2 == 1, i / 4 == 1});
  }
  compare_both(groups, &kernels::adam_step, &adam_step);
}

TEST_CASE("sgd_step equals the CPU's", "[cuda]") {
  std::vector<SgdGroup> groups;
  for (int i = 0; i < 6; ++i) {
    groups.push_back({0.1 * (i + 1), i % 3 == 0 ? 0 : 0.9, i == 1 ? 0.5 : 0, i % 2 * 0.01, i % 3 == 2, i > 3});
  }
  compare_both(groups, &kernels::sgd_step, &sgd_step);
}

TEST_CASE("adagrad_step equals the CPU's", "[cuda]") {
  const std::vector<AdagradGroup> groups = {
      {0.1, 0, 1e-10, 0, false}, {0.2, 0.01, 1e-10, 0.1, false}, {0.1, 0.5, 1e-8, 0, true}};
  compare_both(groups, &kernels::adagrad_step, &adagrad_step);
}

TEST_CASE("a step stores its parameters on other devices, too", "[cuda]") {
  const Schedule schedule(7);
  check_copies<float>(DType::f32);
  check_copies<double>(DType::f64);
}

TEST_CASE("optimizers step in floating point only", "[cuda]") {
  CHECK(adam_step(StepPlan{DType::i32, nullptr, nullptr, 0, nullptr, false}, nullptr, nullptr).code ==
        Status::Code::invalid);
}

}  // namespace
}  // namespace muster::kernels::cuda
