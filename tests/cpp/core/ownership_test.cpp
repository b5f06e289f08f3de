#include "core/ownership.h"

#include "cpp/catch.h"

using namespace muster;

namespace {

ParameterSpec vector_of(const std::string& name, int64_t numel) { return {name, {numel}, {1}, at::kFloat}; }

// Runs follow one another, start at tiles and cover the parameter.
void check_cover(const std::vector<Run>& runs, int64_t numel, int64_t tile) {
  int64_t end = 0;
  for (const auto& run : runs) {
    CHECK(run.begin == end);
    CHECK((run.begin % tile == 0 || run.begin == numel));
    end += run.count;
  }
  CHECK(end == numel);
}

}  // namespace

TEST_CASE("every element has one owner", "[core]") {
  const std::vector<int64_t> numels{10, 0, 64, 100, 1, 640, 7, 7, 7};
  std::vector<ParameterSpec> parameters;
  for (size_t i = 0; i < numels.size(); ++i) parameters.push_back(vector_of("p" + std::to_string(i), numels[i]));
  for (const int64_t bucket_bytes : {1, 1000, 100'000}) {
    const FlatLayout layout(parameters, {}, bucket_bytes, bucket_bytes);
    for (const int ranks : {1, 2, 3, 7, 64}) {
      const auto runs = owned_runs(layout, ranks, 16);
      REQUIRE(runs.size() == numels.size());
      for (size_t p = 0; p < runs.size(); ++p) {
        REQUIRE(runs[p].size() == static_cast<size_t>(ranks));
        check_cover(runs[p], numels[p], 16);
      }
    }
  }
  for (const int64_t numel : {0, 1, 15, 16, 17, 1000}) check_cover(owned_runs(numel, 5, 16), numel, 16);
}

TEST_CASE("the shares of a bucket differ by at most a tile", "[core]") {
  std::vector<ParameterSpec> parameters;
  for (int i = 0; i < 100; ++i) parameters.push_back(vector_of("p" + std::to_string(i), 1 + 37 * i % 200));
  const FlatLayout layout(parameters, {}, 1 << 20, 1 << 20);
  REQUIRE(layout.buckets().size() == 1);
  constexpr int64_t kTile = 64;
  for (const int ranks : {2, 3, 4}) {
    const auto runs = owned_runs(layout, ranks, kTile);
    std::vector<int64_t> owned(static_cast<size_t>(ranks), 0);
    int64_t total = 0;
    for (const auto& of_parameter : runs) {
      for (size_t r = 0; r < owned.size(); ++r) owned[r] += of_parameter[r].count;
    }
    for (const int64_t count : owned) total += count;
    for (const int64_t count : owned) CHECK(std::abs(count - total / ranks) <= kTile);
  }
}
