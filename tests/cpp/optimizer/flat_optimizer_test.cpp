#include "optimizer/flat_optimizer.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/lbfgs.h>
#include <torch/serialize.h>

#include <memory>
#include <optional>
#include <sstream>

#include "cpp/catch.h"
#include "muster/error.h"
#include "muster/mirrored.h"
#include "muster/optim.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::testing;

namespace {

std::vector<at::Tensor> parameters() {
  std::vector<at::Tensor> list;
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{5, 7}, {1}, {0}, {4, 1025}, {}}) {
    const auto values = at::arange(at::empty(sizes).numel()).view(sizes) * 0.01 - 0.1;
    list.push_back(values.clone().requires_grad_());
  }
  return list;
}

// Gradients that change with the step, from the same numbers for everyone.
void write_gradients(const std::vector<at::Tensor>& list, int step) {
  for (const auto& parameter : list) {
    const auto n = parameter.numel();
    parameter.mutable_grad() = ((at::arange(n) * 0.37 + step).sin() * 0.1).view(parameter.sizes());
  }
}

template <class Ours, class Theirs>
void compare(Ours& ours, Theirs& theirs, const std::vector<at::Tensor>& own, const std::vector<at::Tensor>& other) {
  for (int step = 0; step < 100; ++step) {
    write_gradients(own, step);
    write_gradients(other, step);
    ours.step();
    theirs.step();
  }
  for (size_t p = 0; p < own.size(); ++p) CHECK(own[p].allclose(other[p], 1e-5, 1e-6));
}

const kernels::StepScalars kOne{.divisor = 1, .clip = 1, .norm = 0, .unit = 1, .finite = 1, .dropped = 0};

FlatGroups adam() {
  kernels::AdamGroup group{};
  group.lr = 0.01;
  group.beta1 = 0.9;
  group.beta2 = 0.999;
  group.eps = 1e-8;
  group.weight_decay = 0.01;
  group.decoupled = true;
  return std::vector<kernels::AdamGroup>{group};
}

std::vector<FlatParameter> flat_parameters(const std::vector<at::Tensor>& list) {
  std::vector<FlatParameter> flat;
  for (const auto& tensor : list) flat.push_back({"p" + std::to_string(flat.size()), tensor, 0});
  return flat;
}

std::vector<FlatGradient> gradients_of(const std::vector<at::Tensor>& list, int step) {
  write_gradients(list, step);
  std::vector<FlatGradient> gradients;
  for (const auto& parameter : list) gradients.push_back({parameter.grad(), {}});
  return gradients;
}

}  // namespace

TEST_CASE("flat optimizers step as torch::optim's", "[optimizer]") {
  const auto own = parameters();
  const auto other = parameters();
  SECTION("AdamW") {
    const auto options = torch::optim::AdamWOptions(0.003).weight_decay(0.1).amsgrad(true);
    optim::AdamW ours(own, options);
    torch::optim::AdamW theirs(other, options);
    compare(ours, theirs, own, other);
  }
  SECTION("Adam") {
    const auto options = torch::optim::AdamOptions(0.003).weight_decay(0.1);
    optim::Adam ours(own, options);
    torch::optim::Adam theirs(other, options);
    compare(ours, theirs, own, other);
  }
  SECTION("SGD") {
    const auto options = torch::optim::SGDOptions(0.01).momentum(0.9).nesterov(true).weight_decay(0.01);
    optim::SGD ours(own, options);
    torch::optim::SGD theirs(other, options);
    compare(ours, theirs, own, other);
  }
  SECTION("Adagrad") {
    const auto options = torch::optim::AdagradOptions(0.05).lr_decay(0.01).initial_accumulator_value(0.1);
    optim::Adagrad ours(own, options);
    torch::optim::Adagrad theirs(other, options);
    compare(ours, theirs, own, other);
  }
}

