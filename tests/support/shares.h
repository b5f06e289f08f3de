// Work that is divided over processes, a processor each.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace muster::testing {

/// Calls `run(i)` for i from `first` to before `end` in as many forked processes as there are processors, and returns
/// what it gives, one after the other; a process that does not end well is named there.
/// `stops`: a process ends with the first text that is not empty.
std::string run_in_shares(uint64_t first, uint64_t end, const std::function<std::string(uint64_t)>& run, bool stops);

}  // namespace muster::testing
