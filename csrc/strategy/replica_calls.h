// The replicas' part in a call: the user's function in its context and precision, and the collectives that it issues.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/replica_context.h"
#include "strategy/replica_run.h"
#include "strategy/session.h"
#include "strategy/step_call.h"
#include "strategy/step_writes.h"
#include "window/parameter_set.h"

namespace muster {

/// A micro-batch of a step, as the threads of its replicas see it. The call is shared with those that an interrupt
/// leaves behind.
struct MicroBatch {
  ParameterSet& set;
  std::shared_ptr<const StepCall> call;
  uint64_t number = 0;  ///< of the call, see RandomStreams::begin_call
  bool closes = false;  ///< its window
  std::shared_ptr<const StepWrites> writes;
  const std::atomic<bool>& stop_requested;
};

/// Functions that take `local_replica`, and those marked "in a step", are called by replica threads; others by the
/// thread that steps, while none is in a call.
class ReplicaCalls {
 public:
  explicit ReplicaCalls(Session& session);

  /// While it lives on the thread that steps, casts of parameters are those of one call.
  class Casts {
   public:
    explicit Casts(ReplicaCalls& calls);
    ~Casts();
    Casts(const Casts&) = delete;
    Casts& operator=(const Casts&) = delete;

   private:
    ReplicaCalls& calls_;
  };

  /// The parts of the call that begins.
  void set_rows(const std::vector<int64_t>& rows) { rows_ = rows; }

  /// One replica's share of a micro-batch. Whatever happens to the user's code, the replica takes part in every
  /// collective that its peers expect. Does not throw.
  void step(const MicroBatch& batch, int local_replica, ReplicaRun& outcome);

  /// One replica's share of a call of run: without gradients. Does not throw.
  void run(const StepCall& call, const StepWrites& writes, uint64_t number, int local_replica, ReplicaRun& outcome);

  /// In a step: samples of the calling replica's part; negative if unknown.
  int64_t current_rows() const;

  /// In a step: the group for collectives that user code issues, on these values. Throws InvalidArgument where they
  /// could not be differentiated.
  comm::Communicator& step_group(const std::vector<at::Tensor>& values = {});

  /// Collectives inside steps are refused from here on: a worker is gone. It would never leave one, and the group waits
  /// for all of its ranks in time.
  void refuse_collectives();

 private:
  bool shares_casts() const;
  std::shared_ptr<ReplicaContext> make_context(int local_replica, uint64_t number);
  Loss call_in_precision(const StepCall& call, int local_replica) const;
  Loss call_checked(const StepCall& call, int local_replica);
  comm::Work end_scope(int local_replica, const ReplicaRun& outcome, bool is_empty);
  void await_end(comm::Work& end, ReplicaRun& outcome) const;
  void close_window(const MicroBatch& batch, int local_replica, const ReplicaRun& outcome);
  void give_up(int local_replica, ReplicaRun& outcome);

  Session& session_;
  std::vector<int64_t> rows_;  // of the running call, by local replica
  bool refuses_collectives_ = false;
  std::atomic<bool> warned_of_samples_ = false;
  bool has_casts_ = false;  // a call left casts of parameters in torch's cache
};

}  // namespace muster
