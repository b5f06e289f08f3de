// Learns which ads are clicked on: examples/python/click_through.py, which says more, in C++. Both make the same
// impressions and end with the same parameters, bit for bit.
//
//   ./click_through                             two replicas in this process
//   ./click_through --devices cpu               one
//   torchrun --no-python --nproc-per-node 2 ./click_through --multi-worker       two processes
//   muster run --workers 2 --servers 2 --no-python ./click_through --parameter-server
//
// With --staleness the workers of parameter servers step on their own. Under torchrun their parameters are on the
// servers that MUSTER_SERVERS names (as `muster serve` prints them), or on one that the chief hosts.
//
// Users, ads and pages are rows of one sparse table. Impressions are generated, each from (seed, its number) alone, and
// the true log-odds of a click are known: what was learnt is compared with them. The program fails if it did not learn.
#include <muster/muster.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <sstream>

namespace {

// Ids and features, and who clicked.
using Sample = torch::data::Example<torch::data::Example<>, torch::Tensor>;

constexpr double kBias = -1.5;
constexpr std::array kFeatureEffects{1.2, -0.9, 0.6, -0.3};
constexpr double kRowEffect = 0.7;  // standard deviation of users', ads' and pages'
constexpr int64_t kOften = 100;     // times that a row is shown, from which on one may ask what was learnt of it
constexpr int64_t kFeatures = kFeatureEffects.size();

struct Arguments {
  std::vector<std::string> devices;
  bool multi_worker = false;
  bool parameter_server = false;
  muster::ServerOptions server_options;
  int64_t rows = 1'000'000;
  int64_t impressions = 1'000'000;
  int64_t epochs = 2;
  int64_t dim = 8;
  int64_t batch_size = 2048;
  uint64_t seed = 0;
  double least = 0.8;
};

constexpr const char* kUsage =
    "usage: click_through [--devices cpu:0,cpu:1,...] [--multi-worker | --parameter-server [--staleness n|none]]\n"
    "                     [--rows n] [--impressions n] [--epochs n] [--dim n] [--batch-size n] [--seed n]\n"
    "                     [--least share]\n"
    "Each epoch has other impressions. Where less than the least share of what can be known is learnt, the exit code\n"
    "is 1.\n";

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&]() -> std::string {
      if (++i == argc) throw std::invalid_argument(name + " needs a value");
      return argv[i];
    };
    const auto number = [&](int64_t least) {
      const int64_t given = std::stoll(value());
      if (given < least) throw std::invalid_argument(name + " must be " + std::to_string(least) + " or more");
      return given;
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
    } else if (name == "--rows") {
      arguments.rows = number(1000);
    } else if (name == "--impressions") {
      arguments.impressions = number(10'000);
    } else if (name == "--epochs") {
      arguments.epochs = number(1);
    } else if (name == "--dim") {
      arguments.dim = number(1);
    } else if (name == "--batch-size") {
      arguments.batch_size = number(1);
    } else if (name == "--seed") {
      arguments.seed = std::stoull(value());
    } else if (name == "--least") {
      arguments.least = std::stod(value());
    } else {
      throw std::invalid_argument("unknown argument " + name);
    }
  }
  if (arguments.multi_worker && arguments.parameter_server) {
    throw std::invalid_argument("--multi-worker and --parameter-server are two strategies; choose one");
  }
  return arguments;
}

// SplitMix64's output function.
uint64_t mixed(uint64_t word) {
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EB;
  return word ^ (word >> 31);
}

// What SplitMix64 seeded with `seed` gives as its draw of this number.
uint64_t drawn(uint64_t seed, uint64_t number) { return mixed((number + 1) * 0x9E3779B97F4A7C15 + seed); }

// Rows of one kind: `rows` of the table from `first` on. The first row is shown as often as the next two together, or
// the next four, ..., or all that are left over.
struct Field {
  const char* name;
  uint64_t first;
  uint64_t rows;

  uint64_t octaves() const { return static_cast<uint64_t>(std::bit_width(rows + 1)) - 1; }

  // By draw, a row of the table.
  uint64_t row_of(uint64_t word) const {
    const uint64_t octave = (word >> 32) % octaves();
    const uint64_t before = (uint64_t{1} << octave) - 1;
    const uint64_t size = octave == octaves() - 1 ? rows - before : before + 1;
    return first + before + (word & 0xFFFFFFFF) % size;
  }

  // The rows of whole octaves that so many impressions show kOften times or more, in the mean.
  torch::Tensor often(int64_t impressions) const {
    const auto whole = std::bit_width(static_cast<uint64_t>(impressions) / (kOften * octaves()));
    const auto shown = (int64_t{1} << std::min<int64_t>(whole, static_cast<int64_t>(octaves()) - 1)) - 1;
    return torch::arange(shown) + static_cast<int64_t>(first);
  }
};

