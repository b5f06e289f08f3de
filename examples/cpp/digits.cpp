// A small classifier of handwritten digits. It reads the standard IDX files: any MNIST folder, or scikit-learn's digits
// as examples/python/make_idx.py writes them.
//
//   ./digits <folder>                           one replica
//   ./digits <folder> --devices cpu:0,cpu:1     two replicas in this process
//   torchrun --no-python --nproc-per-node 2 ./digits <folder> --multi-worker     two processes
//   muster run --workers 2 --servers 1 --no-python ./digits <folder> --parameter-server
//
// With --staleness the workers of a parameter server step on their own. Under torchrun their parameters are on the
// servers that MUSTER_SERVERS names (as `muster serve` prints them), or on one that the chief hosts.
//
// With --checkpoint FOLDER the state is kept after every epoch and on SIGTERM, after which the exit code is 143
// (128 + 15), and the same command goes on from there; not with --staleness.
//
// The folder holds train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte,
// not compressed. Pixels are divided by the largest value in the training images (16 for scikit-learn's digits, 255 for
// MNIST). The model is three linear layers, "first" (pixels -> 128), "second" (128 -> 64) and "last" (64 -> 10), with
// ReLU between them.
//
// A weights file (--initial, --final) has one text line for each parameter in registration order, its name and its
// sizes
// ("first.weight 128 64"), then an empty line, then all values in that order as little-endian float32, row by row.
#include <muster/muster.h>

#include <array>
#include <csignal>
#include <fstream>
#include <iostream>
#include <sstream>

namespace {

using Example = torch::data::Example<>;

struct Arguments {
  std::string folder;
  std::vector<std::string> devices;
  bool multi_worker = false;
  bool parameter_server = false;
  muster::ServerOptions server_options;
  int epochs = 20;
  int64_t steps = -1;
  int64_t batch_size = 32;
  std::string optimizer = "sgd";
  std::string initial;
  std::string final_weights;
  std::string checkpoint;
  bool shuffle = true;
  muster::StrategyOptions options{.seed = 1};
};

constexpr const char* kUsage =
    "usage: digits <folder> [--devices cpu:0,cpu:1,...] [--multi-worker | --parameter-server [--staleness n|none]]\n"
    "              [--epochs n] [--steps n] [--batch-size n]\n"
    "              [--optimizer sgd|adagrad|adamw] [--accumulate k] [--clip norm] [--precision fp32|bf16|fp16]\n"
    "              [--seed n] [--no-shuffle]\n"
    "              [--initial weights] [--final weights] [--checkpoint folder]\n";

muster::Precision precision_of(const std::string& name) {
  if (name == "fp32") return muster::Precision::fp32;
  if (name == "bf16") return muster::Precision::bf16;
  if (name == "fp16") return muster::Precision::fp16;
  throw std::invalid_argument("--precision " + name + ": it must be fp32, bf16 or fp16");
}

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&]() -> std::string {
      if (++i == argc) throw std::invalid_argument(name + " needs a value");
      return argv[i];
    };
    if (name == "--devices") {
      std::istringstream list(value());
      for (std::string device; std::getline(list, device, ',');) arguments.devices.push_back(device);
    } else if (name == "--multi-worker") {
      arguments.multi_worker = true;
    } else if (name == "--parameter-server") {
      arguments.parameter_server = true;
    } else if (name == "--staleness") {
      const auto steps = value();
      arguments.server_options.staleness = steps == "none" ? std::nullopt : std::optional(std::stoi(steps));
    } else if (name == "--epochs") {
      arguments.epochs = std::stoi(value());
    } else if (name == "--steps") {
      arguments.steps = std::stoll(value());
    } else if (name == "--batch-size") {
      arguments.batch_size = std::stoll(value());
    } else if (name == "--optimizer") {
      arguments.optimizer = value();
    } else if (name == "--accumulate") {
      arguments.options.accumulate = std::stoi(value());
    } else if (name == "--clip") {
      arguments.options.clip_norm = std::stod(value());
    } else if (name == "--precision") {
      arguments.options.precision = precision_of(value());
    } else if (name == "--seed") {
      arguments.options.seed = std::stoull(value());
    } else if (name == "--no-shuffle") {
      arguments.shuffle = false;
    } else if (name == "--initial") {
      arguments.initial = value();
    } else if (name == "--final") {
      arguments.final_weights = value();
    } else if (name == "--checkpoint") {
      arguments.checkpoint = value();
    } else if (arguments.folder.empty() && !name.starts_with("--")) {
      arguments.folder = name;
    } else {
      throw std::invalid_argument("unknown argument " + name);
    }
  }
  if (arguments.folder.empty()) throw std::invalid_argument("no folder given");
  if (arguments.parameter_server && arguments.multi_worker) {
    throw std::invalid_argument("--multi-worker and --parameter-server are two strategies; choose one");
  }
  if (arguments.server_options.staleness != 0 && !arguments.checkpoint.empty()) {
    throw std::invalid_argument("--checkpoint keeps a step that all workers made together; leave out --staleness");
  }
  return arguments;
}

