// Gradients that peers read where autograd left them.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>

#include <memory>
#include <vector>

#include "comm/peer_memory.h"
#include "core/replica_context.h"
#include "cpp/catch.h"
#include "gradient/gradient_engine.h"
#include "gradient/gradient_memory.h"
#include "kernels/kernels.h"
#include "support/run_ranks.h"

namespace muster {
namespace {

using comm::Communicator;
using comm::CommunicatorPtr;
using namespace testing;

constexpr int kOwnersStrategy = 0;
constexpr int64_t kLarge = 5 * static_cast<int64_t>(kernels::kTile);
constexpr int64_t kSmall = 3;
constexpr size_t kLeast = kLarge * sizeof(float);

CommunicatorPtr borrowed(Communicator& communicator) { return {CommunicatorPtr(), &communicator}; }

struct OwnersReplica {
  explicit OwnersReplica(Communicator& communicator)
      : communicator(communicator),
        large(at::ones({kLarge}).set_requires_grad(true)),
        small(at::ones({kSmall}).set_requires_grad(true)) {
    GradientEngineOptions options;
    options.least_lent_bytes = kLeast;
    options.bucket_bytes = options.first_bucket_bytes = 1;  // one a parameter
    options.strategy = &kOwnersStrategy;
    options.replica = communicator.rank();
    context->strategy = &kOwnersStrategy;
    context->replica = communicator.rank();
    engine = std::make_unique<GradientEngine>(
        std::vector<NamedParameter>{{"large", large}, {"small", small}, {"empty", empty}}, borrowed(communicator),
        options);
  }

  /// Whether another leaf gets the memory of `large`'s gradient as its own.
  enum class Sharing { nothing, gradient };

  /// d loss / d large[i] = times (rank + 1) (i + 1), and as much of small.
  void window(int times, Sharing sharing = Sharing::nothing) {
    const ReplicaScope scope(context);
    engine->open_window();
    bucket = engine->slot(0);
    const auto other = at::ones({kLarge}).set_requires_grad(true);
    const auto loss_of = [&] {
      const auto weigh = [&](const at::Tensor& leaf) {
        return (leaf * ((at::arange(leaf.numel()) + 1) * (communicator.rank() + 1.0))).sum();
      };
      const auto leaf = sharing == Sharing::gradient ? large.view({5, -1}) + other.view({5, -1}) : large;
      return weigh(leaf.view({-1})) + weigh(small) + weigh(empty);
    };
    auto loss = loss_of();
    if (times == 2) {  // the second comes before the first has left, or after that is packed
      loss.register_hook([inner = loss_of()](const at::Tensor& gradient) {
        torch::autograd::backward({inner}, {at::ones({})});
        return gradient;
      });
    }
    engine->begin({.to_owners = true});
    engine->queue().hold();
    {
      const GradientMemory::Scope memory(engine->memory());
      torch::autograd::backward({loss}, {at::ones({})});
    }
    const auto before = other.grad().defined() ? other.grad().clone() : at::Tensor();
    engine->flush();
    engine->wait();
    keeps_other = !before.defined() || before.equal(other.grad());
    communicator.barrier().wait();
    engine->release_gradients();
    std::vector<double> counts(2 * engine->num_parameters());
    engine->add_counts(counts.data());
    engine->learn_order(counts.data());
  }

  /// Whether this rank's runs hold the sums.
  bool has_sums(int times) const {
    const double ranks = communicator.size();
    const double total = times * ranks * (ranks + 1) / 2;
    for (size_t p = 0; p < 2; ++p) {
      const auto& run = engine->owners()->run(p, communicator.rank());
      const auto own = elements_of(engine->slot(p), run);
      if (!own.equal((at::arange(run.begin, run.begin + run.count) + 1) * total)) return false;
    }
    return true;
  }

  /// Whether something of `large` was packed for others.
  bool has_packed() const {
    for (int r = 0; r < communicator.size(); ++r) {
      if (r == communicator.rank()) continue;
      const auto theirs = elements_of(bucket, engine->owners()->run(0, r));
      if (!theirs.equal(at::zeros_like(theirs))) return true;
    }
    return false;
  }

  /// Whether the sum of `large` is where its gradient was.
  bool has_sum_in_place() const { return engine->slot(0).const_data_ptr() != bucket.const_data_ptr(); }

  Communicator& communicator;
  at::Tensor large;
  at::Tensor small;
  at::Tensor empty = at::ones({0}).set_requires_grad(true);
  at::Tensor bucket;         // the slot of `large` there
  bool keeps_other = false;  // the other leaf's gradient is what backward made it
  std::shared_ptr<ReplicaContext> context = std::make_shared<ReplicaContext>();
  std::unique_ptr<GradientEngine> engine;
};

TEMPLATE_TEST_CASE("peers read large gradients in place", "[gradient]", Local, Host, HostWithReplicas) {
  CHECK(TestType::run(4, [](Communicator& c) {
          OwnersReplica replica(c);
          for (int window = 0; window < 3; ++window) {
            replica.window(1);
            MUSTER_CHECK(replica.has_sums(1));
            MUSTER_CHECK(!replica.has_packed());
            MUSTER_CHECK(replica.has_sum_in_place());
          }
        }) == "");
}

TEMPLATE_TEST_CASE("a gradient whose memory somebody else has takes no sum", "[gradient]", Local, Host) {
  CHECK(TestType::run(2, [](Communicator& c) {
          OwnersReplica replica(c);
          for (int window = 0; window < 3; ++window) {
            replica.window(1, OwnersReplica::Sharing::gradient);
            MUSTER_CHECK(replica.has_sums(1));
            MUSTER_CHECK(!replica.has_packed());
            MUSTER_CHECK(!replica.has_sum_in_place());
            MUSTER_CHECK(replica.keeps_other);
          }
        }) == "");
}

TEMPLATE_TEST_CASE("a lent gradient to which another one comes is taken back", "[gradient]", Local, Host) {
  CHECK(TestType::run(2, [](Communicator& c) {
          OwnersReplica replica(c);
          replica.window(1);
          for (int window = 0; window < 2; ++window) {
            replica.window(2);  // lent with the first, since one was learned
            MUSTER_CHECK(replica.has_sums(2));
          }
          replica.window(1);
          MUSTER_CHECK(replica.has_sums(1));
        }) == "");
}

}  // namespace
}  // namespace muster
