// What Checkpoints::best writes to a checkpoint besides what is trained.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "checkpoint/manifest.h"

namespace muster {

/// The folder of the best checkpoints in that of the others, and the name of their metric.
inline constexpr const char* kBest = "best";

/// A value.
struct KeptMetric {
  double value = 0;
  std::string mode;  ///< "min" or "max", whichever is better

  bool operator==(const KeptMetric&) const = default;
};

/// That in the metadata of a checkpoint in `folder`; none where best() did not write it.
std::optional<KeptMetric> metric_in(const checkpoint::Metadata& metadata, const std::filesystem::path& folder);

}  // namespace muster
