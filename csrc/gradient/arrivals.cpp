#include "gradient/arrivals.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <mutex>
#include <utility>

#include "gradient/post_hook.h"

namespace muster {

// What hooks write. They stay on autograd's nodes, which may be calling them while whoever watched lets go.
struct GradientArrivals::Noted {
  explicit Noted(std::function<void()> call) : first(std::move(call)) {}

  void note() {
    has_come.store(true);
    if (!announces.load(std::memory_order_relaxed) || !announces.exchange(false)) return;
    std::unique_lock lock(mutex);
    const auto call = first;
    lock.unlock();
    if (call) call();
  }

  void end() {
    announces.store(false);
    std::unique_lock lock(mutex);
    const auto last = std::exchange(first, {});
    lock.unlock();  // its end may wait for the thread that holds Python
  }

  std::atomic<bool> has_come{false};
  std::atomic<bool> announces{false};
  std::mutex mutex;
  std::function<void()> first;  // guarded by mutex; empty once nobody watches
};

struct GradientArrivals::Watched {
  at::Tensor parameter;
  // Kept alive: another one would not have the hook.
  decltype(torch::autograd::impl::grad_accumulator(at::Tensor())) accumulator;

  void hook(const std::shared_ptr<Noted>& noted) {
    auto current = torch::autograd::impl::grad_accumulator(parameter);
    current->add_post_hook(
        make_post_hook([noted](const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>&) {
          noted->note();
          return outputs;
        }));
    accumulator = std::move(current);
  }
};

GradientArrivals::GradientArrivals(std::vector<at::Tensor> parameters, std::function<void()> first)
    : noted_(std::make_shared<Noted>(std::move(first))) {
  watched_.reserve(parameters.size());
  for (auto& parameter : parameters) watched_.push_back({std::move(parameter), nullptr});
  renew();
}

GradientArrivals::~GradientArrivals() { noted_->end(); }

void GradientArrivals::renew() {
  for (auto& watched : watched_) {
    if (!watched.parameter.requires_grad()) continue;
    const auto current = torch::autograd::impl::try_get_grad_accumulator(watched.parameter);
    if (!current || current != watched.accumulator) watched.hook(noted_);
  }
}

void GradientArrivals::announce(bool next) noexcept { noted_->announces.store(next); }

bool GradientArrivals::take() noexcept { return noted_->has_come.exchange(false); }

}  // namespace muster
