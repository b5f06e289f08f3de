#include "window/server_push.h"

namespace muster {

comm::Work ServerPush::reduce(size_t bucket) {
  for (const int index : buckets_[bucket].parameters) {
    const auto p = static_cast<size_t>(index);
    take_(p, buckets_.view(p));
  }
  return {};
}

}  // namespace muster
