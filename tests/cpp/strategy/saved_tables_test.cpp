// Checkpoints under ParameterServerStrategy, and rows that servers alone hold in them.
#include <ATen/ops/arange.h>
#include <ATen/ops/sin.h>
#include <torch/nn/modules/linear.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/snapshot.h"
#include "cpp/catch.h"
#include "muster/error.h"
#include "muster/mirrored.h"
#include "muster/optim.h"
#include "muster/parameter_server.h"
#include "muster/sharded_embedding.h"
#include "support/folder.h"

using namespace muster;
using namespace muster::testing;

namespace {

using Values = std::vector<at::Tensor>;
enum class Rows : uint8_t { dense, on_servers };

constexpr int64_t kRows = 60;
constexpr int64_t kDim = 4;

struct SavedClicks : torch::nn::Module {
  SavedClicks(Rows rows, bool is_row_wise)
      : table(register_module("table", ShardedEmbedding(kRows, kDim,
                                                        ShardedEmbeddingOptions{.mode = Reduction::sum,
                                                                                .scale = 0.3,
                                                                                .seed = 4,
                                                                                .on_servers = rows == Rows::on_servers,
                                                                                .row_wise_adagrad = is_row_wise}))),
        read(register_module("read", torch::nn::Linear(kDim, 1))) {
    const torch::NoGradGuard no_grad;
    read->weight.copy_(at::sin(at::arange(kDim) * 0.9).view({1, kDim}));
    read->bias.fill_(0.1);
  }
  torch::Tensor forward(const torch::Tensor& ids) { return read(table(ids)); }
  ShardedEmbedding table;
  torch::nn::Linear read;
};

std::unique_ptr<torch::optim::Optimizer> optimizer_of(const std::string& name, std::vector<at::Tensor> parameters) {
  if (name == "SGD") return std::make_unique<optim::SGD>(std::move(parameters), torch::optim::SGDOptions(0.5));
  if (name == "Adam") {
    return std::make_unique<optim::Adam>(std::move(parameters), torch::optim::AdamOptions(0.05).amsgrad(true));
  }
  return std::make_unique<optim::Adagrad>(std::move(parameters), torch::optim::AdagradOptions(0.05));
}

struct Job {
  std::unique_ptr<Strategy> strategy;
  std::string optimizer = "Adam";
  Rows rows = Rows::dense;
};

Job mirrored(const std::string& optimizer) {
  return {std::make_unique<MirroredStrategy>(std::vector<std::string>{"cpu"}), optimizer};
}

Job on_servers(const std::string& optimizer, Rows rows) {
  return {std::make_unique<ParameterServerStrategy>(Cluster{}), optimizer, rows};
}

// Goes on from the newest checkpoint in `from`, where there is a folder, until `steps`; saves to `to`.
Values train(const Job& job, int64_t steps, const std::filesystem::path& from, const std::filesystem::path& to) {
  auto& strategy = *job.strategy;
  auto net = strategy.prepare([&] { return SavedClicks(job.rows, job.optimizer == "row-wise"); });
  auto optimizer = optimizer_of(job.optimizer, net->parameters());
  strategy.prepare(*optimizer);
  if (!from.empty()) REQUIRE(strategy.load(from));
  while (strategy.steps() < steps) {
    const auto ids = (at::arange(8) * (3 + strategy.steps())).remainder(20).view({4, 2});
    strategy.step([&](const at::Tensor& x) { return net->forward(x).square().mean(); }, ids);
  }
  if (!to.empty()) strategy.save(to);
  Values values{net->table->whole_weight().clone()};
  for (const auto& parameter : net->read->parameters()) values.push_back(parameter.detach().clone());
  return values;
}

void check_same_values(const Values& ours, const Values& theirs) {
  REQUIRE(ours.size() == theirs.size());
  for (size_t i = 0; i < ours.size(); ++i) CHECK(ours[i].equal(theirs[i]));
}

}  // namespace

TEST_CASE("rows on servers go on from a checkpoint, as rows and as a dense weight", "[saving][server]") {
  const std::string optimizer = GENERATE("SGD", "Adam", "Adagrad", "row-wise");
  const Folder folder;
  const auto expected = train(mirrored(optimizer), 6, {}, folder.path / "mirrored");
  train(on_servers(optimizer, Rows::on_servers), 3, {}, folder.path / "rows");
  train(mirrored(optimizer), 3, {}, folder.path / "dense");
  for (const char* const saved : {"rows", "dense"}) {
    check_same_values(train(on_servers(optimizer, Rows::on_servers), 6, folder.path / saved, {}), expected);
    check_same_values(train(on_servers(optimizer, Rows::dense), 6, folder.path / saved, {}), expected);
    check_same_values(train(mirrored(optimizer), 6, folder.path / saved, {}), expected);
  }
  const auto snapshot = checkpoint::read_newest_snapshot(folder.path / "rows");
  REQUIRE(snapshot);
  CHECK(snapshot->tensors.at("tables/0/rows").numel() < 21);  // the rows that were used
}

