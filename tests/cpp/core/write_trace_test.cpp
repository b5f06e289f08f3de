#include "core/write_trace.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "cpp/catch.h"

using namespace muster;

TEST_CASE("a trace tells what was written, also past the version counter", "[core]") {
  for (const int64_t numel : {1, 3, 16, 1000}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
      auto tensor = at::arange(numel, at::TensorOptions(dtype));
      const auto before = WriteTrace::of(tensor);
      CHECK(WriteTrace::of(tensor) == before);
      tensor.variable_data().neg_();
      CHECK(static_cast<int64_t>(tensor._version()) == before.version);
      CHECK(WriteTrace::of(tensor) != before);
      tensor.variable_data().neg_();
      CHECK(WriteTrace::of(tensor) == before);
      tensor.add_(0);
      CHECK(WriteTrace::of(tensor) != before);
    }
  }
}

TEST_CASE("a trace tells memory that was replaced, and reads no gaps", "[core]") {
  auto tensor = at::zeros({4, 4});
  const auto before = WriteTrace::of(tensor);
  tensor.set_data(tensor.clone());
  CHECK(WriteTrace::of(tensor) != before);
  CHECK(WriteTrace::of(at::empty({0})) == WriteTrace::of(at::empty({0})));
  const auto row = at::zeros({1, 3}).expand({1'000'000'000, 3});  // one row of memory
  CHECK(WriteTrace::of(row) == WriteTrace::of(row));
}
