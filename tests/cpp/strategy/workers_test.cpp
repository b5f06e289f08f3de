// The C++ layer over several workers: each is a thread with a strategy of its own, over one local group.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <torch/data/datasets/base.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <string>
#include <tuple>

#include "cpp/catch.h"
#include "cpp/strategy/workers.h"
#include "muster/mirrored.h"
#include "muster/multi_worker.h"
#include "muster/optim.h"
#include "muster/parameters_after.h"
#include "muster/strategy.h"
#include "optimizer/flat_state.h"
#include "strategy/collectives.h"
#include "strategy/strategy_core.h"
#include "support/local_process_group.h"
#include "support/run_ranks.h"
#include "support/topology.h"

using namespace muster;
using namespace muster::testing;

namespace {

constexpr comm::Milliseconds kPeersTimeout = Seconds(60);

using Body = std::function<void(Strategy& strategy)>;

// Runs body at each of `n` workers with one replica each.
std::string run_workers(int n, const Body& body, const StrategyOptions& options = {},
                        comm::Milliseconds timeout = kPeersTimeout) {
  const auto gradients = comm::make_local(n, timeout);
  const auto step = comm::make_local(n, timeout);
  const auto workers = comm::make_local(n, timeout);
  return run_threads(n, [&](int rank) {
    const auto topology = one_replica_each(rank, n);
    const auto r = static_cast<size_t>(rank);
    Groups groups;
    groups.gradients = {gradients[r]};
    groups.step = {step[r]};
    groups.workers = workers[r];
    OneWorker worker(std::make_shared<StrategyCore>(topology, groups, options, std::make_shared<ReplicaPool>(1, 1), 7));
    body(worker);
  });
}

// Batches of the indices themselves; counts what it is asked for.
struct Indices : torch::data::datasets::BatchDataset<Indices, at::Tensor, c10::ArrayRef<size_t>> {
  Indices(size_t n, std::vector<int64_t>* read) : n(n), read(read) {}
  at::Tensor get_batch(c10::ArrayRef<size_t> indices) override {
    std::vector<int64_t> values(indices.begin(), indices.end());
    read->insert(read->end(), values.begin(), values.end());
    return at::tensor(values);
  }
  std::optional<size_t> size() const override { return n; }

  size_t n;
  std::vector<int64_t>* read;
};

using Pass = std::vector<std::vector<int64_t>>;

template <class Loader>
Pass pass_over(Loader& loader) {
  Pass pass;
  for (auto& batch : loader) {
    const auto values = batch[0].contiguous();
    pass.emplace_back(values.template const_data_ptr<int64_t>(),
                      values.template const_data_ptr<int64_t>() + values.numel());
    MUSTER_CHECK(batch.rows()[0] == values.numel());
  }
  return pass;
}

}  // namespace

TEST_CASE("each worker reads only its part", "[workers]") {
  CHECK(run_workers(2, [](Strategy& strategy) {
          std::vector<int64_t> read;
          auto loader = strategy.prepare_loader(Indices(14, &read), {.batch_size = 8});
          const Pass expected[] = {{{0, 1, 2, 3}, {8, 9, 10}}, {{4, 5, 6, 7}, {11, 12, 13}}};
          const auto rank = static_cast<size_t>(strategy.rank());
          MUSTER_CHECK(pass_over(loader) == expected[rank]);
          MUSTER_CHECK(read == (rank == 0 ? std::vector<int64_t>{0, 1, 2, 3, 8, 9, 10}
                                          : std::vector<int64_t>{4, 5, 6, 7, 11, 12, 13}));

          // An empty part is modelled on the first sample of its own batch.
          read.clear();
          auto uneven = strategy.prepare_loader(Indices(9, &read), {.batch_size = 8});
          MUSTER_CHECK(pass_over(uneven).back().size() == (rank == 0 ? 1 : 0));
          MUSTER_CHECK(read.back() == 8);
        }) == "");
}

