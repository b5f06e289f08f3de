// Writes to a folder what a C++ program leaves with torch::save: modules and optimizers after one step with gradients
// of one. It wrote the files beside it, with torch 2.13; test_checkpoint_libtorch.py reads them.
#include <torch/torch.h>

#include <string>

namespace nn = torch::nn;

nn::Sequential module() {
  nn::Sequential sequential(nn::Linear(3, 2), nn::BatchNorm1d(2), nn::Linear(2, 1));
  torch::NoGradGuard no_grad;
  for (auto& parameter : sequential->parameters()) {
    parameter.copy_(torch::arange(parameter.numel(), torch::kFloat32).view_as(parameter));
  }
  return sequential;
}

template <class Optimizer, class Options>
void write(const std::string& folder, const std::string& name, Options options) {
  auto sequential = module();
  auto parameters = sequential->parameters();
  Optimizer optimizer(parameters, options);
  for (auto& parameter : parameters) parameter.mutable_grad() = torch::ones_like(parameter);
  optimizer.step();
  torch::save(sequential, folder + "/" + name + "_module.pt");
  torch::save(optimizer, folder + "/" + name + ".pt");
}

int main(int, char** argv) {
  const std::string folder = argv[1];
  write<torch::optim::Adam>(folder, "adam", torch::optim::AdamOptions(0.5).betas({0.5, 0.75}).weight_decay(0.25));
  write<torch::optim::SGD>(folder, "sgd", torch::optim::SGDOptions(0.5).momentum(0.75));
  write<torch::optim::RMSprop>(folder, "rmsprop", torch::optim::RMSpropOptions(0.5).momentum(0.5).centered(true));
  write<torch::optim::Adagrad>(folder, "adagrad", torch::optim::AdagradOptions(0.5));

  auto sequential = module();
  torch::optim::AdamW optimizer(sequential->parameters(), torch::optim::AdamWOptions(0.5).amsgrad(true));
  for (auto& parameter : sequential->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
  optimizer.step();
  torch::serialize::OutputArchive archive, model, state;
  sequential->save(model);
  optimizer.save(state);
  archive.write("model", model);
  archive.write("optimizer", state);
  archive.write("epoch", torch::IValue(int64_t{7}));
  archive.save_to(folder + "/both.pt");
}
