#include "strategy/kept_metric.h"

#include <variant>

#include "checkpoint/saved_tree.h"
#include "core/log.h"
#include "muster/error.h"
#include "muster/saved_value.h"
#include "strategy/saved_parts.h"

namespace muster {

std::optional<KeptMetric> metric_in(const checkpoint::Metadata& metadata, const std::filesystem::path& folder) {
  const auto content = metadata.find("content");
  if (content == metadata.end() || !std::holds_alternative<std::string>(content->second)) return std::nullopt;
  SavedValue whole;
  try {
    whole = checkpoint::decode_outline(std::get<std::string>(content->second), folder.string());
  } catch (const CheckpointError& error) {
    log(LogLevel::warning, std::string("no metric is known of the best checkpoint so far, which the next one takes the "
                                       "place of: ") +
                               error.what());
    return std::nullopt;
  }
  try {
    const auto& state = detail::member(whole.get<SavedValue::Dict>(), "state").get<SavedValue::Dict>();
    const auto found = state.find(kBest);
    if (found == state.end()) return std::nullopt;
    const auto& best = detail::member(found->second.get<SavedValue::Dict>(), "value").get<SavedValue::Dict>();
    KeptMetric metric{detail::member(best, "metric").get<double>(), detail::member(best, "mode").get<std::string>()};
    if (metric.mode == "min" || metric.mode == "max") return metric;
    return std::nullopt;
  } catch (const Error&) {
    return std::nullopt;  // another program's
  }
}

}  // namespace muster
