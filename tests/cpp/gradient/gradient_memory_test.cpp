#include "gradient/gradient_memory.h"

#include <ATen/ops/empty.h>

#include <memory>
#include <set>
#include <vector>

#include "comm/peer_memory.h"
#include "cpp/catch.h"
#include "support/run_ranks.h"

namespace muster {

using comm::Communicator;
using comm::CommunicatorPtr;
using namespace testing;

TEST_CASE("gradients come from the memory of a scope, as far as it goes", "[gradient]") {
  CHECK(Host::run(2, [](Communicator& c) {
          constexpr int64_t kBytes = 1 << 20;
          const auto is_reached = [&](const at::Tensor& t) {
            return c.peer_memory()->address_of(t.const_data_ptr(), t.nbytes()).has_value();
          };
          const auto make = [](int64_t bytes) { return at::empty({bytes}, at::kByte); };
          auto memory = std::make_unique<GradientMemory>(CommunicatorPtr(CommunicatorPtr(), &c),
                                                         std::vector<size_t>{kBytes, kBytes});
          MUSTER_CHECK(!is_reached(make(kBytes)));
          at::Tensor outlives;
          {
            const GradientMemory::Scope scope(memory.get());
            std::vector<at::Tensor> taken;
            std::set<const void*> places;
            for (int i = 0; i < 3; ++i) {
              taken.push_back(make(kBytes));
              places.insert(taken.back().const_data_ptr());
              MUSTER_CHECK(is_reached(taken.back()));
            }
            MUSTER_CHECK(!is_reached(make(kBytes)));  // used up
            MUSTER_CHECK(!is_reached(make(kBytes - 4)));
            run_threads(1, [&](int) { taken.clear(); });
            outlives = make(kBytes);
            MUSTER_CHECK(places.count(outlives.const_data_ptr()) == 1);
          }
          MUSTER_CHECK(!is_reached(make(kBytes)));
          memory.reset();
          outlives.fill_(7);
          MUSTER_CHECK(outlives.sum().item<int64_t>() == 7 * kBytes);
          MUSTER_CHECK(is_reached(outlives));
          outlives.resize_({2 * kBytes});
          MUSTER_CHECK(outlives[kBytes - 1].item<int64_t>() == 7);
        }) == "");
}

TEST_CASE("memory that a thread has opened may end before it is closed", "[gradient]") {
  CHECK(Host::run(2, [](Communicator& c) {
          constexpr int64_t kBytes = 1 << 20;
          const auto is_reached = [&] {
            const auto t = at::empty({kBytes}, at::kByte);
            return c.peer_memory()->address_of(t.const_data_ptr(), t.nbytes()).has_value();
          };
          auto memory =
              std::make_unique<GradientMemory>(CommunicatorPtr(CommunicatorPtr(), &c), std::vector<size_t>{kBytes});
          GradientMemory::close();
          memory->open();
          MUSTER_CHECK(is_reached());
          MUSTER_CHECK(run_threads(1, [&](int) { MUSTER_CHECK(!is_reached()); }) == "");
          GradientMemory::close();
          MUSTER_CHECK(!is_reached());
          const auto opens = [&](int) {
            memory->open();
            MUSTER_CHECK(is_reached());
          };
          MUSTER_CHECK(run_threads(1, opens) == "");
          MUSTER_CHECK(!is_reached());
          memory->open();
          memory->end();
          MUSTER_CHECK(!is_reached());
          memory.reset();
          MUSTER_CHECK(!is_reached());
          GradientMemory::close();
        }) == "");
}

}  // namespace muster