TEST_CASE("the state of a flat optimizer is torch::optim's, through an archive too", "[optimizer]") {
  const auto own = parameters();
  const auto other = parameters();
  optim::AdamW ours(own, 0.01);
  for (int step = 0; step < 3; ++step) {
    write_gradients(own, step);
    ours.step();
  }
  auto& state = static_cast<torch::optim::AdamWParamState&>(*ours.state().at(own[0].unsafeGetTensorImpl()));
  CHECK(state.step() == 3);
  CHECK(state.exp_avg().sizes() == own[0].sizes());

  std::stringstream archive;
  torch::save(ours, archive);
  optim::AdamW loaded(other, 0.01);
  torch::load(loaded, archive);
  {
    const at::NoGradGuard no_grad;
    for (size_t p = 0; p < own.size(); ++p) other[p].copy_(own[p]);
  }
  write_gradients(own, 3);
  write_gradients(other, 3);
  ours.step();
  loaded.step();
  for (size_t p = 0; p < own.size(); ++p) CHECK(own[p].equal(other[p]));
}

TEST_CASE("what user code changes in state() acts as torch::optim's", "[optimizer]") {
  using State = torch::optim::AdamWParamState;
  using Edit = std::function<void(torch::optim::Optimizer&, c10::TensorImpl*)>;
  const auto state_of = [](torch::optim::Optimizer& optimizer, c10::TensorImpl* p) -> State& {
    return static_cast<State&>(*optimizer.state().at(p));
  };
  const std::vector<Edit> edits = {
      [](auto& optimizer, auto*) { optimizer.state().clear(); },
      [](auto& optimizer, auto* p) { optimizer.state().erase(p); },
      [&](auto& optimizer, auto* p) { state_of(optimizer, p).exp_avg(at::full({5, 7}, 0.25)); },
      [&](auto& optimizer, auto* p) { state_of(optimizer, p).exp_avg_sq().fill_(0.5); },
      [&](auto& optimizer, auto* p) { state_of(optimizer, p).step(0); },
  };
  const auto& edit = edits[GENERATE(size_t{0}, size_t{1}, size_t{2}, size_t{3}, size_t{4})];
  const auto own = parameters();
  const auto other = parameters();
  optim::AdamW ours(own, 0.01);
  torch::optim::AdamW theirs(other, torch::optim::AdamWOptions(0.01));
  for (int step = 0; step < 6; ++step) {
    if (step == 3) {
      edit(ours, own[0].unsafeGetTensorImpl());
      edit(theirs, other[0].unsafeGetTensorImpl());
    }
    write_gradients(own, step);
    write_gradients(other, step);
    ours.step();
    theirs.step();
  }
  for (size_t p = 0; p < own.size(); ++p) {
    CHECK(own[p].allclose(other[p], 1e-5, 1e-6));
    auto& mine = state_of(ours, own[p].unsafeGetTensorImpl());
    auto& expected = state_of(theirs, other[p].unsafeGetTensorImpl());
    CHECK(mine.step() == expected.step());
    CHECK(mine.exp_avg().allclose(expected.exp_avg(), 1e-5, 1e-6));
  }
}

TEST_CASE("an Adagrad without its state starts anew from its initial value", "[optimizer]") {
  const auto list = parameters();
  optim::Adagrad optimizer(list, torch::optim::AdagradOptions(0.05).initial_accumulator_value(0.1));
  write_gradients(list, 0);
  optimizer.step();
  optimizer.state().clear();
  optimizer.step();
  auto& state = static_cast<torch::optim::AdagradParamState&>(*optimizer.state().at(list[0].unsafeGetTensorImpl()));
  CHECK(state.step() == 1);
  CHECK(state.sum().allclose(list[0].grad().square() + 0.1));
}

TEST_CASE("a state that lacks a tensor is refused", "[optimizer]") {
  const auto list = parameters();
  optim::AdamW optimizer(list, 0.01);
  write_gradients(list, 0);
  optimizer.step();
  static_cast<torch::optim::AdamWParamState&>(*optimizer.state().at(list[0].unsafeGetTensorImpl())).exp_avg({});
  CHECK_THROWS_AS(optimizer.step(), InvalidArgument);
}

