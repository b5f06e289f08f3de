#include <cstdlib>

#include "cpp/catch_runner.h"

int main(int argc, char** argv) {
  // Memory that a process keeps is in the page tables of each one forked from it, and tests fork hundreds.
  ::setenv("MUSTER_KEEP_FREED_MEMORY", "0", 0);
  return run_tests(argc, argv);
}
