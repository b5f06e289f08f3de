#include "core/intra_op_threads.h"

#include <ATen/Parallel.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "cpp/catch.h"
#include "support/run_ranks.h"

using namespace muster;

namespace {

// All threads call at once; how many were refused.
int set_in_threads_at_once() {
  constexpr int kThreads = 4;
  std::atomic<int> ready = 0;
  std::atomic<int> refused = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      ++ready;
      while (ready < kThreads) std::this_thread::yield();
      try {
        set_intra_op_threads_here(1, 1);
      } catch (...) {
        ++refused;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return refused;
}

}  // namespace

TEST_CASE("threads of a forked child may set their intra-op threads at once", "[core]") {
  set_intra_op_threads(at::get_num_threads());  // torch's pool is made
  for (int i = 0; i < 100; ++i) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(set_in_threads_at_once());
    int status = -1;
    REQUIRE(::waitpid(child, &status, 0) == child);
    REQUIRE(WIFEXITED(status));
    REQUIRE(WEXITSTATUS(status) == 0);
  }
}

TEST_CASE("a thread gets back the intra-op threads that it had", "[core]") {
  std::thread([] {
    set_intra_op_threads(2);
    {
      const IntraOpThreads threads(3);
      MUSTER_CHECK(at::get_num_threads() == 3);
    }
    MUSTER_CHECK(at::get_num_threads() == 2);
  }).join();
}