TEST_CASE("a model and its flat optimizer go to another strategy, and on without one", "[optimizer]") {
  const auto x = at::linspace(-1, 1, 24).view({8, 3});
  auto module = std::make_shared<torch::nn::LinearImpl>(3, 2);
  optim::AdamW optimizer(module->parameters(), 0.01);
  const auto count = [&] {
    return static_cast<torch::optim::AdamWParamState&>(*optimizer.state().at(module->weight.unsafeGetTensorImpl()))
        .step();
  };
  for (int round = 1; round <= 2; ++round) {
    MirroredStrategy strategy({"cpu:0", "cpu:1"});
    auto model = strategy.prepare(module);
    strategy.prepare(optimizer);
    const auto loss = [&](const at::Tensor& x) { return model->forward(x).square().mean(); };
    CHECK(strategy.step(loss, x).stepped);
    CHECK(count() == round);
    CHECK_THROWS_AS(optimizer.step(), InvalidArgument);  // the strategy has
    strategy.close();
  }
  optimizer.zero_grad();
  module->forward(x).square().mean().backward();
  const auto before = module->weight.detach().clone();
  optimizer.step();
  CHECK(count() == 3);
  CHECK_FALSE(module->weight.equal(before));
}

TEST_CASE("between steps parameters may change their memory order and their groups", "[optimizer]") {
  const bool keeps = GENERATE(false, true);
  const auto x = at::linspace(-1, 1, 32).view({8, 4});
  const auto change = [](torch::nn::LinearImpl& module, torch::optim::Optimizer& optimizer, int step) {
    if (step == 2) module.weight.set_data(module.weight.detach().t().contiguous().t());
    if (step != 4) return;
    auto& groups = optimizer.param_groups();
    groups.front().params().pop_back();
    groups.emplace_back(std::vector<at::Tensor>{module.bias}, std::make_unique<torch::optim::SGDOptions>(0.0));
  };
  torch::nn::LinearImpl theirs(4, 4);
  auto ours = std::make_shared<torch::nn::LinearImpl>(4, 4);
  ours->weight.set_data(theirs.weight.detach().clone());
  ours->bias.set_data(theirs.bias.detach().clone());
  const torch::optim::SGDOptions options = torch::optim::SGDOptions(0.1).momentum(0.9);
  torch::optim::SGD reference(theirs.parameters(), options);
  optim::SGD optimizer(ours->parameters(), options);
  StrategyOptions kept;
  kept.keep_gradients = keeps;
  MirroredStrategy strategy({"cpu:0", "cpu:1"}, kept);
  auto model = strategy.prepare(ours);
  strategy.prepare(optimizer);
  for (int step = 0; step < 7; ++step) {
    change(theirs, reference, step);
    change(model.module(), optimizer, step);
    reference.zero_grad();
    theirs.forward(x).square().mean().backward();
    reference.step();
    CHECK(strategy.step([&](const at::Tensor& part) { return model->forward(part).square().mean(); }, x).stepped);
    CHECK(model.module().weight.allclose(theirs.weight, 1e-5, 1e-6));
    CHECK(model.module().bias.allclose(theirs.bias, 1e-5, 1e-6));
  }
}

TEST_CASE("an optimizer that evaluates the loss itself is refused", "[optimizer]") {
  MirroredStrategy strategy;
  auto model = strategy.prepare([] { return torch::nn::Linear(3, 2); });
  torch::optim::LBFGS optimizer(model->parameters());
  CHECK_THROWS_AS(strategy.prepare(optimizer), InvalidArgument);
}

TEST_CASE("a strategy steps a flat optimizer from the sums", "[optimizer]") {
  const auto train = [](torch::optim::Optimizer* optimizer, Strategy& strategy,
                        Replicated<torch::nn::LinearImpl>& model) {
    strategy.prepare(*optimizer);
    for (int step = 0; step < 5; ++step) {
      const auto result = strategy.step([&](const at::Tensor& x) { return model->forward(x).square().mean(); },
                                        at::linspace(-1, 1, 24).view({8, 3}));
      CHECK(result.stepped);
      CHECK(result.grad_norm.item<double>() > 0);
    }
    CHECK(!model.module().weight.grad().defined());
  };
  MirroredStrategy strategy({"cpu:0", "cpu:1"}, {.clip_norm = 0.1});
  auto model = strategy.prepare([] {
    auto linear = std::make_shared<torch::nn::LinearImpl>(3, 2);
    const at::NoGradGuard no_grad;
    linear->weight.fill_(0.5);
    linear->bias.zero_();
    return linear;
  });
  optim::AdamW optimizer(model->parameters(), 0.01);
  train(&optimizer, strategy, model);
  auto& state =
      static_cast<torch::optim::AdamWParamState&>(*optimizer.state().at(model.module().weight.unsafeGetTensorImpl()));
  CHECK(state.step() == 5);
}

