// Signs of life in a store.
#include "job/lost_workers.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cpp/catch.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::testing;

namespace {

constexpr comm::Milliseconds kTimeout{600};

// Does not answer while it is silent, as one whose host is cut off.
class SilentStore final : public c10d::HashStore {
 public:
  explicit SilentStore(const std::atomic<bool>& is_silent) : is_silent_(is_silent) {}
  void set(const std::string& key, const std::vector<uint8_t>& data) override {
    while (is_silent_) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    HashStore::set(key, data);
  }

 private:
  const std::atomic<bool>& is_silent_;
};

// Who is silent at the end of a wait of the timeout's length.
std::optional<PeerLost> wait_as(comm::LostWorkers& worker) {
  worker.begin_wait();
  std::this_thread::sleep_for(kTimeout);
  auto found = worker.find_silent();
  worker.end_wait();
  return found;
}

}  // namespace

TEST_CASE("workers that give no sign of life are named, and those that do are not", "[job]") {
  const net::StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto one = make_lost_workers(store, 1, 4, kTimeout);
  const auto three = make_lost_workers(store, 3, 4, kTimeout);
  net::set_text(*store, "alive/0", "5");
  net::set_text(*store, "alive/2", "8");
  auto found = wait_as(*one);
  REQUIRE(found);
  CHECK(found->rank() == 0);
  CHECK(contains(found->what(), "worker 0 and worker 2 have given no sign of life for"));
  const auto zero = make_lost_workers(store, 0, 4, kTimeout);
  found = wait_as(*three);
  REQUIRE(found);
  CHECK(found->rank() == 2);
  CHECK(contains(found->what(), "worker 2 has given no sign of life for"));
  const auto two = make_lost_workers(store, 2, 4, kTimeout);
  CHECK_FALSE(wait_as(*three));
  CHECK_FALSE(wait_as(*zero));
  CHECK_FALSE(three->find_silent());  // no wait is under way
}

TEST_CASE("nobody is silent before all have given a sign of life", "[job]") {
  const net::StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto zero = make_lost_workers(store, 0, 2, kTimeout);
  CHECK_FALSE(wait_as(*zero));
}

TEST_CASE("a store that does not answer is worker 0's silence to the others", "[job]") {
  std::atomic<bool> is_silent = false;
  {
    const net::StorePtr store = c10::make_intrusive<SilentStore>(is_silent);
    const auto zero = make_lost_workers(store, 0, 2, kTimeout);
    const auto one = make_lost_workers(store, 1, 2, kTimeout);
    CHECK_FALSE(wait_as(*one));
    is_silent = true;
    const auto found = wait_as(*one);
    REQUIRE(found);
    CHECK(found->rank() == 0);
    CHECK(contains(found->what(), "the rendezvous, on the host of worker 0, has not answered for"));
    CHECK_FALSE(wait_as(*zero));
    is_silent = false;
  }
}

TEST_CASE("worker 0 leaves once the others know that the job is over", "[job]") {
  const net::StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto zero = make_lost_workers(store, 0, 3, comm::Milliseconds(8000));
  const auto one = make_lost_workers(store, 1, 3, kTimeout);
  const auto two = make_lost_workers(store, 2, 3, kTimeout);
  const auto begun = std::chrono::steady_clock::now();
  zero->leave();
  CHECK(store->add("over", 0) == 3);
  CHECK(std::chrono::steady_clock::now() - begun < std::chrono::milliseconds(1500));
  zero->leave();
  one->leave();
}
