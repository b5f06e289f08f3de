#include "job/bucket_sizes.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <vector>

namespace muster {

namespace {

constexpr int64_t kSmallest = 1 << 20;
constexpr int64_t kLargest = 32 << 20;
constexpr int64_t kSmallestEnd = 256 << 10;
constexpr int64_t kInCaches = 64 << 10;
constexpr double kLatencyShare = 0.05;
constexpr int64_t kProbeBytes = 2 << 20;
constexpr int kSmallProbes = 20;
constexpr int kLargeProbes = 4;

// The median, in seconds; the first one is not counted.
double time_all_reduce(comm::Communicator& replicas, int64_t numel, int repeats) {
  const auto values = replicas.allocate(numel, at::kFloat);
  std::vector<double> times;
  for (int i = 0; i <= repeats; ++i) {
    const auto began = std::chrono::steady_clock::now();
    replicas.all_reduce(values, ReduceOp::sum).wait();
    times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  }
  times.erase(times.begin());
  std::nth_element(times.begin(), times.begin() + repeats / 2, times.end());
  return times[static_cast<size_t>(repeats) / 2];
}

}  // namespace

LinkSpeed measure_link(comm::Communicator& replicas) {
  const double small = time_all_reduce(replicas, 1, kSmallProbes);
  const double large = time_all_reduce(replicas, kProbeBytes / 4, kLargeProbes);
  const auto measured = at::zeros({2}, at::kDouble);
  measured.data_ptr<double>()[0] = small;
  measured.data_ptr<double>()[1] = static_cast<double>(kProbeBytes) / std::max(large - small, 1e-9);
  replicas.broadcast(measured, 0).wait();
  return {measured.const_data_ptr<double>()[0], measured.const_data_ptr<double>()[1]};
}

BucketSizes choose_buckets(const LinkSpeed& link, bool in_one_memory) {
  if (in_one_memory) return {kInCaches, kInCaches, kInCaches};
  const double wanted = std::clamp(link.latency * link.bandwidth / kLatencyShare, static_cast<double>(kSmallest),
                                   static_cast<double>(kLargest));
  const auto usual = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(wanted)));
  const int64_t end = std::max(usual / 8, kSmallestEnd);
  return {usual, end, end};
}

BucketSizes device_buckets() { return {25 << 20, 1 << 20, 1 << 20}; }

BucketSizes buckets_of(int64_t bytes) { return {bytes, std::min(bytes, BucketSizes().first), 0}; }

}  // namespace muster
