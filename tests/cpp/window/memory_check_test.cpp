#include "window/memory_check.h"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "cpp/catch.h"
#include "muster/mirrored.h"
#include "support/run_ranks.h"

using namespace muster;

TEST_CASE("parameters that share memory are refused by name", "[strategy]") {
  MirroredStrategy strategy({"cpu:0", "cpu:1"});
  const auto build = [] {
    torch::nn::Sequential module(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3));
    auto& first = *module->ptr<torch::nn::LinearImpl>(0);
    auto& second = *module->ptr<torch::nn::LinearImpl>(1);
    second.weight.set_data(first.weight.data());
    return module;
  };
  CHECK(muster::testing::contains(muster::testing::message_of<InvalidArgument>([&] { strategy.prepare(build); }),
                                  "parameter '0.weight' and parameter '1.weight' share memory"));
}
