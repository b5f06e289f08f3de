// How requests come in, and who ends.
#include "server/shard/server_core.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/log.h"

namespace muster::server {

using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

// Without a store there is nothing to go on from, and no order of lives.
uint64_t life_of(const ServerSnapshots& snapshots) {
  if (snapshots.are_kept()) return snapshots.life();
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<milliseconds>(since).count()) & 0xffffffff;
}

}  // namespace

ServerCore::ServerCore(std::unique_ptr<SnapshotStore> store, milliseconds snapshot_every, Timekeeper& time)
    : time_(time),
      snapshot_every_(snapshot_every),
      snapshots_(std::move(store)),
      life_(life_of(snapshots_)),
      cuts_(snapshot_every, time) {}

ServerCore::~ServerCore() = default;

void ServerCore::stop() {
  {
    const Lock lock(mutex_);
    stopping_ = true;
    for (auto* const session : sessions_) session->channel->close();
    changed_.notify_all();
  }
  if (const auto shard = this->shard()) shard->stop();
  cuts_.stop();
  parts_.stop();
}

void ServerCore::attach(Session& session) {
  const Lock lock(mutex_);
  sessions_.push_back(&session);
  if (stopping_) session.channel->close();
}

void ServerCore::detach(Session& session) {
  const Lock lock(mutex_);
  sessions_.remove(&session);
}

bool ServerCore::is_deserted() const {
  const Lock lock(mutex_);
  return values_.are_durable && members_.had_any && quorum_.members().live().empty();
}

ServerCore::Stats ServerCore::stats() const {
  const Lock lock(mutex_);
  Stats stats = stats_;
  stats.connections = sessions_.size();
  if (shard_) stats.held_bytes = shard_->held_bytes();
  return stats;
}

std::shared_ptr<Shard> ServerCore::shard() const {
  const Lock lock(mutex_);
  return shard_;
}

std::shared_ptr<Shard> ServerCore::make_shard(const Plan& plan, uint32_t server) {
  const auto may_push = [this](std::optional<uint32_t> rank, uint64_t step) {
    const Lock lock(mutex_);
    return quorum_.members().may_push(rank, step, time_.now());
  };
  return std::make_shared<Shard>(plan, server, may_push, time_);
}

void ServerCore::check_current(const std::shared_ptr<Shard>& shard) const {
  const Lock lock(mutex_);
  if (shard != shard_) throw CheckpointError("it was of a job that is over");
}

Quorum::Rules ServerCore::rules_of(const Plan& plan) const {
  return {
      {plan.workers, milliseconds(plan.heartbeat_ms), milliseconds(plan.timeout_ms)}, plan.staleness, snapshot_every_};
}

void ServerCore::close_channels(const std::vector<uint32_t>& ranks) {
  for (auto* const session : sessions_) {
    if (session->is_known && std::find(ranks.begin(), ranks.end(), session->rank) != ranks.end()) {
      session->channel->close();
    }
  }
}

void ServerCore::expire(Time::duration since_last) {
  std::vector<uint32_t> dead;
  std::vector<uint64_t> incarnations;
  std::shared_ptr<Shard> shard;
  {
    const Lock lock(mutex_);
    const auto now = time_.now();
    dead = quorum_.expire(now, since_last);
    const bool awaits = quorum_.members().awaits_unknown(now);
    const bool is_over = std::exchange(members_.awaited_unknown, awaits) && !awaits;
    if (dead.empty() && !is_over) return;
    quorum_.try_to_decide(now);
    shard = shard_;
    close_channels(dead);
    for (const uint32_t rank : dead) {
      dealer_.take_back(rank);
      incarnations.push_back(quorum_.members().incarnation(rank));
    }
    changed_.notify_all();
  }
  for (size_t i = 0; i < dead.size(); ++i) {
    log(LogLevel::warning, name_of_worker(dead[i]) + " was silent for too long and no longer counts");
    if (shard) shard->drop_pushes(dead[i], incarnations[i]);
  }
  if (shard) shard->wake();
}

void ServerCore::answer(Session& session, net::Frame& frame) {
  try {
    if (is_restored_) return dispatch(session, frame);
    const auto [done, total] = snapshots_.progress();
    reply(session, Busy{done, total});
  } catch (const Fenced&) {
    reply(session, describe(std::current_exception()));
    session.leaves = true;
  } catch (const std::exception&) {
    reply(session, describe(std::current_exception()));
  }
}

void ServerCore::dispatch(Session& session, net::Frame& frame) {
  {
    const Lock lock(mutex_);
    ++stats_.requests;
    if (session.is_known) quorum_.members().touch(session.rank, session.incarnation, time_.now());
  }
  if (frame.type == Inquire::kType) {
    decode<Inquire>(frame.message);
    return inquire(session);
  }
  if (frame.type == Hello::kType) return greet(session, decode<Hello>(frame.message));
  if (!session.is_known) throw InvalidArgument("a connection begins with Hello");
  if (frame.type == Configure::kType) return configure(session, decode<Configure>(frame.message));
  const auto shard = this->shard();
  if (!shard) throw InvalidArgument("this server was not configured; the chief does that first");
  {
    const Lock lock(mutex_);
    check_job(session);
  }
  const auto deadline = time_.now() + milliseconds(shard->plan().timeout_ms);
  switch (frame.type) {
    case Write::kType:
      return write(session, frame);
    case Read::kType:
      return read(session, *shard, decode<Read>(frame.message), deadline);
    case Start::kType:
      return start(session, decode<Start>(frame.message));
    case Resume::kType:
      return resume(session, decode<Resume>(frame.message));
    case Join::kType:
      return join(session, decode<Join>(frame.message), deadline);
    case Push::kType:
      return hold(session, *shard, decode<Push>(frame.message), frame);
    case Commit::kType:
      return commit(session, decode<Commit>(frame.message), deadline);
    case Decision::kType:
      return recall(session, decode<Decision>(frame.message));
    case Sum::kType:
      return sum(session, *shard, decode<Sum>(frame.message), deadline);
    case Apply::kType:
      return apply(session, *shard, decode<Apply>(frame.message), deadline);
    case WritePart::kType:
      return write_part(session, decode<WritePart>(frame.message));
    case Deal::kType:
      return deal(session, decode<Deal>(frame.message), deadline);
    case AskPasses::kType:
      decode<AskPasses>(frame.message);
      return tell_passes(session, deadline);
    case Beat::kType:
      return beat(session, *shard, decode<Beat>(frame.message));
    case Recall::kType:
      decode<Recall>(frame.message);
      return reply(session, Recalled{shard->steps(session.rank, session.incarnation)});
    case Leave::kType:
      decode<Leave>(frame.message);
      return leave(session, *shard);
    default:
      if (answer_rows(session, *shard, frame, deadline)) return;
      throw InvalidArgument("a message of unknown type " + std::to_string(frame.type) +
                            " arrived; run one version of Muster on all workers and servers");
  }
}

}  // namespace muster::server
