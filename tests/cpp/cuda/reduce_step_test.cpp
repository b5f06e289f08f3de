#include "cpp/cuda/peer_group.h"

namespace muster::kernels::cuda {
namespace {

const size_t kSizes[] = {1, 4097, 3, 9000, 4095, 130, 8192, 77};
constexpr size_t kCount = sizeof(kSizes) / sizeof(kSizes[0]);
constexpr size_t kUsed = kTailFields + 2;  // two metrics come before the counts
constexpr size_t kTail = kUsed + kCount;

DType parameter_dtype(size_t p, DType dtype) { return p % 4 == 1 ? DType::bf16 : p % 4 == 3 ? DType::f16 : dtype; }

struct Location {
  size_t gradient, parameter, partial;
};

/// Where each parameter lies. Those of one dtype share a buffer; two of them start off a vector's boundary.
struct Plan {
  std::vector<Location> places;
  size_t gradients = 0, partials = 0;
  size_t parameters[3] = {};  // of the accumulation dtype, bf16, f16

  Plan() {
    for (size_t p = 0; p < kCount; ++p) {
      size_t& parameter = parameters[kind(p)];
      const size_t gap = p == 4 || p == 5 ? 1 : 0;
      gradients = (gradients + 15) / 16 * 16 + (p == 6 ? 2 : 0);
      parameter = (parameter + 15) / 16 * 16 + gap;
      places.push_back({gradients, parameter, partials});
      gradients += kSizes[p];
      parameter += kSizes[p];
      partials += num_tiles(kSizes[p]);
    }
  }

  static size_t kind(size_t p) { return p % 4 == 1 ? 1 : p % 4 == 3 ? 2 : 0; }
};

struct Adaptive {
  using Group = AdamGroup;
  using Optimizer = Adam;
  static std::vector<AdamGroup> groups() {
    return {{1e-2, 0.9, 0.99, 1e-8, 0.1, true, false, false}, {1e-3, 0.8, 0.9, 1e-6, 0.01, false, true, true}};
  }
  static void on_cpu(const StepArguments& a, const AdamGroup* groups) { kernels::adam_step(a, groups); }
  static Status on_device(const Peers& p, const ReduceStep& a) { return reduce_adam_step(p, a, nullptr); }
};

struct Momentum {
  using Group = SgdGroup;
  using Optimizer = Sgd;
  static std::vector<SgdGroup> groups() { return {{0.1, 0.9, 0.1, 0.01, true, false}, {0.2, 0, 0, 0, false, true}}; }
  static void on_cpu(const StepArguments& a, const SgdGroup* groups) { kernels::sgd_step(a, groups); }
  static Status on_device(const Peers& p, const ReduceStep& a) { return reduce_sgd_step(p, a, nullptr); }
};

struct Accumulating {
  using Group = AdagradGroup;
  using Optimizer = Adagrad;
  static std::vector<AdagradGroup> groups() { return {{0.1, 0.01, 1e-10, 0, false}, {0.2, 0, 1e-8, 0.1, true}}; }
  static void on_cpu(const StepArguments& a, const AdagradGroup* groups) { kernels::adagrad_step(a, groups); }
  static Status on_device(const Peers& p, const ReduceStep& a) { return reduce_adagrad_step(p, a, nullptr); }
};

/// The optimizer's state, whole: on the device each rank holds what it owns of it.
template <class T>
struct State {
  std::vector<Buffer<T>> masters, states[3];
  std::vector<float> steps = std::vector<float>(kCount, 4.0f);
  StepScalars scalars{0, 0, 0, 4, 0, 0};
  LossScaleState scale{64, 0};

  State() {
    Values values(5);
    for (const size_t n : kSizes) {
      masters.emplace_back(n);
      values.fill(masters.back());
      for (auto& state : states) {
        state.emplace_back(n);
        values.fill(state.back());
        for (T& value : state.back()) value = std::abs(value);
      }
    }
  }
};

/// What each rank brings to each round.
template <class T>
struct Inputs {
  std::vector<std::vector<Buffer<T>>> gradients;  // [round][rank]
  std::vector<std::vector<Buffer<double>>> tails;

