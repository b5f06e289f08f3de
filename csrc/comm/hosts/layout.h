// Who carries what between the hosts of a job, and the parts of the tree of sums that a host has for itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace muster::comm {

/// A run of elements.
struct Stretch {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const noexcept { return end - begin; }
};

/// Of `whole`, part `index` of `count`: parts follow one another, and all but the last are equal. They begin at
/// multiples of 16 elements, so that every part of an aligned tensor is aligned.
Stretch part_of(const Stretch& whole, int index, int count) noexcept;

/// A job of several hosts. A value. Ranks are replicas, counted worker by worker; a host's are counted alike.
class HostsLayout {
 public:
  /// `replicas_of_worker` and `hosts_by_worker`: by worker; hosts are numbered from 0 and each has a worker.
  HostsLayout(const std::vector<int>& replicas_of_worker, std::vector<int> hosts_by_worker);

  int num_workers() const noexcept { return static_cast<int>(host_of_worker_.size()); }
  int num_hosts() const noexcept { return static_cast<int>(workers_of_host_.size()); }
  int num_ranks() const noexcept { return first_rank_.back(); }
  int host_of_worker(int worker) const { return host_of_worker_.at(static_cast<size_t>(worker)); }
  /// In order; a rank's place in this list is its index among the ranks of its host.
  const std::vector<int>& ranks_of_host(int host) const { return ranks_of_host_.at(static_cast<size_t>(host)); }
  const std::vector<int>& workers_of_host(int host) const { return workers_of_host_.at(static_cast<size_t>(host)); }
  int first_rank(int worker) const { return first_rank_.at(static_cast<size_t>(worker)); }
  int worker_of(int rank) const noexcept;

  /// Tensors are cut into as many stripes, each of which one worker of every host carries: as many as the host with
  /// the fewest workers has.
  int num_stripes() const noexcept { return num_stripes_; }
  /// The worker of `host` that carries `stripe`.
  int carrier(int host, int stripe) const { return workers_of_host(host).at(static_cast<size_t>(stripe)); }
  /// The stripe that `worker` carries; -1 where none.
  int stripe_of(int worker) const noexcept;
  /// The workers of the other hosts that carry the stripe of `worker`.
  std::vector<int> fellow_carriers(int worker) const;

  /// The ranks that a part of the tree of sums is over.
  using Ranks = std::vector<int>;
  /// The largest parts of the tree over all ranks that are over ranks of `host` alone, in the order of their ranks.
  /// Their sums, at the place of each part's first rank, with all others absent, are a tree_reduce with the same bits
  /// as that of all ranks.
  const std::vector<Ranks>& subtrees(int host) const { return subtrees_.at(static_cast<size_t>(host)); }

 private:
  void add_subtrees(int host, int begin, int width);

  std::vector<int> first_rank_;  // by worker; one more at the end
  std::vector<int> host_of_worker_;
  std::vector<std::vector<int>> workers_of_host_;
  std::vector<std::vector<int>> ranks_of_host_;
  std::vector<std::vector<Ranks>> subtrees_;
  int num_stripes_ = 0;
};

}  // namespace muster::comm
