// Parameters and buffers of prepared modules: how they are named, shared and watched.
#include "window/parameter_registry.h"

#include <ATen/ops/empty.h>

#include "cpp/catch.h"
#include "cpp/window/fixtures.h"
#include "muster/error.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::testing;

namespace {

// A module of one parameter as each of two replicas on one device built it.
struct Pair {
  Pair() : registry({c10::Device(c10::kCPU), c10::Device(c10::kCPU)}), first(leaf(1)), second(leaf(2)) {
    registry.add({{{{"w", first}}, {{"w", second}}}, {{{"seen", leaf(0)}}, {{"seen", leaf(3)}}}}, *comm::make_single());
  }
  ParameterRegistry registry;
  at::Tensor first;
  at::Tensor second;
};

}  // namespace

TEST_CASE("every worker gets the chief's values, or hears how models differ", "[window]") {
  const auto groups = comm::make_local(2, Seconds(60));
  CHECK(run_threads(2, [&](int rank) {
          auto& group = *groups[static_cast<size_t>(rank)];
          ParameterRegistry registry({c10::Device(c10::kCPU)});
          const auto w = leaf(rank + 5);
          const auto seen = at::full({2}, rank + 7);
          registry.add({{{{"w", w}}}, {{{"seen", seen}}}}, group);
          MUSTER_CHECK(is_all(w, 5) && is_all(seen, 7));
          const auto message =
              message_of<LayoutMismatch>([&] { registry.add({{{{rank == 0 ? "v" : "u", leaf(0)}}}, {{}}}, group); });
          MUSTER_CHECK(contains(message, "rank 0 has parameter 'v' [4] Float, rank 1 has parameter 'u' [4] Float"));
        }).empty());
}

TEST_CASE("replicas on one device share a parameter's memory and its version counter", "[window]") {
  Pair job;
  CHECK(job.second.const_data_ptr() == job.first.const_data_ptr());
  CHECK(is_all(job.second, 1));
  const auto version = job.second._version();
  job.first.detach().fill_(4);
  CHECK(job.second._version() == version + 1);
  CHECK(is_all(job.registry.buffers(1).front(), 0));
  SECTION("also after replica 0's was replaced and frozen") {
    job.first.set_data(at::full({4}, 6.0));
    job.first.set_requires_grad(false);
    job.registry.follow_moves(/*copies_all=*/false);
    CHECK(job.second.const_data_ptr() == job.first.const_data_ptr());
    CHECK(is_all(job.second, 6));
    CHECK_FALSE(job.second.requires_grad());
  }
}

TEST_CASE("a parameter that is written counts as written until workers agreed on it", "[window]") {
  Pair job;
  CHECK_FALSE(job.registry.was_written(0));
  job.first.detach().fill_(4);
  CHECK(job.registry.was_written(0));
  job.registry.note_agreed(0);
  CHECK_FALSE(job.registry.was_written(0));
  job.first.set_data(at::full({4}, 4.0));
  CHECK(job.registry.was_written(0));
  job.registry.note_agreed(0);
  job.registry.doubt(0);
  CHECK(job.registry.was_written(0));
}

TEST_CASE("modules are numbered, and those after the first name their parameters by number", "[window]") {
  OneReplica job({{"w", leaf(1)}, {"1.v", leaf(1)}});
  const auto w = job.registry.parameter(0, 0);
  CHECK(job.registry.add({{{{"shared", w}, {"x", leaf(2)}}}, {{{"seen", leaf(3)}}}}, *comm::make_single()) == 1);
  CHECK(job.registry.num_parameters() == 3);
  CHECK(job.registry.name(2) == "1.x");
  CHECK(job.registry.find(w) == 0);
  CHECK(job.registry.find(leaf(0)) == -1);
  CHECK(job.registry.parameters_of(1) == std::vector<int>{2});
  job.registry.add({{{{"v", leaf(1)}}}, {{}}}, *comm::make_single());
  CHECK(job.registry.name(3) == "2.v");
  CHECK_THROWS_AS(job.registry.set_buffers(1, 0, {}), InvalidArgument);
  job.registry.set_buffers(1, 0, {leaf(8)});
  CHECK(is_all(job.registry.buffers(0).front(), 8));
}

TEST_CASE("a buffer that was put on another device than its replica's is named", "[window]") {
  Pair job;
  const auto elsewhere = at::empty({4}, at::TensorOptions(at::kMeta));
  CHECK_THROWS_WITH(job.registry.set_buffers(0, 1, {elsewhere}),
                    ContainsSubstring("buffer 'seen' is on meta since prepare(), and its replica on cpu"));
  CHECK_NOTHROW(job.registry.set_buffers(0, 1, {leaf(5)}));
}
