// Runs the tests of this program once for each fault that can be planted in the kernels, and expects them to fail.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "cpp/catch.h"
#include "support/cuda_mutations.h"

namespace {

/// Of the processor, for the tests with one fault, which take a small part of it. Others may use it, too.
constexpr unsigned kSeconds = 240;

/// The exit status of this program's tests with a fault, or without for null; -1 when they crash or take too long.
int run_tests(const char* mutation) {
  fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    if (mutation != nullptr) setenv("MUSTER_MUTATION", mutation, 1);
    if (freopen("/dev/null", "w", stdout) == nullptr || freopen("/dev/null", "w", stderr) == nullptr) _exit(0);
    const rlimit limit{kSeconds, kSeconds};
    setrlimit(RLIMIT_CPU, &limit);
    alarm(5 * kSeconds);
    execl("/proc/self/exe", "muster_cuda_mutants", "[cuda]~[long]", "--abort", static_cast<char*>(nullptr));
    _exit(0);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

TEST_CASE("every planted fault turns a test red", "[mutants]") {
  CHECK(run_tests(nullptr) == 0);
#define MUSTER_CHECK_MUTANT(name) \
  {                               \
    INFO(#name);                  \
    CHECK(run_tests(#name) > 0);  \
  }
#ifdef __SANITIZE_THREAD__
  MUSTER_RACES(MUSTER_CHECK_MUTANT)
#else
  MUSTER_MUTATIONS(MUSTER_CHECK_MUTANT)
#endif
#undef MUSTER_CHECK_MUTANT
}

}  // namespace
