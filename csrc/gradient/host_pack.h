// Packing of gradients into buckets on the host.
#pragma once

#include <cstddef>
#include <vector>

#include "gradient/bucket_reduction.h"
#include "gradient/buckets.h"
#include "gradient/packing.h"

namespace muster {

/// Packs `.grad` of a bucket's parameters and makes it undefined; one without counts as zeros. A parameter that was
/// packed earlier in the micro-batch only adds what came since. What `reduction` reads in place is not packed; what it
/// was offered earlier is taken back.
void pack_on_host(const Buckets& buckets, size_t bucket, const Packing& packing, std::vector<GradientState>& states,
                  BucketReduction& reduction);

}  // namespace muster
