#include "optimizer/shards.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/kernels.h"

namespace muster {

namespace {

constexpr int64_t kPieceBytes = 4 << 20;

// Copies elements [first, last) of a rank's runs, laid end to end, from or to `piece`.
template <class Copy>
void for_each_overlap(const std::vector<at::Tensor>& memories, const std::vector<Run>& runs, int64_t first,
                      int64_t last, const Copy& copy) {
  int64_t position = 0;
  for (size_t i = 0; i < runs.size() && position < last; ++i) {
    const int64_t begin = std::max(first, position);
    const int64_t end = std::min(last, position + runs[i].count);
    if (begin < end) copy(memories[i].narrow(0, runs[i].begin + begin - position, end - begin), begin - first);
    position += runs[i].count;
  }
}

int64_t total(const std::vector<Run>& runs) {
  int64_t sum = 0;
  for (const auto& run : runs) sum += run.count;
  return sum;
}

}  // namespace

std::vector<Run> runs_of(const std::vector<int64_t>& numels, const Shard& shard) {
  constexpr auto kTile = static_cast<int64_t>(kernels::kTile);
  int64_t tiles = 0;
  for (const int64_t n : numels) tiles += (n + kTile - 1) / kTile;
  const int64_t each = tiles / shard.size;
  const int64_t extra = tiles % shard.size;
  const int64_t first = each * shard.rank + std::min<int64_t>(shard.rank, extra);
  const int64_t last = first + each + (shard.rank < extra ? 1 : 0);
  std::vector<Run> runs;
  int64_t position = 0;
  for (const int64_t n : numels) {
    const int64_t own = (n + kTile - 1) / kTile;
    const int64_t begin = std::clamp<int64_t>(first - position, 0, own);
    const int64_t end = std::clamp<int64_t>(last - position, 0, own);
    const int64_t begin_element = std::min(begin * kTile, n);
    runs.push_back({begin_element, std::min(end * kTile, n) - begin_element});
    position += own;
  }
  return runs;
}

void exchange_runs(const std::vector<at::Tensor>& memories, const std::vector<std::vector<Run>>& runs,
                   comm::Communicator& ranks) {
  if (memories.empty() || ranks.size() == 1) return;
  const auto mine = static_cast<size_t>(ranks.rank());
  const int64_t piece = kPieceBytes / static_cast<int64_t>(memories.front().element_size());
  int64_t longest = 0;
  for (const auto& of_rank : runs) longest = std::max(longest, total(of_rank));
  for (int64_t first = 0; first < longest; first += piece) {
    const auto numel_of = [&](size_t rank) { return std::clamp<int64_t>(total(runs[rank]) - first, 0, piece); };
    const auto sent = at::empty({numel_of(mine)}, memories.front().options());
    for_each_overlap(memories, runs[mine], first, first + piece,
                     [&](const at::Tensor& memory, int64_t at) { sent.narrow(0, at, memory.numel()).copy_(memory); });
    auto work = ranks.all_gather(sent);
    work.wait();
    const auto received = work.outputs();
    for (size_t r = 0; r < received.size(); ++r) {
      if (r == mine) continue;
      for_each_overlap(memories, runs[r], first, first + piece, [&](const at::Tensor& memory, int64_t at) {
        memory.copy_(received[r].narrow(0, at, memory.numel()));
      });
    }
  }
}

}  // namespace muster
