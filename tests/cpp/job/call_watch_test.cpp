// Workers that make different calls.
#include "job/call_watch.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cpp/catch.h"
#include "support/eventually.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::testing;

namespace {

constexpr comm::Milliseconds kPause{20};

// Watches of as many workers, and what each says of their calls.
class Workers {
 public:
  explicit Workers(int number) : told_(static_cast<size_t>(number)) {
    const net::StorePtr store = c10::make_intrusive<c10d::HashStore>();
    for (int rank = 0; rank < number; ++rank) {
      watches_.push_back(std::make_unique<CallWatch>(store, rank, number, kPause));
      const auto fail = [this, rank](const std::string& text) {
        const std::lock_guard lock(mutex_);
        told_[static_cast<size_t>(rank)] = text;
      };
      watches_.back()->begin([this, rank] { return rank != outside; }, fail);
    }
  }
  ~Workers() {
    for (auto& watch : watches_) watch->end();
  }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  std::atomic<int> outside{-1};  // of all calls

  CallWatch& operator[](int rank) { return *watches_[static_cast<size_t>(rank)]; }
  void step(int rank) {
    (*this)[rank].note_call("step()");
    (*this)[rank].note_window();
  }
  void reduce(int rank) {
    (*this)[rank].note_call("reduce()");
    (*this)[rank].note_operation();
  }
  std::string told(int rank) const {
    const std::lock_guard lock(mutex_);
    return told_[static_cast<size_t>(rank)];
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> told_;
  std::vector<std::unique_ptr<CallWatch>> watches_;
};

}  // namespace

TEST_CASE("workers that wait for one another in different calls are told so", "[job]") {
  Workers workers(3);
  for (const int rank : {0, 1, 2}) workers.step(rank);
  workers.step(0);
  workers.reduce(1);
  workers.step(2);
  CHECK(eventually([&] { return !workers.told(0).empty() && !workers.told(1).empty() && !workers.told(2).empty(); }));
  const std::string expected =
      "ranks disagree: rank 0 is in step() with 2 windows closed or closing, rank 1 in reduce() with 1. Each waits for "
      "the other; call the same on all ranks, in the same order";
  for (const int rank : {0, 1, 2}) CHECK(workers.told(rank) == expected);
}

TEST_CASE("workers of which some are behind in the same calls are not", "[job]") {
  Workers workers(3);
  for (const int rank : {0, 1, 2}) workers.step(rank);
  workers.reduce(1);
  workers.reduce(2);
  workers.step(2);
  std::this_thread::sleep_for(10 * kPause);
  workers.reduce(0);
  workers.step(0);
  std::this_thread::sleep_for(10 * kPause);
  for (const int rank : {0, 1, 2}) CHECK(workers.told(rank).empty());
}

TEST_CASE("workers of which one is in no call, or gave up, are not", "[job]") {
  Workers workers(2);
  workers.outside = 0;
  workers.step(0);
  workers.reduce(1);
  std::this_thread::sleep_for(6 * kPause);
  CHECK(workers.told(0) + workers.told(1) == "");
  SECTION("until it is in one") {
    workers.outside = -1;
    CHECK(eventually([&] { return workers.told(0) != "" && workers.told(1) != ""; }));
  }
  SECTION("for good") {
    workers[0].give_up();
    workers.outside = -1;
    std::this_thread::sleep_for(6 * kPause);
    CHECK(workers.told(0) + workers.told(1) == "");
  }
  SECTION("nor while it runs a function that waits for nobody") {
    workers[0].note_call("run()");
    workers.outside = -1;
    std::this_thread::sleep_for(6 * kPause);
    CHECK(workers.told(0) + workers.told(1) == "");
  }
}

TEST_CASE("a store that fails, or has no copy, ends a watch and nothing else", "[job]") {
  struct Uncopied : c10d::HashStore {
    c10::intrusive_ptr<Store> clone() override { throw std::runtime_error("no copy"); }
  };
  CallWatch watch(c10::make_intrusive<Uncopied>(), 0, 2, kPause);
  watch.begin([] { return true; }, [](const std::string&) {});
  watch.note_call("step()");
  std::this_thread::sleep_for(4 * kPause);
  watch.end();
}

TEST_CASE("calls of several threads are in no order, which tells nothing", "[job]") {
  Workers workers(2);
  for (const int rank : {0, 1}) workers.step(rank);
  for (const int rank : {0, 1}) std::thread([&] { workers[rank].note_call("reduce()"); }).join();
  workers[0].note_operation();
  workers.step(1);
  std::this_thread::sleep_for(10 * kPause);
  for (const int rank : {0, 1}) CHECK(workers.told(rank).empty());
}

TEST_CASE("a watch that has ended tells nothing", "[job]") {
  Workers workers(2);
  workers[0].end();
  workers.reduce(0);
  workers.step(1);
  std::this_thread::sleep_for(10 * kPause);
  CHECK(workers.told(0).empty());
}

TEST_CASE("places of one sequence of calls do not contradict one another", "[job]") {
  const std::vector<CallPlace> sequence{{0, 0, ""}, {0, 1, ""}, {1, 1, ""}, {1, 2, ""}, {2, 2, ""}};
  for (const auto& one : sequence) {
    for (const auto& other : sequence) CHECK_FALSE(one.contradicts(other));
  }
  CHECK(CallPlace{2, 1, ""}.contradicts({1, 2, ""}));
  CHECK(CallPlace{1, 2, ""}.contradicts({2, 1, ""}));
  const auto read = CallPlace::of(CallPlace{7, 12, "a pass over a loader"}.text());
  CHECK(read.windows == 7);
  CHECK(read.operations == 12);
  CHECK(read.call == "a pass over a loader");
}
