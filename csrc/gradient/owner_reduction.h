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
  /// the layout's. Peers read gradients of `least_lent_bytes` and more where they are.
  OwnerReduction(comm::Communicator& communicator, const FlatLayout& layout, const std::vector<int64_t>& numels,
                 const std::vector<int>& layout_index, const std::vector<Bucket>& buckets, size_t least_lent_bytes,
                 double norm_type);
  ~OwnerReduction();
  OwnerReduction(const OwnerReduction&) = delete;
  OwnerReduction& operator=(const OwnerReduction&) = delete;

  /// What a rank owns of a parameter.
  const Run& run(size_t parameter, int rank) const noexcept { return runs_[parameter][static_cast<size_t>(rank)]; }

  /// Local, before reduce(): the gradient (the dtype that is read, the slot's memory order) is read where it is, times
  /// `factor`, and kept: by this rank until its reduction, by peers until release(). False where peers do not reach it,
  /// or it is small: what they own of it is to be packed all the same. `is_sole`: nobody else knows its memory.
  bool lend(size_t parameter, const at::Tensor& gradient, bool is_sole, double factor);

  /// A lent gradient, and what of it is in no bucket.
  struct Lent {
    at::Tensor gradient;
    Run run;
    double factor;
  };
  /// Local, before reduce(): the bucket is read again, in which the caller puts what is not there.
  std::optional<Lent> take_back(size_t parameter);

  /// Local, after a collective that peers issued after their reductions were done: lets go of lent gradients but for
  /// those that hold sums.
  void release() noexcept;

  /// Local, before a window's first gradient: lets go of all.
  void open_window() noexcept;

  /// Collective; does not block. Once done, this rank's runs of Bucket::sums hold the sums, but where sum_in() does.
  comm::Work reduce(size_t bucket);

  /// The gradient that was lent for a parameter and of which this rank's run holds the sum: memory that is read need
  /// not be fetched to be written. Until open_window(); undefined where the sum is in Bucket::sums.
  const at::Tensor& sum_in(size_t parameter) const noexcept;

  /// Takes the statistics of this rank's run of a parameter again; `slot`: its place in the bucket.
  void take_stats(size_t parameter, const at::Tensor& slot);

  /// Appends the statistics of a parameter's tiles (kernels.h), all ranks', to `partials`: after a collective that
  /// every rank issued after its reductions were done.
  void append_partials(size_t parameter, std::vector<double>& partials) const;

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
