// The facts of a job: what its workers agreed on when they met, and one that joins later learns from the servers.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "server/protocol/plan.h"
#include "server/protocol/protocol.h"

namespace muster {

/// A value; encoded, the facts of server::Configure.
struct JobFacts {
  std::string options;  ///< in words, equal on all workers
  uint64_t seed = 0;
  uint32_t threads = 0;                                     ///< of a replica
  std::vector<uint32_t> replicas_of_worker;                 ///< by rank
  std::vector<std::pair<std::string, uint64_t>> row_seeds;  ///< of embeddings, by name

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.text(m.options, server::kMaxText);
    w.number(m.seed);
    w.number(m.threads);
    w.numbers(m.replicas_of_worker, server::kMaxWorkers);
    w.list(m.row_seeds, server::kMaxTables, [](W& wire, auto& entry) {
      wire.text(entry.first, server::kMaxNameBytes);
      wire.number(entry.second);
    });
  }
};

}  // namespace muster
