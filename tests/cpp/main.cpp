#if !__has_include(<catch2/catch_all.hpp>)
#define CATCH_CONFIG_RUNNER
#endif
#include <cstdlib>

#include "cpp/catch.h"

int main(int argc, char** argv) {
  // Memory that a process keeps is in the page tables of each one forked from it, and tests fork hundreds.
  ::setenv("MUSTER_KEEP_FREED_MEMORY", "0", 0);
  return Catch::Session().run(argc, argv);
}
