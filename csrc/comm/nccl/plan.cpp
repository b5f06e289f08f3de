#include "comm/nccl/plan.h"

#include <algorithm>
#include <deque>
#include <iterator>
#include <map>
#include <string>
#include <utility>

#include "muster/error.h"

namespace muster::comm::nccl {
namespace {

[[noreturn]] void misfit(const std::string& what) {
  throw CommError("the calls of the ranks do not fit together: " + what);
}

std::string describe(int rank, const Operation& operation) {
  constexpr const char* kNames[] = {"all_reduce", "reduce", "reduce_scatter", "broadcast",
                                    "all_gather", "send",   "receive"};
  return "rank " + std::to_string(rank) + " called " + kNames[static_cast<size_t>(operation.kind)] + " of " +
         std::to_string(operation.count);
}

bool fit(const Operation& a, const Operation& b) {
  return a.kind == b.kind && a.count == b.count && a.type == b.type && a.reduction == b.reduction && a.peer == b.peer;
}

std::vector<std::vector<Operation>> match_collectives(const std::vector<std::vector<Operation>>& operations) {
  std::vector<std::vector<Operation>> by_rank(operations.size());
  for (size_t r = 0; r < operations.size(); ++r) {
    std::copy_if(operations[r].begin(), operations[r].end(), std::back_inserter(by_rank[r]),
                 [](const Operation& operation) { return operation.is_collective(); });
    if (by_rank[r].size() == by_rank[0].size()) continue;
    misfit("rank 0 called " + std::to_string(by_rank[0].size()) + " collectives, rank " + std::to_string(r) + " " +
           std::to_string(by_rank[r].size()));
  }
  std::vector<std::vector<Operation>> collectives(by_rank[0].size());
  for (size_t i = 0; i < collectives.size(); ++i) {
    for (size_t r = 0; r < by_rank.size(); ++r) {
      collectives[i].push_back(by_rank[r][i]);
      if (fit(by_rank[0][i], by_rank[r][i])) continue;
      misfit(describe(0, by_rank[0][i]) + ", " + describe(static_cast<int>(r), by_rank[r][i]));
    }
  }
  return collectives;
}

std::vector<Transfer> match_transfers(const std::vector<std::vector<Operation>>& operations) {
  const int size = static_cast<int>(operations.size());
  std::map<std::pair<int, int>, std::deque<Operation>> sent;  // by sender and receiver
  for (int r = 0; r < size; ++r) {
    for (const Operation& own : operations[static_cast<size_t>(r)]) {
      if (own.kind == CallKind::send) sent[{r, own.peer}].push_back(own);
    }
  }
  std::vector<Transfer> transfers;
  for (int r = 0; r < size; ++r) {
    for (const Operation& own : operations[static_cast<size_t>(r)]) {
      if (own.kind != CallKind::receive) continue;
      auto& box = sent[{own.peer, r}];
      if (box.empty()) misfit(describe(r, own) + " from rank " + std::to_string(own.peer) + ", which sends nothing");
      const Operation& theirs = box.front();
      if (theirs.count != own.count) misfit(describe(r, own) + ", " + describe(own.peer, theirs));
      transfers.push_back({r, own.destination, own.peer, theirs.source, own.count});
      box.pop_front();
    }
  }
  for (const auto& [way, box] : sent) {
    if (box.empty()) continue;
    misfit(describe(way.first, box.front()) + " to rank " + std::to_string(way.second) + ", which does not receive it");
  }
  return transfers;
}

}  // namespace

Plan make_plan(const std::vector<std::vector<Operation>>& operations) {
  return {match_collectives(operations), match_transfers(operations)};
}

}  // namespace muster::comm::nccl
