#include "optimizer/shards.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "kernels/kernels.h"

namespace muster {

namespace {

constexpr int64_t kSentBytes = 4 << 20;
constexpr size_t kUnpackedBytes = size_t{2} << 20;  // such a run travels from where it is
constexpr size_t kPackBytes = size_t{32} << 20;

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

/// Small runs of one rank that travel as one.
struct PackedRuns {
  int source = 0;
  std::vector<at::Tensor> values = {};
  std::vector<int64_t> sizes = {};
  int64_t numel = 0;
  size_t bytes = 0;
  at::Tensor travelling = {};
  comm::Work work = {};

  void add(const at::Tensor& run) {
    values.push_back(run);
    sizes.push_back(run.numel());
    numel += run.numel();
    bytes += run.nbytes();
  }
};

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
  const int64_t piece = kSentBytes / static_cast<int64_t>(memories.front().element_size());
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

void broadcast_runs(const std::vector<at::Tensor>& memories, const std::vector<std::vector<Run>>& runs,
                    comm::Communicator& ranks) {
  if (memories.empty() || ranks.size() == 1) return;
  std::vector<comm::Work> in_place;
  std::optional<PackedRuns> under_way;
  const auto arrive = [&] {
    if (!under_way) return;
    under_way->work.wait();
    if (under_way->source != ranks.rank()) {
      at::_foreach_copy_(under_way->values, under_way->travelling.split_with_sizes(under_way->sizes));
    }
    under_way.reset();
  };
  const auto send = [&](PackedRuns pack) {
    if (pack.values.empty()) return;
    pack.travelling =
        pack.source == ranks.rank() ? at::cat(pack.values) : at::empty({pack.numel}, memories.front().options());
    pack.work = ranks.broadcast(pack.travelling, pack.source);
    arrive();  // the one before
    under_way = std::move(pack);
  };
  for (int source = 0; source < ranks.size(); ++source) {
    PackedRuns pack{.source = source};
    for (size_t i = 0; i < memories.size(); ++i) {
      const auto& run = runs[static_cast<size_t>(source)][i];
      if (run.count == 0) continue;
      const auto values = memories[i].narrow(0, run.begin, run.count);
      if (values.nbytes() >= kUnpackedBytes) {
        in_place.push_back(ranks.broadcast(values, source));
        continue;
      }
      pack.add(values);
      if (pack.bytes >= kPackBytes) send(std::exchange(pack, {.source = source}));
    }
    send(std::move(pack));
  }
  arrive();
  for (auto& work : in_place) work.wait();
}

}  // namespace muster
