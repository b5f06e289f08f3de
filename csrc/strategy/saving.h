// Strategy::save and load: what a checkpoint holds, who writes it and when it is read. Python's saving.py keeps the
// same, so that each language reads what the other wrote.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/saved_tree.h"
#include "checkpoint/snapshot_writer.h"
#include "muster/strategy.h"
#include "strategy/cut_writing.h"
#include "strategy/saved_optimizer.h"
#include "strategy/saved_tables.h"

namespace muster {

/// The checkpoints of one strategy. The chief writes and reads, and tells the others; with parameter servers it writes
/// without them, since those that died may not come back. Owned by the thread that prepares and steps.
class Saving {
 public:
  explicit Saving(Strategy::State& strategy) : strategy_(strategy), tables_(strategy) {}

  /// As Strategy::save and load.
  void save(const std::filesystem::path& folder, const SavedState& state, const SaveOptions& options);
  std::optional<SavedState> load(const std::filesystem::path& folder);

  /// What `act` gives on the chief, which every rank calls; where it throws on any, all throw. Collective; with
  /// parameter servers local, and false on the others.
  bool told_by_chief(const char* what, const std::function<bool()>& act);
  /// The chief's `number`. Collective.
  int64_t number_of_chief(int64_t number);
  /// Whether no other worker saves with this one.
  bool saves_alone() const;
  /// Whether there are gradients that a checkpoint would not hold.
  bool has_open_window() const;

  /// Waits until nothing is being written; what went wrong is for the next finish().
  void wait() const;
  /// Waits for what is being written; throws CheckpointError where it could not be.
  void finish();
  /// Waits for what is being written and lets the folder go; throws CheckpointError where it could not be written.
  void end();
  /// The same; what went wrong is logged.
  void leave() noexcept { writer_.reset(); }

 private:
  using Dict = SavedValue::Dict;

  void check_callable(const char* what) const;
  /// Calls `act`, and where that throws on any worker, throws on all, unless the chief acts alone.
  void together(const char* what, bool is_alone, const std::function<void()>& act);

  Dict content(const SavedState& state);
  at::Tensor generators();
  SavedValue::List loss_scales() const;
  SavedValue::List loaders() const;
  checkpoint::SnapshotWriter& writer_of(const std::filesystem::path& folder, const SaveOptions& options);
  /// Null where servers hold nothing: their parts of a checkpoint in that folder.
  std::unique_ptr<CutWriting> begin_cut(const std::filesystem::path& folder, const SaveOptions& options);
  /// `cut`: null, or with whom servers write.
  void write(const std::filesystem::path& folder, Dict content, const SaveOptions& options, CutWriting* cut);

  /// What was read, and the name of its checkpoint's folder.
  struct Found {
    checkpoint::SavedTree tree;
    std::string name;
  };
  std::optional<Found> read(const std::filesystem::path& folder);
  std::optional<Found> broadcast(std::optional<Found> found);
  void check(const Dict& saved) const;
  void take(const Dict& saved);
  void take_generators(const at::Tensor& states) const;
  void take_loss_scale(const Dict& saved);

  bool has_servers() const;
  bool is_chief() const;

  Strategy::State& strategy_;
  SavedTables tables_;
  std::unique_ptr<checkpoint::SnapshotWriter> writer_;
  std::pair<std::filesystem::path, std::optional<int>> made_with_;  // the folder and `keep` of the writer
  std::vector<detail::OtherOptions> other_options_;                 // by optimizer, as the last checkpoint had them
};

}  // namespace muster