  Inputs(int rounds, int ranks, const Plan& plan, int bad_round) {
    for (int round = 0; round < rounds; ++round) {
      gradients.push_back(filled<T>(ranks, plan.gradients, static_cast<uint32_t>(round)));
      if (round == bad_round) gradients.back().back()[plan.places[3].gradient + 8999] = INFINITY;
      tails.push_back(filled<double>(ranks, kTail, static_cast<uint32_t>(round) + 100));
      for (int r = 0; r < ranks; ++r) {
        double* tail = tails.back()[static_cast<size_t>(r)].data();
        tail[kWeight] = 3 + r;
        tail[kContributions] = 1;
        tail[kFailures] = 0;
        tail[kSumLosses] = 0;
        for (size_t p = 0; p < kCount; ++p) tail[kUsed + p] = p == 5 && round % 2 == 1 ? 0 : 1;
      }
    }
  }
};

/// What the ranks' memory holds. Expected: of one rank, as all are alike.
template <class T>
struct Outputs {
  std::vector<Buffer<T>> parameters;
  std::vector<Buffer<BFloat16>> bf16;
  std::vector<Buffer<Half>> f16;
  std::vector<Buffer<double>> partials, tail_sums;

  Outputs(int ranks, const Plan& plan, const State<T>& state) {
    for (int r = 0; r < ranks; ++r) {
      parameters.emplace_back(plan.parameters[0]);
      Values(6).fill(parameters.back());
      bf16.emplace_back(plan.parameters[1]);
      f16.emplace_back(plan.parameters[2]);
      partials.emplace_back(plan.partials);
      tail_sums.emplace_back(kTail);
      for (size_t p = 0; p < kCount; ++p) {
        const size_t first = plan.places[p].parameter;
        if (Plan::kind(p) == 1) write_thirds(state.masters[p], bf16.back().data() + first);
        if (Plan::kind(p) == 2) write_thirds(state.masters[p], f16.back().data() + first);
      }
    }
  }

  void compare(const Outputs& expected) const {
    for (size_t r = 0; r < parameters.size(); ++r) {
      CAPTURE(r);
      CHECK(first_difference(parameters[r], expected.parameters[0]) == -1);
      CHECK(first_difference(bf16[r], expected.bf16[0]) == -1);
      CHECK(first_difference(f16[r], expected.f16[0]) == -1);
      CHECK(first_difference(partials[r], expected.partials[0]) == -1);
      CHECK(first_difference(tail_sums[r], expected.tail_sums[0]) == -1);
      CHECK((parameters[r].is_intact() && bf16[r].is_intact() && f16[r].is_intact() && partials[r].is_intact()));
    }
  }
};

// --- the CPU's version -----------------------------------------------------------------------------------------------

/// Ends one window; `sum` holds the gradients' sum and receives the mean when it is kept.
template <class Kind, class T>
void step_on_cpu(const Plan& plan, DType dtype, Buffer<T>& sum, std::vector<Buffer<double>>& tails, bool keep_gradient,
                 const WindowOptions& options, State<T>& state, Outputs<T>& out) {
  const Buffer<double> tail = sum_of(DType::f64, tails);
  memcpy(out.tail_sums[0].data(), tail.data(), kTail * sizeof(double));
  std::vector<StatsSegment> stats;
  std::vector<StepSegment> segments;
  for (size_t p = 0; p < kCount; ++p) {
    const Location& place = plan.places[p];
    T* gradient = sum.data() + place.gradient;
    stats.push_back({gradient, out.partials[0].data() + place.partial, kSizes[p], dtype});
    StepSegment segment{};
    segment.gradient = gradient;
    segment.low_dtype = parameter_dtype(p, dtype);
    segment.parameter = state.masters[p].data();
    if (Plan::kind(p) == 0) segment.parameter = out.parameters[0].data() + place.parameter;
    if (Plan::kind(p) == 1) segment.low = out.bf16[0].data() + place.parameter;
    if (Plan::kind(p) == 2) segment.low = out.f16[0].data() + place.parameter;
    for (int s = 0; s < 3; ++s) segment.state[s] = state.states[s][p].data();
    segment.step = &state.steps[p];
    segment.used = tail.data() + kUsed + p;
    segment.n = kSizes[p];
    segment.group = p % 2;
    segments.push_back(segment);
  }
  kernels::grad_stats(stats.data(), stats.size());
  kernels::finish_window(out.partials[0].data(), plan.partials, tail.data(), tail.data() + kUsed, state.steps.data(),
                         kCount, options, &state.scalars, &state.scale);
  const auto groups = Kind::groups();
  Kind::on_cpu({dtype, segments.data(), segments.size(), &state.scalars, keep_gradient}, groups.data());
}

// --- the device's version --------------------------------------------------------------------------------------------

/// The tables of one rank: of each parameter, the tiles of this rank's share.
template <class T>
struct Shard {
  std::vector<PeerSegment> segments;
  std::vector<Chunk> chunks;
  std::vector<float> steps;
  StepScalars scalars;
  LossScaleState scale;