// Who clicks on what: all of it follows from `seed`.
class World {
 public:
  World(int64_t rows, uint64_t seed) : impressions_seed_(drawn(seed, 0)), effects_seed_(drawn(seed, 1)) {
    const auto all = static_cast<uint64_t>(rows);
    const uint64_t ads = all / 8;
    const uint64_t pages = all / 64;
    const uint64_t users = all - ads - pages;
    fields_ = {Field{"users", 0, users}, Field{"ads", users, ads}, Field{"pages", users + ads, pages}};
  }

  const std::array<Field, 3>& fields() const { return fields_; }

  // What a row adds to the log-odds: near a normal distribution, as sums of four uniform numbers are.
  double row_effect(int64_t row) const {
    const uint64_t word = drawn(effects_seed_, static_cast<uint64_t>(row));
    const uint64_t sum = (word & 0xFFFF) + (word >> 16 & 0xFFFF) + (word >> 32 & 0xFFFF) + (word >> 48);
    return (static_cast<double>(sum) / 65536 - 2) * (kRowEffect * std::sqrt(3.0));
  }

  double log_odds(const int64_t* ids, const float* features) const {
    double of_rows = 0;
    for (size_t i = 0; i < fields_.size(); ++i) of_rows += row_effect(ids[i]);
    double of_features = 0;
    for (size_t i = 0; i < kFeatureEffects.size(); ++i) of_features += features[i] * kFeatureEffects[i];
    return kBias + of_rows + of_features;
  }

  // Of impressions with ids [n, 3] and features [n, 4].
  torch::Tensor log_odds(const torch::Tensor& ids, const torch::Tensor& features) const {
    const int64_t n = ids.size(0);
    auto all = torch::empty({n}, torch::kDouble);
    for (int64_t i = 0; i < n; ++i) {
      all.data_ptr<double>()[i] =
          log_odds(ids.const_data_ptr<int64_t>() + 3 * i, features.const_data_ptr<float>() + kFeatures * i);
    }
    return all;
  }

  // Writes the impression of this number: 3 ids, and 4 features in -1..1. Returns whether it is clicked on.
  bool impression(uint64_t number, int64_t* ids, float* features) const {
    uint64_t draw = number * (fields_.size() + kFeatureEffects.size() + 1);
    for (size_t i = 0; i < fields_.size(); ++i) {
      ids[i] = static_cast<int64_t>(fields_[i].row_of(drawn(impressions_seed_, draw++)));
    }
    for (size_t i = 0; i < kFeatureEffects.size(); ++i) {
      features[i] = static_cast<float>(drawn(impressions_seed_, draw++) >> 40) / float{1 << 23} - 1;
    }
    const auto uniform = static_cast<double>(drawn(impressions_seed_, draw) >> 11) / static_cast<double>(1ULL << 53);
    return uniform < 1 / (1 + std::exp(-log_odds(ids, features)));
  }

 private:
  uint64_t impressions_seed_;
  uint64_t effects_seed_;
  std::array<Field, 3> fields_{};
};

// Those of a world with the numbers `first`, `first` + 1, ...
class Impressions : public torch::data::datasets::BatchDataset<Impressions, Sample, torch::ArrayRef<size_t>> {
 public:
  Impressions(const World& world, int64_t first, int64_t size) : world_(world), first_(first), size_(size) {}

  Sample get_batch(torch::ArrayRef<size_t> indices) override {
    const auto n = static_cast<int64_t>(indices.size());
    auto ids = torch::empty({n, static_cast<int64_t>(world_.fields().size())}, torch::kInt64);
    auto features = torch::empty({n, kFeatures});
    auto clicks = torch::empty({n});
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t number = static_cast<uint64_t>(first_) + indices[static_cast<size_t>(i)];
      clicks.data_ptr<float>()[i] = world_.impression(number, ids.data_ptr<int64_t>() + i * ids.size(1),
                                                      features.data_ptr<float>() + i * kFeatures)
                                        ? 1
                                        : 0;
    }
    return {{ids, features}, clicks};
  }
  std::optional<size_t> size() const override { return static_cast<size_t>(size_); }

 private:
  World world_;
  int64_t first_;
  int64_t size_;
};

// A vector for each row, summed over an impression's and read, with its features, by one linear layer.
struct ClickModel : torch::nn::Module {
  ClickModel(int64_t rows, int64_t dim, uint64_t seed)
      : table(register_module(
            "table", muster::ShardedEmbedding(rows, dim,
                                              muster::ShardedEmbeddingOptions{
                                                  .mode = muster::Reduction::sum, .scale = 0.01, .seed = seed}))),
        read(register_module("read", torch::nn::Linear(dim + kFeatures, 1))) {}

