#include <algorithm>

#include "cpp/cuda/emulated.h"

namespace muster::kernels::cuda {
namespace {

constexpr int kRanks = 3;

/// One rank's buffers: two averaged ones and integers, the largest of which no rank but the first has.
struct Rank {
  explicit Rank(int rank)
      : floats(kFloats, 1),
        halves(kHalves, 1),
        integers(kIntegers),
        noted(kAveraged),
        sums(kAveraged),
        writers(kAveraged),
        words(2 * kIntegers * kRanks),
        segments{{floats.data(), kFloats, 0, DType::f32},
                 {halves.data(), kHalves, kFloats, DType::bf16},
                 {integers.data(), kIntegers, 0, DType::i64}},
        chunks(chunks_of({kFloats, kHalves, kIntegers})) {
    Values random(5 + static_cast<uint32_t>(rank), false);
    random.fill(floats.data(), kFloats);
    for (size_t i = 0; i < kHalves; ++i)
      halves[i] = narrow<BFloat16>(static_cast<float>(i % 7 + static_cast<size_t>(rank)));
    for (size_t i = 0; i < kIntegers; ++i)
      integers[i] = static_cast<int64_t>(i) * 3'000'000'019 * (i % 2 == 0 ? -1 : 1) - rank;
    // Every other element of the first none has written.
    for (size_t i = 0; i < kAveraged; ++i) noted[i] = std::nan("");
    for (size_t i = 0; i < kFloats; i += 2) noted[i] = floats[i] = unwritten(rank);
  }

  static float unwritten(int rank) { return 0.1F + static_cast<float>(rank); }
  BufferPlan plan() const { return {segments, chunks.data(), static_cast<uint32_t>(chunks.size()), kIntegers}; }
  BufferSums arrays() { return {noted.data(), sums.data(), writers.data(), words.data(), nullptr}; }

  static constexpr size_t kFloats = kTile + 301, kHalves = 77, kIntegers = 19, kAveraged = kFloats + kHalves;
  Buffer<float> floats;
  Buffer<BFloat16> halves;
  Buffer<int64_t> integers;
  Buffer<double> noted, sums, writers, words;
  BufferSegment segments[3];
  std::vector<Chunk> chunks;
};

double wide(float value) { return value; }
double wide(BFloat16 value) { return widen(value); }

/// The sums over ranks, to each of them.
void add_up(std::vector<Rank>& ranks, Buffer<double> Rank::* member) {
  Buffer<double> total = ranks[0].*member;
  for (size_t r = 1; r < ranks.size(); ++r) {
    for (size_t i = 0; i < total.size(); ++i) total[i] += (ranks[r].*member)[i];
  }
  for (Rank& rank : ranks) std::copy(total.begin(), total.end(), (rank.*member).begin());
}

struct Merge {
  bool is_mean = true;
  double total = 0;  // of the weights
  std::vector<Rank> before, after;

  explicit Merge(bool averages, bool has_weight) : is_mean(averages) {
    for (int r = 0; r < kRanks; ++r) before.emplace_back(r);
    for (int r = 0; r < kRanks; ++r) after.emplace_back(r);
    for (int r = 0; r < kRanks; ++r) {
      const double weight = has_weight ? weights[r] : 0;
      total += weight;
      check_ok(gather_buffers(after[static_cast<size_t>(r)].plan(), after[static_cast<size_t>(r)].arrays(),
                              is_mean ? &weight : nullptr, is_mean || r == 0 ? 1 : 0, r, kRanks, nullptr));
    }
    for (const auto member : {&Rank::sums, &Rank::writers, &Rank::words}) add_up(after, member);
    for (Rank& rank : after) {
      check_ok(scatter_buffers(rank.plan(), rank.arrays(), &total, is_mean, kRanks, nullptr));
    }
  }

  /// Of element i of each rank before it.
  template <class T>
  double expected(Buffer<T> Rank::* member, size_t i) const {
    double sum = 0;
    if (!is_mean) return wide((before[0].*member)[i]);
    for (int r = 0; r < kRanks; ++r)
      sum += weights[r] > 0 ? wide((before[static_cast<size_t>(r)].*member)[i]) * weights[r] : 0;
    return sum / total;
  }

  static constexpr double weights[kRanks] = {3, 0, 2};
};

TEST_CASE("buffers become what their writers' weights make of them", "[cuda]") {
  for (const uint32_t seed : kSeeds) {
    const Schedule schedule(seed);
    for (const bool is_mean : {true, false}) {
      CAPTURE(seed, is_mean);
      const Merge merge(is_mean, true);
      for (int r = 0; r < kRanks; ++r) {
        const Rank& rank = merge.after[static_cast<size_t>(r)];
        size_t wrong = 0;
        for (size_t i = 0; i < Rank::kFloats; ++i) {
          const float expected = i % 2 == 0 ? Rank::unwritten(r) : static_cast<float>(merge.expected(&Rank::floats, i));
          wrong += rank.floats[i] == expected && rank.noted[i] == static_cast<double>(expected) ? 0 : 1;
        }
        for (size_t i = 0; i < Rank::kHalves; ++i) {
          const auto expected = narrow<BFloat16>(static_cast<float>(merge.expected(&Rank::halves, i)));
          wrong += rank.halves[i].bits == expected.bits ? 0 : 1;
        }
        for (size_t i = 0; i < Rank::kIntegers; ++i) wrong += rank.integers[i] == merge.before[0].integers[i] ? 0 : 1;
        CHECK(wrong == 0);
        CHECK((rank.floats.is_intact() && rank.halves.is_intact() && rank.integers.is_intact()));
        CHECK((rank.noted.is_intact() && rank.sums.is_intact() && rank.writers.is_intact() && rank.words.is_intact()));
      }
    }
  }
}

TEST_CASE("buffers of a window without weight stay, and are noted", "[cuda]") {
  const Merge merge(true, false);
  for (size_t r = 0; r < kRanks; ++r) {
    CHECK(first_difference(merge.after[r].floats, merge.before[r].floats) == -1);
    CHECK(first_difference(merge.after[r].integers, merge.before[r].integers) == -1);
    CHECK(merge.after[r].noted[1] == static_cast<double>(merge.before[r].floats[1]));
  }
}

TEST_CASE("no buffers launch nothing", "[cuda]") {
  const int before = emulation::launches;
  check_ok(gather_buffers({}, {}, nullptr, 1, 0, 2, nullptr));
  check_ok(scatter_buffers({}, {}, nullptr, true, 2, nullptr));
  CHECK(emulation::launches == before);
}

}  // namespace
}  // namespace muster::kernels::cuda
