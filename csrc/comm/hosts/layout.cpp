#include "comm/hosts/layout.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

#include "muster/error.h"

namespace muster::comm {

Stretch part_of(const Stretch& whole, int index, int count) noexcept {
  constexpr int64_t kAligned = 16;
  const int64_t each = (whole.size() + count * kAligned - 1) / (count * kAligned) * kAligned;
  const auto border = [&](int64_t part) { return std::min(whole.begin + part * each, whole.end); };
  return {border(index), border(index + 1)};
}

HostsLayout::HostsLayout(const std::vector<int>& replicas_of_worker, std::vector<int> hosts_by_worker)
    : first_rank_(replicas_of_worker.size() + 1), host_of_worker_(std::move(hosts_by_worker)) {
  std::partial_sum(replicas_of_worker.begin(), replicas_of_worker.end(), first_rank_.begin() + 1);
  const int hosts = *std::max_element(host_of_worker_.begin(), host_of_worker_.end()) + 1;
  workers_of_host_.resize(static_cast<size_t>(hosts));
  ranks_of_host_.resize(static_cast<size_t>(hosts));
  subtrees_.resize(static_cast<size_t>(hosts));
  for (int worker = 0; worker < num_workers(); ++worker) {
    const auto host = static_cast<size_t>(host_of_worker(worker));
    workers_of_host_[host].push_back(worker);
    for (int rank = first_rank(worker); rank < first_rank(worker + 1); ++rank) ranks_of_host_[host].push_back(rank);
  }
  num_stripes_ = num_workers();
  for (const auto& workers : workers_of_host_) num_stripes_ = std::min(num_stripes_, static_cast<int>(workers.size()));
  if (num_stripes_ == 0) throw InvalidArgument("a host without a worker; number the hosts of a job from 0 on");
  const auto width = static_cast<int>(std::bit_ceil(static_cast<unsigned>(num_ranks())));
  for (int host = 0; host < hosts; ++host) add_subtrees(host, 0, width);
}

int HostsLayout::worker_of(int rank) const noexcept {
  return static_cast<int>(std::upper_bound(first_rank_.begin(), first_rank_.end(), rank) - first_rank_.begin()) - 1;
}

int HostsLayout::stripe_of(int worker) const noexcept {
  const auto& workers = workers_of_host(host_of_worker(worker));
  const auto stripe = static_cast<int>(std::find(workers.begin(), workers.end(), worker) - workers.begin());
  return stripe < num_stripes_ ? stripe : -1;
}

std::vector<int> HostsLayout::fellow_carriers(int worker) const {
  std::vector<int> found;
  const int stripe = stripe_of(worker);
  for (int host = 0; stripe >= 0 && host < num_hosts(); ++host) {
    if (host != host_of_worker(worker)) found.push_back(carrier(host, stripe));
  }
  return found;
}

// Of the node of the tree that is over `width` ranks, a power of two, from `begin` on.
void HostsLayout::add_subtrees(int host, int begin, int width) {
  const int end = std::min(begin + width, num_ranks());
  const auto& ours = ranks_of_host(host);
  Ranks ranks(static_cast<size_t>(std::max(end - begin, 0)));
  std::iota(ranks.begin(), ranks.end(), begin);
  const auto is_ours = [&](int rank) { return std::binary_search(ours.begin(), ours.end(), rank); };
  if (ranks.empty() || std::none_of(ranks.begin(), ranks.end(), is_ours)) return;
  if (std::all_of(ranks.begin(), ranks.end(), is_ours)) {
    subtrees_[static_cast<size_t>(host)].push_back(std::move(ranks));
    return;
  }
  add_subtrees(host, begin, width / 2);
  add_subtrees(host, begin + width / 2, width / 2);
}

}  // namespace muster::comm
