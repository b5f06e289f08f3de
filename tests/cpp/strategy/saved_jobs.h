// Jobs whose checkpoints tests write and read.
#pragma once

#include <ATen/ops/ones.h>
#include <torch/nn/modules/linear.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "cpp/catch.h"
#include "cpp/strategy/workers.h"
#include "muster/optim.h"
#include "muster/strategy.h"
#include "strategy/strategy_core.h"
#include "support/run_ranks.h"
#include "support/topology.h"

namespace muster::testing {

// Runs body at each of two workers, which met in `store`.
inline void run_workers(const std::function<void(Strategy& strategy)>& body, const StrategyOptions& options = {},
                        const net::StorePtr& store = {}) {
  constexpr int n = 2;
  const auto gradients = comm::make_local(n, testing::Seconds(60));
  const auto step = comm::make_local(n, testing::Seconds(60));
  const auto workers = comm::make_local(n, testing::Seconds(60));
  const auto problem = testing::run_threads(n, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    Groups groups;
    groups.gradients = {gradients[r]};
    groups.step = {step[r]};
    groups.workers = workers[r];
    groups.store = store;
    OneWorker worker(std::make_shared<StrategyCore>(testing::one_replica_each(rank, n), groups, options,
                                                    std::make_shared<ReplicaPool>(1, 1), 7));
    body(worker);
  });
  CHECK(problem == "");
}

// A model and an optimizer, stepped once.
struct Small {
  explicit Small(Strategy& strategy, int64_t outputs = 1, double lr = 0.1)
      : model(strategy.prepare([outputs] { return torch::nn::Linear(2, outputs); })),
        optimizer(model->parameters(), torch::optim::AdamWOptions(lr)) {
    strategy.prepare(optimizer);
  }
  StepResult step(Strategy& strategy) {
    return strategy.step([&](const at::Tensor& x) { return model->forward(x).sum(); }, at::ones({2, 2}));
  }

  Replicated<torch::nn::LinearImpl> model;
  muster::optim::AdamW optimizer;
};

}  // namespace muster::testing
