#include <ATen/autocast_mode.h>

#include "muster/precision.h"

namespace muster {

namespace {

at::ScalarType dtype_of(Precision precision, at::ScalarType otherwise) {
  switch (precision) {
    case Precision::bf16:
      return at::kBFloat16;
    case Precision::fp16:
      return at::kHalf;
    default:
      return otherwise;
  }
}

}  // namespace

Autocast::Autocast(Precision precision, c10::DeviceType device)
    : device_(device),
      was_enabled_(at::autocast::is_autocast_enabled(device)),
      was_caching_(at::autocast::is_autocast_cache_enabled()),
      outer_dtype_(at::autocast::get_autocast_dtype(device)) {
  at::autocast::increment_nesting();
  const auto dtype = dtype_of(precision, outer_dtype_);
  // The cache does not know the dtype that it was filled for.
  recasts_ = was_enabled_ && dtype != outer_dtype_;
  if (recasts_) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device, precision != Precision::fp32);
  at::autocast::set_autocast_dtype(device, dtype);
  at::autocast::set_autocast_cache_enabled(true);
}

Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0 || recasts_) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, was_enabled_);
  at::autocast::set_autocast_dtype(device_, outer_dtype_);
  at::autocast::set_autocast_cache_enabled(was_caching_);
}

void Autocast::clear_cache() { at::autocast::clear_cache(); }

}  // namespace muster