TEST_CASE("a step that is not finite or dropped changes nothing", "[optimizer]") {
  for (const bool dropped : {false, true}) {
    const auto list = parameters();
    const auto before = parameters();
    FlatOptimizer flat(flat_parameters(list), adam());
    auto scalars = kOne;
    (dropped ? scalars.dropped : scalars.finite) = dropped ? 1 : 0;
    flat.step(gradients_of(list, 0), adam(), &scalars, false);
    for (size_t p = 0; p < list.size(); ++p) CHECK(list[p].equal(before[p]));
  }
}

TEST_CASE("shards of the state give the bits of the whole", "[optimizer]") {
  const auto whole = parameters();
  FlatOptimizer reference(flat_parameters(whole), adam());
  for (int step = 0; step < 4; ++step) reference.step(gradients_of(whole, step), adam(), &kOne, false);
  for (const int ranks : {2, 3, 4}) {
    const auto groups = comm::make_local(ranks, Seconds(60));
    CHECK(run_threads(ranks, [&](int rank) {
            auto& group = *groups[static_cast<size_t>(rank)];
            const auto list = parameters();
            FlatOptimizer flat(flat_parameters(list), adam(), {rank, ranks});
            for (int step = 0; step < 4; ++step) {
              flat.step(gradients_of(list, step), adam(), &kOne, false);
              flat.gather_parameters(group);
            }
            for (size_t p = 0; p < list.size(); ++p) {
              MUSTER_CHECK(list[p].equal(whole[p]));
              MUSTER_CHECK(flat.state().whole(p, 1, group).equal(reference.state().tensor(p, 1)));
            }
          }) == "");
  }
}

namespace {

// A process of a divided step, whose parameters lie in memory of its own as those of the others do in theirs.
struct Process {
  explicit Process(bool low) : home(at::zeros({1 << 16}, at::kByte)) {
    int64_t offset = 0;
    for (const auto& values : parameters()) {
      const auto dtype = low ? at::kBFloat16 : at::kFloat;
      const auto place = at::from_blob(home.mutable_data_ptr<uint8_t>() + offset, values.sizes(), dtype);
      place.copy_(values.detach());
      list.push_back(place.requires_grad_());
      offset += (static_cast<int64_t>(place.nbytes()) + 63) / 64 * 64;
    }
    flat.emplace(flat_parameters(list), adam());
  }
  at::Tensor home;
  std::vector<at::Tensor> list;
  std::optional<FlatOptimizer> flat;
};

std::vector<Run> half_of(const std::vector<at::Tensor>& list, int half) {
  std::vector<Run> runs;
  for (const auto& parameter : list)
    runs.push_back(owned_runs(parameter.numel(), 2, kernels::kTile)[static_cast<size_t>(half)]);
  return runs;
}

}  // namespace

TEST_CASE("a step that processes divide gives the bits of the whole on each", "[optimizer]") {
  const bool low = GENERATE(false, true);
  Process reference(low);
  std::vector<std::unique_ptr<Process>> processes;
  for (int r = 0; r < 2; ++r) processes.push_back(std::make_unique<Process>(low));
  at::Tensor common;  // memory that the process which asks first got
  for (int step = 0; step < 5; ++step) {
    INFO("step " << step);
    // One more state, and values of another process's own, go to common memory as well.
    auto groups = adam();
    std::get<0>(groups).front().amsgrad = step >= 2;
    if (step == 3) {
      const auto moment = reference.flat->state().tensor(3, 0) * 2;
      reference.flat->state().set(3, 0, moment);
      for (auto& process : processes) process->flat->state().set(3, 0, moment);
    }
    if (step == 4) {
      for (auto* process : {&reference, processes[0].get(), processes[1].get()}) {
        write_gradients(process->list, 9);
        process->flat->step_from_grad(groups);
      }
    }
    reference.flat->step(gradients_of(reference.list, step), groups, &kOne, false);
    for (int r = 0; r < 2; ++r) {
      auto& own = *processes[static_cast<size_t>(r)];
      const auto& other = *processes[static_cast<size_t>(1 - r)];
      DividedStep divided;
      divided.shares.push_back({gradients_of(own.list, step), half_of(own.list, r)});
      divided.displacements = {other.home.const_data_ptr<uint8_t>() - own.home.const_data_ptr<uint8_t>()};
      const int64_t bytes = own.flat->common_bytes(divided, groups);
      if (r == 0) common = at::zeros({bytes}, at::kByte);
      REQUIRE(common.numel() == bytes);
      if (bytes > 0) own.flat->share_state(divided, groups, common);
      CHECK(own.flat->common_bytes(divided, groups) == 0);
      auto plan = own.flat->begin(divided, groups, &kOne, false);
      plan.run(0);
      plan.finish();
    }
    for (const auto& process : processes) {
      for (size_t p = 0; p < reference.list.size(); ++p) {
        CHECK(process->list[p].equal(reference.list[p]));
        for (size_t s = 0; s < (step >= 2 ? 3U : 2U); ++s) {
          CHECK(process->flat->state().tensor(p, s).equal(reference.flat->state().tensor(p, s)));
        }
        CHECK(process->flat->state().entry(p).step.equal(reference.flat->state().entry(p).step));
        if (low) CHECK(process->flat->state().entry(p).master.equal(reference.flat->state().entry(p).master));
      }
    }
  }
}

