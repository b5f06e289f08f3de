// A checkpoint that parameter servers write together with the chief.
#pragma once

#include <ATen/core/Tensor.h>
#include <sys/types.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <set>

#include "checkpoint/awaited_part.h"
#include "checkpoint/snapshot_writer.h"
#include "strategy/call_gate.h"
#include "strategy/strategy_core.h"

namespace muster {

/// From the request to the servers on, until the writer's thread waits for their parts. Owned by the thread that steps,
/// which is in a call of the strategy until close(): nobody else ends it meanwhile.
class CutWriting {
 public:
  /// Waits for the writer's last snapshot, begins a draft in its folder, and has all servers begin their parts; both
  /// arguments outlive it. Until close() the core's ParameterSets give stand-ins for what they write. Throws
  /// CheckpointError where the folder refuses, or a server does not stand where it should, what went wrong with the
  /// last snapshot, and as ServerClient.
  CutWriting(checkpoint::SnapshotWriter& writer, StrategyCore& core);
  /// What was not started is given up.
  ~CutWriting() { close(); }
  CutWriting(const CutWriting&) = delete;
  CutWriting& operator=(const CutWriting&) = delete;

  /// False where a server cannot write to that folder, as the log says; then the chief is to write all of it.
  bool is_begun() const noexcept { return cut_ != nullptr; }

  /// What stands for a parameter of the registry in the document, once each; undefined where the chief writes it.
  at::Tensor stand_in(int parameter);

  /// Copies what of `snapshot` are no stand-ins, and has the writer's thread write that, wait for the servers, and make
  /// the draft the snapshot. A server that could not write is named in what the writer throws, and so is one that died,
  /// or from which nothing came for the strategy's `timeout`. Throws InvalidArgument for tensors that cannot be stored.
  void start(const checkpoint::Snapshot& snapshot);

  /// Ends the stand-ins; what was not started is given up. Idempotent.
  void close() noexcept;

 private:
  checkpoint::SnapshotWriter& writer_;
  StrategyCore& core_;
  const pid_t made_by_;
  std::optional<CallGate::Pass> pass_;
  std::filesystem::path draft_;
  std::shared_ptr<const checkpoint::PartLock> lock_;
  std::set<int> given_;  // parameters of stand_in()
  std::shared_ptr<const ServerCut> cut_;
  bool is_started_ = false;
};

}  // namespace muster
