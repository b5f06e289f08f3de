#include "gradient/arrivals.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <utility>

#include "muster/error.h"

namespace muster {

struct GradientArrivals::Noted {
  explicit Noted(std::function<void()> first) : first(std::move(first)) {}

  void note() {
    has_come.store(true);
    if (announces.load(std::memory_order_relaxed) && announces.exchange(false)) first();
  }

  const std::function<void()> first;
  std::atomic<bool> has_come{false};
  std::atomic<bool> announces{false};
};

// Removes itself from the accumulator, which it keeps alive: another one would not have it.
struct GradientArrivals::Hook {
  Hook(const at::Tensor& parameter, const std::shared_ptr<Noted>& noted)
      : accumulator(torch::autograd::impl::grad_accumulator(parameter)) {
    if (!accumulator) throw InvalidArgument("a parameter that requires no gradient gets none");
    key = accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [noted](const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>&) {
          noted->note();
          return outputs;
        }));
  }
  ~Hook() { accumulator->del_post_hook(key); }
  Hook(const Hook&) = delete;
  Hook& operator=(const Hook&) = delete;

  decltype(torch::autograd::impl::grad_accumulator(at::Tensor())) accumulator;
  uintptr_t key = 0;
};

GradientArrivals::GradientArrivals(const std::vector<at::Tensor>& parameters, std::function<void()> first)
    : noted_(std::make_shared<Noted>(std::move(first))) {
  hooks_.reserve(parameters.size());
  for (const auto& parameter : parameters) hooks_.push_back(std::make_unique<Hook>(parameter, noted_));
}

GradientArrivals::~GradientArrivals() = default;

void GradientArrivals::announce(bool next) noexcept { noted_->announces.store(next); }

bool GradientArrivals::take() noexcept { return noted_->has_come.exchange(false); }

}  // namespace muster