TEST_CASE("a worker whose own data ends goes on with empty parts", "[workers]") {
  CHECK(run_workers(
            2,
            [](Strategy& strategy) {
              std::vector<int64_t> read;
              const size_t samples = strategy.is_chief() ? 2 : 5;
              auto loader = strategy.prepare_loader(Indices(samples, &read), {.batch_size = 2, .sharded = true});
              MUSTER_CHECK(loader.size() == (strategy.is_chief() ? 1 : 3));
              for (int epoch = 0; epoch < 2; ++epoch) {
                const Pass expected = strategy.is_chief() ? Pass{{0, 1}, {}, {}} : Pass{{0, 1}, {2, 3}, {4}};
                MUSTER_CHECK(pass_over(loader) == expected);
              }

              auto model = strategy.prepare([] { return torch::nn::Linear(1, 1); });
              std::vector<bool> stepped;
              for (auto& batch : loader) {
                stepped.push_back(
                    strategy
                        .step([&](const at::Tensor& x) { return model->forward(x.to(at::kFloat).unsqueeze(1)).mean(); },
                              batch)
                        .stepped);
              }
              MUSTER_CHECK((stepped == std::vector<bool>{false, true, true}));
            },
            {.accumulate = 2}) == "");
}

TEST_CASE("a worker without data has empty parts while others have some", "[workers]") {
  CHECK(run_workers(2, [](Strategy& strategy) {
          std::vector<int64_t> read;
          auto loader =
              strategy.prepare_loader(Indices(strategy.is_chief() ? 3 : 0, &read), {.batch_size = 2, .sharded = true});
          std::vector<int64_t> rows;
          for (auto& batch : loader) rows.push_back(batch.rows()[0]);
          MUSTER_CHECK((rows == (strategy.is_chief() ? std::vector<int64_t>{2, 1} : std::vector<int64_t>{0, 0})));
        }) == "");
}

