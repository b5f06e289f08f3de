#include "muster/checkpoints.h"

#include <cmath>
#include <string>
#include <utility>

#include "checkpoint/snapshot.h"
#include "checkpoint/snapshot_folder.h"
#include "checkpoint/snapshot_names.h"
#include "core/log.h"
#include "muster/error.h"
#include "strategy/kept_metric.h"
#include "strategy/saving_schedule.h"
#include "strategy/strategy_state.h"

namespace muster {

namespace {

namespace fs = std::filesystem;
using Mode = CheckpointsOptions::Mode;

std::string text_of(Mode mode) { return mode == Mode::min ? "min" : "max"; }

void check_count(const char* name, const std::optional<int>& count) {
  if (!count || *count >= 1) return;
  throw InvalidArgument(std::string(name) + "=" + std::to_string(*count) + ": it must be at least 1, or empty");
}

void check_names(const SavedState& values) {
  if (!values.contains(kBest)) return;
  throw InvalidArgument("'best' is what best() calls its metric in a checkpoint; give the value another name");
}

// None too where warnings say of each what is wrong with it.
std::vector<checkpoint::SnapshotInfo> good_manifests_in(const fs::path& folder) {
  try {
    return checkpoint::list_snapshots(folder);
  } catch (const CheckpointError&) {
    return {};
  }
}

// Reads all of a checkpoint, tensors included; a warning says what is wrong with one that is damaged, not all here, or
// not signed where there is a secret.
bool can_be_loaded(const fs::path& snapshot) {
  try {
    if (!checkpoint::check_snapshot(snapshot).elsewhere.empty()) checkpoint::read_snapshot(snapshot);  // which throws
    checkpoint::note_good(snapshot, true);
    return true;
  } catch (const CheckpointError& error) {
    log(LogLevel::warning, "snapshot '" + snapshot.string() + "' is passed over: " + error.what());
    return false;
  }
}

}  // namespace

struct Checkpoints::State {
  State(Strategy& the_strategy, Saving& its_saving, const fs::path& its_folder, const CheckpointsOptions& its_options)
      : strategy(the_strategy),
        saving(its_saving),
        folder(its_folder.empty() ? its_folder : fs::absolute(its_folder)),  // wherever the program goes later
        options(its_options),
        schedule({.every = options.every,
                  .seconds = options.every_seconds,
                  .number_of_chief = folder.empty() || saving.saves_alone()
                                         ? std::function<int64_t(int64_t)>()
                                         : [this](int64_t n) { return saving.number_of_chief(n); }}) {
    check_count("keep", options.keep);
    check_count("best_keep", options.best_keep);
    if (!checkpoint::number_of(folder)) return;
    throw InvalidArgument("'" + its_folder.string() +
                          "' is called as one checkpoint; give the folder of all, and load() its number");
  }

  // `others`: what is kept, where workers look for it together.
  bool is_better(double metric, const std::optional<KeptMetric>& others) {
    if (folder.empty() || !strategy.is_chief() || std::isnan(metric)) return false;
    const auto kept = saving.saves_alone() ? kept_best() : others;
    if (!kept) return true;
    const auto& [value, mode] = *kept;
    if (mode != text_of(options.mode)) {
      throw InvalidArgument("what is in '" + (folder / kBest).string() + "' is the best by mode " + mode +
                            ", and mode " + text_of(options.mode) + " was given; give that mode, or another folder");
    }
    return options.mode == Mode::min ? metric < value : metric > value;
  }

  // Of the newest good checkpoint that best() wrote, in whichever job. One that cannot be loaded is not the best.
  std::optional<KeptMetric> kept_best() {
    auto written = std::exchange(written_best, std::nullopt);
    saving.finish();
    const auto snapshots = good_manifests_in(folder / kBest);
    for (auto snapshot = snapshots.rbegin(); snapshot != snapshots.rend(); ++snapshot) {
      const auto metric = metric_in(snapshot->metadata, snapshot->folder);
      if (!metric) continue;
      const bool is_own = metric == written;
      if (!is_own && snapshot->folder != known_best && !can_be_loaded(snapshot->folder)) continue;
      known_best = snapshot->folder;
      return metric;
    }
    return std::nullopt;
  }

  Strategy& strategy;
  Saving& saving;
  const fs::path folder;
  const CheckpointsOptions options;
  SavingSchedule schedule;
  std::optional<int64_t> saved_at;         // the strategy's steps when it was saved last
  std::optional<KeptMetric> written_best;  // by this job, and not looked at since
  fs::path known_best;                     // a checkpoint all of which is good
};

Checkpoints::Checkpoints(Strategy& strategy, const fs::path& folder, const CheckpointsOptions& options)
    : state_(std::make_unique<State>(strategy, strategy.state_->saving, folder, options)) {}

Checkpoints::~Checkpoints() = default;

std::optional<SavedState> Checkpoints::load(std::optional<int64_t> number) {
  if (number && *number < 1) {
    throw InvalidArgument("number=" + std::to_string(*number) + ": it must be at least 1, or empty for the newest");
  }
  if (state_->folder.empty()) return std::nullopt;
  auto found = state_->strategy.load(number ? state_->folder / checkpoint::name_of(*number) : state_->folder);
  state_->schedule.start_over();
  if (!found) return std::nullopt;
  state_->saved_at = state_->strategy.steps();
  return found;
}

bool Checkpoints::after_step(const StepResult& result, const SavedState& values) {
  if (result.stepped) state_->schedule.note_step(result.step);
  return after_step(std::nullopt, values);
}

bool Checkpoints::after_step(const std::optional<StepResult>& flushed, const SavedState& values) {
  if (flushed) return after_step(*flushed, values);
  const bool is_stopping = state_->strategy.stopping();
  const bool is_due = state_->schedule.is_due();
  if (!(is_due || is_stopping) || state_->saving.has_open_window()) return false;
  if (is_due || state_->saved_at != state_->strategy.steps()) save(values);
  return is_stopping;
}

void Checkpoints::save(const SavedState& values) {
  check_names(values);
  if (!state_->folder.empty()) state_->strategy.save(state_->folder, values, {.keep = state_->options.keep});
  state_->saved_at = state_->strategy.steps();
  state_->schedule.start_over();
}

bool Checkpoints::best(double metric, const SavedState& values) {
  auto& saving = state_->saving;
  std::optional<KeptMetric> kept;
  if (!saving.saves_alone() && !state_->folder.empty()) kept = saving.kept_metric(state_->folder / kBest);
  const bool is_best = saving.told_by_chief("best", [&] {
    check_names(values);
    return state_->is_better(metric, kept);
  });
  if (!is_best || state_->folder.empty()) return is_best;
  auto described = values;
  const auto mode = text_of(state_->options.mode);
  described[kBest] = SavedValue::Dict{{"metric", metric}, {"mode", mode}};
  if (state_->strategy.is_chief()) state_->written_best = KeptMetric{metric, mode};
  state_->strategy.save(state_->folder / kBest, described, {.keep = state_->options.best_keep});
  return is_best;
}

}  // namespace muster
