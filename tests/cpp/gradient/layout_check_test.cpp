#include "gradient/layout_check.h"

#include "cpp/catch.h"
#include "support/run_ranks.h"

namespace muster {

using comm::Communicator;
using namespace testing;

TEST_CASE("layouts that agree pass, others name the first parameter that differs", "[gradient]") {
  const auto layout_of = [](const std::vector<std::string>& names, int64_t size) {
    std::vector<ParameterSpec> specs;
    for (const auto& name : names) specs.push_back({name, {size}, {1}, at::kFloat});
    return FlatLayout(specs, {}, 1 << 20, 1 << 20);
  };
  CHECK(Local::run(2, [&](Communicator& c) {
          check_layouts_agree(c, layout_of({"a", "b"}, 3));
          const auto more = message_of<LayoutMismatch>(
              [&] { check_layouts_agree(c, c.rank() == 0 ? layout_of({"a", "b"}, 3) : layout_of({"a", "c"}, 3)); });
          MUSTER_CHECK(contains(more, c.rank() == 0 ? "trains parameter 'b' where replica 1 trains 'c'"
                                                    : "trains parameter 'c' where replica 0 trains 'b'"));
          const auto shape =
              message_of<LayoutMismatch>([&] { check_layouts_agree(c, layout_of({"a"}, 3 + c.rank())); });
          MUSTER_CHECK(contains(shape, "shapes, dtypes or bucket_bytes"));
        }) == "");
}

TEST_CASE("rank 0's order is everybody's, those that did not come last", "[gradient]") {
  CHECK(Local::run(2, [](Communicator& c) {
          GradientOrder order;
          order.note(0);
          order.open_window();  // the window came to nothing
          for (const size_t p : c.rank() == 0 ? std::vector<size_t>{2, 1} : std::vector<size_t>{1, 0, 2}) order.note(p);
          MUSTER_CHECK(!order.is_learned());
          MUSTER_CHECK(order.take().empty());
          order.learn(c, 5);
          MUSTER_CHECK(order.is_learned());
          MUSTER_CHECK((order.take() == std::vector<int>{2, 1, 4, 3, 0}));
          MUSTER_CHECK(order.take().empty());
        }) == "");
}

}  // namespace muster