TEST_CASE("rows that were loaded and not stepped yet are saved again", "[saving][server]") {
  const Folder folder;
  train(on_servers("Adam", Rows::on_servers), 3, {}, folder.path / "first");
  {
    const auto job = on_servers("Adam", Rows::on_servers);
    auto net = job.strategy->prepare([&] { return SavedClicks(job.rows, false); });
    auto optimizer = optimizer_of(job.optimizer, net->parameters());
    job.strategy->prepare(*optimizer);
    REQUIRE(job.strategy->load(folder.path / "first"));
    job.strategy->save(folder.path / "second");
  }
  const auto first = checkpoint::read_newest_snapshot(folder.path / "first");
  const auto second = checkpoint::read_newest_snapshot(folder.path / "second");
  for (const char* const name :
       {"rows", "values", "step", "state/exp_avg", "state/exp_avg_sq", "state/max_exp_avg_sq"}) {
    const auto key = std::string("tables/0/") + name;
    CHECK(first->tensors.at(key).equal(second->tensors.at(key)));
  }
}

TEST_CASE("a copy of a module has the rows that its embedding has on servers", "[strategy][server]") {
  struct Clicks : torch::nn::Cloneable<Clicks> {
    explicit Clicks(bool on_servers) : on_servers_(on_servers) { Clicks::reset(); }
    void reset() override {
      const ShardedEmbeddingOptions options{.mode = Reduction::sum, .seed = 4, .on_servers = on_servers_};
      table = register_module("table", ShardedEmbedding(kRows, kDim, options));
    }
    ShardedEmbedding table{nullptr};

   private:
    bool on_servers_;
  };
  const bool on_servers = GENERATE(false, true);
  ParameterServerStrategy strategy(Cluster{}, {"cpu", "cpu"}, {}, {});
  const auto net = std::make_shared<Clicks>(on_servers);
  auto model = strategy.prepare(net);
  optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.5));
  strategy.prepare(optimizer);
  const auto ids = at::arange(8).view({4, 2});
  strategy.step([&](const at::Tensor& x) { return model->table->forward(x).square().mean(); }, ids);
  net->eval();
  const auto copy = std::dynamic_pointer_cast<Clicks>(net->clone());
  REQUIRE(copy);
  CHECK(!copy->table->is_training());
  CHECK(copy->table->weight.requires_grad());
  CHECK(copy->table->weight.sizes() == at::IntArrayRef({kRows, kDim}));
  if (on_servers) {
    CHECK(copy->table->weight.storage().nbytes() == sizeof(float));
    CHECK_THROWS_WITH(copy->table->forward(ids), ContainsSubstring("this copy of it is not connected to them"));
  } else {
    CHECK(copy->table->weight.equal(net->table->whole_weight()));
    CHECK(copy->table->forward(ids).equal(net->table->forward(ids)));
  }
}

TEST_CASE("a table of another size is refused by name", "[saving][server]") {
  struct Narrow : torch::nn::Module {
    Narrow()
        : table(register_module(
              "table",
              ShardedEmbedding(kRows - 1, kDim, ShardedEmbeddingOptions{.mode = Reduction::sum, .on_servers = true}))),
          read(register_module("read", torch::nn::Linear(kDim, 1))) {}
    ShardedEmbedding table;
    torch::nn::Linear read;
  };
  const Folder folder;
  train(on_servers("SGD", Rows::on_servers), 1, {}, folder.path);
  ParameterServerStrategy strategy(Cluster{});
  auto net = strategy.prepare([] { return Narrow(); });
  optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.5));
  strategy.prepare(optimizer);
  CHECK_THROWS_WITH(strategy.load(folder.path), ContainsSubstring("'table.weight' has shape [59, 4]"));
}

TEST_CASE("a module that could not be prepared belongs to no strategy", "[saving]") {
  MirroredStrategy mirrored({"cpu"});
  const auto build = [](Rows rows) { return std::make_shared<SavedClicks>(rows, /*is_row_wise=*/false); };
  const auto left = build(Rows::on_servers);
  CHECK_THROWS_WITH(mirrored.prepare(left), ContainsSubstring("were left to parameter servers"));
  const auto whole = mirrored.prepare(build(Rows::dense));
  CHECK(mirrored.explain().find("1.read.weight") == std::string::npos);
  MirroredStrategy other({"cpu"});
  CHECK_THROWS_WITH(other.prepare(left), ContainsSubstring("were left to parameter servers"));
}
