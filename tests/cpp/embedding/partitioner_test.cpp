#include "muster/partitioner.h"

#include <limits>
#include <numeric>

#include "cpp/catch.h"
#include "embedding/row_sharding.h"
#include "muster/error.h"

using namespace muster;

using Sizes = std::vector<int64_t>;

namespace {

// `rows` rows of so many bytes.
template <class Partitioner>
Sizes divided(const Partitioner& partitioner, int64_t rows, int64_t row_bytes) {
  return partitioner({rows, row_bytes}, at::kByte);
}

}  // namespace

TEST_CASE("the first shards take the extra row", "[server]") {
  CHECK(divided(FixedShards(4), 10, 4) == Sizes{3, 3, 2, 2});
  CHECK(divided(FixedShards(1), 10, 4) == Sizes{10});
  CHECK(divided(FixedShards(4), 3, 4) == Sizes{1, 1, 1});
  CHECK(divided(FixedShards(4), 0, 4) == Sizes{0});
  CHECK(FixedShards(2)({5, 2, 3}, at::kFloat) == Sizes{3, 2});
  CHECK(MaxSize(24)({5, 2, 3}, at::kFloat) == Sizes(5, 1));
  CHECK(MaxSize(24)({5, 2, 3}, at::kHalf) == Sizes{2, 2, 1});
}

TEST_CASE("partitioners count as those of TensorFlow", "[server]") {
  // The examples of its documentation: 6 rows of one float.
  CHECK(divided(MinSize(4, 2), 6, 4) == Sizes{3, 3});
  CHECK(divided(MinSize(4, 10), 6, 4) == Sizes{1, 1, 1, 1, 1, 1});
  CHECK(divided(MaxSize(4), 6, 4) == Sizes{1, 1, 1, 1, 1, 1});
  CHECK(divided(MaxSize(4, 2), 6, 4) == Sizes{3, 3});
  CHECK(divided(MaxSize(1024), 6, 4) == Sizes{6});
  CHECK(divided(MinSize(), 1 << 20, 4) == Sizes{1 << 20});
  CHECK(divided(MinSize(256 << 10, 16), 1024, 1024 * 4) == Sizes(16, 64));
  CHECK(divided(MinSize(10, 10), 7, 4) == Sizes{3, 2, 2});  // 28 bytes are three times 10, rounded up
  CHECK(divided(MaxSize(10), 7, 4) == Sizes{2, 2, 2, 1});
  CHECK(divided(MaxSize(3), 7, 4) == Sizes(7, 1));
  CHECK(divided(MaxSize(10), 7, 0) == Sizes{7});
  CHECK(divided(MinSize(1, 3), std::numeric_limits<int64_t>::max(), 1000).size() == 3);
}

TEST_CASE("what cannot be divided is refused", "[server]") {
  CHECK_THROWS_AS(FixedShards(0), InvalidArgument);
  CHECK_THROWS_AS(MinSize(0), InvalidArgument);
  CHECK_THROWS_AS(MinSize(1, 0), InvalidArgument);
  CHECK_THROWS_AS(MaxSize(0), InvalidArgument);
  CHECK_THROWS_AS(MaxSize(1, 0), InvalidArgument);
  CHECK_THROWS_AS(divided(FixedShards(2), -1, 4), InvalidArgument);
  CHECK_THROWS_AS(divided(MinSize(2), 1, -4), InvalidArgument);
  CHECK_THROWS_AS(FixedShards(2)({}, at::kFloat), InvalidArgument);
  CHECK_THROWS_AS(MaxSize(2)({1, int64_t{1} << 40, int64_t{1} << 40}, at::kFloat), InvalidArgument);
  CHECK_THROWS_AS(RowSharding(RowPlacement::modulo, 10, 0), InvalidArgument);
  CHECK_THROWS_AS(RowSharding(RowPlacement::range, -1, 2), InvalidArgument);
}

TEST_CASE("every row has one server, and ranges are the partitioners'", "[server]") {
  const auto placement = GENERATE(RowPlacement::modulo, RowPlacement::range);
  for (const int64_t rows : {0, 1, 3, 10, 12, 101}) {
    for (const int servers : {1, 2, 4, 7}) {
      const RowSharding sharding(placement, rows, servers);
      Sizes counts(static_cast<size_t>(servers));
      int last = 0;
      for (int64_t row = 0; row < rows; ++row) {
        const int server = sharding.server_of(row);
        REQUIRE((server >= 0 && server < servers));
        ++counts[static_cast<size_t>(server)];
        if (placement == RowPlacement::range) {
          CHECK(server >= last);
        } else {
          CHECK(server == row % servers);
        }
        last = server;
      }
      for (int s = 0; s < servers; ++s) CHECK(counts[static_cast<size_t>(s)] == sharding.num_rows_of(s));
      if (rows >= servers) CHECK(counts == divided(FixedShards(servers), rows, 4));
    }
  }
}
