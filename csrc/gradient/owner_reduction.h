// Sums of gradients that go to their owners alone, where ranks see one another's memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "comm/communicator.h"
#include "comm/peer_memory.h"
#include "core/ownership.h"
#include "gradient/bucket_reduction.h"
#include "gradient/buckets.h"
#include "kernels/norm_sum.h"

namespace muster {

/// Each rank sums its own runs of every bucket, with their statistics. It reads of each other rank what travels of the
/// bucket, or the gradients that were offered there.
class OwnerReduction final : public BucketReduction {
 public:
  /// Whether the ranks see one another's memory, and are not too many.
  static bool is_possible(comm::Communicator& communicator);

  /// Collective, blocking. The buckets are `communicator`'s, which outlives this. Peers read
  /// gradients of `least_lent_bytes` and more where they are.
  OwnerReduction(comm::Communicator& communicator, const Buckets& buckets, size_t least_lent_bytes, double norm_type);
  ~OwnerReduction() override;
  OwnerReduction(const OwnerReduction&) = delete;
  OwnerReduction& operator=(const OwnerReduction&) = delete;

  /// The elements that a rank owns of a parameter.
  const Run& run(size_t parameter, int rank) const noexcept { return runs_[parameter][static_cast<size_t>(rank)]; }

  bool reads_gradients() const noexcept override { return true; }
  void open_window() noexcept override;

  /// The gradient is kept by this rank until its reduction, by peers until release(): all of it where they reach it and
  /// it is large, else this rank's own run.
  Run offer(size_t parameter, const at::Tensor& gradient, bool is_sole, double factor) override;
  std::optional<Lent> take_back(size_t parameter) override;

  /// Collective. Once done, this rank's runs of Bucket::sums hold the sums, but where sum_of() does.
  comm::Work reduce(size_t bucket) override;
  void release() noexcept override;

  /// The gradient that was offered for a parameter and of which this rank's run holds the sum: memory that is read need
  /// not be fetched to be written.
  const at::Tensor& sum_of(size_t parameter) const noexcept override;

  /// Takes the statistics of this rank's run of a parameter again.
  bool note_changed(size_t parameter, const at::Tensor& sum) override;

  /// Adds the statistics of a parameter's tiles (kernels.h), all ranks', to `sum`: after a collective that every rank
  /// issued after its reductions were done.
  void add_partials(size_t parameter, double norm_type, kernels::NormSum& sum) const;

 private:
  struct OwnedSums;
  struct Place {
    OwnedSums* sums = nullptr;  // null: the parameter is in no bucket that holds something
    size_t index = 0;           // there
  };

  double* own_partials(size_t parameter) const;

  comm::PeerMemory& peers_;
  const uint64_t digest_;
  const int rank_;
  const size_t least_lent_bytes_;
  const double norm_type_;
  std::vector<std::vector<Run>> runs_;             // [parameter][rank]
  std::vector<size_t> first_tile_;                 // by parameter, in partials
  at::Tensor partials_;                            // of the owned tiles; fp64
  std::vector<const double*> partials_of_ranks_;   // where every rank's are
  std::vector<std::shared_ptr<OwnedSums>> owned_;  // by bucket
  std::vector<Place> places_;                      // by parameter
};

}  // namespace muster
