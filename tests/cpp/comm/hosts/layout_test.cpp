#include "comm/hosts/layout.h"

#include "cpp/catch.h"
#include "muster/error.h"

using namespace muster;
using namespace muster::comm;
using Subtrees = std::vector<HostsLayout::Ranks>;

TEST_CASE("parts follow one another, aligned", "[comm][hosts]") {
  for (const int64_t size : {0, 1, 16, 17, 1000, 4096}) {
    for (const int count : {1, 2, 3, 7}) {
      int64_t next = 5;
      for (int i = 0; i < count; ++i) {
        const Stretch part = part_of({5, 5 + size}, i, count);
        CHECK(part.begin == next);
        CHECK((part.size() == 0 || (part.begin - 5) % 16 == 0));
        next = part.end;
      }
      CHECK(next == 5 + size);
    }
  }
}

TEST_CASE("two hosts with two workers each have half the tree and carry half of everything", "[comm][hosts]") {
  const HostsLayout layout({1, 1, 1, 1}, {0, 0, 1, 1});
  CHECK(layout.num_hosts() == 2);
  CHECK(layout.num_stripes() == 2);
  CHECK(layout.subtrees(0) == Subtrees{{0, 1}});
  CHECK(layout.subtrees(1) == Subtrees{{2, 3}});
  CHECK(layout.carrier(1, 0) == 2);
  CHECK(layout.stripe_of(3) == 1);
  CHECK(layout.fellow_carriers(3) == std::vector<int>{1});
}

TEST_CASE("a host whose ranks are no whole part of the tree has several", "[comm][hosts]") {
  const HostsLayout uneven({1, 1, 1, 1}, {0, 0, 0, 1});
  CHECK(uneven.num_stripes() == 1);
  CHECK(uneven.subtrees(0) == Subtrees{{0, 1}, {2}});
  CHECK(uneven.subtrees(1) == Subtrees{{3}});
  CHECK(uneven.stripe_of(1) == -1);
  CHECK(uneven.fellow_carriers(1).empty());
  const HostsLayout alternating({2, 2, 1}, {0, 1, 0});
  CHECK(alternating.subtrees(0) == Subtrees{{0, 1}, {4}});
  CHECK(alternating.subtrees(1) == Subtrees{{2, 3}});
  CHECK(alternating.ranks_of_host(0) == std::vector<int>{0, 1, 4});
  CHECK(alternating.worker_of(4) == 2);
  // The last ranks of a job that are no power of two are a part as well.
  const HostsLayout last({3, 3}, {0, 1});
  CHECK(last.subtrees(0) == Subtrees{{0, 1}, {2}});
  CHECK(last.subtrees(1) == Subtrees{{3}, {4, 5}});
}

TEST_CASE("a host without workers is an error", "[comm][hosts]") {
  CHECK_THROWS_AS(HostsLayout({1, 1}, {0, 2}), InvalidArgument);
}
