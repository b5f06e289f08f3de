// What holds for every end of a window. A source that defines MUSTER_WINDOW_ENDS, the ends that it can run, and
// includes this has the suite.
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <unistd.h>

#include <cmath>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "comm/communicator.h"
#include "cpp/catch.h"
#include "device/device.h"
#include "muster/error.h"
#include "server/shard/server.h"
#include "support/topology.h"
#include "window/parameter_set.h"

namespace muster::testing {

/// The replicas work on the host and reduce among themselves.
struct HostEnd {
  static constexpr bool kStreams = false;
  static constexpr bool kServers = false;
};
/// The replicas work on streams; kernels are emulated.
struct DeviceEnd {
  static constexpr bool kStreams = true;
  static constexpr bool kServers = false;
};
/// A server of this process holds the parameter.
struct ServerEnd {
  static constexpr bool kStreams = false;
  static constexpr bool kServers = true;
};

/// A replica's part of a micro-batch: the gradient of each of the parameter's four elements, and its weight.
struct PlayedPart {
  double gradient = 1;
  double weight = 1;
  bool fails = false;
  Reduction reduction = Reduction::mean;
};
using PlayedBatch = std::vector<PlayedPart>;    // by replica
using PlayedWindow = std::vector<PlayedBatch>;  // by micro-batch

/// What a rank knows after a window.
struct Seen {
  double weight = 0;
  double loss = 0;
  double norm = 0;
  double scale = 1;
  bool dropped = false;
  bool finite = true;
  std::vector<WindowSums::Failed> failures;
  std::map<std::string, double> metrics;
  double parameter = 0;  // every element
  double buffer = 0;
};

inline constexpr double kStart = 0.5;  // of the parameter's elements
inline constexpr double kLearningRate = 0.125;

inline Seen seen_of(const WindowSums& sums) {
  Seen seen;
  seen.dropped = sums.dropped;
  seen.failures = sums.failures;
  if (sums.ends_unchanged()) return seen;
  if (!sums.on_device) {
    seen.weight = sums.weight;
    seen.loss = sums.loss;
    seen.norm = sums.grad_norm;
    seen.finite = sums.finite;
    seen.metrics = sums.metrics;
    return seen;
  }
  seen.weight = sums.on_device->weight.item<double>();
  seen.loss = sums.on_device->loss.item<double>();
  seen.norm = sums.report.grad_norm().item<double>();
  seen.finite = !sums.on_device->skipped.item<bool>();
  // NaN where no loss that weighs brought one.
  for (const auto& [name, value] : sums.on_device->metrics) {
    if (!std::isnan(value.item<double>())) seen.metrics[name] = value.item<double>();
  }
  return seen;
}

/// One worker of one replica, as a strategy drives its set.
class PlayedWorker {
 public:
  PlayedWorker(const Topology& topology, const Groups& groups, const StrategyOptions& options)
      : topology_(topology), groups_(groups), options_(options), registry_(topology_.devices) {
    parameter_ = at::full({4}, kStart, at::kFloat).requires_grad_();
    buffer_ = at::ones({1});
    registry_.add({{{{"w", parameter_}}}, {{{"seen", buffer_}}}}, *groups_.workers);
    set_ = std::make_unique<ParameterSet>(registry_, topology_, groups_, options_, this, std::vector<int>{0});
    step_groups_ = std::vector<kernels::SgdGroup>{{kLearningRate, 0, 0, 0, false, false}};
    optimizer_ = std::make_unique<FlatOptimizer>(std::vector<FlatParameter>{{"w", parameter_, 0}}, step_groups_);
    if (groups_.servers) set_->connect_servers(*optimizer_, {0}, step_groups_);
  }

  Seen play(const PlayedWindow& window) {
    for (size_t m = 0; m < window.size(); ++m) {
      const bool last = m + 1 == window.size();
      const auto& part = window[m][static_cast<size_t>(topology_.rank)];
      set_->open_micro_batch(last, /*fused=*/true);
      set_->open_window(0, part.weight);
      if (!part.fails) backward(part);
      if (const auto error = set_->end_micro_batch(0, part.fails)) std::rethrow_exception(error);
      const auto failure = part.fails ? Failure{"Slip", "lost its grip"} : Failure{};
      if (last) {
        set_->close_window(0, failure, /*stop_requested=*/false);
      } else if (failure) {
        set_->poison(0, failure);
      }
    }
    const auto sums = set_->finish_window(/*fused=*/true);
    auto seen = seen_of(sums);
    if (!sums.ends_unchanged() && sums.finite) {
      set_->step(*optimizer_, {0}, step_groups_, [](const std::function<void(int)>& work) { work(0); });
    }
    seen.scale = set_->window().loss_scale().get().scale;
    seen.parameter = parameter_[0].item<double>();
    check_equal_elements(parameter_);
    seen.buffer = buffer_.item<double>();
    return seen;
  }

