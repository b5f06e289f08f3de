// close() at any moment, calls of two threads at once, and what replicas may use of one another.
#include <ATen/ops/ones.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <future>
#include <thread>
#include <vector>

#include "cpp/catch.h"
#include "muster/mirrored.h"

using namespace muster;

namespace {

std::vector<std::string> devices(int n) { return std::vector<std::string>(static_cast<size_t>(n), "cpu"); }

at::Tensor rows(int64_t n) { return at::ones({n, 3}); }

}  // namespace

TEST_CASE("close() of another thread waits for the step", "[strategy]") {
  const int replicas = GENERATE(1, 2);
  MirroredStrategy strategy(devices(replicas));
  auto model = strategy.prepare([] { return torch::nn::LinearImpl(3, 1); });
  std::promise<void> began;
  std::promise<void> may_end;
  const auto end = may_end.get_future().share();
  std::once_flag once;
  std::thread closer([&] {
    began.get_future().wait();
    may_end.set_value();
    strategy.close();
  });
  const auto result = strategy.step(
      [&](const at::Tensor& x) {
        std::call_once(once, [&] { began.set_value(); });
        end.wait();
        return model->forward(x).mean();
      },
      rows(4));
  closer.join();
  CHECK(result.stepped);
  CHECK_THROWS_WITH(strategy.step([&](const at::Tensor& x) { return model->forward(x).mean(); }, rows(4)),
                    ContainsSubstring("closed"));
}

TEST_CASE("close() in a step function is refused", "[strategy]") {
  const int replicas = GENERATE(1, 2);
  MirroredStrategy strategy(devices(replicas));
  auto model = strategy.prepare([] { return torch::nn::LinearImpl(3, 1); });
  CHECK_THROWS_WITH(strategy.step(
                        [&](const at::Tensor& x) {
                          strategy.close();
                          return model->forward(x).mean();
                        },
                        rows(4)),
                    ContainsSubstring("close() was called inside"));
  CHECK(strategy.step([&](const at::Tensor& x) { return model->forward(x).mean(); }, rows(4)).stepped);
}

TEST_CASE("two threads that step at once are told so", "[strategy]") {
  MirroredStrategy strategy(devices(2));
  auto model = strategy.prepare([] { return torch::nn::LinearImpl(3, 1); });
  std::promise<void> began;
  std::promise<void> may_end;
  const auto end = may_end.get_future().share();
  std::once_flag once;
  std::thread first([&] {
    strategy.step(
        [&](const at::Tensor& x) {
          std::call_once(once, [&] { began.set_value(); });
          end.wait();
          return model->forward(x).mean();
        },
        rows(4));
  });
  began.get_future().wait();
  CHECK_THROWS_WITH(strategy.step([&](const at::Tensor& x) { return model->forward(x).mean(); }, rows(4)),
                    ContainsSubstring("another thread"));
  may_end.set_value();
  first.join();
  CHECK(strategy.step([&](const at::Tensor& x) { return model->forward(x).mean(); }, rows(4)).stepped);
}

TEST_CASE("a gradient for another replica's parameter is an error, always", "[strategy]") {
  MirroredStrategy strategy(devices(2));
  auto model = strategy.prepare([] { return torch::nn::LinearImpl(3, 1); });
  torch::optim::SGD optimizer(model.module().parameters(), 0.1);
  strategy.prepare(optimizer);
  auto& first = *model;  // replica 0's, outside a step
  for (int i = 0; i < 20; ++i) {
    CHECK_THROWS_WITH(strategy.step([&](const at::Tensor& x) { return first.forward(x).mean(); }, rows(4)),
                      ContainsSubstring("got a gradient in the step of replica 1"));
  }
  CHECK(strategy.step([&](const at::Tensor& x) { return model->forward(x).mean(); }, rows(4)).stepped);
}
