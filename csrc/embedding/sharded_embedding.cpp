#include "muster/sharded_embedding.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>
#include <torch/nn/functional/embedding.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <cmath>
#include <limits>
#include <string>

#include "embedding/row_initialiser.h"
#include "embedding/row_source.h"
#include "muster/error.h"

namespace muster {

namespace {

namespace functional = torch::nn::functional;

void check_ids(const at::Tensor& ids, int64_t num_embeddings) {
  if (ids.scalar_type() != at::kLong && ids.scalar_type() != at::kInt) {
    throw InvalidArgument(std::string("ids are int64 or int32, not ") + c10::toString(ids.scalar_type()));
  }
  if (ids.numel() == 0) return;
  const auto [least, greatest] = at::aminmax(ids);
  for (const auto& id : {least, greatest}) {
    const auto value = id.item<int64_t>();
    if (value >= 0 && value < num_embeddings) continue;
    throw InvalidArgument("id " + std::to_string(value) + " is not in [0, " + std::to_string(num_embeddings) +
                          "): the embedding has so many rows. Map ids to rows first, by their remainder, say");
  }
}

uint64_t draw_seed() {
  return static_cast<uint64_t>(at::randint(std::numeric_limits<int64_t>::max(), {1}, at::kLong).item<int64_t>());
}

}  // namespace

EmbeddingRows rows_of(const ShardedEmbeddingOptions& options) {
  const auto kind = options.init == RowInit::normal ? RowInitialiser::Kind::normal : RowInitialiser::Kind::uniform;
  return {{kind, options.scale, options.seed.value_or(0)}, options.placement, options.row_wise_adagrad};
}

ShardedEmbeddingImpl::ShardedEmbeddingImpl(int64_t num_embeddings, int64_t dim, const ShardedEmbeddingOptions& options)
    : num_embeddings_(num_embeddings), dim_(dim), options_(options) {
  if (num_embeddings < 1 || dim < 1) {
    throw InvalidArgument("an embedding of " + std::to_string(num_embeddings) + " rows of " + std::to_string(dim) +
                          " values: both must be positive");
  }
  if (!(options.scale >= 0) || !std::isfinite(options.scale)) {
    throw InvalidArgument("scale=" + std::to_string(options.scale) + " must be finite and not negative");
  }
  if (!options_.seed) options_.seed = draw_seed();
  reset();
}

void ShardedEmbeddingImpl::reset() {
  const at::NoGradGuard no_grad;
  if (options_.on_servers) {
    weight = register_parameter("weight", make_row_stub(num_embeddings_, dim_));
    return;
  }
  auto values = at::empty({num_embeddings_, dim_}, at::kFloat);
  rows_of(options_).initialiser.fill_rows(values);
  weight = register_parameter("weight", values);
}

// torch's clone copies a stub's values, which are NaN and would take the table's memory.
std::shared_ptr<torch::nn::Module> ShardedEmbeddingImpl::clone(const std::optional<torch::Device>& device) const {
  if (!is_row_stub(weight)) return Cloneable::clone(device);
  auto options = options_;
  options.on_servers = true;
  auto copy = std::make_shared<ShardedEmbeddingImpl>(num_embeddings_, dim_, options);
  copy->options_ = options_;
  if (!options_.on_servers) copy->weight.set_data(device ? whole_weight().to(*device) : whole_weight());
  copy->weight.set_requires_grad(weight.requires_grad());
  copy->train(is_training());
  return copy;
}

void ShardedEmbeddingImpl::save(torch::serialize::OutputArchive& archive) const {
  archive.write("weight", whole_weight());
}

at::Tensor ShardedEmbeddingImpl::whole_weight() const { return whole_rows(weight); }

void ShardedEmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "muster::ShardedEmbedding(num_embeddings=" << num_embeddings_ << ", dim=" << dim_;
  if (options_.mode) stream << ", mode=" << (*options_.mode == Reduction::sum ? "sum" : "mean");
  stream << ")";
}

at::Tensor ShardedEmbeddingImpl::forward(const at::Tensor& ids, const at::Tensor& offsets,
                                         const at::Tensor& per_sample_weights) {
  check_ids(ids, num_embeddings_);
  const auto pulled = pull_rows(weight, ids);
  const auto& rows = pulled ? pulled->rows : weight;
  const auto& places = pulled ? pulled->ids : ids;
  if (!options_.mode) {
    if (offsets.defined() || per_sample_weights.defined()) {
      throw InvalidArgument("offsets and per_sample_weights are for bags; set mode to Reduction::sum or ::mean");
    }
    return functional::embedding(places, rows, functional::EmbeddingFuncOptions().sparse(true));
  }
  auto options =
      functional::EmbeddingBagFuncOptions().sparse(true).offsets(offsets).per_sample_weights(per_sample_weights);
  if (*options_.mode == Reduction::sum) {
    options.mode(torch::kSum);
  } else {
    options.mode(torch::kMean);
  }
  return functional::embedding_bag(places, rows, options);
}

}  // namespace muster
