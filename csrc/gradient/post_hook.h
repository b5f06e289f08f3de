// Hooks that run after a parameter's gradient was added to `.grad`.
#pragma once

#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <memory>
#include <utility>

#include "muster/error.h"

namespace muster {

/// What compiled autograd gets in the place of a hook: it would run backward without it. Throws InvalidArgument.
[[noreturn]] inline void refuse_compiled_autograd() {
  throw InvalidArgument(
      "compiled autograd cannot run the hooks that bring a parameter's gradient to other replicas; leave "
      "torch._dynamo.config.compiled_autograd off (torch.compile works without it)");
}

/// `hook(outputs, inputs)` as an accumulator's; see refuse_compiled_autograd().
template <class Hook>
std::unique_ptr<torch::autograd::utils::LambdaPostHook> make_post_hook(Hook hook) {
  return std::make_unique<torch::autograd::utils::LambdaPostHook>(std::move(hook),
                                                                  [](auto&) { refuse_compiled_autograd(); });
}

}  // namespace muster
