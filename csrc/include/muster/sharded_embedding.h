// An embedding whose gradients are rows.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any_value.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>

#include "muster/row_placement.h"
#include "muster/step.h"

namespace muster {

/// What rows hold at first: see ShardedEmbeddingOptions.
enum class RowInit : uint8_t { normal, uniform };

/// A value.
struct ShardedEmbeddingOptions {
  std::optional<Reduction> mode = {};  ///< of bags; empty: one row an id
  RowInit init = RowInit::normal;     ///< normal: of mean 0 and standard deviation `scale`; uniform: in (-scale, scale)
  double scale = 1;                   ///< of `init`
  std::optional<uint64_t> seed = {};  ///< a row's first values follow from (seed, row) alone; empty: drawn from torch
  bool on_servers = false;            ///< `weight` takes no memory here: for ParameterServerStrategy alone
  RowPlacement placement = RowPlacement::modulo;  ///< of rows, under ParameterServerStrategy
  bool row_wise_adagrad = false;                  ///< one accumulator a row; see below
};

/// torch::nn::Embedding, or with a mode torch::nn::EmbeddingBag, with sparse gradients: only the rows that a step used
/// are summed over replicas, and a flat optimizer steps only those. Its optimizer and learning rate are those of the
/// parameter group that holds `weight`, which may be written before `prepare`. Rows are fp32. Thread-safe where
/// torch::nn::Embedding is.
///
/// With `row_wise_adagrad` the optimizer, a flat Adagrad without weight decay, keeps one accumulator a row, to which it
/// adds the mean of the row's squared gradients (FBGEMM's EXACT_ROWWISE_ADAGRAD): a `dim`-th of the state. Its `sum`
/// has the shape [num_embeddings, 1]; one of the weight's shape is taken over by each row's mean. On the CPU.
///
/// Under ParameterServerStrategy rows are divided over the servers from the first step on: the module pulls those that
/// its ids name, each once, and in the step pushes their gradients. `weight` is then a stub of NaN without memory,
/// save() fetches all rows, and close() brings them back, but for `on_servers`; forward belongs to the thread that
/// steps, and in a step to each replica's. Rows that were never used take no memory on servers. What moves every row at
/// every step (momentum and, but for Adam and AdamW, weight decay) is refused there.
class ShardedEmbeddingImpl : public torch::nn::Cloneable<ShardedEmbeddingImpl> {
 public:
  /// Throws InvalidArgument unless both sizes are positive and `scale` is finite and not negative.
  ShardedEmbeddingImpl(int64_t num_embeddings, int64_t dim, const ShardedEmbeddingOptions& options = {});

  /// Gives `weight` its first values again.
  void reset() override;
  /// As of torch::nn::Module.
  void pretty_print(std::ostream& stream) const override;
  /// As of torch::nn::Module, with all rows where they are on servers; with `on_servers` the copy has none, and its
  /// forward() throws InvalidArgument until a strategy has prepared it.
  std::shared_ptr<torch::nn::Module> clone(const std::optional<torch::Device>& device = std::nullopt) const override;
  /// As of torch::nn::Module, with all rows where they are on servers.
  void save(torch::serialize::OutputArchive& archive) const override;

  /// Without a mode: ids of any shape, int64 or int32, to the shape with `dim` behind it. With one: ids [bags, ids a
  /// bag], or [ids] with `offsets` [bags], where each bag begins, to [bags, dim]; an empty bag is 0.
  /// `per_sample_weights`, of the ids' shape, multiply rows of a sum. Throws InvalidArgument for an id outside [0,
  /// num_embeddings), which on CUDA waits for the ids, and for offsets or weights without a mode; otherwise what torch
  /// throws.
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& offsets = {}, const at::Tensor& per_sample_weights = {});

  /// `weight`, or a copy of all rows where they are on servers.
  at::Tensor whole_weight() const;

  /// Rows.
  int64_t num_embeddings() const noexcept { return num_embeddings_; }
  /// Elements of a row.
  int64_t dim() const noexcept { return dim_; }
  const ShardedEmbeddingOptions& options() const noexcept { return options_; }  ///< with the seed that was drawn

  at::Tensor weight;  ///< [num_embeddings, dim]

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())}, {2, torch::nn::AnyValue(at::Tensor())})

 private:
  int64_t num_embeddings_;
  int64_t dim_;
  ShardedEmbeddingOptions options_;
};

TORCH_MODULE(ShardedEmbedding);

}  // namespace muster
