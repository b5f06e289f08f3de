#include "muster/options.h"

#include <cmath>

#include "muster/error.h"

namespace muster {

namespace {

void require(bool holds, const char* option, const std::string& value, const char* requirement) {
  if (!holds) throw InvalidArgument(std::string(option) + "=" + value + ": it must be " + requirement);
}

}  // namespace

void StrategyOptions::validate() const {
  require(accumulate >= 1, "accumulate", std::to_string(accumulate), "at least 1");
  require(!clip_norm || (*clip_norm > 0 && !std::isnan(*clip_norm)), "clip_norm", std::to_string(clip_norm.value_or(0)),
          "positive, or left out for no clipping");
  require(clip_norm_type > 0, "clip_norm_type", std::to_string(clip_norm_type),
          "positive; infinity is the maximum norm");
  require(!clip_value || *clip_value > 0, "clip_value", std::to_string(clip_value.value_or(0)),
          "positive, or left out for no clipping");
  require(!clip_value || !clip_norm, "clip_value", std::to_string(clip_value.value_or(0)),
          "left out where clip_norm is given; choose one of the two");
  require(!threads_per_replica || *threads_per_replica >= 1, "threads_per_replica",
          std::to_string(threads_per_replica.value_or(0)), "at least 1, or left out to share the cores");
  require(!bucket_bytes || *bucket_bytes >= 1024, "bucket_bytes", std::to_string(bucket_bytes.value_or(0)),
          "at least 1024");
  require(max_skipped >= 1, "max_skipped", std::to_string(max_skipped), "at least 1");
  require(!shard_optimizer || fuse, "shard_optimizer", "True",
          "False with fuse=False, which keeps the state in the optimizer");
  if (loss_scale) loss_scale->validate();
  // In milliseconds, and added to a clock that counts nanoseconds in 64 bits.
  require(timeout >= 1e-3 && timeout <= 1e9, "timeout", std::to_string(timeout),
          "a number of seconds from 0.001 to 1e9");
}

}  // namespace muster
