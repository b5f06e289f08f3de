// The layout that all ranks share: the order in which gradients come, learned once, and the comparison of layouts.
#pragma once

#include <vector>

#include "comm/communicator.h"
#include "core/flat_layout.h"

namespace muster {

/// Collective, blocking. Throws LayoutMismatch naming a parameter if the layouts of the ranks differ.
void check_layouts_agree(comm::Communicator& control, const FlatLayout& layout);

/// The order of gradients: noted while the first window that anybody contributes to comes, then rank 0's for all.
/// Owned by the replica thread.
class GradientOrder {
 public:
  /// Whether learn() has come: the order is rank 0's from there on.
  bool is_learned() const noexcept { return is_learned_; }

  /// A window opens: what a window noted that came to nothing is forgotten.
  void open_window() {
    if (!is_learned_) arrivals_.clear();
  }

  /// A parameter's first gradient of the window came.
  void note(size_t parameter) { arrivals_.push_back(static_cast<int>(parameter)); }

  /// Collective, blocking, once. Those of `num_parameters` that nobody noted come last, in reverse.
  void learn(comm::Communicator& control, size_t num_parameters);

  /// The learned order, once; empty before and afterwards.
  std::vector<int> take();

 private:
  std::vector<int> arrivals_;
  std::vector<int> learned_;
  bool is_learned_ = false;
};

}  // namespace muster
