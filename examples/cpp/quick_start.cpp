#include <muster/muster.h>

#include <iostream>

using Example = torch::data::Example<>;

// Points, and on which side of a plane they lie.
struct Points : torch::data::datasets::BatchDataset<Points, Example> {
  torch::Tensor x = torch::randn({1000, 20});
  torch::Tensor y = (x.sum(1) > 0).to(torch::kInt64);

  Example get_batch(torch::ArrayRef<size_t> indices) override {
    const auto rows = torch::tensor(std::vector<int64_t>(indices.begin(), indices.end()));
    return {x.index_select(0, rows), y.index_select(0, rows)};
  }
  std::optional<size_t> size() const override { return 1000; }
};

int main() {
  torch::manual_seed(0);
  muster::MirroredStrategy strategy({"cpu:0", "cpu:1"});  // two replicas in this process
  // muster::MultiWorkerMirroredStrategy strategy;        // a replica per process, started by torchrun
  // muster::ParameterServerStrategy strategy;            // the same, with parameters on servers; started by muster run

  auto model = strategy.prepare(
      [] { return torch::nn::Sequential(torch::nn::Linear(20, 64), torch::nn::ReLU(), torch::nn::Linear(64, 2)); });
  muster::optim::AdamW optimizer(model->parameters(), 1e-2);
  strategy.prepare(optimizer);
  auto loader = strategy.prepare_loader(Points(), {.batch_size = 50, .shuffle = true});

  const auto train_step = [&](const Example& part) {
    return torch::cross_entropy_loss(model->forward(part.data), part.target);
  };
  for (int epoch = 0; epoch < 3; ++epoch) {
    muster::StepResult result;
    for (auto& batch : loader) result = strategy.step(train_step, batch);
    if (strategy.is_chief()) std::cout << "epoch " << epoch << ": loss " << result.loss.item<double>() << "\n";
  }
}
