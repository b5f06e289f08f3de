#include "core/ownership.h"

#include <algorithm>

namespace muster {

namespace {

// The multiple of `tile`, or the end, that is nearest to `element`.
int64_t cut_near(int64_t element, int64_t numel, int64_t tile) {
  const int64_t below = std::clamp<int64_t>(element, 0, numel) / tile * tile;
  const int64_t above = std::min(below + tile, numel);
  return element - below <= above - element ? below : above;
}

// Cuts a parameter that lies `before` elements into a range of `total` ones, of which every rank has a share.
std::vector<Run> cut(int64_t numel, int64_t before, int64_t total, int ranks, int64_t tile) {
  std::vector<Run> runs;
  int64_t begin = 0;
  for (int rank = 1; rank <= ranks; ++rank) {
    const int64_t share_end = total / ranks * rank + total % ranks * rank / ranks;
    const int64_t end = rank == ranks ? numel : std::max(begin, cut_near(share_end - before, numel, tile));
    runs.push_back({begin, end - begin});
    begin = end;
  }
  return runs;
}

}  // namespace

at::Tensor elements_of(const at::Tensor& dense, const Run& run) {
  return dense.as_strided({run.count}, {1}, dense.storage_offset() + run.begin);
}

std::vector<std::vector<Run>> owned_runs(const FlatLayout& layout, int ranks, int64_t tile) {
  std::vector<std::vector<Run>> runs(layout.parameters().size());
  for (const auto& bucket : layout.buckets()) {
    int64_t total = 0;
    for (const int p : bucket.parameters) total += layout.slots()[static_cast<size_t>(p)].numel;
    int64_t before = 0;
    for (const int p : bucket.parameters) {
      const int64_t numel = layout.slots()[static_cast<size_t>(p)].numel;
      runs[static_cast<size_t>(p)] = cut(numel, before, total, ranks, tile);
      before += numel;
    }
  }
  return runs;
}

std::vector<Run> owned_runs(int64_t numel, int ranks, int64_t tile) { return cut(numel, 0, numel, ranks, tile); }

}  // namespace muster
