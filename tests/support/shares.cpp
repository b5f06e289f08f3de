#include "support/shares.h"

#include <ATen/Parallel.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <thread>
#include <vector>

#include "muster/error.h"

namespace muster::testing {

namespace {

void write_all(int to, const std::string& text) {
  for (size_t begin = 0; begin < text.size();) {
    const auto written = ::write(to, text.data() + begin, text.size() - begin);
    if (written <= 0) ::_exit(2);
    begin += static_cast<size_t>(written);
  }
}

// Threads that take turns are fastest on one processor.
void stay_on(unsigned processor) {
  cpu_set_t own;
  CPU_ZERO(&own);
  CPU_SET(processor, &own);
  ::sched_setaffinity(0, sizeof(own), &own);  // or anywhere
}

}  // namespace

std::string run_in_shares(uint64_t first, uint64_t end, const std::function<std::string(uint64_t)>& run, bool stops) {
  const unsigned shares = std::clamp(std::thread::hardware_concurrency(), 1U, 16U);
  struct Share {
    pid_t process;
    int result;
  };
  std::vector<Share> running;
  for (unsigned share = 0; share < shares; ++share) {
    int ends[2];
    if (::pipe(ends) != 0) throw Error("no pipe can be made");
    const pid_t child = ::fork();
    if (child < 0) throw Error("no process can be made");
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      at::set_num_threads(1);  // the pool's threads did not follow the fork
      stay_on(share);
      for (uint64_t i = first + share; i < end; i += shares) {
        const auto text = run(i);
        write_all(ends[1], text);
        if (stops && !text.empty()) break;
      }
      ::_exit(0);
    }
    ::close(ends[1]);
    running.push_back({child, ends[0]});
  }
  std::string all;
  for (const auto& share : running) {
    char buffer[4096];
    for (ssize_t got = 0; (got = ::read(share.result, buffer, sizeof(buffer))) > 0;) {
      all.append(buffer, static_cast<size_t>(got));
    }
    ::close(share.result);
    int status = 0;
    ::waitpid(share.process, &status, 0);
    if (status != 0) all += "a process ended with status " + std::to_string(status) + "\n";
  }
  return all;
}

}  // namespace muster::testing
