// What the workers of a job write together of a checkpoint, each a part: tensors that all of them have, and tensors of
// which each has some elements.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/joint_snapshot.h"
#include "checkpoint/saved_tree.h"
#include "optimizer/optimizer_state.h"

namespace muster {

/// This rank's elements of a tensor of sharded state, `which` as of OptimizerState, in a run without a name: empty
/// where other ranks have all of them. Nothing where there is no such tensor, and where a rank's elements are no run in
/// row-major order.
std::optional<checkpoint::Run> own_run(const OptimizerState& state, size_t parameter, size_t which);

/// Runs by tensors that stand for the whole ones in nested values. Stand-ins have no memory.
class DividedTensors {
 public:
  /// A tensor on the meta device, of the whole one's shape and dtype.
  at::Tensor stand_in(checkpoint::Run run);
  /// Null where a tensor is no stand-in.
  const checkpoint::Run* find(const at::Tensor& tensor) const;

 private:
  std::map<const void*, checkpoint::Run> runs_;  // by storage
  std::vector<at::Tensor> stand_ins_;            // whose storages stay theirs
};

/// The tensors of a tree, by who writes them: stand-ins' runs, those of which `alike` has the names, and the rest.
checkpoint::JointContent joint_content(const checkpoint::NamedTensors& tensors, const DividedTensors& divided,
                                       const std::set<std::string>& alike);

}  // namespace muster
