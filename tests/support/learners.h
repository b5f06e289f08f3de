// Workers of a job on parameter servers that learn from numbered samples, as threads.
#pragma once

#include <ATen/ops/tensor.h>
#include <torch/data/datasets/base.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "muster/loader.h"
#include "muster/optim.h"
#include "muster/parameter_server.h"
#include "strategy/strategy_core.h"
#include "support/run_ranks.h"
#include "support/servers.h"
#include "support/topology.h"

namespace muster::testing {

inline constexpr size_t kSamples = 50;
inline constexpr LoaderOptions kLoading{.batch_size = 4, .shuffle = true};  // 13 batches

// Sample i is (i, i).
struct Numbers : torch::data::datasets::BatchDataset<Numbers, at::Tensor> {
  explicit Numbers(size_t n = kSamples) : n(n) {}
  at::Tensor get_batch(c10::ArrayRef<size_t> indices) override {
    std::vector<float> values;
    for (const size_t index : indices) {
      if (index == broken) throw std::out_of_range("sample " + std::to_string(index) + " is broken");
      values.insert(values.end(), 2, static_cast<float>(index));
    }
    return at::tensor(values).view({-1, 2});
  }
  std::optional<size_t> size() const override { return n; }

  size_t n;
  size_t broken = kSamples;
};

using Samples = std::vector<int64_t>;

inline Samples samples_of(const at::Tensor& batch) {
  const auto column = batch.select(1, 0).to(at::kLong).contiguous();
  return {column.const_data_ptr<int64_t>(), column.const_data_ptr<int64_t>() + column.numel()};
}

// A strategy with a model that is ready to step.
class Learner : public Strategy {
 public:
  explicit Learner(std::shared_ptr<StrategyCore> core)
      : Strategy(std::move(core), "Learner"),
        model(prepare([] { return torch::nn::Linear(2, 1); })),
        optimizer(model->parameters(), torch::optim::SGDOptions(1e-6)) {
    prepare(optimizer);
  }

  StepResult learn(const PerReplica<at::Tensor>& batch) {
    return step([&](const at::Tensor& x) { return model->forward(x).mean(); }, batch);
  }

  Replicated<torch::nn::LinearImpl> model;
  optim::SGD optimizer;
};

// Workers, and servers of their own.
class Job {
 public:
  Job(int workers, const StrategyOptions& options, uint32_t staleness)
      : options_(options),
        staleness_(staleness),
        step_(comm::make_local(workers, timeout())),
        workers_(comm::make_local(workers, timeout())) {}

  std::shared_ptr<StrategyCore> core(int rank, bool joins = false) const {
    const auto r = static_cast<size_t>(rank);
    const int n = static_cast<int>(workers_.size());
    Groups groups;
    groups.gradients = {comm::make_single()};
    groups.step = {step_[r]};
    groups.workers = workers_[r];
    if (joins) {
      groups.workers = comm::make_refusing(rank, n, "this worker joined");
      groups.step = {groups.workers};
      groups.prepare = comm::make_single();
    }
    groups.servers =
        ServerJob{.channels = servers_.names, .joins = joins, .staleness = staleness_, .embedded = nullptr};
    return std::make_shared<StrategyCore>(one_replica_each(rank, n), groups, options_,
                                          std::make_shared<ReplicaPool>(1, 1), 7);
  }

 private:
  comm::Milliseconds timeout() const { return comm::Milliseconds(static_cast<int64_t>(options_.timeout * 1000)); }

  const Servers servers_{server_names(2)};
  const StrategyOptions options_;
  const uint32_t staleness_;
  const std::vector<comm::CommunicatorPtr> step_;
  const std::vector<comm::CommunicatorPtr> workers_;
};

inline std::string on_workers(int n, const StrategyOptions& options, const std::function<void(Learner&)>& body,
                              uint32_t staleness = server::kAnyStaleness) {
  const Job job(n, options, staleness);
  return run_threads(n, [&](int rank) {
    Learner worker(job.core(rank));
    body(worker);
  });
}

inline StrategyOptions patient(double timeout) {
  StrategyOptions options;
  options.timeout = timeout;
  return options;
}

inline Samples everything() {
  Samples samples(kSamples);
  std::iota(samples.begin(), samples.end(), 0);
  return samples;
}

inline Samples sorted(Samples samples) {
  std::sort(samples.begin(), samples.end());
  return samples;
}

inline void append(Samples& to, const Samples& samples) { to.insert(to.end(), samples.begin(), samples.end()); }

// Something that happens once, and others wait for.
class Event {
 public:
  void happened() {
    if (!is_set_.exchange(true)) promise_.set_value();
  }
  void wait() const { MUSTER_CHECK(future_.wait_for(Seconds(60)) == std::future_status::ready); }

 private:
  std::atomic<bool> is_set_{false};
  std::promise<void> promise_;
  std::shared_future<void> future_{promise_.get_future()};
};

}  // namespace muster::testing
