// Strategy::save and load: what a checkpoint holds, who writes it and when it is read. Python's saving.py keeps the
// same, so that each language reads what the other wrote.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/saved_tree.h"
#include "checkpoint/snapshot_writer.h"
#include "muster/strategy.h"
#include "strategy/cut_writing.h"
#include "strategy/divided_tensors.h"
#include "strategy/kept_metric.h"
#include "strategy/saved_optimizer.h"
#include "strategy/saved_tables.h"
#include "window/loss_scale.h"

namespace muster {

/// The checkpoints of one strategy. Workers write together, each a part, in the chief's folder where they see it, and
/// else what they alone have in that of their host. The chief reads, and is given what it has not, and tells the
/// others. With parameter servers it writes without them, since those that died may not come back. Owned by the thread
/// that prepares and steps.
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

  /// What Checkpoints::best wrote to the checkpoint that load() would take from a folder; waits as finish().
  /// Collective.
  std::optional<KeptMetric> kept_metric(const std::filesystem::path& folder);

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
  /// The same; what `act` gives on all workers, by rank.
  std::vector<std::string> told_by_all(const char* what, bool is_alone, const std::function<std::string()>& act);

  void save_alone(const std::filesystem::path& folder, const SavedState& state, const SaveOptions& options);
  /// False where servers cannot write to the writer's folder.
  bool save_with_servers(checkpoint::SnapshotWriter& writer, const SavedState& state, const SavedValue::List& places);
  void save_with_others(const std::filesystem::path& folder, const SavedState& state, const SaveOptions& options);
  /// Collective where state is divided over workers, and `divided` is null or does not take all of it.
  Dict content(const SavedState& state, const SavedValue::List& places, const at::Tensor& generators,
               DividedTensors* divided);
  std::set<std::string> names_of_alike(const checkpoint::NamedTensors& tensors) const;
  at::Tensor generators();
  SavedValue::List loss_scales() const;
  SavedValue::List units() const;
  checkpoint::Metadata metadata(std::string document);
  /// What tells what it saves from what others do: that of the checkpoint that was loaded.
  const std::string& lineage();
  checkpoint::SnapshotWriter& writer_to(const std::filesystem::path& folder, const SaveOptions& options);

  /// What was read, and the name of its checkpoint's folder.
  struct Found {
    checkpoint::SavedTree tree;
    std::string name;
  };
  Found found_in(checkpoint::StoredSnapshot snapshot, const std::filesystem::path& folder);
  std::optional<Found> broadcast(std::optional<Found> found);
  void check(const Dict& saved) const;
  void take(const Dict& saved);
  void take_generators(const at::Tensor& states) const;
  void take_loss_scale(const Dict& saved);
  /// The scale of the set that a checkpoint names by positions of optimizers.
  WindowScale& scale_of(const Dict& saved);

  bool has_servers() const;
  bool is_chief() const;

  Strategy::State& strategy_;
  SavedTables tables_;
  std::unique_ptr<checkpoint::SnapshotWriter> writer_;
  std::pair<std::filesystem::path, std::optional<int>> made_with_;  // the folder and `keep` of the writer
  std::string lineage_;
  std::vector<detail::OtherOptions> other_options_;  // by optimizer, as the last checkpoint had them
  std::optional<SavedValue> random_;  // of the checkpoint that was loaded: generators of Python's, for the next one
};

}  // namespace muster