  // Log-odds of a click.
  torch::Tensor forward(const torch::data::Example<>& shown) {
    return read(torch::cat({table(shown.data), shown.target}, 1)).squeeze(1);
  }
  torch::Tensor effects(const torch::Tensor& rows) {
    return table(rows.unsqueeze(1)).mv(read->weight[0].slice(0, 0, table->dim()));
  }

  muster::ShardedEmbedding table;
  torch::nn::Linear read;
};

// How good log-odds of clicks are, from the sums that `of` gives and that add up over sets of impressions.
struct Score {
  static constexpr int64_t kBins = 4096;  // of probabilities, to count the AUC by

  Score() = default;
  explicit Score(const torch::Tensor& sums) {
    const auto counts = sums.slice(0, 0, -1).view({2, kBins});
    const auto others = counts[0];
    const auto clicked = counts[1];
    const double seen = counts.sum().item<double>();
    const double clicks = clicked.sum().item<double>();
    log_loss = sums[-1].item<double>() / seen;
    auc = (clicked * (others.cumsum(0) - others / 2)).sum().item<double>() / (clicks * (seen - clicks));
    rate = clicks / seen;
  }

  // float64 [2 * kBins + 1]: by bin, impressions that are not clicked on, then those that are; the loss.
  static torch::Tensor of(const torch::Tensor& log_odds, const torch::Tensor& clicks) {
    const auto exact = log_odds.to(torch::kDouble);
    const auto bin = (exact.sigmoid() * kBins).to(torch::kInt64).clamp_max(kBins - 1);
    const auto counts = torch::bincount(bin + kBins * clicks.to(torch::kInt64), {}, 2 * kBins);
    const auto loss =
        torch::binary_cross_entropy_with_logits(exact, clicks.to(torch::kDouble), {}, {}, torch::Reduction::Sum);
    return torch::cat({counts.to(torch::kDouble), loss.view(1)});
  }

  double log_loss = 0;  // the mean over impressions
  double auc = 0;       // the chance that of two impressions the one that is clicked on has the greater log-odds
  double rate = 0;      // of clicks
};

// The log loss of the best constant guess, for clicks at this rate.
double entropy(double rate) { return -rate * std::log(rate) - (1 - rate) * std::log(1 - rate); }

// Of all parameters: each value's bits mixed with its place, and added up.
uint64_t digest(const ClickModel& model) {
  uint64_t total = 0;
  uint64_t place = 0;
  for (const auto& parameter : {model.table->whole_weight(), model.read->weight, model.read->bias}) {
    const auto values = parameter.detach().contiguous();
    for (int64_t i = 0; i < values.numel(); ++i) {
      total += mixed(drawn(0, place++) ^ std::bit_cast<uint32_t>(values.const_data_ptr<float>()[i]));
    }
  }
  return total;
}

std::unique_ptr<muster::Strategy> make_strategy(const Arguments& arguments) {
  if (arguments.parameter_server) {
    return std::make_unique<muster::ParameterServerStrategy>(muster::Cluster::from_env(), arguments.devices,
                                                             arguments.server_options, muster::StrategyOptions());
  }
  if (arguments.multi_worker) {
    return std::make_unique<muster::MultiWorkerMirroredStrategy>(muster::Cluster::from_env(), arguments.devices);
  }
  return std::make_unique<muster::MirroredStrategy>(
      arguments.devices.empty() ? std::vector<std::string>{"cpu:0", "cpu:1"} : arguments.devices);
}

muster::optim::Adagrad make_optimizer(ClickModel& model) {
  using Group = torch::optim::OptimizerParamGroup;
  using Options = torch::optim::AdagradOptions;
  return muster::optim::Adagrad(std::vector<Group>{
      Group(model.table->parameters(), std::make_unique<Options>(0.05)),
      Group(model.read->parameters(), std::make_unique<Options>(0.1)),
  });
}

struct Scores {
  Score learnt;
  Score truth;  // of the true log-odds
};

Scores test(muster::Strategy& strategy, const muster::Replicated<ClickModel>& model, const World& world,
            muster::Loader<Impressions>& loader) {
  auto sums = torch::zeros({2, 2 * Score::kBins + 1}, torch::kDouble);
  for (auto& batch : loader) {
    const auto measured = strategy.run(
        [&](const Sample& part) {
          return torch::stack({Score::of(model->forward(part.data), part.target),
                               Score::of(world.log_odds(part.data.data, part.data.target), part.target)});
        },
        batch);
    for (const auto& part : measured) {
      if (part.defined()) sums += part;
    }
  }
  // Once: workers that step on their own have different numbers of batches.
  sums = strategy.reduce(sums, muster::ReduceOp::sum);
  return {Score(sums[0]), Score(sums[1])};
}

