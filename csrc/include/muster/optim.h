// Flat optimizers: torch::optim's, stepped in one pass over gradient, state and parameter.
#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <utility>
#include <vector>

namespace muster::detail {
struct FlatState;
struct FlatAccess;

/// In their order, without those that came before: a module that is registered under two names gives its parameters
/// twice.
std::vector<at::Tensor> each_once(const std::vector<at::Tensor>& parameters);
std::vector<torch::optim::OptimizerParamGroup> each_once(std::vector<torch::optim::OptimizerParamGroup> groups);
}  // namespace muster::detail

namespace muster::optim {

/// An optimizer of torch::optim with its constructors, options and state, so that learning rate schedulers and
/// serialisation work as with that one. A strategy steps it straight from the reduced sums: division, clipping, decay
/// and update in one pass. Low-precision parameters have an fp32 master copy. Formulas are those of torch.optim in
/// Python: the same options give the same bits in both languages.
///
/// Rows of a sparse gradient alone move (Adam, AdamW: as torch.optim.SparseAdam in Python), but with SGD's momentum or,
/// but for Adam and AdamW, weight decay. With shard_optimizer `state()` holds this worker's share. On CUDA a step waits
/// for nothing, so that the step counts in `state()` are those of the last save(). A parameter that is given twice is
/// stepped once.
template <class Base, class Options>
class Flat : public Base {
 public:
  /// Of `parameters` in one group.
  explicit Flat(const std::vector<at::Tensor>& parameters, Options defaults = Options())
      : Base(detail::each_once(parameters), std::move(defaults)) {}
  /// Of `groups`; those without options of their own have `defaults`.
  explicit Flat(const std::vector<torch::optim::OptimizerParamGroup>& groups, Options defaults = Options())
      : Base(detail::each_once(groups), std::move(defaults)) {}

  /// From `.grad`, without a strategy or after a backward by hand. A strategy's step does not call it: for a rule of
  /// your own derive from an optimizer of torch::optim.
  at::Tensor step(typename Base::LossClosure closure = nullptr) final;
  /// Base's format, with the fp32 master copies of low-precision parameters beside it: with shard_optimizer this
  /// worker's share, with parameter servers what they hold.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// From Base's format, with master copies or without: they then begin with the parameters. Throws InvalidArgument
  /// while parameter servers hold the state.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  friend struct detail::FlatAccess;
  std::shared_ptr<detail::FlatState> flat_;                            // null until the first step, and after load
  std::vector<at::Tensor> loaded_masters_;                             // by parameter, for the next flat_
  std::shared_ptr<const void> life_ = std::make_shared<const char>();  // ends with the optimizer
};

extern template class Flat<torch::optim::AdamW, torch::optim::AdamWOptions>;
extern template class Flat<torch::optim::Adam, torch::optim::AdamOptions>;
extern template class Flat<torch::optim::SGD, torch::optim::SGDOptions>;
extern template class Flat<torch::optim::Adagrad, torch::optim::AdagradOptions>;

using AdamW = Flat<torch::optim::AdamW, torch::optim::AdamWOptions>;
using Adam = Flat<torch::optim::Adam, torch::optim::AdamOptions>;
using SGD = Flat<torch::optim::SGD, torch::optim::SGDOptions>;
using Adagrad = Flat<torch::optim::Adagrad, torch::optim::AdagradOptions>;

}  // namespace muster::optim