// A tensor of bytes from an IDX file: a magic number with the number of dimensions, their sizes, the bytes.
torch::Tensor read_idx(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot open " + path + "; it must be there, and not compressed");
  const auto number = [&] {
    std::array<unsigned char, 4> bytes{};
    file.read(reinterpret_cast<char*>(bytes.data()), bytes.size());
    return (int64_t{bytes[0]} << 24) | (int64_t{bytes[1]} << 16) | (int64_t{bytes[2]} << 8) | int64_t{bytes[3]};
  };
  const int64_t magic = number();
  if (!file || (magic >> 8) != 0x08 || (magic & 0xff) == 0) throw std::runtime_error(path + " is no IDX file of bytes");
  std::vector<int64_t> sizes(static_cast<size_t>(magic & 0xff));
  for (auto& size : sizes) size = number();
  auto bytes = torch::empty(sizes, torch::kUInt8);
  file.read(reinterpret_cast<char*>(bytes.data_ptr<uint8_t>()), bytes.numel());
  if (!file) throw std::runtime_error(path + " is shorter than its header says");
  return bytes;
}

// Images as rows of pixels in [0, 1], and their labels; a batch is read at once.
class Digits : public torch::data::datasets::BatchDataset<Digits, Example, torch::ArrayRef<size_t>> {
 public:
  Digits(const std::string& folder, const std::string& part, double scale)
      : images_(read_idx(folder + "/" + part + "-images-idx3-ubyte").flatten(1).to(torch::kFloat32) / scale),
        labels_(read_idx(folder + "/" + part + "-labels-idx1-ubyte").to(torch::kInt64)) {
    if (images_.size(0) != labels_.size(0)) throw std::runtime_error(part + " has more images or more labels");
  }

  Example get_batch(torch::ArrayRef<size_t> indices) override {
    auto rows = torch::empty({static_cast<int64_t>(indices.size())}, torch::kInt64);
    std::copy(indices.begin(), indices.end(), rows.data_ptr<int64_t>());
    return {images_.index_select(0, rows), labels_.index_select(0, rows)};
  }
  std::optional<size_t> size() const override { return static_cast<size_t>(images_.size(0)); }
  int64_t pixels() const { return images_.size(1); }

 private:
  torch::Tensor images_;
  torch::Tensor labels_;
};

struct Net : torch::nn::Module {
  explicit Net(int64_t pixels)
      : first(register_module("first", torch::nn::Linear(pixels, 128))),
        second(register_module("second", torch::nn::Linear(128, 64))),
        last(register_module("last", torch::nn::Linear(64, 10))) {}

  torch::Tensor forward(const torch::Tensor& images) { return last(torch::relu(second(torch::relu(first(images))))); }

  torch::nn::Linear first;
  torch::nn::Linear second;
  torch::nn::Linear last;
};

std::string header_of(const torch::nn::Module& module) {
  std::ostringstream header;
  for (const auto& parameter : module.named_parameters()) {
    header << parameter.key();
    for (int64_t size : parameter.value().sizes()) header << ' ' << size;
    header << '\n';
  }
  header << '\n';
  return header.str();
}

void load_weights(torch::nn::Module& module, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string expected = header_of(module);
  std::string header(expected.size(), '\0');
  file.read(header.data(), static_cast<std::streamsize>(header.size()));
  if (!file || header != expected) throw std::runtime_error(path + " does not hold this model's weights:\n" + expected);
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) {
    auto values = torch::empty(parameter.sizes(), torch::kFloat32);
    file.read(reinterpret_cast<char*>(values.data_ptr<float>()), static_cast<std::streamsize>(values.nbytes()));
    if (!file) throw std::runtime_error(path + " is shorter than its header says");
    parameter.copy_(values);
  }
}

void save_weights(const torch::nn::Module& module, const std::string& path) {
  std::ofstream file(path, std::ios::binary);
  file << header_of(module);
  for (const auto& parameter : module.parameters()) {
    const auto values = parameter.detach().contiguous();
    file.write(reinterpret_cast<const char*>(values.data_ptr<float>()), static_cast<std::streamsize>(values.nbytes()));
  }
  if (!file) throw std::runtime_error("cannot write " + path);
}

