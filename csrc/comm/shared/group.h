// The one reduction algorithm of ranks that share memory, used by `local` (threads) and `host` (processes).
//
// Each rank publishes its operations in its slot of the control block and reads its peers'. An operation goes through
// these states at each rank, advanced by whoever calls done() or wait() there (there is no helper thread):
//   queued    not visible yet: the ring of headers is full
//   posted    its header is visible; waits for the headers of all peers
//   running   headers agree; rank r reduces shard r of every rank's data straight into the data of every rank that
//             receives, in one or more rounds (several where data has to be staged in chunks)
//   finished  all ranks have done their part, so that peers no longer touch this rank's tensor; or it failed
// Payloads of up to kInlineBytes travel in the header; each rank then reduces everything itself and one
// synchronisation is enough.
//
// An all_reduce of data that every rank reaches is shared: shards are cut into pieces, each taken by whoever comes
// first. A rank begins with its own shard, whose data are in its caches; one that waits goes on with what the others
// have not begun, so that nobody waits for a rank that is computing or off its core. Who brings the last header wakes
// the others only where the pieces are worth more than that; who does the last piece wakes them for good.
#pragma once

#include <c10/util/SmallVector.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "comm/peer_memory.h"
#include "comm/request.h"
#include "comm/shared/control.h"
#include "comm/shared/space.h"

namespace muster::comm::shared {

class Group;

/// One collective at one rank. Externally synchronised with its group.
struct Operation final : Work::Impl {
  enum class State { queued, posted, running, finished };

  bool advance() override;
  void wait(Milliseconds timeout) override;
  std::vector<at::Tensor> outputs() override { return gathered; }

  std::shared_ptr<Group> group;
  Header header{};
  Key key = 0;
  at::Tensor tensor;                 // what peers read; also written, except by all_gather and reduce_scatter
  at::Tensor output;                 // reduce_scatter
  std::vector<at::Tensor> gathered;  // all_gather
  PeerMemory::Visit visit;

  State state = State::queued;
  std::exception_ptr error;
  c10::SmallVector<Entry*, 8> entries;  // by rank, null for an absent one; from state running on
  c10::SmallVector<int, 8> present;
  bool is_shared = false;  // reduced in pieces
  bool is_last = false;    // its header completed those of all ranks, and sleepers do not know yet
  // Ticks number the rounds of an epoch's operations; all present ranks count alike.
  Key first_tick = 0;
  uint32_t rounds = 1;  // 0: all is done at once, or in pieces
  uint32_t staged = 0;
  uint32_t reduced = 0;
  uint32_t completed = 0;
};

/// One rank's side of the group. Externally synchronised, except abort().
class Group : public std::enable_shared_from_this<Group> {
 public:
  Group(std::shared_ptr<SharedSpace> space, int rank, Milliseconds timeout);

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  SharedSpace& space() noexcept { return *space_; }

  /// Numbers the operation and advances what can be advanced.
  Work issue(std::shared_ptr<Operation> operation);
  void wait(Operation& operation, Milliseconds timeout);
  bool poll(Operation& operation);

  void begin_scope(uint64_t scope);
  void end_scope(ScopeEnd end, const std::string& reason);
  bool in_scope() const noexcept { return scope_.id != 0; }
  uint64_t scope() const noexcept { return scope_.id; }

  /// Throws what ended the group, if something did.
  void check();
  bool has_ended() const noexcept { return control_.ended.load() != 0; }
  /// See PeerMemory.
  void begin_stores();
  void end_stores() noexcept { ++stores_ended_; }
  bool may_have_stores() noexcept;
  void abort(const std::string& reason) noexcept;
  void end(const Error& error) noexcept;
  /// Leaves in good order; what is still under way fails.
  void close() noexcept;

 private:
  enum class PeerState { missing, left, posted, absent, failed, finished };
  using Clock = std::chrono::steady_clock;

