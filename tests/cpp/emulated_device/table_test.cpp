// Tables in a device's memory.
#include "device/table.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstring>

#include "cpp/catch.h"

using namespace muster;

namespace {

// What the CPU's allocator, which plays the device's and the pinned one, gives the calling thread.
class Memory : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    held += bytes;
    if (bytes > 0) ++allocations;
  }
  bool memoryProfilingEnabled() const override { return true; }

  int64_t held = 0;
  int allocations = 0;
};

}  // namespace

TEST_CASE("tables of many sizes take bounded memory", "[device]") {
  const auto memory = std::make_shared<Memory>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, memory);
  {
    DeviceTable<int64_t> table;
    for (size_t n = 1; n <= 1000; ++n) {
      const size_t count = n % 2 == 0 ? n : 1001 - n;  // up and down
      std::vector<int64_t> elements(count, static_cast<int64_t>(n));
      elements.back() = -1;
      const auto* found = table.follow(elements, c10::kCPU);
      REQUIRE(std::memcmp(found, elements.data(), count * sizeof(int64_t)) == 0);
    }
    CHECK(memory->allocations > 0);
    CHECK(memory->allocations <= 16);
    CHECK(memory->held <= 4 * 8192);
  }
  CHECK(memory->held == 0);
}
