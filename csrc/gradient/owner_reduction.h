// Sums of gradients that go to their owners alone, where ranks see one another's memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "comm/peer_memory.h"
#include "core/flat_layout.h"
#include "core/ownership.h"

namespace muster {

/// One rank's part of reducing the buckets of a layout: each rank sums its own runs of every bucket, with their
/// statistics. Owned by the rank's GradientEngine.
class OwnerReduction {
 public:
  /// Whether the ranks see one another's memory, and are not too many.
  static bool is_possible(comm::Communicator& communicator);

  /// What ranks read of each other, from the communicator's allocate(), and where this one's sums go: the same tensor,
  /// or one of its own where gradients travel in less precision.
  struct Bucket {
    at::Tensor read;
    at::Tensor sums;
    std::vector<int> parameters;  ///< in the layout's order
  };

  /// Collective, blocking. `numels` and `layout_index` (its index in `layout`, or -1) are by parameter; `buckets` are
  /// the layout's.
  OwnerReduction(comm::Communicator& communicator, const FlatLayout& layout, const std::vector<int64_t>& numels,
                 const std::vector<int>& layout_index, const std::vector<Bucket>& buckets);
  ~OwnerReduction();
  OwnerReduction(const OwnerReduction&) = delete;
  OwnerReduction& operator=(const OwnerReduction&) = delete;

  /// What a rank owns of a parameter.
  const Run& run(size_t parameter, int rank) const noexcept { return runs_[parameter][static_cast<size_t>(rank)]; }

  /// Local, before reduce(): this rank's run of a parameter need not be packed; its reduction reads it from `gradient`
  /// (the dtype that is read, the slot's memory order) and keeps that until then. Undefined: from the bucket, as at
  /// first.
  void lend(size_t parameter, const at::Tensor& gradient);
  /// What was lent of the parameter and is not reduced.
  const at::Tensor& lent(size_t parameter) const noexcept;

  /// Collective; does not block. Once done, Bucket::sums holds the sums in this rank's runs.
  comm::Work reduce(size_t bucket);

  /// Takes the statistics of this rank's run of a parameter again; `slot`: its place in the bucket.
  void take_stats(size_t parameter, const at::Tensor& slot);

  /// Appends the sums of squares of a parameter's tiles (kernels.h), all ranks', to `partials`: after a collective that
  /// every rank issued after its reductions were done.
  void append_partials(size_t parameter, std::vector<double>& partials) const;

 private:
  struct OwnedSums;

  double* own_partials(size_t parameter) const;

  comm::PeerMemory& peers_;
  const uint64_t digest_;
  const int rank_;
  std::vector<std::vector<Run>> runs_;             // [parameter][rank]
  std::vector<size_t> first_tile_;                 // by parameter, in partials
  at::Tensor partials_;                            // of the owned tiles; fp64
  std::vector<const double*> partials_of_ranks_;   // where every rank's are
  std::vector<std::shared_ptr<OwnedSums>> owned_;  // by bucket
  struct Place {
    OwnedSums* sums = nullptr;  // null: this rank owns nothing of it
    size_t piece = 0;
  };
  std::vector<Place> places_;  // by parameter
};

}  // namespace muster