 private:
  static void check_equal_elements(const at::Tensor& tensor) {
    if (!tensor.eq(tensor[0]).all().item<bool>()) throw std::logic_error("elements were stepped differently");
  }

  void backward(const PlayedPart& part) {
    Loss loss((parameter_ * part.gradient).sum());
    loss.weight = at::scalar_tensor(part.weight, at::kDouble);
    loss.metrics["gradient"] = at::scalar_tensor(part.gradient, at::kDouble);
    loss.reduction = part.reduction;
    buffer_.fill_(part.gradient);
    set_->backward(0, loss, 1);
  }

  Topology topology_;
  Groups groups_;
  StrategyOptions options_;
  ParameterRegistry registry_;
  at::Tensor parameter_;
  at::Tensor buffer_;
  std::unique_ptr<ParameterSet> set_;
  FlatGroups step_groups_;
  std::unique_ptr<FlatOptimizer> optimizer_;
};

/// Two workers play the windows one after the other; what both saw, which must be the same. Rethrows what one threw.
template <class End>
std::vector<Seen> play(const std::vector<PlayedWindow>& windows, const StrategyOptions& options = {}) {
  constexpr int kWorkers = 2;
  play_streams_on_cpu(End::kStreams);
  static int job = 0;
  const auto name = "muster-window-test-" + std::to_string(::getpid()) + "-" + std::to_string(++job);
  std::unique_ptr<server::ParameterServer> server;
  if (End::kServers) server = std::make_unique<server::ParameterServer>(server::ServerConfig{.name = name});
  const auto gradients = comm::make_local(kWorkers, comm::Milliseconds(60'000));
  const auto workers = comm::make_local(kWorkers, comm::Milliseconds(60'000));
  std::vector<std::vector<Seen>> seen(kWorkers);
  std::vector<std::exception_ptr> errors(kWorkers);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kWorkers; ++rank) {
    threads.emplace_back([&, rank] {
      const auto r = static_cast<size_t>(rank);
      try {
        Groups groups;
        groups.gradients = {End::kServers ? comm::make_single() : gradients[r]};
        groups.workers = workers[r];
        if (End::kServers) groups.servers = ServerJob{.channels = {name}, .staleness = 0, .embedded = nullptr};
        PlayedWorker worker(one_replica_each(rank, kWorkers), groups, options);
        for (const auto& window : windows) seen[r].push_back(worker.play(window));
      } catch (...) {
        errors[r] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  for (size_t w = 0; w < windows.size(); ++w) {
    const auto& [a, b] = std::tie(seen[0][w], seen[1][w]);
    CHECK(a.weight == b.weight);
    CHECK(a.norm == b.norm);
    CHECK(a.parameter == b.parameter);
    CHECK(a.metrics == b.metrics);
    CHECK(a.failures.size() == b.failures.size());
    CHECK(a.scale == b.scale);
  }
  return seen.front();
}

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace muster::testing

using namespace muster;
using namespace muster::testing;

TEMPLATE_TEST_CASE("a window's mean is weighted by what parts weigh", "[window]", MUSTER_WINDOW_ENDS) {
  const auto seen = play<TestType>({{{{1, 3}, {5, 1}}}}).front();
  CHECK(seen.weight == 4);
  CHECK(seen.norm == Approx(4));  // four elements of 2
  CHECK(seen.loss == Approx(4 * kStart * 2));
  CHECK(seen.metrics.at("gradient") == Approx(2));
  CHECK(seen.parameter == kStart - kLearningRate * 2);
}

TEMPLATE_TEST_CASE("micro-batches add up to one window, and weights may change between windows", "[window]",
                   MUSTER_WINDOW_ENDS) {
  const auto seen = play<TestType>({{{{1, 2}, {2, 2}}, {{3, 2}, {6, 2}}}, {{{8, 1000}, {0, 3000}}}});
  CHECK(seen[0].weight == 8);
  CHECK(seen[0].metrics.at("gradient") == Approx(3));
  CHECK(seen[0].parameter == kStart - kLearningRate * 3);
  CHECK(seen[1].weight == 4000);
  CHECK(seen[1].parameter == Approx(kStart - kLearningRate * (3 + 2)));
}

TEMPLATE_TEST_CASE("the norm is clipped, and told before clipping", "[window]", MUSTER_WINDOW_ENDS) {
  StrategyOptions options;
  options.clip_norm = 1;
  const auto seen = play<TestType>({{{{2, 1}, {2, 1}}}}, options).front();
  CHECK(seen.norm == Approx(4));
  CHECK(seen.parameter == Approx(kStart - kLearningRate * 0.5).epsilon(1e-5));
}

TEMPLATE_TEST_CASE("losses that are sums are not divided, nor mixed with means", "[window]", MUSTER_WINDOW_ENDS) {
  const PlayedPart one{1, 1, false, Reduction::sum};
  CHECK(play<TestType>({{{one, one}}}).front().parameter == kStart - kLearningRate * 2);
  CHECK_THROWS_AS(play<TestType>({{{one, {1, 1}}}}), InvalidArgument);
}

TEMPLATE_TEST_CASE("a window that is not finite is skipped", "[window]", MUSTER_WINDOW_ENDS) {
  const auto seen = play<TestType>({{{{1, 1}, {kInfinity, 1}}}, {{{1, 1}, {1, 1}}}});
  CHECK_FALSE(seen[0].finite);
  CHECK(seen[0].parameter == kStart);
  CHECK(seen[1].finite);
  CHECK(seen[1].parameter == kStart - kLearningRate);
}

TEMPLATE_TEST_CASE("a window in which nothing weighs is dropped", "[window]", MUSTER_WINDOW_ENDS) {
  const auto seen = play<TestType>({{{{1, 0}, {2, 0}}}, {{{1, 1}, {1, 0}}}});
  CHECK((seen[0].dropped || std::isnan(seen[0].loss)));  // on a device the weight is not read
  CHECK(seen[0].parameter == kStart);
  CHECK(seen[1].weight == 1);
  CHECK(seen[1].parameter == kStart - kLearningRate);
}

TEMPLATE_TEST_CASE("a replica's failure drops the window on all ranks, and the next one goes on", "[window]",
                   MUSTER_WINDOW_ENDS) {
  const PlayedPart failing{1, 1, true};
  const auto seen = play<TestType>({{{{1, 1}, failing}}, {{failing, {1, 1}}, {{1, 1}, {1, 1}}}, {{{1, 1}, {1, 1}}}});
  for (const size_t window : {size_t{0}, size_t{1}}) {
    REQUIRE(seen[window].failures.size() == 1);
    const auto& [rank, replica, failure] = seen[window].failures.front();
    CHECK(rank == (window == 0 ? 1 : 0));
    CHECK(replica == rank);
    CHECK(failure.type == "Slip");
    CHECK(failure.text == "lost its grip");
    CHECK(seen[window].parameter == kStart);
  }
  CHECK(seen[2].failures.empty());
  CHECK(seen[2].parameter == kStart - kLearningRate);
}

TEMPLATE_TEST_CASE("the loss scale is taken out again, grows and backs off", "[window]", MUSTER_WINDOW_ENDS) {
  StrategyOptions options;
  options.loss_scale = LossScale{.init = 8, .growth = 2, .backoff = 0.5, .interval = 1};
  const auto seen = play<TestType>({{{{1, 1}, {1, 1}}}, {{{kInfinity, 1}, {1, 1}}}, {{{1, 0}, {1, 0}}}}, options);
  CHECK(seen[0].parameter == kStart - kLearningRate);
  CHECK(seen[0].norm == Approx(2));
  CHECK(seen[0].scale == 16);
  CHECK(seen[1].scale == 8);
  CHECK(seen[2].scale == 8);
}

TEMPLATE_TEST_CASE("buffers that replicas write become their mean by weight", "[window]", MUSTER_WINDOW_ENDS) {
  CHECK(play<TestType>({{{{1, 3}, {5, 1}}}}).front().buffer == Approx(2));
}
