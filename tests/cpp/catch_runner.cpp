// Catch2's own part, which all programs of tests share: of version 2 it takes half a minute to compile.
#if !__has_include(<catch2/catch_all.hpp>)
#define CATCH_CONFIG_RUNNER
#endif
#include "cpp/catch_runner.h"

#include "cpp/catch.h"

int run_tests(int argc, char** argv) { return Catch::Session().run(argc, argv); }
