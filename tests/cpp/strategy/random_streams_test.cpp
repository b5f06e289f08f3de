#include "strategy/random_streams.h"

#include <ATen/ops/rand.h>

#include <set>

#include "cpp/catch.h"

namespace muster {

TEST_CASE("a stream is a function of seed, replica and call", "[strategy]") {
  const std::vector<c10::Device> devices(2, c10::Device(c10::kCPU));
  const auto draw = [&](uint64_t seed, int first_replica, int local_replica, uint64_t call) {
    RandomStreams streams(devices, seed);
    ReplicaContext context;
    context.local_replica = local_replica;
    context.replica = first_replica + local_replica;
    streams.give(context, call);
    return at::rand({1}, context.generator, at::kDouble).item<double>();
  };
  CHECK(draw(1, 0, 1, 4) == draw(1, 0, 1, 4));
  CHECK(draw(1, 0, 1, 4) == draw(1, 1, 0, 4));  // wherever the replica lives
  CHECK(std::set<double>{draw(1, 0, 0, 1), draw(2, 0, 0, 1), draw(1, 0, 1, 1), draw(1, 0, 0, 2)}.size() == 4);
}

TEST_CASE("calls are numbered from one, and on after those that others made", "[strategy]") {
  RandomStreams streams({c10::Device(c10::kCPU)}, 7);
  CHECK(streams.seed() == 7);
  CHECK(streams.begin_call() == 1);
  CHECK(streams.begin_call() == 2);
  streams.follow(9);
  CHECK(streams.begin_call() == 10);
}

}  // namespace muster
