// How jobs begin, and go on.
#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

#include "core/control_group.h"
#include "core/log.h"
#include "server/shard/server_core.h"

namespace muster::server {

namespace {

using std::chrono::milliseconds;

// With gradients and one state, a shard takes three times its bytes and more.
void check_memory(const Plan& plan, uint32_t server) {
  int64_t bytes = 0;
  for (const auto& chunk : cut_chunks(plan))
    bytes += chunk.server == static_cast<int>(server) ? chunk.gradient_bytes() : 0;
  const int64_t memory = memory_limit();
  if (bytes <= memory / 3) return;
  throw InvalidArgument("this server's share of the model has " + std::to_string(bytes) +
                        " bytes, the machine or its container " + std::to_string(memory) + "; start more servers");
}

}  // namespace

std::vector<uint32_t> ServerCore::begin_job(const Session& session, const Configure& request) {
  job_ = {request.job, request.facts, session.token, /*is_told=*/!values_.are_durable,
          /*is_settled=*/!values_.are_durable};
  dealer_ = Dealer();
  const auto fenced = quorum_.begin_anew(rules_of(request.plan), time_.now());
  close_channels(fenced);
  if (values_.are_durable) {
    shard_->commands().close();
  } else {
    values_.are_there = false;  // an earlier chief's, of which nobody heard
  }
  changed_.notify_all();
  return fenced;
}

ServerCore::Former::~Former() {
  if (shard) shard->stop();
}

ServerCore::Former ServerCore::replace_shard(const Plan& plan) {
  Former former;
  former.shard = std::exchange(shard_, make_shard(plan, index_));
  former.images = cuts_.begin_with(shard_->members(), plan.is_synchronous(), /*is_anew=*/true);
  snapshots_.begin_anew();
  return former;
}

ServerCore::Former ServerCore::give_up(const Configure& request) {
  index_ = request.server;
  auto former = replace_shard(request.plan);
  quorum_.begin_at(0);
  values_.gave_up = values_.gave_up || values_.are_durable;
  values_.origin = 0;
  values_.are_there = values_.are_durable = members_.had_any = false;
  return former;
}

// It may have written more than this one has: rows, and the optimizer's state.
ServerCore::Former ServerCore::take_over_values() {
  if (values_.are_durable && !is_untouched(shard_)) {
    throw InvalidArgument(
        "this parameter server holds trained values, which no worker may write over; move its folder "
        "away to begin anew");
  }
  Former former;
  if (values_.origin != 0 && values_.origin != job_.id) former = replace_shard(shard_->plan());
  values_.origin = job_.id;
  return former;
}

// What the chief wrote nobody has trained here. Other servers may know better.
bool ServerCore::is_untouched(const std::shared_ptr<Shard>& shard) const {
  return !members_.had_any && shard != nullptr && made_by(*shard).second == 0;
}

void ServerCore::take_up_job(const Session& session, const Configure& request) {
  if (request.job > job_.id) {
    job_ = {request.job, request.facts, session.token};
    dealer_ = Dealer();
    quorum_.members().forget_joined();
  }
  job_.is_told = job_.is_settled = true;
  shard_->commands().open(kMaxStep);
  changed_.notify_all();
}

void ServerCore::check_job(const Session& session) const {
  if (!session.job || *session.job >= job_.id) return;
  throw Fenced(
      name_of_worker(session.rank) +
      " belongs to a job that another one on the same parameter servers has ended; start its workers again, on "
      "servers of their own");
}

// Who joins does not know where the job goes on; who returns to it, or its chief, does.
void ServerCore::await_job(const Session& session, const Configure& request) {
  Lock lock(mutex_);
  const auto deadline = session.greeted + milliseconds(request.plan.heartbeat_ms);
  const bool is_known = time_.wait_until(lock, changed_, deadline, [&] {
    return stopping_ || shard_ == nullptr || (job_.id >= request.job && job_.is_settled);
  });
  if (is_known) return;
  throw PeerLost(kChief,
                 "nobody who knows where the job goes on came to this parameter server; start all workers again");
}

void ServerCore::configure(Session& session, const Configure& request) {
  request.plan.validate();
  check_memory(request.plan, request.server);
  if (request.server >= request.plan.servers) throw InvalidArgument("a server's index is not below their number");
  if (request.coming == Configure::Coming::joins) await_job(session, request);
  Configured configured;
  std::shared_ptr<Shard> shard;
  std::vector<std::pair<uint32_t, uint64_t>> fenced;  // and their incarnations
  Former former;
  bool gives_up = false;
  {
    const Lock lock(mutex_);
    session.job = request.job;
    check_job(session);
    using Coming = Configure::Coming;
    const bool is_anew = request.coming == Coming::begins_anew;
    const bool begins = (request.coming == Coming::begins || is_anew) && shard_ != nullptr && request.job > job_.id;
    const std::string difference = shard_ ? shard_->plan().describe_difference(request.plan) : std::string();
    if (!shard_) {
      job_ = {request.job, request.facts, session.token};
      index_ = request.server;
      shard_ = make_shard(request.plan, index_);
      former.images = cuts_.begin_with(shard_->members(), shard_->plan().is_synchronous(), /*is_anew=*/true);
      quorum_.configure(rules_of(request.plan), time_.now());
    } else if (begins && !values_.are_durable && (is_anew || !difference.empty())) {
      former = give_up(request);  // of a job that ended before its values were there
    } else if (!difference.empty()) {
      throw LayoutMismatch(name_of_worker(session.rank) +
                           " trains another model, or in another way, than the parameter server holds (there: the "
                           "worker's): " +
                           difference);
    } else if (request.server != index_) {
      throw InvalidArgument("this is server " + std::to_string(index_) + ", not " + std::to_string(request.server) +
                            "; give all workers the servers in one order, and each server its own folder");
    } else if (begins && is_anew) {
      former = give_up(request);
      gives_up = !former.shard->members().empty();
    }
    if (request.coming == Coming::returns) take_up_job(session, request);
    if (begins) {
      if (values_.gave_up && !is_anew) {
        throw CheckpointError(
            "an earlier job loaded a checkpoint, and ended before the parameter servers had its values; load it again, "
            "or, where the servers keep snapshots, start them again to go on from what these hold");
      }
      for (const uint32_t rank : begin_job(session, request)) {
        fenced.emplace_back(rank, quorum_.members().incarnation(rank));
      }
    }
    shard = shard_;
    configured.started = values_.are_durable;
    configured.is_untouched = is_untouched(shard);
    configured.is_settled = job_.is_settled;
    configured.origin = values_.origin;
  }
  if (gives_up) {
    log(LogLevel::warning, "parameter server " + std::to_string(request.server) + " gives up what it held after step " +
                               std::to_string(made_by(*former.shard).second) +
                               ": the job that begins has loaded a checkpoint");
  }
  {
    const Former gone = std::move(former);
  }  // before the worker is waited for
  for (const auto& [rank, incarnation] : fenced) shard->drop_pushes(rank, incarnation);
  if (!fenced.empty()) shard->wake();
  configured.owns = !shard->members().empty();
  std::tie(configured.made, configured.begun) = made_by(*shard);
  if (shard->plan().is_synchronous()) {
    configured.cuts = snapshots_.steps();
    if (configured.cuts.size() > kMaxCuts)
      configured.cuts.erase(configured.cuts.begin(), configured.cuts.end() - kMaxCuts);
    if (const auto command = shard->commands().command()) configured.command = {*command};
  }
  reply(session, configured);
}

std::shared_ptr<Shard> ServerCore::begin_writing(const Session& session) {
  Former former;
  const Lock lock(mutex_);
  check_job(session);
  former = take_over_values();
  values_.are_there = values_.are_durable = false;
  return shard_;
}

// A chief that was replaced while it began may not have heard of it.
void ServerCore::check_origin(const Session& session) const {
  check_job(session);
  if (shard_->chunks().empty() || values_.origin == job_.id) return;
  throw Fenced(name_of_worker(session.rank) +
               " starts a job that another one has ended, which began meanwhile; start its workers again");
}

// Nobody has the initial values but the chief: they are durable before anybody steps.
void ServerCore::start(Session& session, const Start& request) {
  Former former;
  {
    const Lock lock(mutex_);
    check_origin(session);
    if (values_.are_durable && job_.is_settled && values_.origin == job_.id) return reply(session, Done{});
    former = take_over_values();
    if (index_ == 0) dealer_.go_on(request.passes);
    values_.are_there = job_.is_told = true;
  }
  snapshot(kOnce, /*even_if_kept=*/true);
  {
    const Lock lock(mutex_);
    check_origin(session);  // another chief may write meanwhile
    quorum_.members().check(session.rank, session.incarnation);
    values_.are_durable = job_.is_settled = true;
    values_.gave_up = false;
    shard_->commands().open(0);
    changed_.notify_all();
  }
  reply(session, Done{});
}

// A chief that asks again over a new connection, or its job's end, may come while a large snapshot is read.
void ServerCore::resume(Session& session, const Resume& request) {
  check_step(request.step);
  const std::lock_guard lets_go_on(resuming_);
  auto shard = this->shard();
  const auto stands_there = [&] {
    const auto [least, greatest] = made_by(*shard);
    return shard->members().empty() || (least == request.step && greatest == request.step);
  };
  const bool is_synchronous = shard->plan().is_synchronous();
  {
    const Lock lock(mutex_);
    check_job(session);
    if (job_.is_settled && (!is_synchronous || stands_there())) return reply(session, Done{});
    if (job_.is_settled && !quorum_.members().present(Time::min()).empty()) {
      throw CheckpointError("the job goes on after another step than " + std::to_string(request.step) +
                            " here, and workers take part in it; start all workers again");
    }
  }
  if (is_synchronous) {
    for (const auto& command : request.command) {
      check_members(command.members);
      if (command.step == request.step) shard->settle(command);
    }
    if (!request.command.empty()) {
      if (stands_there()) return reply(session, Done{});
      throw CheckpointError("this parameter server has not all parts of step " + std::to_string(request.step));
    }
    if (!stands_there()) {
      snapshots_.read(request.step, [&](const auto& source) { take(source, &session); });
      shard->stop();
      shard = this->shard();
      log(LogLevel::warning, "parameter server " + std::to_string(index_) + " goes back to its snapshot of step " +
                                 std::to_string(request.step) + ": not all servers have what came after");
    }
    {
      const Lock lock(mutex_);
      check_job(session);
    }
    snapshots_.remove_after(request.step);
    snapshots_.forget_trouble();
    shard->drop_all();
    {
      const Lock lock(mutex_);
      check_job(session);
      shard->commands().open(request.step);
      cuts_.go_on_after(request.step);
      quorum_.begin_at(request.step);  // which the snapshot is to know
      job_.is_told = true;             // likewise
    }
    const auto kept = snapshots_.steps();
    if (std::find(kept.begin(), kept.end(), request.step) == kept.end()) {
      snapshot(kOnce, /*even_if_kept=*/false, request.step);
    }
  }
  {
    const Lock lock(mutex_);
    check_job(session);
    job_.is_told = job_.is_settled = true;
    changed_.notify_all();
  }
  reply(session, Done{});
}

}  // namespace muster::server
