#include "columns.h"

#include <muster/muster.h>

#include <barrier>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

namespace benchmark {

namespace {

constexpr int kReplicas = 2;

// What a C++ user would write for speed: torch::optim has no fused AdamW, ATen has its kernel.
class FusedAdamW : public torch::optim::AdamW {
 public:
  explicit FusedAdamW(std::vector<torch::Tensor> parameters, double lr)
      : torch::optim::AdamW(parameters, torch::optim::AdamWOptions(lr)), parameters_(std::move(parameters)) {
    for (const auto& parameter : parameters_) {
      first_.push_back(torch::zeros_like(parameter));
      second_.push_back(torch::zeros_like(parameter));
      steps_.push_back(torch::zeros({}));
    }
  }

  torch::Tensor step(LossClosure /*closure*/ = nullptr) override {
    const torch::NoGradGuard no_grad;
    const auto& options = static_cast<const torch::optim::AdamWOptions&>(param_groups().front().options());
    std::vector<torch::Tensor> gradients;
    for (const auto& parameter : parameters_) gradients.push_back(parameter.grad());
    torch::_foreach_add_(steps_, 1);
    at::_fused_adamw_(parameters_, gradients, first_, second_, {}, steps_, options.lr(), std::get<0>(options.betas()),
                      std::get<1>(options.betas()), options.weight_decay(), options.eps(), /*amsgrad=*/false,
                      /*maximize=*/false);
    return {};
  }

 private:
  std::vector<torch::Tensor> parameters_;
  std::vector<torch::Tensor> first_;
  std::vector<torch::Tensor> second_;
  std::vector<torch::Tensor> steps_;
};

std::shared_ptr<torch::optim::Optimizer> torch_optimizer(const Setting& setting, const Net& net) {
  if (setting.optimizer == "sgd") return std::make_shared<torch::optim::SGD>(net.parameters(), setting.lr);
  if (setting.optimizer == "adamw") return std::make_shared<torch::optim::AdamW>(net.parameters(), setting.lr);
  if (setting.optimizer == "fused_adamw") return std::make_shared<FusedAdamW>(net.parameters(), setting.lr);
  throw std::invalid_argument("there is no optimizer named " + setting.optimizer);
}

std::shared_ptr<torch::optim::Optimizer> flat_optimizer(const Setting& setting, const Net& net) {
  if (setting.optimizer == "sgd") return std::make_shared<muster::optim::SGD>(net.parameters(), setting.lr);
  return std::make_shared<muster::optim::AdamW>(net.parameters(), setting.lr);
}

Step ordinary(const Setting& setting, const Batch& batch, int threads) {
  const auto net = setting.model.fresh();
  return [=, optimizer = torch_optimizer(setting, *net), loss = setting.model.loss] {
    at::set_num_threads(threads);
    optimizer->zero_grad();
    loss(net->forward(batch.data), batch.target).backward();
    optimizer->step();
  };
}

Step without_step(const Setting& setting, const Batch& batch) {
  return [batch, net = setting.model.fresh(), loss = setting.model.loss] {
    net->zero_grad();
    loss(net->forward(batch.data), batch.target).backward();
  };
}

// Threads that stay, of one intra-op thread each: step() lets each make its step once.
class BareThreads {
 public:
  explicit BareThreads(const std::vector<Step>& steps)
      : begin_(static_cast<std::ptrdiff_t>(steps.size()) + 1), end_(static_cast<std::ptrdiff_t>(steps.size()) + 1) {
    for (const auto& step : steps) threads_.emplace_back([this, step] { serve(step); });
  }
  ~BareThreads() {
    ends_ = true;
    begin_.arrive_and_wait();
    for (auto& thread : threads_) thread.join();
  }
  BareThreads(const BareThreads&) = delete;
  BareThreads& operator=(const BareThreads&) = delete;

  void step() {
    begin_.arrive_and_wait();
    end_.arrive_and_wait();
  }

 private:
  void serve(const Step& step) {
    at::set_num_threads(1);
    for (begin_.arrive_and_wait(); !ends_; begin_.arrive_and_wait()) {
      step();
      end_.arrive_and_wait();
    }
  }

  std::barrier<> begin_;
  std::barrier<> end_;
  bool ends_ = false;  // ordered by begin_
  std::vector<std::thread> threads_;
};

Step on_threads(const std::vector<Step>& steps) {
  return [threads = std::make_shared<BareThreads>(steps)] { threads->step(); };
}

std::vector<Batch> parts_of(const Batch& batch) {
  const auto data = batch.data.chunk(kReplicas);
  const auto target = batch.target.chunk(kReplicas);
  std::vector<Batch> parts;
  for (size_t i = 0; i < data.size(); ++i) parts.emplace_back(data[i], target[i]);
  return parts;
}

}  // namespace

struct Columns::Strategies {
  std::optional<muster::MirroredStrategy> mirrored;
  std::optional<muster::MultiWorkerMirroredStrategy> workers;
  std::shared_ptr<Net> of_workers;

  static Step train(muster::Strategy& strategy, const Setting& setting, const Batch& batch, std::shared_ptr<Net> net) {
    const auto model = strategy.prepare(
        [&]() -> std::shared_ptr<Net> { return net ? std::exchange(net, nullptr) : setting.model.fresh(); });
    auto optimizer = flat_optimizer(setting, model.module());
    strategy.prepare(*optimizer);
    return [&strategy, model, optimizer, batch, loss = setting.model.loss] {
      strategy.step([&](const Batch& part) { return loss(model->forward(part.data), part.target); }, batch);
    };
  }
};

Columns::Columns(const Setting& setting, const std::vector<std::string>& names)
    : strategies_(std::make_unique<Strategies>()) {
  torch::manual_seed(1 + setting.rank);
  const auto batch = setting.model.batch(setting.rows);
  const muster::StrategyOptions options{.seed = 0, .threads_per_replica = 1};
  for (const auto& name : names) {
    auto& step = steps_[name];
    if (name == "alone") {
      step = ordinary(setting, batch, 1);
    } else if (name == "two_intra_op") {
      step = ordinary(setting, batch, kReplicas);
    } else if (name == "threads" || name == "stepping_threads") {
      std::vector<Step> steps;
      for (const auto& part : parts_of(batch)) {
        steps.push_back(name == "threads" ? without_step(setting, part) : ordinary(setting, part, 1));
      }
      step = on_threads(steps);
    } else if (name == "mirrored") {
      strategies_->mirrored.emplace(std::vector<std::string>(kReplicas, "cpu"), options);
      step = Strategies::train(*strategies_->mirrored, setting, batch, nullptr);
    } else if (name == "workers") {
      const muster::Cluster cluster{
          .rank = setting.rank, .num_workers = kReplicas, .address = setting.address, .local_rank = setting.rank};
      strategies_->workers.emplace(cluster, std::vector<std::string>{"cpu"}, options);
      strategies_->of_workers = setting.model.fresh();
      step = Strategies::train(*strategies_->workers, setting, batch, strategies_->of_workers);
    } else {
      throw std::invalid_argument("there is no column named " + name);
    }
  }
}

Columns::~Columns() = default;

void Columns::check_agreement() const {
  if (!strategies_->workers) return;
  std::vector<torch::Tensor> values;
  for (const auto& parameter : strategies_->of_workers->parameters()) values.push_back(parameter.detach().flatten());
  const auto mine = torch::cat(values);
  if (!torch::equal(strategies_->workers->broadcast(mine), mine)) {
    throw std::runtime_error("the workers have learnt different parameters");
  }
}

}  // namespace benchmark
