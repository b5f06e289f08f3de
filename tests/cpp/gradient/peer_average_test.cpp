#include "gradient/peer_average.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "cpp/catch.h"
#include "kernels/kernels.h"
#include "support/run_ranks.h"

namespace muster {
namespace {

using comm::Communicator;
using namespace testing;

constexpr auto kTileElements = static_cast<int64_t>(kernels::kTile);

at::Tensor values_of(int rank, int64_t numel, at::ScalarType dtype) {
  return at::sin(at::arange(numel, at::kDouble) * (rank + 1) + rank).to(dtype);
}

// This rank's, in memory that peers reach.
std::vector<at::Tensor> tensors_of(Communicator& c) {
  std::vector<at::Tensor> made;
  for (const int64_t numel : {int64_t{1}, kTileElements, 5 * kTileElements + 3, 200 * kTileElements}) {
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      made.push_back(c.allocate(numel, dtype));
      made.back().copy_(values_of(c.rank(), numel, dtype));
    }
  }
  return made;
}

}  // namespace

TEMPLATE_TEST_CASE("tensors become their means where they are, with the bits of all_reduce", "[gradient]", Local, Host,
                   HostWithReplicas) {
  const int ranks = GENERATE(2, 3, 4);
  CHECK(TestType::run(ranks, [ranks](Communicator& c) {
          auto average = PeerAverage::over(c);
          MUSTER_CHECK(average);
          for (int times = 0; times < 3; ++times) {
            const auto tensors = tensors_of(c);
            average->average(tensors);
            for (const auto& tensor : tensors) {
              const auto sum = c.allocate(tensor.numel(), tensor.scalar_type());
              sum.copy_(values_of(c.rank(), tensor.numel(), tensor.scalar_type()));
              c.all_reduce(sum, ReduceOp::sum).wait();
              MUSTER_CHECK(sum.div_(ranks).equal(tensor));
            }
          }
        }) == "");
}

TEST_CASE("a rank averages what peers reach, and nothing else", "[gradient]") {
  CHECK(Host::run(2, [](Communicator& c) {
          auto average = PeerAverage::over(c);
          const auto own = at::zeros({kTileElements});
          const auto reached = c.allocate(4 * kTileElements, at::kFloat);
          const auto part = [&](int64_t first, int64_t count) {
            return reached.narrow(0, first * kTileElements, count * kTileElements);
          };
          using May = std::vector<bool>;
          MUSTER_CHECK((average->may_change({own, reached, {}}) == May{false, true, false}));
          MUSTER_CHECK((average->may_change({part(2, 2), part(0, 1), part(1, 1)}) == May{true, true, true}));
          MUSTER_CHECK((average->may_change({part(0, 1), part(0, 1), part(1, 3)}) == May{false, false, true}));
          MUSTER_CHECK((average->may_change({part(3, 1), part(0, 4), part(1, 1)}) == May{false, false, false}));
          MUSTER_CHECK(contains(message_of<InvalidArgument>([&] { average->average({own}); }), "allocate()"));
          average->average({reached});  // the call above has sent nothing
        }) == "");
}

TEST_CASE("tensors that differ over ranks are an error on all of them", "[gradient]") {
  CHECK(Host::run(2, [](Communicator& c) {
          auto average = PeerAverage::over(c);
          const auto tensor = c.allocate((1 + c.rank()) * kTileElements, at::kFloat);
          message_of<LayoutMismatch>([&] { average->average({tensor}); });
        }) == "");
}

TEST_CASE("ranks that do not see one another's memory have no average in it", "[gradient]") {
  CHECK(!PeerAverage::over(*comm::make_single()));
}

}  // namespace muster
