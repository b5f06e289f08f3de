#include "strategy/saved_passes.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "core/log.h"
#include "muster/error.h"
#include "strategy/saved_parts.h"

namespace muster::detail {

namespace {

using List = SavedValue::List;
using Dict = SavedValue::Dict;

constexpr const char* kPasses = "passes";
constexpr const char* kBatchSize = "batch_size";
constexpr const char* kSize = "size";
constexpr const char* kSamples = "samples";  // that the sampler draws: in C++ all of the data set

SavedValue value_of(const std::optional<int64_t>& number) { return number ? SavedValue(*number) : SavedValue(); }

uint64_t count_in(const Dict& dict, const char* key) {
  const int64_t count = integer(dict, key);
  if (count >= 0) return static_cast<uint64_t>(count);
  throw InvalidArgument(std::string("'") + key + "' of a loader is negative");
}

server::PassProgress pass_in(const Dict& saved, uint32_t loader) {
  server::PassProgress pass{loader, count_in(saved, "epoch"), count_in(saved, "batches"), count_in(saved, "next"), {}};
  const auto next = static_cast<int64_t>(pass.next);
  int64_t last = -1;
  for (const auto& value : list_of(saved, "undone")) {
    const auto batch = value.get<int64_t>();
    if (batch <= last || batch >= next) throw InvalidArgument("'undone' of a loader has batches that cannot be");
    pass.undone.push_back(static_cast<uint64_t>(batch));
    last = batch;
  }
  return pass;
}

}  // namespace

Dict saved_loader(int64_t epoch, const std::vector<server::PassProgress>& passes) {
  List list;
  for (const auto& pass : passes) {
    List undone;
    for (const uint64_t batch : pass.undone) undone.emplace_back(static_cast<int64_t>(batch));
    list.emplace_back(Dict{{"epoch", static_cast<int64_t>(pass.epoch)},
                           {"batches", static_cast<int64_t>(pass.batches)},
                           {"next", static_cast<int64_t>(pass.next)},
                           {"undone", std::move(undone)}});
  }
  return {{"epoch", epoch}, {"batches", int64_t{0}}, {"generators", List()}, {kPasses, std::move(list)}};
}

std::vector<server::PassProgress> passes_in(const Dict& saved, uint32_t loader) {
  std::vector<server::PassProgress> passes;
  for (const auto& pass : list_of(saved, kPasses)) passes.push_back(pass_in(pass.get<Dict>(), loader));
  // Of a loader whose batches were not dealt.
  const uint64_t yielded = count_in(saved, "batches");
  if (yielded > 0) passes.push_back({loader, count_in(saved, "epoch"), 0, yielded, {}});
  return passes;
}

LoaderState place_in(const Dict& saved) {
  LoaderState state{.epoch = integer(saved, "epoch")};
  for (const auto& pass : passes_in(saved, 0)) {
    if (static_cast<int64_t>(pass.epoch) != state.epoch) continue;
    const uint64_t first = pass.undone.empty() ? pass.next : pass.undone.front();
    state.batches = static_cast<int64_t>(first);
    const uint64_t again = pass.next - first - pass.undone.size();
    if (again == 0) continue;
    log(LogLevel::warning, "epoch " + std::to_string(state.epoch) + " goes on with batch " + std::to_string(first) +
                               ": parameter servers had dealt its batches, and " + std::to_string(again) +
                               " that were trained on come once more");
  }
  return state;
}

void add_extent(Dict& saved, const LoaderExtent& extent) {
  if (!extent.batch_size) return;
  saved[kBatchSize] = value_of(extent.batch_size);
  saved[kSize] = value_of(extent.size);
  if (extent.size) saved[kSamples] = *extent.size;
}

void check_extent(const Dict& saved, const LoaderExtent& extent, const std::string& loader) {
  const auto passes = passes_in(saved, 0);
  if (std::none_of(passes.begin(), passes.end(), [](const auto& pass) { return pass.next > 0; })) return;
  const auto compare = [&](const char* key, const std::optional<int64_t>& ours, const std::string& words) {
    const auto found = saved.find(key);
    if (!ours || found == saved.end() || found->second.is_null()) return;
    const auto theirs = integer(saved, key);
    if (theirs == *ours) return;
    throw LayoutMismatch(loader + ": the checkpoint is of the middle of an epoch with " + words + " " +
                         std::to_string(theirs) + ", and now " + std::to_string(*ours) +
                         ": samples would come twice, or not at all; give the loader what it had, and other data or "
                         "batches from an epoch's end on");
  };
  compare(kBatchSize, extent.batch_size, "batches of");
  compare(kSize, extent.size, "a data set of");
  compare(kSamples, extent.size, "a sampler whose samples are");
}

}  // namespace muster::detail
