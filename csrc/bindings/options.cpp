#include "bindings/options.h"

#include <optional>
#include <string>

#include "muster/error.h"

namespace muster {

namespace {

namespace py = pybind11;

Precision precision_of(const std::string& name) {
  if (name == "fp32") return Precision::fp32;
  if (name == "bf16") return Precision::bf16;
  if (name == "fp16") return Precision::fp16;
  throw InvalidArgument("precision='" + name + "': it must be 'fp32', 'bf16' or 'fp16'");
}

Wire wire_of(const std::string& name) {
  if (name == "bf16") return Wire::bf16;
  throw InvalidArgument("wire='" + name + "': it must be 'bf16', or None for what gradients are accumulated in");
}

LossScale loss_scale_of(const py::dict& given) {
  LossScale scale;
  scale.init = py::cast<double>(given["init"]);
  scale.growth = py::cast<double>(given["growth"]);
  scale.backoff = py::cast<double>(given["backoff"]);
  scale.interval = py::cast<int>(given["interval"]);
  return scale;
}

}  // namespace

StrategyOptions options_of(const py::dict& given) {
  StrategyOptions options;
  for (const auto& [key, value] : given) {
    const auto name = py::cast<std::string>(key);
    if (name == "accumulate") {
      options.accumulate = py::cast<int>(value);
    } else if (name == "drop_incomplete") {
      options.drop_incomplete = py::cast<bool>(value);
    } else if (name == "clip_norm") {
      options.clip_norm = py::cast<std::optional<double>>(value);
    } else if (name == "clip_norm_type") {
      options.clip_norm_type = py::cast<double>(value);
    } else if (name == "clip_value") {
      options.clip_value = py::cast<std::optional<double>>(value);
    } else if (name == "seed") {
      options.seed = py::cast<std::optional<uint64_t>>(value);
    } else if (name == "buffers") {
      options.buffers = py::cast<std::string>(value) == "chief" ? Buffers::chief : Buffers::mean;
    } else if (name == "threads_per_replica") {
      options.threads_per_replica = py::cast<std::optional<int>>(value);
    } else if (name == "bucket_bytes") {
      options.bucket_bytes = py::cast<std::optional<int64_t>>(value);
    } else if (name == "wire") {
      if (!value.is_none()) options.wire = wire_of(py::cast<std::string>(value));
    } else if (name == "precision") {
      options.precision = precision_of(py::cast<std::string>(value));
    } else if (name == "loss_scale") {
      if (!value.is_none()) options.loss_scale = loss_scale_of(py::cast<py::dict>(value));
    } else if (name == "fuse") {
      options.fuse = py::cast<bool>(value);
    } else if (name == "keep_gradients") {
      options.keep_gradients = py::cast<bool>(value);
    } else if (name == "shard_optimizer") {
      options.shard_optimizer = py::cast<bool>(value);
    } else if (name == "max_skipped") {
      options.max_skipped = py::cast<int>(value);
    } else if (name == "timeout") {
      options.timeout = py::cast<double>(value);
    } else {
      throw InvalidArgument("unknown option '" + name + "'");
    }
  }
  return options;
}

}  // namespace muster
