#include "core/replica_context.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <set>
#include <thread>
#include <vector>

#include "cpp/catch.h"
#include "muster/error.h"

namespace muster {
namespace {

std::shared_ptr<ReplicaContext> make_context(int replica, uint64_t seed) {
  auto context = std::make_shared<ReplicaContext>();
  context->replica = replica;
  context->generator = at::detail::createCPUGenerator(seed);
  return context;
}

at::Tensor ambient_state() { return at::detail::getDefaultCPUGenerator().get_state(); }

using Draw = std::function<at::Tensor()>;

const std::vector<std::pair<const char*, Draw>>& draws() {
  static const std::vector<std::pair<const char*, Draw>> table = {
      {"rand", [] { return at::rand({64}); }},
      {"randn", [] { return at::randn({64}); }},
      {"randint", [] { return at::randint(1000, {64}); }},
      {"randperm", [] { return at::randperm(64); }},
      {"rand_like", [] { return at::rand_like(at::zeros({64})); }},
      {"normal", [] { return at::normal(0.0, 1.0, {64}); }},
      {"normal_", [] { return at::empty({64}).normal_(); }},
      {"uniform_", [] { return at::empty({64}).uniform_(); }},
      {"random_", [] { return at::empty({64}).random_(); }},
      {"exponential_", [] { return at::empty({64}).exponential_(); }},
      {"bernoulli", [] { return at::bernoulli(at::full({64}, 0.5)); }},
      {"bernoulli_", [] { return at::empty({64}).bernoulli_(0.5); }},
      {"multinomial", [] { return at::multinomial(at::ones({64}), 32); }},
      {"poisson", [] { return at::poisson(at::full({64}, 50.0)); }},
      {"rrelu", [] { return at::rrelu(at::full({64}, -1.0), 0.1, 0.9, true); }},
      {"dropout", [] { return at::dropout(at::ones({64}), 0.5, true); }},
      {"native_dropout", [] { return std::get<0>(at::native_dropout(at::ones({64}), 0.5, true)); }},
      {"attention",
       [] {
         auto x = at::ones({1, 1, 8, 8});
         return at::scaled_dot_product_attention(x, x, x, {}, 0.5);
       }},
  };
  return table;
}

TEST_CASE("no replica outside a scope", "[replica_context]") {
  CHECK(current_replica() == nullptr);
  CHECK_THROWS_AS(ReplicaScope(nullptr), InvalidArgument);
  CHECK(current_replica() == nullptr);
}

TEST_CASE("scopes nest", "[replica_context]") {
  const auto outer = make_context(1, 1);
  const auto inner = make_context(2, 2);
  {
    ReplicaScope outer_scope(outer);
    CHECK(current_replica() == outer);
    {
      ReplicaScope inner_scope(inner);
      CHECK(current_replica() == inner);
    }
    CHECK(current_replica() == outer);
    const at::Tensor drawn = at::rand({4});
    CHECK(at::equal(drawn, at::rand({4}, at::detail::createCPUGenerator(1))));
  }
  CHECK(current_replica() == nullptr);
}

TEST_CASE("random operators draw from the replica's stream alone", "[replica_context]") {
  for (const auto& [name, draw] : draws()) {
    INFO(name);
    const at::Tensor ambient = ambient_state();
    const auto first = make_context(0, 7);
    at::Tensor a, b, c;
    {
      ReplicaScope scope(first);
      a = draw();
      b = draw();
    }
    {
      ReplicaScope scope(make_context(0, 7));
      c = draw();
    }
    CHECK(at::equal(a, c));
    CHECK_FALSE(at::equal(a, b));
    CHECK(at::equal(ambient, ambient_state()));
    draw();
    CHECK_FALSE(at::equal(ambient, ambient_state()));
  }
}

TEST_CASE("an explicit generator is left alone", "[replica_context]") {
  const auto context = make_context(0, 7);
  const at::Tensor before = context->generator.get_state();
  ReplicaScope scope(context);
  const at::Tensor drawn = at::randn({8}, at::detail::createCPUGenerator(3));
  CHECK(at::equal(before, context->generator.get_state()));
  CHECK(at::equal(drawn, at::randn({8}, at::detail::createCPUGenerator(3))));
}

TEST_CASE("a context without a generator leaves the ambient one in use", "[replica_context]") {
  const at::Tensor before = ambient_state();
  ReplicaScope scope(std::make_shared<ReplicaContext>());
  at::rand({4});
  CHECK_FALSE(at::equal(before, ambient_state()));
}

bool foreign_call_had_generator = false;

/// normal_ of a device of our own; leaves its first argument as the result.
void foreign_normal(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  foreign_call_had_generator = !stack->back().isNone();
  stack->resize(stack->size() - 3);
}

TEST_CASE("tensors on another device get no CPU generator", "[replica_context]") {
  const auto handle = c10::Dispatcher::singleton().registerImpl(
      {"aten::normal_", ""}, c10::DispatchKey::PrivateUse1,
      c10::KernelFunction::makeFromBoxedFunction<&foreign_normal>(), std::nullopt, nullptr, "muster's test");
  auto storage = at::Storage(at::Storage::use_byte_size_t(), 0, at::DataPtr(nullptr, at::Device("privateuseone:0")));
  at::Tensor foreign = at::detail::make_tensor<at::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), caffe2::TypeMeta::Make<float>());
  ReplicaScope scope(make_context(0, 7));
  foreign_call_had_generator = true;
  foreign.normal_();
  CHECK_FALSE(foreign_call_had_generator);
  CHECK(at::empty({4}, at::TensorOptions().device(at::kMeta)).normal_().is_meta());
  CHECK(at::rand({4}, at::TensorOptions().device(at::kMeta)).is_meta());
}

