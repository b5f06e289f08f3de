#include "gradient/gradient_engine.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <thread>

#include "core/replica_context.h"
#include "cpp/catch.h"
#include "support/passing_communicator.h"

namespace muster {
namespace {

constexpr int kStrategy = 0;  // its address is the identity of the strategy under test
constexpr auto kTimeout = comm::Milliseconds(20'000);

/// A group of one that notes what is allocated in it, and whether what was allocated before is still there.
class NotingCommunicator final : public testing::PassingCommunicator {
 public:
  NotingCommunicator() : PassingCommunicator(comm::make_single()) {}

  at::Tensor allocate(int64_t numel, at::ScalarType dtype) override {
    were_alive.push_back(is_alive());
    auto tensor = PassingCommunicator::allocate(numel, dtype);
    last_ = tensor.storage().getWeakStorageImpl();
    return tensor;
  }

  std::vector<bool> were_alive;  ///< by allocation: whether the one before was still there

 private:
  bool is_alive() const { return last_ && !last_->expired(); }

  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> last_;
};

/// A replica with three leaves and an engine over them.
struct Replica {
  explicit Replica(comm::CommunicatorPtr communicator, int index = 0, int64_t bucket_bytes = 64) {
    for (auto& leaf : leaves) leaf = at::ones({4}).set_requires_grad(true);
    GradientEngineOptions options;
    options.bucket_bytes = options.first_bucket_bytes = bucket_bytes;  // a bucket for each leaf
    options.strategy = &kStrategy;
    options.replica = index;
    context->strategy = &kStrategy;
    context->replica = index;
    engine = std::make_unique<GradientEngine>(
        std::vector<NamedParameter>{{"a", leaves[0]}, {"b", leaves[1]}, {"c", leaves[2]}}, std::move(communicator),
        options);
  }

  void micro_batch(const std::function<at::Tensor()>& loss, GradientEngine::MicroBatch kind = {}) {
    const ReplicaScope scope(context);
    if (kind.first) engine->open_window();
    const auto value = loss();
    engine->begin(kind);
    torch::autograd::backward({value}, {at::ones({})});
    launches_before_flush = engine->launches();
    engine->flush();
    if (kind.last) {
      engine->wait();
      counts = std::vector<double>(2 * engine->num_parameters());
      engine->add_counts(counts.data());
    }
  }

  double sum(size_t leaf) const { return engine->slot(leaf).sum().item<double>(); }

  at::Tensor leaves[3];
  std::shared_ptr<ReplicaContext> context = std::make_shared<ReplicaContext>();
  std::unique_ptr<GradientEngine> engine;
  std::vector<double> counts;
  int64_t launches_before_flush = 0;
};

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("the first window launches after backward, later ones while it runs", "[gradient]") {
  Replica replica(comm::make_single());
  const auto loss = [&] { return (replica.leaves[0] + replica.leaves[1] * 2 + replica.leaves[2] * 3).sum(); };
  replica.micro_batch(loss);
  CHECK(replica.launches_before_flush == 0);
  CHECK(replica.sum(0) == 4);
  CHECK(replica.sum(1) == 8);
  CHECK(replica.sum(2) == 12);
  CHECK_FALSE(replica.leaves[0].grad().defined());
  replica.engine->learn_order(replica.counts.data());

  const auto before = replica.engine->launches();
  replica.micro_batch(loss);
  CHECK(replica.launches_before_flush == before + 3);
  CHECK(replica.sum(2) == 12);
}

TEST_CASE("the learned order takes no memory beside what the guess has", "[gradient]") {
  const auto group = std::make_shared<NotingCommunicator>();
  Replica replica(group);
  const auto& [a, b, c] = replica.leaves;
  const bool is_as_guessed = GENERATE(true, false);
  // Backward ends with what the loss began with.
  const auto loss = [&] { return is_as_guessed ? ((a.exp() * b).exp() * c).sum() : ((c.exp() * b).exp() * a).sum(); };
  replica.micro_batch(loss);
  const auto* const guessed = replica.engine->slot(0).const_data_ptr();
  const auto sums = std::vector<double>{replica.sum(0), replica.sum(1), replica.sum(2)};
  replica.engine->learn_order(replica.counts.data());
  for (int window = 0; window < 2; ++window) {
    replica.micro_batch(loss);
    CHECK(sums == std::vector<double>{replica.sum(0), replica.sum(1), replica.sum(2)});
  }
  CHECK(group->were_alive == std::vector<bool>{false});
  CHECK((replica.engine->slot(0).const_data_ptr() == guessed) == is_as_guessed);
  CHECK((replica.engine->layout().order() == std::vector<int>{2, 1, 0}) == is_as_guessed);
}

TEST_CASE("micro-batches add up and are reduced once", "[gradient]") {
  Replica replica(comm::make_single());
  const auto loss = [&] { return replica.leaves[0].sum() + replica.leaves[1].sum(); };
  replica.micro_batch(loss, {.first = true, .last = false});
  CHECK(replica.engine->launches() == 0);
  replica.micro_batch([&] { return replica.leaves[0].sum(); }, {.first = false, .last = false});
  replica.micro_batch(loss, {.first = false, .last = true});
  CHECK(replica.engine->launches() == 3);
  CHECK(replica.sum(0) == 12);
  CHECK(replica.sum(1) == 8);
  CHECK(replica.sum(2) == 0);
  CHECK((replica.counts == std::vector<double>{1, 1, 0, 0, 0, 0}));
}

TEST_CASE("a micro-batch that does not contribute leaves no trace, not even NaN", "[gradient]") {
  Replica replica(comm::make_single());
  replica.micro_batch([&] { return (replica.leaves[0] * std::numeric_limits<double>::quiet_NaN()).sum(); },
                      {.first = true, .last = false, .contributes = false});
  replica.micro_batch([&] { return replica.leaves[0].sum(); }, {.first = false, .last = true});
  CHECK(replica.sum(0) == 4);
}

TEST_CASE("a gradient that comes after its bucket left is an error that names the parameter", "[gradient]") {
  Replica replica(comm::make_single());
  replica.micro_batch([&] { return replica.leaves[0].sum(); });
  replica.engine->learn_order(replica.counts.data());
  const auto twice = [&] {
    replica.micro_batch([&] {
      // A backward inside backward makes the accumulator fire a second time.
      auto inner = replica.leaves[0].sum();
      auto outer = replica.leaves[0].sum();
      outer.register_hook([inner](const at::Tensor& gradient) {
        torch::autograd::backward({inner}, {at::ones({})});
        return gradient;
      });
      return outer;
    });
  };
  const auto message = error_of(twice);
  CHECK(message.find("'a'") != std::string::npos);
  CHECK(message.find("came after its bucket") != std::string::npos);
  replica.engine->wait();
  twice();
  CHECK(replica.sum(0) == 8);
}

TEST_CASE("a backward of the step's own is an error that says what to return", "[gradient]") {
  Replica replica(comm::make_single());
  {
    const ReplicaScope scope(replica.context);
    torch::autograd::backward({replica.leaves[1].sum()}, {at::ones({})});
  }
  CHECK_FALSE(replica.leaves[1].grad().defined());
  const auto message = error_of([&] { replica.micro_batch([&] { return replica.leaves[0].sum(); }); });
  CHECK(message.find("'b'") != std::string::npos);
  CHECK(message.find("return the loss") != std::string::npos);
}

TEST_CASE("gradients outside a step stay where autograd put them", "[gradient]") {
  Replica replica(comm::make_single());
  torch::autograd::backward({replica.leaves[1].sum()}, {at::ones({})});
  CHECK(replica.leaves[1].grad().sum().item<double>() == 4);
}

TEST_CASE("replicas add along the tree, also where they use different parameters", "[gradient]") {
  constexpr int kReplicas = 3;
  const auto group = comm::make_local(kReplicas, kTimeout);
  std::vector<std::unique_ptr<Replica>> replicas;
  for (int r = 0; r < kReplicas; ++r) replicas.push_back(std::make_unique<Replica>(group[static_cast<size_t>(r)], r));
  for (int window = 0; window < 3; ++window) {
    std::vector<std::thread> threads;
    for (int r = 0; r < kReplicas; ++r) {
      threads.emplace_back([&, r] {
        auto& replica = *replicas[static_cast<size_t>(r)];
        replica.micro_batch(
            [&] { return (replica.leaves[static_cast<size_t>(r)] * (r + 1.0) + replica.leaves[2]).sum(); });
        replica.engine->learn_order(replica.counts.data());
      });
    }
    for (auto& thread : threads) thread.join();
    for (const auto& replica : replicas) {
      CHECK(replica->sum(0) == 4);
      CHECK(replica->sum(1) == 8);
      CHECK(replica->sum(2) == 4 + 4 + 16);
    }
  }
}

TEST_CASE("a replica that gives up contributes zeros and its peers do not wait", "[gradient]") {
  const auto group = comm::make_local(2, kTimeout);
  Replica fine(group[0], 0);
  Replica failing(group[1], 1);
  std::thread peer([&] { fine.micro_batch([&] { return fine.leaves[0].sum(); }); });
  {
    const ReplicaScope scope(failing.context);
    failing.engine->open_window();
    failing.engine->begin({});
    failing.engine->abandon();
    failing.engine->flush();
    failing.engine->wait();
  }
  peer.join();
  CHECK(fine.sum(0) == 4);
  CHECK(failing.sum(0) == 4);
}

TEST_CASE("layouts that differ are refused by name", "[gradient]") {
  const auto group = comm::make_local(2, kTimeout);
  GradientEngineOptions options;
  const auto leaf = [] { return at::ones({4}).set_requires_grad(true); };
  GradientEngine one({{"a", leaf()}, {"b", leaf()}}, group[0], options);
  GradientEngine other({{"a", leaf()}, {"frozen", leaf()}}, group[1], options);
  std::string here;
  std::thread peer([&] { here = error_of([&] { one.open_window(); }); });
  const auto there = error_of([&] { other.open_window(); });
  peer.join();
  for (const auto& message : {here, there}) {
    CHECK(message.find("'b'") != std::string::npos);
    CHECK(message.find("'frozen'") != std::string::npos);
  }
}

}  // namespace
}  // namespace muster
