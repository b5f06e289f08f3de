// How a server's snapshots are taken, and taken up.
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "core/log.h"
#include "server/shard/saved.h"
#include "server/shard/server_core.h"
#include "server/shard/shard_image.h"

namespace muster::server {

namespace {

using std::chrono::seconds;

constexpr seconds kGather{10};  // for a step that is being made
constexpr uint64_t kKeepsNone = std::numeric_limits<uint64_t>::max();

}  // namespace

std::pair<uint64_t, uint64_t> ServerCore::made_by(Shard& shard) {
  uint64_t least = std::numeric_limits<uint64_t>::max();
  uint64_t greatest = 0;
  for (auto* const member : shard.members()) {
    const uint64_t steps = member->steps();
    least = std::min(least, steps);
    greatest = std::max(greatest, steps);
  }
  return {shard.members().empty() ? 0 : least, greatest};
}

Saved ServerCore::saved_now(Shard& shard) const {
  const Lock lock(mutex_);
  Saved saved;
  saved.configured.server = index_;
  saved.configured.plan = shard.plan();
  saved.configured.plan.workers = quorum_.members().workers();
  saved.configured.job = job_.id;
  saved.configured.facts = job_.facts;
  saved.token = job_.token;
  saved.origin = values_.origin;
  saved.is_told = job_.is_told;
  saved.quorum = quorum_.record();
  saved.batches = dealer_.record();
  return saved;
}

void ServerCore::write_cut(const std::shared_ptr<Shard>& shard, CutCollector::Cut& cut,
                           const ServerSnapshots::Pause& pause) {
  ShardImage image(shard, std::move(cut.images));
  // After the images: a step that they hold has its batches finished here.
  auto saved = saved_now(*shard);
  saved.images = image.facts();
  // A job that goes on from this step would take a later one for decided. Those that missed the decision of this one
  // have committed no later one.
  if (shard->plan().is_synchronous() && saved.quorum.decision.step > cut.step) {
    saved.quorum.decision = Decision{.step = cut.step};
  }
  auto first = tensor_of(saved);
  const auto next = [&] {
    check_current(shard);
    return first.empty() ? image.next() : std::exchange(first, {});
  };
  snapshots_.write({saved.images, next, image.file_bytes(), saved.origin}, cut.step, cut.keep, pause);
  const Lock lock(mutex_);
  ++stats_.snapshots;
  changed_.notify_all();
}

void ServerCore::keep_snapshot() noexcept {
  const auto shard = this->shard();  // before the cut, which is of this one or of one that took its place
  bool is_called_off = false;        // by a snapshot that is taken at once, or the end
  const auto wake = [&] {
    const Lock lock(mutex_);
    changed_.notify_all();
  };
  const auto pause = [&](uint32_t failures) {
    wake();
    if (cuts_.pause(failures)) return shard == this->shard();
    is_called_off = true;
    return false;
  };
  // A job that makes its steps together waits for just this one: it cuts no later step before it has it.
  std::optional<uint64_t> step;
  const auto give_up = [&](const std::string& why) {
    log(LogLevel::error, "a snapshot failed: " + why);
    if (!step || is_called_off || shard != this->shard()) return;
    snapshots_.give_up(*step, why);
    wake();
  };
  try {
    if (const auto cut = cuts_.take()) {
      step = cut->step;
      write_cut(shard, *cut, pause);
    } else {
      snapshot(pause);
    }
  } catch (const std::exception& error) {
    give_up(error.what());
  } catch (...) {
    give_up("what it waits for did not come");
  }
  cuts_.note_written();
}

// A server that owns nothing makes no steps: what it keeps is as new as what it was told, or has kept.
uint64_t ServerCore::step_to_keep(Shard& shard) const {
  const uint64_t begun = std::max(made_by(shard).second, shard.commands().commanded());
  return shard.members().empty() ? std::max(begun, snapshots_.durable().newest) : begun;
}

void ServerCore::snapshot() {
  cuts_.let_retry(false);
  const auto done = c10::make_scope_exit([this] { cuts_.let_retry(true); });
  snapshot(kOnce);
}

void ServerCore::snapshot(const ServerSnapshots::Pause& pause, bool even_if_kept, uint64_t at_least) {
  const auto shard = this->shard();
  {
    const Lock lock(mutex_);
    if (!values_.are_there || !snapshots_.are_kept()) return;
  }
  if (!shard->plan().is_synchronous()) {
    CutCollector::Cut cut;
    cut.keep = kKeepsNone;
    cut.images = shard->begin_images();
    return write_cut(shard, cut, pause);
  }
  const auto deadline = time_.now() + kGather;
  for (;;) {
    const uint64_t step = std::max(step_to_keep(*shard), at_least);
    if (!even_if_kept && !snapshots_.steps().empty() && snapshots_.durable().newest == step) return;
    if (const auto gathered = cuts_.gather(shard->members(), step, deadline)) return write_cut(shard, *gathered, pause);
    if (time_.now() >= deadline) {
      throw CheckpointError("a step is half made, and what is missing does not come: no snapshot is taken of it");
    }
  }
}

void ServerCore::restore() {
  const bool has_any = snapshots_.read_newest([&](const auto& source) { take(source, nullptr); });
  if (has_any) {
    log(LogLevel::info, "parameter server " + std::to_string(index_) + " goes on after step " +
                            std::to_string(made_by(*shard()).first) + " of its snapshot");
    const auto steps = snapshots_.steps();
    if (steps.size() > 1) cuts_.note_kept(*(steps.end() - 2));
  }
  is_restored_ = true;
}

void ServerCore::take(const ServerSnapshots::Source& source, const Session* chief) {
  Saved saved;
  std::shared_ptr<Shard> shard;
  std::optional<ShardRestorer> restorer;
  source([&](const checkpoint::NamedTensors& tensors) {
    if (!restorer) {
      saved = saved_in(tensors);
      shard = make_shard(saved.configured.plan, saved.configured.server);
      restorer.emplace(*shard, saved.images);
    }
    restorer->take(tensors);
  });
  if (!restorer) throw CheckpointError("it is empty; use an older snapshot");
  restorer->finish();
  std::vector<std::unique_ptr<Image>> lost;
  const Lock lock(mutex_);
  if (chief != nullptr) check_job(*chief);
  lost = cuts_.begin_with(shard->members(), shard->plan().is_synchronous(), /*is_anew=*/false);
  shard_ = std::move(shard);
  values_.are_there = values_.are_durable = true;
  values_.origin = saved.origin;
  if (chief != nullptr) return;
  const auto now = time_.now();
  index_ = saved.configured.server;
  job_ = {saved.configured.job, saved.configured.facts, saved.token, saved.is_told, saved.is_told};
  quorum_.configure(rules_of(saved.configured.plan), now);
  quorum_.restore(saved.quorum, now);
  dealer_.restore(saved.batches);
  members_.had_any = !saved.quorum.members.ranks.empty();
  members_.awaited_unknown = true;
}

}  // namespace muster::server
