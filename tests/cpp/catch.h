// Catch2, version 2 (Debian 12, Ubuntu 22.04) or 3.
#pragma once

#if __has_include(<c10/util/Logging.h>)
#include <c10/util/Logging.h>
#endif

#include <string>

// torch's logging has a CHECK of its own, which ends the program: whatever is included later, Catch2's is meant.
#undef CHECK

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
using Catch::Matchers::ContainsSubstring;
#else
#include <catch2/catch.hpp>
inline auto ContainsSubstring(const std::string& text) { return Catch::Matchers::Contains(text); }
#endif