  Shard(const Plan& plan, DType dtype, int rank, int ranks, State<T>& state)
      : steps(state.steps), scalars(state.scalars), scale(state.scale) {
    std::vector<size_t> sizes;
    for (uint32_t p = 0; p < kCount; ++p) {
      const auto tiles = static_cast<int>(num_tiles(kSizes[p]));
      // Rotated, so that parameters of one tile do not all fall to one rank.
      const int share = (rank + static_cast<int>(p)) % ranks;
      const size_t first = static_cast<size_t>(tiles * share / ranks) * kTile;
      const size_t last = std::min(static_cast<size_t>(tiles * (share + 1) / ranks) * kTile, kSizes[p]);
      if (first >= last) continue;
      PeerSegment segment{};
      segment.gradient = plan.places[p].gradient + first;
      segment.parameter = plan.places[p].parameter + first;
      if (Plan::kind(p) != 0) segment.master = state.masters[p].data() + first;
      for (int s = 0; s < 3; ++s) segment.state[s] = state.states[s][p].data() + first;
      segment.n = last - first;
      segment.partial = static_cast<uint32_t>(plan.places[p].partial + first / kTile);
      segment.index = p;
      segment.group = p % 2;
      segment.parameter_dtype = parameter_dtype(p, dtype);
      segments.push_back(segment);
      sizes.push_back(segment.n);
    }
    chunks = chunks_of(sizes);
  }
};

struct StepRounds {
  int count;
  const void* gradients[8][kMaxPeers];  // what each round starts from
  const double* tails[8][kMaxPeers];
};

/// Each rank writes its gradients and tail, ends a window, and starts over.
template <class Optimizer, class T>
MUSTER_KERNEL void step_rounds_kernel(MUSTER_GRID_CONSTANT(PeerStep) a, MUSTER_GRID_CONSTANT(StepRounds) rounds,
                                      uint64_t num_gradients) {
  Place place = enter_peers(a.peers);
  const PeerBuffers& own = a.step.buffers[place.rank];
  const uint64_t first = uint64_t{place.block} * kPeerThreads + threadIdx.x;
  const uint64_t stride = uint64_t{a.peers.blocks} * kPeerThreads;
  for (int round = 0; round < rounds.count; ++round) {
    const T* gradients = static_cast<const T*>(rounds.gradients[round][place.rank]);
    for (uint64_t i = first; i < num_gradients; i += stride) static_cast<T*>(own.gradients)[i] = gradients[i];
    for (uint64_t i = first; i < kTail; i += stride) {
      const_cast<double*>(own.tail)[i] = rounds.tails[round][place.rank][i];
    }
    reduce_step_round<Optimizer, T>(a, place);
  }
  leave_peers(a.peers, place);
}

struct Setting {
  int ranks;
  unsigned blocks;
  int rounds;
  bool is_one_launch;  // else a launch for each rank and round
  bool keep_gradient;
  int bad_round;  // whose gradients are not finite
};

template <class Kind, class T>
void compare_steps(DType dtype, const Setting& setting) {
  CAPTURE(setting.ranks, setting.blocks, setting.rounds, setting.is_one_launch, setting.keep_gradient);
  const Plan plan;
  const WindowOptions options{0.7, 1, 2.1, 0.7, 2};
  Inputs<T> inputs(setting.rounds, setting.ranks, plan, setting.bad_round);
  State<T> expected_state, state;
  Outputs<T> expected(1, plan, expected_state), out(setting.ranks, plan, state);

  Buffer<T> mean(plan.gradients);
  for (int round = 0; round < setting.rounds; ++round) {
    const Buffer<T> sum = sum_of(dtype, inputs.gradients[static_cast<size_t>(round)]);
    memcpy(mean.data(), sum.data(), plan.gradients * sizeof(T));
    step_on_cpu<Kind>(plan, dtype, mean, inputs.tails[static_cast<size_t>(round)], setting.keep_gradient, options,
                      expected_state, expected);
  }

  const PeerGroup group(setting.ranks, setting.blocks);
  std::vector<Buffer<T>> gradients = filled<T>(setting.ranks, plan.gradients, 1);
  std::vector<Buffer<double>> tails = filled<double>(setting.ranks, kTail, 1);
  const auto groups = Kind::groups();
  std::vector<Shard<T>> shards;
  for (int r = 0; r < setting.ranks; ++r) shards.emplace_back(plan, dtype, r, setting.ranks, state);
  ReduceStep step{};
  step.dtype = dtype;
  step.num_partials = plan.partials;
  step.num_parameters = kCount;
  step.tail_size = kTail;
  step.used = kUsed;
  step.options = options;
  step.keep_gradient = setting.keep_gradient;
  for (size_t r = 0; r < shards.size(); ++r) {
    step.buffers[r] = {gradients[r].data(),    out.parameters[r].data(), {out.bf16[r].data(), out.f16[r].data()},
                       out.partials[r].data(), tails[r].data(),          out.tail_sums[r].data()};
    step.state[r] = {shards[r].segments.data(),
                     shards[r].chunks.data(),
                     static_cast<uint32_t>(shards[r].chunks.size()),
                     shards[r].steps.data(),
                     &shards[r].scalars,
                     &shards[r].scale,
                     groups.data()};
  }
  if (setting.is_one_launch) {
    StepRounds rounds{setting.rounds, {}, {}};
    for (int round = 0; round < setting.rounds; ++round) {
      for (size_t r = 0; r < shards.size(); ++r) {
        rounds.gradients[round][r] = inputs.gradients[static_cast<size_t>(round)][r].data();
        rounds.tails[round][r] = inputs.tails[static_cast<size_t>(round)][r].data();
      }
    }
    check_ok(launch(step_rounds_kernel<typename Kind::Optimizer, T>,
                    {static_cast<unsigned>(setting.ranks) * setting.blocks, kPeerThreads, true}, nullptr,
                    PeerStep{group.peers, step}, rounds, plan.gradients));
  } else {
    for (size_t round = 0; round < static_cast<size_t>(setting.rounds); ++round) {
      for (size_t r = 0; r < shards.size(); ++r) {
        memcpy(gradients[r].data(), inputs.gradients[round][r].data(), plan.gradients * sizeof(T));
        memcpy(tails[r].data(), inputs.tails[round][r].data(), kTail * sizeof(double));
      }
      group.run(round % 2 == 0, [&](const Peers& peers) { return Kind::on_device(peers, step); });
    }
  }

  out.compare(expected);
  for (size_t p = 0; p < kCount; ++p) {
    CAPTURE(p);
    CHECK(first_difference(state.masters[p], expected_state.masters[p]) == -1);
    for (int s = 0; s < 3; ++s) CHECK(first_difference(state.states[s][p], expected_state.states[s][p]) == -1);
  }
  for (const auto& shard : shards) {
    CHECK(shard.steps == expected_state.steps);
    CHECK(is_same(shard.scalars.norm, expected_state.scalars.norm));
    CHECK(is_same(shard.scalars.clip, expected_state.scalars.clip));
    CHECK(is_same(shard.scalars.unit, expected_state.scalars.unit));
    CHECK(shard.scalars.finite == expected_state.scalars.finite);
    CHECK(is_same(shard.scale.scale, expected_state.scale.scale));
    CHECK(shard.scale.growth_tracker == expected_state.scale.growth_tracker);
  }
  // Each rank's share of the last round's sum, or mean.
  for (size_t r = 0; r < shards.size(); ++r) {
    for (const PeerSegment& segment : shards[r].segments) {
      bool is_equal = true;
      for (uint64_t i = segment.gradient; i < segment.gradient + segment.n; ++i) {
        is_equal = is_equal && is_same(gradients[r][i], mean[i]);
      }
      CHECK(is_equal);
    }
  }
}

TEST_CASE("reduce_step equals the CPU's sum, statistics, window and step", "[cuda]") {
  for (const uint32_t seed : kSeeds) {
    CAPTURE(seed);
    const Schedule schedule(seed);
    for (const int ranks : {1, 2, 3, 4}) {
      compare_steps<Adaptive, float>(DType::f32, {ranks, 2, 2, false, ranks == 2, -1});
    }
    compare_steps<Adaptive, double>(DType::f64, {2, 1, 2, false, true, -1});
    compare_steps<Momentum, float>(DType::f32, {2, 2, 2, false, true, 1});
    compare_steps<Accumulating, float>(DType::f32, {3, 1, 2, false, false, 0});
  }
}

TEST_CASE("rounds of reduce_step in one launch", "[cuda][rounds]") {
  for (const uint32_t seed : {0u, 3u}) {
    CAPTURE(seed);
    const Schedule schedule(seed);
    compare_steps<Adaptive, float>(DType::f32, {2, 2, 5, true, false, 2});
    compare_steps<Momentum, float>(DType::f32, {4, 1, 4, true, true, 3});
  }
}

TEST_CASE("reduce_step under many schedules", "[cuda][.long]") {
  for (uint32_t seed = 0; seed < 12; ++seed) {
    CAPTURE(seed);
    const Schedule schedule(seed);
    for (const int ranks : {1, 2, 3, 4, 8}) {
      compare_steps<Adaptive, float>(DType::f32, {ranks, 3, 5, true, seed % 2 == 0, 2});
      compare_steps<Momentum, double>(DType::f64, {ranks, 2, 4, true, seed % 2 == 1, 1});
      compare_steps<Accumulating, float>(DType::f32, {ranks, 1, 3, false, seed % 2 == 1, -1});
    }
  }
}

}  // namespace
}  // namespace muster::kernels::cuda