TEST_CASE("each of two threads has its own stream", "[replica_context]") {
  const auto run = [](uint64_t seed) {
    ReplicaScope scope(make_context(0, seed));
    std::vector<at::Tensor> masks;
    for (int i = 0; i < 200; ++i) masks.push_back(at::dropout(at::ones({257}), 0.5, true));
    return at::stack(masks);
  };
  const at::Tensor alone[2] = {run(1), run(2)};
  for (int repeat = 0; repeat < 3; ++repeat) {
    at::Tensor together[2];
    std::thread threads[2];
    for (uint64_t i = 0; i < 2; ++i) threads[i] = std::thread([&, i] { together[i] = run(i + 1); });
    for (auto& thread : threads) thread.join();
    CHECK(at::equal(alone[0], together[0]));
    CHECK(at::equal(alone[1], together[1]));
  }
  CHECK_FALSE(at::equal(alone[0], alone[1]));
}

TEST_CASE("the replica travels with the thread-local state", "[replica_context]") {
  const auto context = make_context(3, 9);
  std::optional<at::ThreadLocalState> state;
  {
    ReplicaScope scope(context);
    state.emplace();
  }
  std::shared_ptr<ReplicaContext> inside, outside;
  at::Tensor drawn;
  std::thread([&] {
    {
      at::ThreadLocalStateGuard guard(*state);
      inside = current_replica();
      drawn = at::rand({4});
    }
    outside = current_replica();
  }).join();
  CHECK(inside == context);
  CHECK(outside == nullptr);
  CHECK(at::equal(drawn, at::rand({4}, at::detail::createCPUGenerator(9))));
}

TEST_CASE("gradients flow through routed operators", "[replica_context]") {
  ReplicaScope scope(make_context(0, 7));
  at::Tensor x = at::ones({64}).set_requires_grad(true);
  at::Tensor y = at::dropout(x, 0.5, true);
  CHECK(y.requires_grad());
  y.sum().backward();
  CHECK(at::equal(x.grad(), y.detach()));
}

TEST_CASE("stream seeds are fixed and distinct", "[replica_context]") {
  CHECK(stream_seed(0, 0, 0) == 0x238275bc38fcbe91ULL);
  CHECK(stream_seed(1234, 3, 17) == 0x7bac0114febecbb0ULL);
  std::set<uint64_t> seeds;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    for (uint64_t replica = 0; replica < 8; ++replica) {
      for (uint64_t t = 0; t < 8; ++t) seeds.insert(stream_seed(seed, replica, t));
    }
  }
  CHECK(seeds.size() == 512);
}

}  // namespace
}  // namespace muster
