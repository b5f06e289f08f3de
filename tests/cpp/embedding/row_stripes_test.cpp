#include "embedding/row_stripes.h"

#include <algorithm>
#include <vector>

#include "cpp/catch.h"

using namespace muster;

TEST_CASE("a table has as many stripes as its size asks for, and all processes the same", "[embedding]") {
  const auto count = [](int64_t rows, int64_t dim) { return RowStripes(rows, dim).count(); };
  CHECK(count(1, 1) == 1);
  CHECK(count(16'383, 64) == 1);  // of less than 4 MB
  CHECK(count(16'384, 64) == 2);
  CHECK(count(32'767, 64) == 2);
  CHECK(count(32'768, 64) == 4);
  CHECK(count(131'072, 64) == 16);
  CHECK(count(int64_t{1} << 48, 1) == 16);
  CHECK(count(1, int64_t{1} << 19) == 1);
  CHECK(count(20, int64_t{1} << 19) == 16);
  CHECK(count(20, int64_t{1} << 24) == 16);
  // What the protocol's document says; who computed others would send rows that servers refuse.
  const RowStripes most(int64_t{1} << 48, 1);
  std::vector<uint32_t> first;
  for (int64_t row = 0; row < 8; ++row) first.push_back(most.of(row));
  CHECK(first == std::vector<uint32_t>{0, 12, 0, 5, 8, 7, 1, 11});
}

TEST_CASE("rows of any stride are spread over stripes evenly", "[embedding]") {
  for (const int64_t stride : {1, 2, 3, 16, 1000, 4096}) {
    const RowStripes stripes(1'000'000, 64);
    std::vector<int> counts(stripes.count());
    for (int64_t i = 0; i < 16'000; ++i) ++counts[stripes.of(i * stride)];
    CAPTURE(stride);
    CHECK(*std::min_element(counts.begin(), counts.end()) > 850);
    CHECK(*std::max_element(counts.begin(), counts.end()) < 1150);
  }
}