std::unique_ptr<muster::Strategy> make_strategy(const Arguments& arguments) {
  if (arguments.parameter_server) {
    return std::make_unique<muster::ParameterServerStrategy>(muster::Cluster::from_env(), arguments.devices,
                                                             arguments.server_options, arguments.options);
  }
  if (!arguments.multi_worker) {
    return std::make_unique<muster::MirroredStrategy>(arguments.devices, arguments.options);
  }
  return std::make_unique<muster::MultiWorkerMirroredStrategy>(muster::Cluster::from_env(), arguments.devices,
                                                               arguments.options);
}

// Workers that step on their own bring momentum of their own (Mitliagkas et al., Asynchrony begets momentum, 2016).
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Arguments& arguments, const Net& net) {
  const auto& name = arguments.optimizer;
  if (name == "sgd") {
    const double momentum = arguments.server_options.staleness == 0 ? 0.9 : 0;
    return std::make_unique<muster::optim::SGD>(net.parameters(), torch::optim::SGDOptions(0.1).momentum(momentum));
  }
  if (name == "adagrad") return std::make_unique<muster::optim::Adagrad>(net.parameters(), 0.02);
  if (name == "adamw") return std::make_unique<muster::optim::AdamW>(net.parameters(), 1e-3);
  throw std::invalid_argument("--optimizer " + name + ": it must be sgd, adagrad or adamw");
}

double accuracy(muster::Strategy& strategy, const muster::Replicated<Net>& model, const Digits& digits) {
  double correct = 0;
  for (auto& batch : strategy.prepare_loader(digits, {.batch_size = 256})) {
    const auto hits = strategy.run(
        [&](const Example& part) { return (model->forward(part.data).argmax(1) == part.target).sum(); }, batch);
    for (const auto& part : hits) correct += part.defined() ? part.item<double>() : 0;
  }
  // Once: workers that step on their own have different numbers of batches.
  const auto total = strategy.reduce(torch::scalar_tensor(correct, torch::kDouble), muster::ReduceOp::sum);
  return total.item<double>() / static_cast<double>(*digits.size());
}

// Returns the program's exit code.
int run(const Arguments& arguments) {
  torch::manual_seed(*arguments.options.seed);
  const double scale = read_idx(arguments.folder + "/train-images-idx3-ubyte").max().item<double>();
  const Digits train(arguments.folder, "train", scale);
  const Digits test(arguments.folder, "t10k", scale);

  const auto strategy = make_strategy(arguments);
  const auto model = strategy->prepare([&] { return Net(train.pixels()); });
  if (!arguments.initial.empty()) load_weights(model.module(), arguments.initial);
  const auto optimizer = make_optimizer(arguments, model.module());
  strategy->prepare(*optimizer);
  auto loader =
      strategy->prepare_loader(train, {.batch_size = arguments.batch_size, .shuffle = arguments.shuffle, .workers = 1});
  if (strategy->is_chief()) std::cout << strategy->explain();

  muster::Checkpoints checkpoints(*strategy, arguments.checkpoint, {.keep = 2});
  checkpoints.load();
  bool stopping = false;
  const auto finished = [&] { return stopping || (arguments.steps >= 0 && strategy->steps() >= arguments.steps); };
  while (loader.epoch() < arguments.epochs && !finished()) {
    const auto epoch = loader.epoch();
    muster::StepResult result;
    for (auto& batch : loader) {
      result = strategy->step(
          [&](const Example& part) {
            return torch::nn::functional::cross_entropy(model->forward(part.data), part.target);
          },
          batch);
      stopping = checkpoints.after_step(result);
      if (finished()) break;
    }
    // A worker that steps on its own may have come too late for a batch of this epoch.
    if (strategy->is_chief() && result.loss.defined()) {
      std::cout << "epoch " << epoch << ", step " << strategy->steps() << ": loss " << result.loss.item<double>()
                << '\n';
    }
    if (!finished()) checkpoints.save();
  }
  if (stopping) {
    if (strategy->is_chief()) std::cout << "stopped after " << strategy->steps() << " steps\n";
    strategy->close();
    return 128 + SIGTERM;
  }
  strategy->barrier();  // workers that step on their own may be late
  const double test_accuracy = accuracy(*strategy, model, test);
  strategy->close();
  if (!strategy->is_chief()) return 0;
  std::cout << "test accuracy: " << test_accuracy << '\n';
  if (!arguments.final_weights.empty()) save_weights(model.module(), arguments.final_weights);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(parse(argc, argv));
  } catch (const std::invalid_argument& error) {
    std::cerr << "digits: " << error.what() << '\n' << kUsage;
    return 2;
  } catch (const muster::CommError& error) {  // a worker or a server is gone, or late
    std::cerr << "digits: " << error.what() << "\nStart all workers again: --checkpoint goes on from the last epoch\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "digits: " << error.what() << '\n';
    return 1;
  }
}