  RankSlot& slot(int rank) noexcept { return control_.slots[rank]; }
  RankSlot& mine() noexcept { return control_.slots[rank_]; }

  // group.cpp
  bool advance();
  bool run(Operation& op, bool may_stage, bool may_reduce);
  template <class Done>
  void wait_until(const Done& done, Milliseconds timeout, Sleep least = kAsleep);
  bool waits_for_room() const noexcept;
  void learn_from_wait(bool has_slept) noexcept;
  bool is_done(const Operation& operation) const noexcept;
  bool check_lost();
  void call_wait_hook();
  void time_out(Milliseconds timeout);
  bool is_late(const Operation& op, int peer) noexcept;
  void end_epoch(ScopeEnd end, const std::string& reason);
  void publish_passed();
  void wake_peers(Sleep least = kAsleep) noexcept;
  void wake(RankSlot& slot) noexcept;
  void fail(FailureKind kind, int worker, const std::string& text);
  void fail_with(std::exception_ptr error);
  void publish_failure(FailureKind kind, int worker, const std::string& text) noexcept;
  void adopt_failure();
  bool all_passed(Key key) noexcept;
  bool all_posted(Key key) noexcept;
  std::string describe_wait() const;
  std::string describe_peer(int rank) const;

  // operation.cpp; each returns whether something moved
  PeerState state_of(int peer, Key key) noexcept;
  bool post(Operation& op);
  bool resolve(Operation& op);
  bool stage(Operation& op);
  bool reduce(Operation& op);
  bool share(Operation& op);
  bool takes_over(const Operation& op, int peer) noexcept;
  bool is_small(const Operation& op) const noexcept;
  bool reduce_pieces(Operation& op, size_t part);
  bool complete(Operation& op);
  bool fail_unmatched(Operation& op, int peer, PeerState state);
  void fail_alone(Operation& op, std::exception_ptr error);
  void fail_left(const Operation& op, int peer);
  void start(Operation& op);
  void run_round(Operation& op, uint32_t round);
  void reduce_range(Operation& op, uint32_t round, uint64_t first_byte, uint64_t last_byte, uint64_t origin);
  bool staging_is_free(Key tick) noexcept;
  const std::byte* data_of(const Operation& op, int peer, uint32_t round, uint64_t byte) const noexcept;

  const std::shared_ptr<SharedSpace> space_;
  ControlBlock& control_;
  const int rank_;
  const int size_;
  const Milliseconds timeout_;
  const int owner_process_;

  std::deque<std::shared_ptr<Operation>> under_way_;
  uint64_t epoch_ = 0;
  uint64_t count_ = 0;  // operations issued in the epoch
  struct Scope {
    uint64_t id = 0;           // 1 + id inside a scope
    std::exception_ptr error;  // what ranks disagreed about in it; its later operations fail alike
  } scope_;
  struct Ticks {
    uint64_t epoch = 0;
    uint64_t count = 0;
  } ticks_;
  Key ring_occupants_[kRing] = {};  // 1 + key of the last header in each place; 0: none
  Key passed_by_all_ = 0;           // at least
  uint64_t stores_ended_ = 0;
  bool is_idle_ = false;  // inside a wait
  struct Spin {
    std::chrono::nanoseconds longest;
    std::chrono::nanoseconds now = longest;
    uint32_t sleeps = 0;  // that followed no spin
  } spin_;
  struct StagingUse {
    Key operation = 0;
    Key tick = 0;
    bool used = false;
    bool holds_result = false;  // not copied out yet
  } staging_uses_[kStagingSlots];
  Clock::time_point last_lost_check_ = Clock::now();
  std::exception_ptr failure_;
  std::atomic<bool> failure_published_{false};
};

/// The Communicator of rank `rank` over `space`.
CommunicatorPtr make_shared_communicator(std::shared_ptr<SharedSpace> space, int rank, Milliseconds timeout);

}  // namespace muster::comm::shared
