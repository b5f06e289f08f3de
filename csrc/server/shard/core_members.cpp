// How workers come, and go.
#include <algorithm>
#include <limits>
#include <string>
#include <tuple>
#include <utility>

#include "core/control_group.h"
#include "core/log.h"
#include "server/shard/server_core.h"

namespace muster::server {

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr milliseconds kPresent{1'500};  // three signs of life
constexpr seconds kLeave{60};            // that one who leaves waits for its last steps to be durable

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

void ServerCore::check_step(uint64_t step) {
  if (step <= kMaxStep) return;
  throw InvalidArgument("step " + std::to_string(step) + " is out of range");
}

void ServerCore::greet(Session& session, const Hello& hello) {
  Welcome welcome{life_, 0};
  std::shared_ptr<Shard> shard;
  uint64_t before = 0;
  {
    const Lock lock(mutex_);
    check_free(hello);
    before = quorum_.members().incarnation(hello.rank);
    welcome.incarnation = quorum_.greet(hello.rank, hello.incarnation, life_, time_.now());
    if (hello.incarnation == 0) dealer_.take_back(hello.rank);
    session.rank = hello.rank;
    session.lane = hello.lane;
    session.token = hello.token;
    session.incarnation = welcome.incarnation;
    session.greeted = time_.now();
    session.is_known = true;
    for (auto* const other : sessions_) {
      if (other == &session || !other->is_known || other->rank != session.rank) continue;
      if (other->lane == session.lane || other->incarnation < session.incarnation) other->channel->close();
    }
    shard = shard_;
    changed_.notify_all();
  }
  if (shard) {
    // Else nothing is to be dropped, and the connection does not wait for a step.
    if (before != 0 && before < welcome.incarnation) shard->drop_pushes(hello.rank, before);
    shard->wake();
  }
  reply(session, welcome);
}

std::vector<uint32_t> ServerCore::present() const { return quorum_.members().present(time_.now() - kPresent); }

void ServerCore::inquire(Session& session) {
  Standing standing;
  {
    const Lock lock(mutex_);
    standing = {started_ && job_.is_settled, job_.id, present(), job_.facts, job_.token};
  }
  reply(session, standing);
}

std::vector<uint32_t> ServerCore::begin_job(const Session& session, const Configure& request) {
  job_ = {request.job, request.facts, session.token, /*is_told=*/!started_, /*is_settled=*/!started_};
  dealer_ = Dealer();
  const auto fenced = quorum_.begin_anew(rules_of(request.plan), time_.now());
  close_channels(fenced);
  if (started_) {
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
  values_.gave_up = values_.gave_up || started_;
  values_.origin = 0;
  values_.are_there = started_ = members_.had_any = false;
  return former;
}

// It may have written more than this one has: rows, and the optimizer's state.
ServerCore::Former ServerCore::take_over_values() {
  if (started_ && !is_untouched(shard_)) {
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

// Another job's worker of the same rank would be fenced.
void ServerCore::check_free(const Hello& hello) const {
  if (hello.takes_over || shard_ == nullptr || hello.token == job_.token) return;
  const auto ranks = present();
  if (ranks.empty()) return;
  throw Occupied("another job trains on these parameter servers (" + name_of_worker(ranks.front()) +
                 " gives signs of life); give this one servers of its own, or takeover=True to end that one");
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
    if (!shard_) {
      job_ = {request.job, request.facts, session.token};
      index_ = request.server;
      shard_ = make_shard(request.plan, index_);
      former.images = cuts_.begin_with(shard_->members(), shard_->plan().is_synchronous(), /*is_anew=*/true);
      quorum_.configure(rules_of(request.plan), time_.now());
    } else if (begins && is_anew && !started_) {
      former = give_up(request);  // of another model, perhaps
    } else if (const auto difference = shard_->plan().describe_difference(request.plan); !difference.empty()) {
      if (!begins || started_) {
        throw LayoutMismatch(name_of_worker(session.rank) +
                             " trains another model, or in another way, than the parameter server holds (there: the "
                             "worker's): " +
                             difference);
      }
      former = give_up(request);  // of a job that ended before its values were there
    } else if (request.server != index_) {
      throw InvalidArgument("this is server " + std::to_string(index_) + ", not " + std::to_string(request.server) +
                            "; give all workers the servers in one order, and each server its own folder");
    } else if (begins && is_anew) {
      former = give_up(request);
      gives_up = true;
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
    configured.started = started_;
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
  values_.are_there = started_ = false;
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
    if (started_ && job_.is_settled && values_.origin == job_.id) return reply(session, Done{});
    former = take_over_values();
    if (index_ == 0) dealer_.go_on(request.passes);
    values_.are_there = job_.is_told = true;
  }
  snapshot(kOnce, /*even_if_kept=*/true);
  {
    const Lock lock(mutex_);
    check_origin(session);  // another chief may write meanwhile
    quorum_.members().check(session.rank, session.incarnation);
    started_ = job_.is_settled = true;
    values_.gave_up = false;
    shard_->commands().open(0);
    changed_.notify_all();
  }
  reply(session, Done{});
}

void ServerCore::resume(Session& session, const Resume& request) {
  check_step(request.step);
  auto shard = this->shard();
  const auto stands_there = [&] {
    const auto [least, greatest] = made_by(*shard);
    return shard->members().empty() || (least == request.step && greatest == request.step);
  };
  const bool is_synchronous = shard->plan().is_synchronous();
  {
    const Lock lock(mutex_);
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
      snapshots_.read(request.step, [&](const auto& source) { take(source, /*with_members=*/false); });
      shard->stop();
      shard = this->shard();
      log(LogLevel::warning, "parameter server " + std::to_string(index_) + " goes back to its snapshot of step " +
                                 std::to_string(request.step) + ": not all servers have what came after");
    }
    snapshots_.remove_after(request.step);
    shard->drop_all();
    shard->commands().open(request.step);
    cuts_.go_on_after(request.step);
    {
      const Lock lock(mutex_);
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
    job_.is_told = job_.is_settled = true;
    changed_.notify_all();
  }
  reply(session, Done{});
}

// Server 0 says after which step who joins comes in. Where it lost its newest snapshot, and all who knew of later steps
// are gone, it would decide those again.
void ServerCore::check_not_ahead(const Session& session, const Join& request) {
  const auto shard = this->shard();
  if (index_ == 0 || request.returns || shard == nullptr || !shard->plan().is_synchronous()) return;
  const uint64_t made = made_by(*shard).second;
  if (made <= request.step) return;
  throw CheckpointError(name_of_worker(session.rank) + " came in after step " + std::to_string(request.step) +
                        ", and this parameter server has made step " + std::to_string(made) +
                        ": parameter server 0 has lost what came between, and the workers that knew of it are gone; "
                        "start all workers again, which go on from a step that all servers have");
}

void ServerCore::join(Session& session, const Join& request, Time deadline) {
  check_step(request.step);
  Joined joined{request.step};
  {
    Lock lock(mutex_);
    // Who comes back after a restart of server 0 says which step was decided last.
    // A snapshot may have it as a member whose answer did not come.
    if (!request.returns) quorum_.members().note_return(session.rank, session.incarnation, 0);
    const auto may_come_in = [&] { return index_ != 0 || request.returns || is_up_to_date(); };
    const auto has_begun = [&] { return started_ && job_.is_settled; };
    const bool is_over = time_.wait_until(lock, changed_, deadline, [&] {
      check_job(session);
      return stopping_ || (has_begun() ? may_come_in() : quorum_.members().is_gone(kChief));
    });
    if (stopping_) throw CommError("the parameter server ends; start it again, or end the job");
    if (!is_over && has_begun()) throw Timeout(lacks_return());
    if (!is_over) throw Timeout("worker 0, the chief, did not send the initial values in time; look at its log");
    if (!has_begun()) {
      throw PeerLost(kChief, "worker 0, the chief, left before it had sent the initial values; look at its log");
    }
    if (index_ == 0 && !request.returns) joined = {quorum_.step_of_joiner(), dealer_.newest()};
    const auto now = time_.now();
    quorum_.join(session.rank, session.incarnation, joined.step, now);
    if (request.returns) {
      if (index_ == 0) {
        dealer_.put_right(session.rank, request.held, request.finished);
        quorum_.recall(request.step);
      }
      quorum_.members().note_return(session.rank, session.incarnation, request.first);
      quorum_.try_to_decide(now);
    }
    members_.had_any = true;
    changed_.notify_all();
  }
  if (const auto shard = this->shard()) shard->wake();
  check_not_ahead(session, request);
  reply(session, joined);
}

void ServerCore::beat(Session& session, Shard& shard, const Beat& request) {
  const auto trouble = snapshots_.trouble();
  if (request.wants_snapshot && shard.plan().is_synchronous()) {
    const Lock lock(mutex_);
    quorum_.cuts().hurry();
  } else if (request.wants_snapshot) {
    cuts_.hurry();
  }
  reply(session, Beaten{durable(session, shard), trouble.text.substr(0, kMaxText), trouble.failures});
}

Durable ServerCore::durable(const Session& session, Shard& shard) const {
  if (!snapshots_.are_kept() || shard.members().empty()) {
    const uint64_t step = shard.least_step(session.rank, session.incarnation);
    return {step, step};
  }
  return shard.plan().is_synchronous() ? snapshots_.durable() : snapshots_.durable(session.rank, session.incarnation);
}

// Whether a worker's steps up to the `last` are in a snapshot.
bool ServerCore::is_safe(const Session& session, Shard& shard, uint64_t last) const {
  return durable(session, shard).newest >= last;
}

void ServerCore::leave(Session& session, Shard& shard) {
  bool is_last = false;
  {
    const Lock lock(mutex_);
    if (!session.leaves) quorum_.leave(session.rank, session.incarnation, time_.now());
    session.leaves = true;
    dealer_.take_back(session.rank);
    is_last = quorum_.members().live().empty();
    changed_.notify_all();
  }
  shard.drop_pushes(session.rank, session.incarnation);
  shard.wake();
  const auto failures = snapshots_.trouble().failures;
  const uint64_t last = shard.least_step(session.rank, session.incarnation);
  if (!is_safe(session, shard, last)) {
    if (is_last) cuts_.demand();
    if (!shard.plan().is_synchronous()) cuts_.want();
    Lock lock(mutex_);
    time_.wait_until(lock, changed_, time_.now() + kLeave, [&] {
      if (!is_last && shard.plan().is_synchronous() && quorum_.members().live().empty()) {
        cuts_.demand();  // nobody is left who would decide a step that is cut
        is_last = true;
      }
      return stopping_ || snapshots_.trouble().failures > failures || is_safe(session, shard, last);
    });
  }
  reply(session, Done{});
}

}  // namespace muster::server
