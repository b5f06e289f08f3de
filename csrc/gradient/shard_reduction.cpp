#include "gradient/shard_reduction.h"

#include <utility>

#include "core/plain_memory.h"

namespace muster {

std::vector<comm::OwnedRun> runs_in_bucket(const Buckets& buckets, size_t bucket, const Shards& shards) {
  std::vector<comm::OwnedRun> runs;
  for (const int index : buckets[bucket].parameters) {
    const auto p = static_cast<size_t>(index);
    for (size_t r = 0; r < shards.size(); ++r) {
      const auto& run = shards[r][p];
      if (run.count == 0) continue;
      const int64_t begin = buckets.slot(p).offset + run.begin;
      const auto rank = static_cast<int>(r);
      // What lies between two slots is nobody's.
      if (!runs.empty() && runs.back().rank == rank) {
        runs.back().count = begin + run.count - runs.back().begin;
      } else {
        runs.push_back({rank, begin, run.count});
      }
    }
  }
  return runs;
}

std::shared_ptr<const Shards> whole_for(int rank, int size, const Buckets& buckets) {
  auto shards = std::make_shared<Shards>(static_cast<size_t>(size));
  for (auto& of_rank : *shards) of_rank.resize(buckets.parameters().size());
  for (size_t p = 0; p < buckets.parameters().size(); ++p) {
    shards->at(static_cast<size_t>(rank))[p] = {0, num_reals(buckets.parameters()[p].tensor)};
  }
  return shards;
}

ShardReduction::ShardReduction(comm::Communicator& communicator, const Buckets& buckets,
                               std::shared_ptr<const Shards> shards)
    : communicator_(communicator), buckets_(buckets), shards_(std::move(shards)) {
  for (size_t b = 0; b < buckets.size(); ++b) {
    receivers_.push_back(comm::Receivers::owners(runs_in_bucket(buckets, b, *shards_), communicator.rank()));
  }
}

comm::Work ShardReduction::reduce(size_t b) {
  const auto& bucket = buckets_[b];
  fill_wire(bucket);
  return communicator_.all_reduce(bucket.travelling(), ReduceOp::sum, buckets_.layout().digest() + b, receivers_[b]);
}

void ShardReduction::finish() {
  for (size_t b = 0; b < buckets_.size(); ++b) {
    for (const auto& run : receivers_[b].runs) {
      if (run.rank == communicator_.rank()) empty_wire(buckets_[b], {run.begin, run.count});
    }
  }
}

}  // namespace muster
