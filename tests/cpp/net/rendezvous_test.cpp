#include "net/rendezvous.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

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

TEST_CASE("jobs of some of the workers, or with other ranks, meet at one address by their names", "[net]") {
  const std::string address = free_address();
  const std::vector<std::pair<std::string, std::vector<int>>> jobs = {
      {"all", {0, 1, 2}}, {"two", {0, -1, 1}}, {"others", {0, 2, 1}}, {"two", {0, -1, 1}}, {"all", {0, 1, 2}}};
  CHECK(run_processes(3, [&](int process) {
          const auto meet = [&](const std::string& name, const std::vector<int>& ranks) {
            const int rank = ranks[static_cast<size_t>(process)];
            if (rank < 0) return;
            const int size = name == "two" ? 2 : 3;
            auto cluster = make_cluster(rank, size, address);
            cluster.meeting = name;
            const StorePtr store = open_store(cluster, Seconds(30));
            MUSTER_CHECK(store->add("came", 1) <= size);  // a store of its own
            set_text(*store, "from/" + std::to_string(rank), name);
            const auto texts = get_texts(*store, {"from/0", "from/1"}, {"a", "b"}, Seconds(30));
            MUSTER_CHECK(texts == std::vector<std::string>(2, name));
          };
          for (const auto& [name, ranks] : jobs) meet(name, ranks);
          // The process of rank 0 hosts them all.
          const StorePtr store = open_store(make_cluster(process, 3, address), Seconds(30));
          set_text(*store, "done/" + std::to_string(process), "");
          if (process == 0) get_texts(*store, {"done/1", "done/2"}, {"b", "c"}, Seconds(30));
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

TEST_CASE("a worker has arrived before others can know of a conflict with it, and so they wait for it", "[net]") {
  struct Watched final : c10d::HashStore {
    std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                    const std::vector<uint8_t>& desired) override {
      arrived = std::max(arrived, add("arrived", 0));
      return HashStore::compareSet(key, expected, desired);
    }
    int64_t arrived = 0;
  };
  auto store = c10::make_intrusive<Watched>();
  store->HashStore::compareSet("world", {}, {'3'});
  message_of<InvalidArgument>([&] { join(*store, 1, 2, Seconds(30)); });
  CHECK(store->arrived == 1);
}

TEST_CASE("the store is shared with another one that this process hosts at the address, whichever came first",
          "[net]") {
  const bool ours_first = GENERATE(true, false);
  const std::string address = free_address();
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
  options.isServer = true;
  options.waitWorkers = false;
  options.multiTenant = true;  // as torch.distributed's env:// is
  const auto open_theirs = [&] { return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options); };
  auto theirs = ours_first ? nullptr : open_theirs();
  CHECK(run_threads(2, [&](int rank) {
          const auto ours = open_store(make_cluster(rank, 2, address), Seconds(30));
          if (rank == 0) set_text(*ours, "key", "b");
        }) == "");
  if (ours_first) theirs = open_theirs();
  theirs->set("key", std::vector<uint8_t>{'a'});
  CHECK(theirs->get("key") == std::vector<uint8_t>{'a'});
}

TEST_CASE("a port that another process listens at is refused, whatever this one hosts besides", "[net]") {
  const std::string address = free_address();
  int pipe[2];
  REQUIRE(::pipe(pipe) == 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const bool is_fine =
        ::bind(listener, reinterpret_cast<sockaddr*>(&at), sizeof(at)) == 0 && ::listen(listener, 1) == 0;
    const char told = is_fine ? 'y' : 'n';
    if (::write(pipe[1], &told, 1) == 1) ::pause();
    ::_exit(1);
  }
  char told = 0;
  CHECK(::read(pipe[0], &told, 1) == 1);
  CHECK(told == 'y');
  CHECK_THROWS_WITH(open_store(make_cluster(0, 2, address), Seconds(1)), ContainsSubstring("Address already in use"));
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
  ::close(pipe[0]);
  ::close(pipe[1]);
}

TEST_CASE("what listens at the address and says nothing is given up at the deadline", "[net]") {
  const std::string address = free_address();
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  REQUIRE(::bind(listener, reinterpret_cast<sockaddr*>(&at), sizeof(at)) == 0);
  REQUIRE(::listen(listener, 4) == 0);
  const auto begun = std::chrono::steady_clock::now();
  const auto text =
      message_of<Timeout>([&] { open_store(make_cluster(1, 2, address), std::chrono::milliseconds(300)); });
  CHECK(contains(text, "does not answer as a rendezvous"));
  CHECK(std::chrono::steady_clock::now() - begun < Seconds(20));
  ::close(listener);
}

TEST_CASE("a process hosts stores at one port of several interfaces", "[net]") {
  const std::string address = free_address();
  for (const std::string host : {"127.0.0.1", "127.0.0.2"}) {
    const auto at = host + address.substr(address.rfind(':'));
    CHECK(run_threads(2, [&](int rank) { open_store(make_cluster(rank, 2, at), Seconds(30)); }) == "");
  }
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

TEST_CASE("who waits at a loopback says that other hosts do not come there", "[net]") {
  const auto address = free_address();
  const auto late =
      message_of<Timeout>([&] { open_store(make_cluster(0, 2, address), std::chrono::milliseconds(50)); });
  CHECK(contains(late, "missing: worker 1"));
  CHECK(contains(late, address + " is 127.0.0.1 here, this host's loopback; set MASTER_ADDR"));
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
