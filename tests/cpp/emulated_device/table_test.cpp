// Tables in a device's memory.
#include "device/table.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "cpp/catch.h"
#include "device/segments.h"
#include "muster/error.h"
#include "support/cuda_emulation.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::testing;

namespace {

// While it lives, what is launched is captured into a graph.
struct Capture {
  Capture() { kernels::cuda::emulation::options.is_captured = true; }
  ~Capture() { kernels::cuda::emulation::options.is_captured = false; }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
};

kernels::MeanSegment mean_of(std::vector<float>& values) {
  kernels::MeanSegment segment{};
  segment.values = values.data();
  segment.n = values.size();
  segment.dtype = kernels::DType::f32;
  return segment;
}

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

TEST_CASE("what a graph was captured with stays in its memory", "[device]") {
  const std::vector<int64_t> first{1, 2, 3};
  DeviceTable<int64_t> table;
  table.follow(first, c10::kCPU);
  const int64_t* of_graph = nullptr;
  {
    const Capture capture;
    of_graph = table.follow(first, c10::kCPU);
  }
  for (int64_t n = 4; n < 300; ++n) {
    const std::vector<int64_t> later(static_cast<size_t>(n), n);
    const auto* const found = table.follow(later, c10::kCPU);
    REQUIRE(std::equal(later.begin(), later.end(), found));
    REQUIRE(std::equal(first.begin(), first.end(), of_graph));
  }
}

TEST_CASE("a graph keeps the memory that it writes when more is needed", "[device]") {
  GraphMemory memory;
  memory.reserve(100, c10::kCPU);
  {
    const Capture capture;
    memory.note_launch(c10::kCPU);
  }
  auto* const of_graph = static_cast<std::byte*>(memory.data());
  memory.reserve(100, c10::kCPU);
  CHECK(memory.data() == of_graph);  // for whoever launches now, too
  std::memset(of_graph, 7, 100);
  memory.reserve(1 << 20, c10::kCPU);
  std::memset(memory.data(), 8, 1 << 20);
  CHECK(std::all_of(of_graph, of_graph + 100, [](std::byte byte) { return byte == std::byte{7}; }));
}

TEST_CASE("a table that a capture refused is complete for the step after it", "[device]") {
  std::vector<float> a(3000), b(5);
  DeviceSegments<kernels::MeanSegment> segments;
  segments.follow({mean_of(a)}, c10::kCPU);
  const std::vector<kernels::MeanSegment> both{mean_of(a), mean_of(b)};
  {
    const Capture capture;
    CHECK(contains(message_of<InvalidArgument>([&] { segments.follow(both, c10::kCPU); }), "before capturing"));
    CHECK(contains(message_of<InvalidArgument>([&] { segments.follow({mean_of(a)}, c10::kCPU); }), "before capturing"));
  }
  segments.follow({mean_of(a)}, c10::kCPU);
  REQUIRE(segments.num_items() == 1);
  REQUIRE(segments.items()[0] == mean_of(a));
  REQUIRE(segments.chunks() != nullptr);
  for (uint32_t c = 0; c < segments.num_chunks(); ++c) CHECK(segments.chunks()[c].item == 0);
}
