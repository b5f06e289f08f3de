// Tables in a checkpoint: rows of embeddings that parameter servers alone hold. Python's saved_tables.py keeps the
// same.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/saved_tree.h"
#include "muster/strategy.h"

namespace muster {

/// Those of a strategy's modules. A checkpoint has the rows that are no longer what the embedding begins with, and what
/// gives all others; in an embedding without `on_servers` they become a dense weight with its optimizer's state, and
/// the other way round. Owned by the thread that prepares and steps.
class SavedTables {
 public:
  using Dict = SavedValue::Dict;
  using List = SavedValue::List;

  explicit SavedTables(Strategy::State& strategy) : strategy_(strategy) {}

  /// What a checkpoint keeps of them.
  List state() const;

  /// Without the rows that servers alone get: as workers need it that do not begin the job.
  checkpoint::SavedTree for_others(checkpoint::SavedTree tree) const;

  /// Brings the parts of a checkpoint into the form that the modules need: tables for embeddings with `on_servers`,
  /// which take() gives the servers, and dense weights for all others. Throws CheckpointError for a table that
  /// contradicts itself, LayoutMismatch for one of another size, InvalidArgument where memory does not hold it.
  void place(Dict& saved);
  void take();

 private:
  using Place = std::pair<int64_t, std::string>;  // the number of a module, and the weight's name there
  struct Embedding {
    at::Tensor weight;
    std::vector<Place> places;
  };
  struct Kinds {
    std::vector<std::string> names;
    bool count_steps = false;
  };
  struct Placed {
    int parameter;
    Dict table;
  };

  std::vector<Embedding> on_servers() const;
  Dict state_of(const Embedding& embedding) const;
  bool make_sparse(Dict& saved, const Embedding& embedding, Dict& table) const;

  Strategy::State& strategy_;
  std::vector<Placed> placed_;
  std::map<int, Kinds> loaded_;  // by parameter: of what servers will begin with
};

/// Whether a submodule is an embedding with `on_servers`.
bool is_on_servers(const torch::nn::Module& module);

}  // namespace muster
