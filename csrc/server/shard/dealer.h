// A dealer: which worker computes which batch of an epoch, where workers step on their own. Logic alone.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "server/protocol/protocol.h"

namespace muster::server {

/// A batch is dealt in order, to whoever asks; once it is finished it is not dealt again, and one whose worker died,
/// left, or ended its pass early is dealt before others. Server 0's business. Externally synchronised.
class Dealer {
 public:
  /// Also notes what the request says is finished. Repeating a worker's last request gives the last answer. Throws
  /// LayoutMismatch where workers count different batches, InvalidArgument where too many passes are under way, or
  /// there are too many loaders.
  Dealt deal(uint32_t rank, uint64_t incarnation, const Deal& request);

  /// These went into a step of the worker's. What was not dealt to it, or finished before, is as it is.
  void finish(uint32_t rank, const std::vector<BatchId>& batches);

  /// Takes back what was dealt to a worker and is not finished.
  void take_back(uint32_t rank);

  /// A worker comes back after a restart: it holds these, and has finished those; what else it was dealt, it never
  /// heard of, and is taken back.
  void put_right(uint32_t rank, const std::vector<BatchId>& held, const std::vector<BatchId>& finished);

  /// Of each loader that was dealt from, the pass of the greatest epoch: a worker that joins leaves out those before.
  std::vector<PassId> newest() const;

  /// How far all passes are, for a job that goes on with them; and in that one, in which nothing was dealt yet. Throws
  /// InvalidArgument for what no pass can be.
  std::vector<PassProgress> progress() const;
  void go_on(const std::vector<PassProgress>& passes);

  /// For a snapshot, and back.
  struct Record {
    struct Pass {
      uint32_t loader = 0;
      uint64_t epoch = 0;
      uint64_t batches = 0;
      uint64_t next = 0;
      std::vector<uint64_t> returned;
      std::vector<uint64_t> held;
      std::vector<uint32_t> holders;  // by batch that is held

      template <class M, class W>
      static void visit(M& m, W& w) {
        w.number(m.loader);
        w.number(m.epoch);
        w.number(m.batches);
        w.number(m.next);
        w.numbers(m.returned, kMaxNumbers);
        w.numbers(m.held, kMaxNumbers);
        w.numbers(m.holders, kMaxNumbers);
      }
    };
    std::vector<Pass> passes;
    std::vector<PassId> newest;

    template <class M, class W>
    static void visit(M& m, W& w) {
      w.list(m.passes, kMaxPasses, [](W& wire, auto& pass) { Pass::visit(pass, wire); });
      visit_value(m.newest, w, kMaxLoaders);
    }
  };
  Record record() const;
  void restore(const Record& record);

 private:
  struct Pass {
    uint64_t batches = 0;               // 0: not known yet
    uint64_t next = 0;                  // not dealt yet, from here on
    std::set<uint64_t> returned;        // to be dealt again
    std::map<uint64_t, uint32_t> held;  // by whom
  };
  struct Last {
    uint64_t incarnation = 0;
    uint64_t request = 0;
    Dealt answer;
  };

  Pass& pass_of(const Deal& request);
  static void finish(Pass& pass, uint32_t rank, uint64_t batch);
  /// Takes a batch out of those that are dealt sooner or later.
  static void take_out(Pass& pass, uint64_t batch);
  static void take_back(Pass& pass, uint32_t rank);

  std::map<std::pair<uint32_t, uint64_t>, Pass> passes_;  // by loader and epoch
  std::map<uint32_t, uint64_t> newest_;                   // epoch by loader
  std::map<uint32_t, Last> last_;                         // by rank
};

}  // namespace muster::server