// Of effects of rows that were shown often, by field.
void print_correlations(const World& world, const std::vector<torch::Tensor>& often, const torch::Tensor& learnt) {
  int64_t first = 0;
  for (size_t i = 0; i < often.size(); ++i) {
    auto true_effects = torch::empty(often[i].sizes(), torch::kDouble);
    for (int64_t row = 0; row < often[i].size(0); ++row) {
      true_effects.data_ptr<double>()[row] = world.row_effect(often[i].const_data_ptr<int64_t>()[row]);
    }
    const auto learnt_effects = learnt.slice(0, first, first + often[i].size(0)).to(torch::kDouble);
    const double near = torch::corrcoef(torch::stack({learnt_effects, true_effects}))[0][1].item<double>();
    std::printf("%s: correlation with true effects %.3f (%lld shown %lld times or more)\n", world.fields()[i].name,
                near, static_cast<long long>(often[i].size(0)), static_cast<long long>(kOften));
    first += often[i].size(0);
  }
}

void print_features(const ClickModel& model) {
  std::printf("features: effects");
  for (int64_t i = 0; i < kFeatures; ++i) {
    std::printf(" %.2f", model.read->weight[0][model.table->dim() + i].item<double>());
  }
  std::printf(" (true");
  for (double effect : kFeatureEffects) std::printf(" %g", effect);
  std::printf(")\n");
}

void run(const Arguments& arguments) {
  torch::manual_seed(arguments.seed);
  const auto strategy = make_strategy(arguments);
  const World world(arguments.rows, arguments.seed);
  const auto model = strategy->prepare([&] { return ClickModel(arguments.rows, arguments.dim, arguments.seed); });
  auto optimizer = make_optimizer(model.module());
  strategy->prepare(optimizer);

  const int64_t shown = arguments.epochs * arguments.impressions;
  const auto prepared_loader = [&](int64_t first, int64_t size) {
    return strategy->prepare_loader(Impressions(world, first, size),
                                    {.batch_size = arguments.batch_size, .workers = 1});
  };
  std::vector<muster::Loader<Impressions>> loaders;
  for (int64_t epoch = 0; epoch < arguments.epochs; ++epoch) {
    loaders.push_back(prepared_loader(epoch * arguments.impressions, arguments.impressions));
  }
  auto test_loader = prepared_loader(shown, arguments.impressions / 10);

  const auto train_step = [&](const Sample& part) {
    return torch::binary_cross_entropy_with_logits(model->forward(part.data), part.target);
  };
  Scores scores;
  std::chrono::duration<double> training{};
  for (size_t epoch = 0; epoch < loaders.size(); ++epoch) {
    const auto started = std::chrono::steady_clock::now();
    for (auto& batch : loaders[epoch]) {
      strategy->step(train_step, batch);
      if (strategy->stopping()) return;
    }
    training += std::chrono::steady_clock::now() - started;
    scores = test(*strategy, model, world, test_loader);
    if (strategy->is_chief()) {
      std::printf("epoch %zu: log loss %.4f, AUC %.4f\n", epoch + 1, scores.learnt.log_loss, scores.learnt.auc);
    }
  }

  const auto& [learnt, truth] = scores;
  const double constant = entropy(truth.rate);
  const double known = (constant - learnt.log_loss) / (constant - truth.log_loss);
  std::vector<torch::Tensor> often;
  for (const auto& field : world.fields()) often.push_back(field.often(shown));
  const auto effects =
      strategy->run([&](const torch::Tensor& rows) { return model->effects(rows); }, torch::cat(often));
  if (strategy->is_chief()) {
    std::printf("trained in %.1f s on %d replicas of %d process(es)\n", training.count(), strategy->num_replicas(),
                strategy->num_workers());
    std::printf("table: %lld rows of %lld, %lld impressions\n", static_cast<long long>(arguments.rows),
                static_cast<long long>(arguments.dim), static_cast<long long>(shown));
    std::printf("parameters: %016llx\n", static_cast<unsigned long long>(digest(model.module())));
    print_correlations(world, often, torch::cat(effects.parts()));
    print_features(model.module());
    std::printf("log loss: %.4f (a constant guess %.4f, the true log-odds %.4f)\n", learnt.log_loss, constant,
                truth.log_loss);
    std::printf("AUC: %.4f (a constant guess 0.5, the true log-odds %.4f)\n", learnt.auc, truth.auc);
    std::printf("of what can be known: %.3f\n", known);
  }
  strategy->close();
  if (known < arguments.least) {
    std::ostringstream message;
    message << "it learnt less than " << arguments.least << " of what can be known; give it more impressions";
    throw std::runtime_error(message.str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(parse(argc, argv));
    return 0;
  } catch (const std::invalid_argument& error) {
    std::cerr << "click_through: " << error.what() << '\n' << kUsage;
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "click_through: " << error.what() << '\n';
    return 1;
  }
}
