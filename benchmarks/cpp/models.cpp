#include "models.h"

#include <stdexcept>

namespace benchmark {

namespace {

namespace nn = torch::nn;

struct Stack : Net {
  explicit Stack(const nn::Sequential& of) : layers(register_module("layers", of)) {}
  torch::Tensor forward(const torch::Tensor& x) override { return layers->forward(x); }
  nn::Sequential layers;
};

// torch's C++ encoder layer neither normalises first nor uses the fused attention, as Python's does here.
struct EncoderLayer : nn::Module {
  EncoderLayer(int64_t width, int64_t head_count)
      : heads(head_count),
        in_projection(register_module("in_projection", nn::Linear(width, 3 * width))),
        out_projection(register_module("out_projection", nn::Linear(width, width))),
        linear1(register_module("linear1", nn::Linear(width, 4 * width))),
        linear2(register_module("linear2", nn::Linear(4 * width, width))),
        norm1(register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({width})))),
        norm2(register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({width})))) {}

  torch::Tensor forward(const torch::Tensor& x) {
    const auto attended = x + attention(norm1(x));
    return attended + linear2(torch::relu(linear1(norm2(attended))));
  }

  torch::Tensor attention(const torch::Tensor& x) {
    const int64_t rows = x.size(0);
    const int64_t tokens = x.size(1);
    const auto parts = in_projection(x).view({rows, tokens, 3, heads, x.size(2) / heads}).permute({2, 0, 3, 1, 4});
    const auto values =
        at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, /*dropout_p=*/0.0, /*is_causal=*/true);
    return out_projection(values.transpose(1, 2).reshape(x.sizes()));
  }

  int64_t heads;
  nn::Linear in_projection;
  nn::Linear out_projection;
  nn::Linear linear1;
  nn::Linear linear2;
  nn::LayerNorm norm1;
  nn::LayerNorm norm2;
};

struct Transformer : Net {
  explicit Transformer(int64_t width = 384, int layers = 6) {
    embedding = register_module("embedding", nn::Embedding(256, width));
    for (int i = 0; i < layers; ++i) {
      encoder.push_back(register_module("layer" + std::to_string(i), std::make_shared<EncoderLayer>(width, 6)));
    }
    head = register_module("head", nn::Linear(width, 256));
  }

  torch::Tensor forward(const torch::Tensor& tokens) override {
    auto x = embedding(tokens);
    for (const auto& layer : encoder) x = layer->forward(x);
    return head(x);
  }

  nn::Embedding embedding{nullptr};
  std::vector<std::shared_ptr<EncoderLayer>> encoder;
  nn::Linear head{nullptr};
};

nn::Sequential small_tensors() {
  nn::Sequential layers;
  for (int i = 0; i < 1000; ++i) {
    layers->push_back(nn::Linear(16, 16));
    layers->push_back(nn::Tanh());
  }
  return layers;
}

nn::Sequential mlp(int64_t width) {
  const int64_t wide = 4 * width;
  return nn::Sequential(nn::Linear(width, wide), nn::ReLU(), nn::Linear(wide, wide), nn::ReLU(),
                        nn::Linear(wide, width));
}

nn::Sequential digits() {
  return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(1, 16, 3).padding(1)), nn::ReLU(),
                        nn::Conv2d(nn::Conv2dOptions(16, 32, 3).padding(1)), nn::ReLU(), nn::MaxPool2d(2),
                        nn::Flatten(), nn::Linear(512, 64), nn::ReLU(), nn::Linear(64, 10));
}

template <class Layers>
auto stack(Layers layers) {
  return [layers] { return std::make_shared<Stack>(layers()); };
}

auto noise(int64_t width) {
  return [width](int64_t rows) { return Batch(torch::randn({rows, width}), torch::randn({rows, width})); };
}

torch::Tensor squared_error(const torch::Tensor& output, const torch::Tensor& target) {
  return torch::mse_loss(output, target);
}

torch::Tensor cross_entropy(const torch::Tensor& logits, const torch::Tensor& target) {
  return torch::cross_entropy_loss(logits.flatten(0, -2), target.flatten());
}

}  // namespace

std::shared_ptr<Net> Model::fresh() const {
  torch::manual_seed(0);
  return build();
}

Model model_of(const std::string& name) {
  if (name == "small") return {stack(small_tensors), noise(16), squared_error};
  if (name == "mlp") return {stack([] { return mlp(1024); }), noise(1024), squared_error};
  if (name == "tiny") return {stack([] { return mlp(16); }), noise(16), squared_error};
  if (name == "transformer") {
    const auto tokens = [](int64_t rows) {
      return Batch(torch::randint(256, {rows, 64}, torch::kLong), torch::randint(256, {rows, 64}, torch::kLong));
    };
    return {[] { return std::make_shared<Transformer>(); }, tokens, cross_entropy};
  }
  if (name == "digits") {
    const auto images = [](int64_t rows) {
      return Batch(torch::randn({rows, 1, 8, 8}), torch::randint(10, {rows}, torch::kLong));
    };
    return {stack(digits), images, cross_entropy};
  }
  throw std::invalid_argument("there is no model named " + name);
}

}  // namespace benchmark
