// The models of muster.benchmarks.models (Python), with the same parameters in the same order, on random data.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>

namespace benchmark {

using Batch = torch::data::Example<>;

struct Net : torch::nn::Module {
  virtual torch::Tensor forward(const torch::Tensor& x) = 0;
};

/// A value.
struct Model {
  std::function<std::shared_ptr<Net>()> build;
  std::function<Batch(int64_t rows)> batch;
  std::function<torch::Tensor(const torch::Tensor& output, const torch::Tensor& target)> loss;

  /// With equal parameters each time.
  std::shared_ptr<Net> fresh() const;
};

/// "small", "mlp", "transformer", "digits" or "tiny". Throws std::invalid_argument for another name.
Model model_of(const std::string& name);

}  // namespace benchmark
