// Skipped windows in a row, as the host learns of them.
#include "window/skip_watch.h"

#include <ATen/ops/zeros.h>

#include <limits>

#include "cpp/catch.h"
#include "cpp/emulated_device/device_job.h"
#include "muster/error.h"
#include "support/operators.h"

using namespace muster;
using namespace muster::testing;

namespace {

enum class End { stepped, skipped, dropped };

DeviceReport report_of(End end) {
  DeviceReport report{at::zeros({static_cast<int64_t>(kernels::report_bytes(1))}, at::kByte)};
  report.flags()[0] = end == End::skipped ? 1 : 0;
  report.flags()[1] = end == End::dropped ? 1 : 0;
  return report;
}

}  // namespace

TEST_CASE("windows skipped in a row are counted, and the last of them is known", "[window]") {
  SkipWatch watch(c10::kCPU);
  watch.note(report_of(End::skipped), 1, "parameter 'a'");
  CHECK(watch.in_a_row() == 0);  // nobody looked
  watch.look();
  CHECK(watch.in_a_row() == 1);
  CHECK(watch.step() == 1);
  watch.note(report_of(End::dropped), 2, "parameter 'b'");
  watch.note(report_of(End::skipped), 3, {});
  watch.look();
  CHECK(watch.in_a_row() == 2);
  CHECK(watch.step() == 3);
  CHECK(watch.non_finite_at() == "parameter 'a'");
  watch.note(report_of(End::stepped), 4, {});
  watch.look();
  CHECK(watch.in_a_row() == 0);
}

TEST_CASE("a window allocates nothing while the device sleeps", "[window]") {
  SkipWatch watch(c10::kCPU);
  const auto skipped = report_of(End::skipped), stepped = report_of(End::stepped);
  const OperatorCount count;
  for (int64_t step = 0; step < int64_t{SkipWatch::kWindows}; ++step)
    watch.note(step % 3 == 0 ? stepped : skipped, step, {});
  CHECK(count.by_name().contains("aten::copy_"));
  CHECK_FALSE(count.by_name().contains("aten::empty"));
  // More are as right, if not as quick.
  for (int i = 0; i < 100; ++i) watch.note(skipped, 1000 + i, {});
  watch.look();
  CHECK(watch.in_a_row() == 100);
  watch.note(stepped, 2000, {});
  watch.look();
  CHECK(watch.in_a_row() == 0);
}

TEST_CASE("windows skipped in a row are an error that names where", "[device]") {
  Job job;
  job.options.max_skipped = 4;
  job.rows.assign(10, 8);
  job.step = [](Net& net, const at::Tensor& x, int step) -> Loss {
    return plain_loss(net, x, step).value * std::numeric_limits<double>::infinity();
  };
  try {
    run(job, true);
    FAIL("nothing was thrown");
  } catch (const NonFinite& error) {
    CHECK_THAT(error.what(), ContainsSubstring("4 windows in a row"));
    CHECK_THAT(error.what(), ContainsSubstring("of replica 0"));
  }
  play_streams_on_cpu(true);
}
