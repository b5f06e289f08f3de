// How large buckets are: large enough that their number costs little, small enough that most of them are reduced while
// backward still runs, and their gradients are still at hand.
#pragma once

#include <cstdint>

#include "comm/communicator.h"

namespace muster {

/// What a reduction costs: seconds of a small one, and bytes per second of a large one.
struct LinkSpeed {
  double latency = 0;
  double bandwidth = 0;
};

/// Upper bounds in bytes. The first bucket is small so that reduction starts early, the last one because nothing is
/// left to hide it behind.
struct BucketSizes {
  int64_t usual = 8 << 20;
  int64_t first = 1 << 20;
  int64_t last = 1 << 20;  ///< 0: none of its own
};

/// Collective, each replica on its thread; a fixed number of reductions, a few milliseconds on one host. Equal on all:
/// what rank 0 measured.
LinkSpeed measure_link(comm::Communicator& replicas);

/// Buckets whose latency is a twentieth of what moving them takes, as a power of two between 1 and 32 MiB; the first
/// and the last an eighth of that, at least 256 KiB. Where ranks read one another's memory nothing is sent, and a
/// bucket costs some microseconds: 64 KiB, all of them, so that what is packed and summed is still in the nearest
/// caches.
BucketSizes choose_buckets(const LinkSpeed& link, bool in_one_memory);

/// Between devices, where nothing is measured: 25 MiB, as DistributedDataParallel has them by default (bucket_cap_mb);
/// the first and the last 1 MiB.
BucketSizes device_buckets();

/// Buckets of at most `bytes`, set by hand; the first one of at most 1 MiB.
BucketSizes buckets_of(int64_t bytes);

}  // namespace muster
