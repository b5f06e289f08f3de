#include "net/rendezvous.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "cpp/catch.h"
#include "muster/error.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::net;
using namespace muster::testing;

namespace {

Cluster make_cluster(int rank, int num_workers, const std::string& address) {
  Cluster cluster;
  cluster.rank = rank;
  cluster.num_workers = num_workers;
  cluster.address = address;
  return cluster;
}

}  // namespace

TEST_CASE("workers meet in a store, again and again, each time a fresh one", "[net]") {
  const std::string address = free_address();
  CHECK(run_processes(3, [&](int rank) {
          for (int round = 0; round < 3; ++round) {
            const StorePtr store = open_store(make_cluster(rank, 3, address), Seconds(30));
            MUSTER_CHECK(!store->check({"from/0/again"}));
            set_text(*store, "from/" + std::to_string(rank), std::to_string(rank * 10 + round));
            const auto texts = get_texts(*store, {"from/0", "from/1", "from/2"}, {"a", "b", "c"}, Seconds(30));
            for (int r = 0; r < 3; ++r) MUSTER_CHECK(texts[static_cast<size_t>(r)] == std::to_string(r * 10 + round));
            // Rank 0's process hosts the store.
            set_text(*store, "done/" + std::to_string(rank), "");
            if (rank == 0) get_texts(*store, {"done/1", "done/2"}, {"b", "c"}, Seconds(30));
          }
        }) == "");
}

TEST_CASE("workers that disagree about the size of the job all learn it", "[net]") {
  const std::string address = free_address();
  CHECK(run_processes(2, [&](int rank) {
          const std::string text =
              message_of<InvalidArgument>([&] { open_store(make_cluster(rank, 2 + rank, address), Seconds(30)); });
          MUSTER_CHECK(contains(text, "2 workers") || contains(text, "3 workers"));
        }) == "");
}

TEST_CASE("two workers of one rank are refused", "[net]") {
  c10d::HashStore store;
  CHECK(run_threads(2, [&](int) {
          MUSTER_CHECK(contains(message_of<InvalidArgument>([&] { join(store, 1, 3, Seconds(30)); }),
                                "two workers were started with rank 1"));
        }) == "");
}

TEST_CASE("missing workers are named at the deadline", "[net]") {
  c10d::HashStore store;
  CHECK(contains(message_of<Timeout>([&] { join(store, 0, 3, std::chrono::milliseconds(50)); }), "worker 1, worker 2"));
  CHECK(contains(
      message_of<Timeout>([&] { get_texts(store, {"x"}, {"the x of worker 2"}, std::chrono::milliseconds(50)); }),
      "the x of worker 2"));
}

TEST_CASE("addresses that cannot be listened on or resolved", "[net]") {
  CHECK_THROWS_AS(open_store(make_cluster(0, 2, "192.0.2.1:29999"), Seconds(1)), InvalidArgument);
  CHECK_THROWS_AS(open_store(make_cluster(0, 2, "no-such-host.invalid:29999"), Seconds(1)), InvalidArgument);
  CHECK_THROWS_AS(open_store(make_cluster(1, 2, free_address()), Seconds(1)), CommError);
}

TEST_CASE("a world of one needs no address", "[net]") {
  const StorePtr store = open_store(make_cluster(0, 1, ""), Seconds(1));
  set_text(*store, "a", "b");
  CHECK(get_texts(*store, {"a"}, {"a"}, Seconds(1)) == std::vector<std::string>{"b"});
}
