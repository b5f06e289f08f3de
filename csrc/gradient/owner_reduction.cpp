#include "gradient/owner_reduction.h"

#include <algorithm>
#include <utility>

#include "comm/kernel_dtype.h"
#include "kernels/kernels.h"

namespace muster {

// What this rank owns of a bucket. Its visit may come after the engine's end.
struct OwnerReduction::OwnedSums {
  struct Piece {
    size_t offset;  // in elements
    double* partials;
    Run run;          // of the parameter
    at::Tensor lent;  // the gradient that is read instead of the own bucket
  };
  Bucket bucket;
  at::Tensor partials;
  int ranks;
  int rank;
  std::vector<Piece> pieces;

  // data[r]: rank r's bucket, packed.
  void sum(void* const* data) {
    const auto size = static_cast<size_t>(ranks);
    const size_t read_size = bucket.read.element_size();
    auto* const sums = static_cast<std::byte*>(bucket.sums.mutable_data_ptr());
    std::vector<const void*> gradients(pieces.size() * size);
    std::vector<kernels::ReduceSegment> segments;
    segments.reserve(pieces.size());
    for (size_t i = 0; i < pieces.size(); ++i) {
      const auto& piece = pieces[i];
      const void** sources = gradients.data() + i * size;
      for (size_t r = 0; r < size; ++r) sources[r] = static_cast<const std::byte*>(data[r]) + piece.offset * read_size;
      auto* const sum = sums + piece.offset * bucket.sums.element_size();
      if (piece.lent.defined()) {
        const auto* const whole = static_cast<const std::byte*>(piece.lent.const_data_ptr());
        sources[rank] = whole + static_cast<size_t>(piece.run.begin) * read_size;
      }
      segments.push_back({sources, sum, piece.partials, static_cast<size_t>(piece.run.count)});
    }
    kernels::reduce_stats(kernel_dtype(bucket.read.scalar_type()), ranks, segments.data(), segments.size());
    for (auto& piece : pieces) piece.lent.reset();
  }
};

bool OwnerReduction::is_possible(comm::Communicator& communicator) {
  return communicator.peer_memory() != nullptr && communicator.size() <= kernels::kMaxReduceRanks;
}

OwnerReduction::OwnerReduction(comm::Communicator& communicator, const FlatLayout& layout,
                               const std::vector<int64_t>& numels, const std::vector<int>& layout_index,
                               const std::vector<Bucket>& buckets)
    : peers_(*communicator.peer_memory()), digest_(layout.digest()), rank_(communicator.rank()) {
  constexpr auto kTile = static_cast<int64_t>(kernels::kTile);
  const int ranks = communicator.size();
  const auto in_layout = owned_runs(layout, ranks, kTile);
  size_t tiles = 0;
  for (size_t p = 0; p < numels.size(); ++p) {
    const int index = layout_index[p];
    runs_.push_back(index >= 0 ? in_layout[static_cast<size_t>(index)] : owned_runs(numels[p], ranks, kTile));
    first_tile_.push_back(tiles);
    tiles += kernels::num_tiles(static_cast<size_t>(numels[p]));
  }
  partials_ = communicator.allocate(std::max<int64_t>(static_cast<int64_t>(tiles), 1), at::kDouble);
  for (void* data : peers_.find(partials_, digest_, ranks)) {
    partials_of_ranks_.push_back(static_cast<const double*>(data));
  }
  places_.resize(numels.size());
  for (size_t b = 0; b < buckets.size(); ++b) {
    owned_.push_back(std::make_shared<OwnedSums>(OwnedSums{buckets[b], partials_, ranks, rank_, {}}));
    auto& sums = *owned_.back();
    for (const int index : buckets[b].parameters) {
      const auto p = static_cast<size_t>(index);
      const auto& own = run(p, rank_);
      if (own.count == 0) continue;
      const int64_t first = layout.slots()[static_cast<size_t>(layout_index[p])].offset + own.begin;
      places_[p] = {&sums, sums.pieces.size()};
      sums.pieces.push_back({static_cast<size_t>(first), own_partials(p), own, {}});
    }
  }
}

OwnerReduction::~OwnerReduction() = default;

void OwnerReduction::lend(size_t p, const at::Tensor& gradient) {
  if (places_[p].sums != nullptr) places_[p].sums->pieces[places_[p].piece].lent = gradient;
}

const at::Tensor& OwnerReduction::lent(size_t p) const noexcept {
  static const at::Tensor none;
  return places_[p].sums == nullptr ? none : places_[p].sums->pieces[places_[p].piece].lent;
}

comm::Work OwnerReduction::reduce(size_t bucket) {
  auto& owned = owned_[bucket];
  if (owned->bucket.read.numel() == 0) return {};
  return peers_.visit(owned->bucket.read, digest_ + bucket, [owned](void* const* data) { owned->sum(data); });
}

double* OwnerReduction::own_partials(size_t p) const {
  return partials_.mutable_data_ptr<double>() + first_tile_[p] +
         static_cast<size_t>(run(p, rank_).begin) / kernels::kTile;
}

void OwnerReduction::take_stats(size_t p, const at::Tensor& slot) {
  const auto own = elements_of(slot, run(p, rank_));
  const kernels::StatsSegment segment{own.const_data_ptr(), own_partials(p), static_cast<size_t>(own.numel()),
                                      kernel_dtype(own.scalar_type())};
  kernels::grad_stats(&segment, 1);
}

void OwnerReduction::append_partials(size_t p, std::vector<double>& partials) const {
  const size_t first = partials.size();
  const Run& last = runs_[p].back();
  partials.resize(first + kernels::num_tiles(static_cast<size_t>(last.begin + last.count)));
  for (size_t r = 0; r < runs_[p].size(); ++r) {
    const auto& owned = runs_[p][r];
    const auto tile = static_cast<size_t>(owned.begin) / kernels::kTile;
    std::copy_n(partials_of_ranks_[r] + first_tile_[p] + tile, kernels::num_tiles(static_cast<size_t>(owned.count)),
                partials.data() + first + tile);
  }
}

}  // namespace muster