TEST_CASE("workers get the chief's parameters, optimizer state and learning rate", "[workers]") {
  CHECK(run_workers(3, [](Strategy& strategy) {
          auto module = std::make_shared<torch::nn::LinearImpl>(2, 2);
          torch::optim::Adam adam(module->parameters(), strategy.is_chief() ? 0.25 : 0.5);
          torch::optim::SGD sgd(module->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
          {
            const at::NoGradGuard no_grad;
            module->weight.fill_(strategy.rank());
          }
          module->weight.mutable_grad() = at::full({2, 2}, 3.0);
          if (strategy.is_chief()) {
            adam.step();
            adam.step();
          }
          sgd.step();
          auto model = strategy.prepare(module);
          strategy.prepare(adam);
          strategy.prepare(sgd);
          MUSTER_CHECK(strategy.gather(module->weight.detach().flatten()).view({3, 4}).std(0).max().item<double>() ==
                       0);
          MUSTER_CHECK(adam.param_groups()[0].options().get_lr() == 0.25);
          auto& state =
              static_cast<torch::optim::AdamParamState&>(*adam.state().at(module->weight.unsafeGetTensorImpl()));
          MUSTER_CHECK(state.step() == 2);
          MUSTER_CHECK(state.exp_avg().allclose(at::full({2, 2}, 3 * (1 - 0.9 * 0.9))));
          MUSTER_CHECK(!state.max_exp_avg_sq().defined());
          MUSTER_CHECK(adam.state().size() == 1);
          auto& momentum =
              static_cast<torch::optim::SGDParamState&>(*sgd.state().at(module->weight.unsafeGetTensorImpl()));
          MUSTER_CHECK(momentum.momentum_buffer().equal(at::full({2, 2}, 3.0)));
        }) == "");
}

TEST_CASE("workers get the chief's fp32 master copies with its optimizer's state", "[workers]") {
  CHECK(run_workers(2, [](Strategy& strategy) {
          auto module = std::make_shared<torch::nn::LinearImpl>(2, 2);
          module->to(at::kBFloat16);
          optim::AdamW adam(module->parameters(), torch::optim::AdamWOptions(1e-4));
          for (int step = 0; step < 3 && strategy.is_chief(); ++step) {
            for (auto& parameter : module->parameters()) parameter.mutable_grad() = at::ones_like(parameter);
            adam.step();
          }
          auto model = strategy.prepare(module);
          strategy.prepare(adam);
          const auto masters = muster::detail::masters_in(adam);
          MUSTER_CHECK(masters.size() == 2 && masters[0].defined() && masters[1].defined());
          const auto of_all = strategy.gather(masters[0].detach().flatten()).view({2, 4});
          MUSTER_CHECK(of_all[0].equal(of_all[1]));
          MUSTER_CHECK(!of_all.to(at::kBFloat16).to(at::kFloat).equal(of_all));
        }) == "");
}

TEST_CASE("optimizers that differ over workers are refused on all", "[workers]") {
  CHECK(run_workers(2, [](Strategy& strategy) {
          auto model = strategy.prepare([] { return torch::nn::Linear(2, 2); });
          auto parameters = model->parameters();
          if (!strategy.is_chief()) parameters.pop_back();
          torch::optim::SGD optimizer(parameters, 0.1);
          const auto message = message_of<LayoutMismatch>([&] { strategy.prepare(optimizer); });
          MUSTER_CHECK(contains(message, "rank 1"));
        }) == "");
}

TEST_CASE("optimizers over parameters in another order are refused on all, by name", "[workers]") {
  CHECK(run_workers(2, [](Strategy& strategy) {
          auto model =
              strategy.prepare([] { return torch::nn::Sequential(torch::nn::Linear(2, 2), torch::nn::Linear(2, 2)); });
          auto parameters = model->parameters();
          if (!strategy.is_chief()) std::swap(parameters[0], parameters[2]);
          torch::optim::SGD optimizer(parameters, 0.1);
          const auto message = message_of<LayoutMismatch>([&] { strategy.prepare(optimizer); });
          MUSTER_CHECK(contains(message, "parameter 0 is '0.weight'"));
          MUSTER_CHECK(contains(message, "'1.weight'"));
          MUSTER_CHECK(contains(message, "on rank 1"));
        }) == "");
}

TEST_CASE("results are collected over workers", "[workers]") {
  CHECK(run_workers(2, [](Strategy& strategy) {
          const auto rows = strategy.rank() + 1;
          const auto sums = strategy.run([](const at::Tensor& x) { return x.mean(); },
                                         at::full({rows}, static_cast<double>(strategy.rank()), at::kDouble));
          MUSTER_CHECK(std::abs(strategy.reduce(sums).item<double>() - 2.0 / 3) < 1e-15);
          MUSTER_CHECK(strategy.gather(sums).equal(at::arange(2, at::kDouble)));
          const auto empty = strategy.run([](const at::Tensor& x) { return x.sum(); }, at::ones({strategy.rank()}));
          MUSTER_CHECK(strategy.reduce(empty, ReduceOp::sum).item<double>() == 1);
          MUSTER_CHECK(strategy.broadcast(at::scalar_tensor(strategy.rank(), at::kDouble), 1).item<double>() == 1);
          strategy.barrier();
        }) == "");
}

TEST_CASE("workers that would step otherwise than one another say so and change nothing", "[workers]") {
  CHECK(run_workers(2, [](Strategy& strategy) {
          auto model = strategy.prepare([] { return torch::nn::Linear(40, 40); });
          muster::optim::AdamW optimizer(model->parameters(), 0.1);
          strategy.prepare(optimizer);
          const auto step = [&] {
            return strategy.step([&](const at::Tensor& x) { return model->forward(x).square().mean(); },
                                 at::ones({2, 40}));
          };
          step();
          const auto weight = model->weight.detach().clone();
          if (strategy.rank() == 1) optimizer.param_groups()[0].options().set_lr(0.5);
          const auto rates = message_of<LayoutMismatch>(step);
          MUSTER_CHECK(contains(rates, "rank 0 has lr 0.1") && contains(rates, "rank 1 has lr 0.5 in group 0"));
          MUSTER_CHECK(model->weight.equal(weight));
          optimizer.param_groups()[0].options().set_lr(0.1);
          const auto write = [&] {
            const at::NoGradGuard no_grad;
            model->bias.fill_(7);
          };
          if (strategy.rank() == 0) write();
          MUSTER_CHECK(contains(message_of<LayoutMismatch>(step), "parameter 'bias' was written"));
          write();
          MUSTER_CHECK(step().stepped);
        }) == "");
}

TEST_CASE("workers compare the learning rates of torch's own optimizers", "[workers]") {
  CHECK(run_workers(2, [](Strategy& strategy) {
          auto model = strategy.prepare([] { return torch::nn::Linear(4, 4); });
          torch::optim::RMSprop optimizer(model->parameters(), 0.25);
          strategy.prepare(optimizer);
          const auto step = [&] {
            return strategy.step([&](const at::Tensor& x) { return model->forward(x).square().mean(); },
                                 at::ones({2, 4}));
          };
          step();
          const auto weight = model->weight.detach().clone();
          if (strategy.rank() == 1) optimizer.param_groups()[0].options().set_lr(0.5);
          const auto rates = message_of<LayoutMismatch>(step);
          MUSTER_CHECK(contains(rates, "rank 0 has lr 0.25 in group 0, rank 1 has lr 0.5 in group 0"));
          MUSTER_CHECK(model->weight.equal(weight));
          optimizer.param_groups()[0].options().set_lr(0.25);
          MUSTER_CHECK(step().stepped);
        }) == "");
}

TEST_CASE("after an error of communication a worker's parameters are known to be whole", "[workers]") {
  CHECK(run_workers(
            2,
            [](Strategy& strategy) {
              auto model = strategy.prepare([] { return torch::nn::Linear(40, 40); });
              muster::optim::AdamW optimizer(model->parameters(), 0.1);
              strategy.prepare(optimizer);
              const auto step = [&] {
                strategy.step([&](const at::Tensor& x) { return model->forward(x).square().mean(); },
                              at::ones({2, 40}));
              };
              step();
              if (strategy.rank() == 1) return;
              const auto weight = model->weight.detach().clone();
              try {
                step();
                MUSTER_CHECK(false);
              } catch (const Timeout& error) {
                MUSTER_CHECK(parameters_after(error) == Parameters::whole);
                MUSTER_CHECK(contains(error.what(), "are whole"));
              }
              MUSTER_CHECK(model->weight.equal(weight));
            },
            {}, Seconds(1)) == "");
}

TEST_CASE("an exception in one worker's step reaches the others and ends nothing", "[workers]") {
  CHECK(run_workers(2, [](Strategy& strategy) {
          auto model = strategy.prepare([] { return torch::nn::Linear(2, 1); });
          const auto good = [&](const at::Tensor& x) { return model->forward(x).mean(); };
          const auto bad = [&](const at::Tensor& x) {
            if (strategy.rank() == 1) throw std::length_error("too long");
            return good(x);
          };
          const auto batch = at::ones({2, 2});
          if (strategy.rank() == 1) {
            message_of<std::length_error>([&] { strategy.step(bad, batch); });
          } else {
            const auto message = message_of<RemoteError>([&] { strategy.step(bad, batch); });
            MUSTER_CHECK(contains(message, "too long"));
          }
          MUSTER_CHECK(strategy.steps() == 0);
          MUSTER_CHECK(strategy.step(good, batch).stepped);
        }) == "");
}

TEST_CASE("workers may communicate through a process group", "[workers]") {
  const auto train = [](Strategy& strategy, const at::Tensor& x) {
    auto model = strategy.prepare([] {
      auto module = std::make_shared<torch::nn::LinearImpl>(3, 2);
      const at::NoGradGuard no_grad;
      module->weight.copy_(at::arange(6).view({2, 3}) * 0.1);
      module->bias.zero_();
      return module;
    });
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    strategy.prepare(optimizer);
    for (int i = 0; i < 5; ++i) {
      strategy.step([&](const at::Tensor& part) { return model->forward(part).square().mean(); }, x);
    }
    return model->weight.detach().clone();
  };
  const auto x = at::arange(12, at::kFloat).view({4, 3}) * 0.25;
  MirroredStrategy mirrored({"cpu:0", "cpu:1"}, {.threads_per_replica = 1});
  const auto expected = train(mirrored, x);

  const auto ranks = comm::make_local(2, kPeersTimeout);
  CHECK(run_threads(2, [&](int rank) {
          const Cluster cluster{.rank = rank, .num_workers = 2, .address = "127.0.0.1:1", .local_rank = rank};
          MultiWorkerMirroredStrategy strategy(cluster, {}, {.threads_per_replica = 1},
                                               make_process_group(ranks[static_cast<size_t>(rank)]));
          MUSTER_CHECK(train(strategy, x.narrow(0, 2 * rank, 2).clone()).equal(expected));
          MUSTER_CHECK(contains(strategy.explain(), "process group"));
          const Cluster other{.rank = rank, .num_workers = 3, .address = "127.0.0.1:1", .local_rank = rank};
          const auto message = message_of<InvalidArgument>([&] {
            MultiWorkerMirroredStrategy(other, {}, {}, make_process_group(ranks[static_cast<size_t>(rank)]));
          });
          MUSTER_CHECK(contains(message, "same job"));
        }) == "");
}

TEST_CASE("calls outside a step that differ between ranks are refused on both, by name", "[workers]") {
  using Call = std::function<void(Strategy&)>;
  const Call barrier = [](Strategy& strategy) { strategy.barrier(); };
  const Call sum = [](Strategy& strategy) { strategy.reduce(at::ones({2}), ReduceOp::sum); };
  const Call most = [](Strategy& strategy) { strategy.reduce(at::ones({2}), ReduceOp::max); };
  const Call gather = [](Strategy& strategy) { strategy.gather(at::ones({2})); };
  const Call sent = [](Strategy& strategy) { strategy.broadcast(at::ones({2}), 1); };
  const std::tuple<Call, Call, std::string> cases[] = {
      {barrier, sum, "rank 0 asked for barrier"},
      {sum, most, "called reduce("},
      {gather, sum, "gather()"},
      {sum, sent, "broadcast(source=1)"},
  };
  for (const auto& [first, second, words] : cases) {
    const auto ranks = comm::make_local(2, kPeersTimeout);
    CHECK(run_threads(2, [&](int rank) {
            const Cluster cluster{.rank = rank, .num_workers = 2, .address = "127.0.0.1:1", .local_rank = rank};
            MultiWorkerMirroredStrategy strategy(cluster, {}, {.threads_per_replica = 1},
                                                 make_process_group(ranks[static_cast<size_t>(rank)]));
            const auto message = message_of<LayoutMismatch>([&] { (rank == 0 ? first : second)(strategy); });
            MUSTER_CHECK(contains(message, "ranks disagree: rank "));
            MUSTER_CHECK(contains(message, words));
          }) == "");
  }
}

TEST_CASE("values that are reduced at once have the bits of each by itself", "[workers]") {
  CHECK(
      run_workers(2, [](Strategy& strategy) {
        const auto of = [&](at::IntArrayRef sizes, at::ScalarType dtype) {
          const auto numel = c10::multiply_integers(sizes);
          return at::arange(numel, at::kFloat).mul(1.37).add(strategy.rank() + 0.3).sin().mul(9).view(sizes).to(dtype);
        };
        const std::vector<at::Tensor> values{of({}, at::kFloat),     of({2}, at::kLong),       of({3, 2}, at::kFloat),
                                             of({0, 4}, at::kFloat), of({90, 90}, at::kFloat), of({5}, at::kBFloat16),
                                             of({}, at::kLong),      of({2, 2}, at::kDouble)};
        for (const auto op : {ReduceOp::sum, ReduceOp::mean, ReduceOp::max}) {
          const auto together = strategy.reduce(values, op);
          MUSTER_CHECK(together.size() == values.size());
          for (size_t i = 0; i < values.size(); ++i) {
            const auto alone = strategy.reduce(values[i], op);
            MUSTER_CHECK(together[i].sizes() == values[i].sizes());
            MUSTER_CHECK(together[i].scalar_type() == alone.scalar_type());
            MUSTER_CHECK(together[i].equal(alone));
          }
        }
      }) == "");
}

TEST_CASE("what is broadcast from a device's memory goes the same way on all workers", "[workers]") {
  const auto hosts = comm::make_local(2, Seconds(10));
  const auto problems = run_threads(2, [&](int rank) {
    const auto host = hosts[static_cast<size_t>(rank)];
    const c10::Device device(c10::kMeta);
    const auto workers = comm::make_staged(host, device, comm::make_refusing(rank, 2, "from device to device"));
    const auto mine = at::full({3}, rank == 0 ? 1 : 0);
    MUSTER_CHECK(broadcast_over_workers(*workers, {mine}, 0).front().equal(at::full({3}, 1)));
    const auto there = at::empty({3}, at::TensorOptions(device));
    const auto text = message_of<Error>([&] { broadcast_over_workers(*workers, {mine, there}, 0); });
    MUSTER_CHECK(contains(text, "from device to device"));
  });
  CAPTURE(problems);
  CHECK(problems.empty());
}
