// Dense parameters as servers hold them.
#include "window/server_values.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>

#include "cpp/catch.h"
#include "cpp/window/server_fixtures.h"

using namespace muster;
using namespace muster::testing;

namespace {

FlatGroups with_momentum() {
  return std::vector<kernels::SgdGroup>{
      {.lr = 0.5, .momentum = 0.9, .dampening = 0, .weight_decay = 0, .nesterov = false, .maximize = false}};
}

// The memory of one is in another order than its elements, that of the other has gaps.
struct Held {
  Held()
      : turned(at::arange(6, at::kFloat).view({2, 3}).t()),
        gaps(at::zeros({4, 2}).select(1, 0)),
        client(config_of(server.servers.names, 0,
                         plan_of({spec_of("turned", turned), spec_of("gaps", gaps)}, {}, with_momentum()))),
        values(client),
        optimizer({{"turned", turned, 0}, {"gaps", gaps, 0}}, with_momentum()) {
    gaps.copy_(at::arange(4, at::kFloat));
    optimizer.state().set(0, 0, at::full({3, 2}, 8.0F));
    values.add(turned, 0);
    values.add(gaps, 1);
    values.land();
    client.start([&] {
      values.give(optimizer, server::Part::parameter);
      values.give(optimizer, server::Part::state0);
    });
    client.join();
  }
  void read() {
    values.read(0);
    values.adopt();
  }

  OneServer server;
  at::Tensor turned;
  at::Tensor gaps;
  server::ServerClient client;
  ServerValues values;
  FlatOptimizer optimizer;
};

}  // namespace

TEST_CASE("parameters and their state come back as they were given", "[window]") {
  Held held;
  const auto turned = held.turned.clone();
  const auto gaps = held.gaps.clone();
  held.turned.zero_();
  held.gaps.zero_();
  held.read();
  CHECK(held.turned.equal(turned));
  CHECK(held.gaps.equal(gaps));
  const auto fetched = held.values.fetch(server::Part::parameter, 0);
  CHECK(fetched[0].equal(turned));
  CHECK(fetched[1].equal(gaps));
  CHECK(is_all(held.values.fetch(server::Part::state0, 0)[0], 8));
  CHECK_FALSE(held.values.fetch(server::Part::state1, 0)[0].defined());
}

TEST_CASE("a parameter that user code wrote is told from one that servers wrote", "[window]") {
  Held held;
  held.read();
  CHECK_FALSE(held.values.was_written(0));
  CHECK_FALSE(held.values.was_written(1));
  SECTION("in ways that torch counts") {
    held.turned.add_(1);
    held.gaps.add_(1);
    CHECK(held.values.was_written(0));
    CHECK(held.values.was_written(1));
  }
  SECTION("past the version counter") {
    held.turned.mutable_data_ptr<float>()[0] = 77;
    CHECK(held.values.was_written(0));
  }
  SECTION("by giving it other memory") {
    held.turned.set_data(held.turned.clone());
    CHECK(held.values.was_written(0));
  }
  held.read();
  CHECK_FALSE(held.values.was_written(0));
}
