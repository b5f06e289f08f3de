// Modules that a loss depends on, and that a program forgot to prepare, or whose optimizer it forgot.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "muster/strategy.h"

namespace muster::detail {

/// Warns of them, once each: their gradients are not averaged, or dropped. Owned by the thread that prepares and steps;
/// the functions that it gives are for the replicas' threads.
class ForgottenModules {
 public:
  using Call = std::function<Loss(int local_replica)>;

  /// The optimizer was prepared.
  void note(const torch::optim::Optimizer& optimizer);

  /// `call`, or, in a set's first steps with the modules that the strategy has now, a call that looks at its losses,
  /// too. Those are compared with each other: a leaf that the losses of two parts depend on is a parameter, and no
  /// input. The call is for as long as the step runs.
  Call watching(Call call, int set, const Strategy::State& strategy);

 private:
  struct Looked {
    int parts = 0;
    std::vector<at::Tensor> unknown;  // leaves of the first part that are in no prepared module
  };

  void look(Looked& looked, const at::Tensor& loss, const Strategy::State& strategy);
  void tell_of_unprepared(const std::vector<at::Tensor>& parameters);
  void tell_of_unstepped(const std::string& names);

  std::mutex mutex_;                                    // guards what follows
  std::unordered_set<const c10::TensorImpl*> stepped_;  // by prepared optimizers; compared by address alone
  std::map<std::pair<int, size_t>, Looked> looked_;     // by set and number of modules
  bool told_of_unprepared_ = false;
  bool told_of_unstepped_ = false;
};

}  // namespace muster::detail
