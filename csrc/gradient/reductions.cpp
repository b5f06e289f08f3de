#include "gradient/reductions.h"

#include <utility>
#include <vector>

#include "core/heap.h"
#include "gradient/all_reduction.h"

namespace muster {

namespace {

std::unique_ptr<BucketReduction> make_whole(comm::Communicator& communicator, const Buckets& buckets, Receive receive) {
  if (receive == Receive::first) {
    return std::make_unique<ShardReduction>(communicator, buckets, whole_for(0, communicator.size(), buckets));
  }
  return std::make_unique<AllReduction>(communicator, buckets, receive == Receive::yes);
}

}  // namespace

Reductions::Reductions(comm::CommunicatorPtr communicator, const Buckets& buckets, const Make& make, Receive receive,
                       size_t least_lent_bytes, double norm_type)
    : communicator_(std::move(communicator)),
      buckets_(buckets),
      whole_(make ? make(buckets) : make_whole(*communicator_, buckets, receive)) {
  choose(/*to_owners=*/false);
  if (make || !OwnerReduction::is_possible(*communicator_)) return;
  owners_ = std::make_unique<OwnerReduction>(*communicator_, buckets, least_lent_bytes, norm_type);
  std::vector<size_t> bytes;
  for (size_t p = 0; p < buckets.parameters().size(); ++p) {
    const size_t size = buckets.parameters()[p].tensor.nbytes();
    if (!buckets.holds(p) || size < least_lent_bytes) continue;
    bytes.push_back(size);
    // Where such gradients are read where they come, their places in buckets stay unused.
    const auto& place = buckets.view(p);
    return_shared_pages(place.mutable_data_ptr(), place.nbytes());
  }
  memory_ = std::make_unique<GradientMemory>(communicator_, bytes);
}

void Reductions::choose(bool to_owners) noexcept {
  if (to_owners && owners_) {
    chosen_ = owners_.get();
  } else {
    chosen_ = whole_.get();
  }
  reads_gradients_ = chosen_->reads_gradients();
}

void Reductions::choose_shards(const std::shared_ptr<const Shards>& shards) {
  if (!shards_ || shards_->shards() != shards) {
    shards_ = std::make_unique<ShardReduction>(*communicator_, buckets_, shards);
  }
  chosen_ = shards_.get();
  reads_gradients_ = chosen_->reads_gradients();
}

void Reductions::open_window() noexcept {
  whole_->open_window();
  if (owners_) owners_->open_window();
}

}  // namespace muster
