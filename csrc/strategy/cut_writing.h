// A checkpoint that parameter servers write together with the chief.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <set>

#include "checkpoint/snapshot_writer.h"
#include "strategy/parameter_sets.h"

namespace muster {

/// From the request to the servers on, until the writer's thread waits for their parts. Owned by the thread that steps.
class CutWriting {
 public:
  /// Waits for the writer's last snapshot, begins a draft in its folder, and has all servers begin their parts; both
  /// arguments outlive it. Until close() ParameterSets gives stand-ins for what they write. Throws CheckpointError
  /// where a server or the folder refuses, what went wrong with the last snapshot, and as ServerClient.
  CutWriting(checkpoint::SnapshotWriter& writer, ParameterSets& sets);
  /// What was not started is given up.
  ~CutWriting() { close(); }
  CutWriting(const CutWriting&) = delete;
  CutWriting& operator=(const CutWriting&) = delete;

  /// What stands for a parameter of the registry in the document, once each; undefined where the chief writes it.
  at::Tensor stand_in(int parameter);

  /// Copies what of `snapshot` are no stand-ins, and has the writer's thread write that, wait for the servers, and make
  /// the draft the snapshot. Throws InvalidArgument for tensors that cannot be stored.
  void start(const checkpoint::Snapshot& snapshot);

  /// Ends the stand-ins; what was not started is given up.
  void close() noexcept;

 private:
  checkpoint::SnapshotWriter& writer_;
  ParameterSets& sets_;
  std::filesystem::path draft_;
  std::set<int> given_;  // parameters of stand_in()
  const ServerCut* cut_ = nullptr;
  bool is_started_ = false;
};

}  // namespace muster
