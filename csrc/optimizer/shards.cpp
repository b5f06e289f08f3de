#include "optimizer/shards.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "comm/wait_all.h"
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

/// The tiles of parameters, laid end to end: those from `first` to before `last`.
struct Tiles {
  int64_t first;
  int64_t last;

  Tiles of(const Shard& shard) const {
    const int64_t each = (last - first) / shard.size;
    const int64_t extra = (last - first) % shard.size;
    const int64_t begin = first + each * shard.rank + std::min<int64_t>(shard.rank, extra);
    return {begin, begin + each + (shard.rank < extra ? 1 : 0)};
  }
};

/// Small runs of one rank that travel as one, as this process's ranks have them.
class PackedRuns {
 public:
  PackedRuns(int source, size_t num_ranks) : source_(source), values_(num_ranks) {}

  size_t bytes() const noexcept { return bytes_; }

  /// `run[l]` is that of the l-th rank.
  void add(const std::vector<at::Tensor>& run) {
    for (size_t l = 0; l < run.size(); ++l) values_[l].push_back(run[l]);
    sizes_.push_back(run.front().numel());
    numel_ += run.front().numel();
    bytes_ += run.front().nbytes();
  }
  void leave(const std::vector<comm::CommunicatorPtr>& ranks) {
    for (size_t l = 0; l < ranks.size(); ++l) {
      const auto& values = values_[l];
      travelling_.push_back(ranks[l]->rank() == source_ ? at::cat(values)
                                                        : at::empty({numel_}, values.front().options()));
      works_.push_back(ranks[l]->broadcast(travelling_.back(), source_));
    }
  }
  void arrive(const std::vector<comm::CommunicatorPtr>& ranks) {
    comm::wait_all(works_, ranks.front()->device());
    for (size_t l = 0; l < ranks.size(); ++l) {
      if (ranks[l]->rank() == source_) continue;
      at::_foreach_copy_(values_[l], travelling_[l].split_with_sizes(sizes_));
    }
  }

 private:
  int source_;
  std::vector<std::vector<at::Tensor>> values_;  // by rank of this process
  std::vector<int64_t> sizes_;
  int64_t numel_ = 0;
  size_t bytes_ = 0;
  std::vector<at::Tensor> travelling_;  // once it left, by rank of this process
  std::vector<comm::Work> works_;       // likewise
};

}  // namespace

std::vector<Run> runs_of(const std::vector<int64_t>& numels, const Shard& shard, const Shard& part) {
  constexpr auto kTile = static_cast<int64_t>(kernels::kTile);
  int64_t tiles = 0;
  for (const int64_t n : numels) tiles += (n + kTile - 1) / kTile;
  const auto [first, last] = Tiles{0, tiles}.of(shard).of(part);
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

void broadcast_runs(const std::vector<std::vector<at::Tensor>>& memories, const std::vector<std::vector<Run>>& runs,
                    const std::vector<comm::CommunicatorPtr>& ranks) {
  if (memories.front().empty() || ranks.front()->size() == 1) return;
  std::vector<comm::Work> in_place;
  std::optional<PackedRuns> under_way;
  const auto send = [&](PackedRuns pack) {
    if (pack.bytes() == 0) return;
    pack.leave(ranks);
    if (under_way) under_way->arrive(ranks);
    under_way = std::move(pack);
  };
  for (int source = 0; source < ranks.front()->size(); ++source) {
    PackedRuns pack(source, ranks.size());
    for (size_t i = 0; i < memories.front().size(); ++i) {
      const auto& run = runs[static_cast<size_t>(source)][i];
      if (run.count == 0) continue;
      std::vector<at::Tensor> values;
      for (const auto& of_rank : memories) values.push_back(of_rank[i].narrow(0, run.begin, run.count));
      if (values.front().nbytes() >= kUnpackedBytes) {
        for (size_t l = 0; l < ranks.size(); ++l) in_place.push_back(ranks[l]->broadcast(values[l], source));
        continue;
      }
      pack.add(values);
      if (pack.bytes() >= kPackBytes) send(std::exchange(pack, PackedRuns(source, ranks.size())));
    }
    send(std::move(pack));
  }
  if (under_way) under_way->arrive(ranks);
  comm::wait_all(in_place, ranks.front()->device());
}

}  // namespace muster