TEST_CASE("a step that replicas of one process divide gives the bits of the whole", "[optimizer]") {
  const auto whole = parameters();
  const auto shared = parameters();
  FlatOptimizer reference(flat_parameters(whole), adam());
  FlatOptimizer flat(flat_parameters(shared), adam());
  for (int step = 0; step < 3; ++step) {
    reference.step(gradients_of(whole, step), adam(), &kOne, false);
    DividedStep divided;
    for (int r = 0; r < 2; ++r) divided.shares.push_back({gradients_of(shared, step), half_of(shared, r)});
    const auto groups = adam();
    auto plan = flat.begin(divided, groups, &kOne, false);
    CHECK(run_threads(2, [&](int rank) { plan.run(static_cast<size_t>(rank)); }) == "");
    plan.finish();
    for (size_t p = 0; p < whole.size(); ++p) CHECK(shared[p].equal(whole[p]));
  }
}

TEST_CASE("a step of which no share ran changes nothing", "[optimizer]") {
  const auto list = parameters();
  FlatOptimizer flat(flat_parameters(list), adam());
  const auto groups = adam();
  DividedStep divided;
  divided.shares.push_back({gradients_of(list, 0), half_of(list, 0)});
  {
    const auto plan = flat.begin(divided, groups, &kOne, false);
    CHECK(flat.state().step_counts().front() == 1);
  }
  CHECK(flat.state().step_counts().front() == 0);
  {
    auto plan = flat.begin(divided, groups, &kOne, false);
    plan.run(0);
  }
  CHECK(flat.state().step_counts().front() == 1);
}

TEST_CASE("state follows a parameter that changes its memory order or dtype", "[optimizer]") {
  const auto list = std::vector<at::Tensor>{at::arange(24).view({1, 2, 3, 4}).to(at::kFloat).requires_grad_()};
  const auto other = std::vector<at::Tensor>{list[0].detach().clone().requires_grad_()};
  FlatOptimizer moved(flat_parameters(list), adam());
  FlatOptimizer fixed(flat_parameters(other), adam());
  for (int step = 0; step < 3; ++step) {
    if (step == 1) list[0].set_data(list[0].detach().contiguous(at::MemoryFormat::ChannelsLast));
    write_gradients(list, step);
    write_gradients(other, step);
    moved.step_from_grad(adam());
    fixed.step_from_grad(adam());
    CHECK(list[0].equal(other[0]));
    CHECK(moved.state().tensor(0, 0).equal(fixed.state().tensor(0, 0)));
  }
  list[0].set_data(list[0].detach().to(at::kDouble));
  write_gradients(list, 3);
  list[0].mutable_grad() = list[0].grad().to(at::kDouble);
  moved.step_from_grad(adam());
  CHECK(moved.state().tensor(0, 0).scalar_type() == at::kDouble);
}

TEST_CASE("what was written into a parameter of low precision counts, and the master copy for the rest",
          "[optimizer]") {
  const auto dtype = GENERATE(at::kBFloat16, at::kHalf);
  const bool has_gaps = GENERATE(false, true);
  const auto values = at::linspace(-1, 1, 600).to(dtype);
  const auto low = (has_gaps ? at::zeros({600, 2}, dtype).select(1, 0) : at::zeros({600}, dtype)).copy_(values);
  const std::vector<at::Tensor> list{low.detach().requires_grad_()};
  const std::vector<at::Tensor> full{values.to(at::kFloat).requires_grad_()};
  FlatOptimizer ours(flat_parameters(list), adam());
  FlatOptimizer theirs(flat_parameters(full), adam());
  const auto step = [&](int number) {
    write_gradients(list, number);
    full[0].mutable_grad() = list[0].grad().to(at::kFloat).contiguous();
    ours.step_from_grad(adam());
    theirs.step_from_grad(adam());
    CHECK(list[0].equal(full[0].to(dtype)));
  };
  step(0);
  step(1);
  const auto version = list[0]._version();
  const auto written = list[0].variable_data().narrow(0, 100, 50);  // as `.data`: its version is its own
  written.mul_(-3);
  full[0].variable_data().narrow(0, 100, 50).copy_(written);
  REQUIRE(list[0]._version() == version);
  CHECK(ours.state().entry(0).current(StateEntry::kMaster).equal(full[0]));
  step(2);
  // Other values, and back: bits that only the master copy has stay.
  const auto before = list[0].detach().clone();
  const at::NoGradGuard no_grad;
  list[0].fill_(0.5);
  list[0].copy_(before);
  step(3);
}

TEST_CASE("what a flat optimizer cannot step is refused", "[optimizer]") {
  CHECK_THROWS_AS(FlatOptimizer(flat_parameters({at::zeros({2}, at::kLong)}), adam()), InvalidArgument);
  const auto list = parameters();
  FlatOptimizer flat(flat_parameters(list), adam());
  CHECK_THROWS_AS(flat.step(gradients_of(list, 0), std::vector<kernels::SgdGroup>(1), &kOne, false), InvalidArgument);
  CHECK_THROWS_AS(flat.step(gradients_of(list, 0), std::vector<kernels::AdamGroup>(), &kOne, false), InvalidArgument);
  CHECK_THROWS_AS(flat.state().set(0, 0, at::zeros({3})), InvalidArgument);
  FlatOptimizer shard(flat_parameters(list), adam(), {0, 2});
  CHECK_THROWS_AS(shard.step_from_grad(adam()), InvalidArgument);
}

TEST_CASE("master copies go through an archive, and along to another strategy", "[optimizer]") {
  using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<at::Tensor>&)>;
  const auto make =
      GENERATE(Make([](const auto& of) { return std::make_unique<optim::AdamW>(of, 1e-3); }),
               Make([](const auto& of) { return std::make_unique<optim::SGD>(of, torch::optim::SGDOptions(1e-3)); }),
               Make([](const auto& of) {
                 return std::make_unique<optim::SGD>(of, torch::optim::SGDOptions(1e-3).momentum(0.9));
               }));
  const auto low = [] {
    std::vector<at::Tensor> tensors;
    for (const auto& parameter : parameters()) {
      tensors.push_back(parameter.detach().to(at::kBFloat16).requires_grad_());
    }
    return tensors;
  };
  const auto write = [](const std::vector<at::Tensor>& list, int step) {
    write_gradients(list, step);
    for (const auto& parameter : list) parameter.mutable_grad() = parameter.grad().to(at::kBFloat16);
  };
  const auto own = low();
  const auto other = low();
  const auto ours = make(own);
  for (int step = 0; step < 5; ++step) {
    write(own, step);
    ours->step();
  }
  std::stringstream archive;
  torch::save(*ours, archive);
  const auto loaded = make(other);
  torch::load(*loaded, archive);
  std::stringstream again;  // before they are used
  torch::save(*loaded, again);
  torch::load(*loaded, again);
  {
    const at::NoGradGuard no_grad;
    for (size_t p = 0; p < own.size(); ++p) other[p].copy_(own[p]);
  }
  for (int step = 5; step < 10; ++step) {
    write(own, step);
    write(other, step);
    ours->step();
    loaded->step();
  }
  for (size_t p = 0; p < own.size(); ++p) CHECK(own[p].equal(other[p]));
  // Another set of parameters makes the state anew.
  for (auto* const each : {ours.get(), loaded.get()}) {
    each->add_param_group(torch::optim::OptimizerParamGroup({at::ones({2}).requires_grad_()}));
    CHECK_NOTHROW(each->step());
  }
}
