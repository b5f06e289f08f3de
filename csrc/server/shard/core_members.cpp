// How workers come, and go.
#include <string>
#include <utility>

#include "server/shard/server_core.h"

namespace muster::server {

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr milliseconds kPresent{1'500};  // three signs of life
constexpr seconds kLeave{60};            // that one who leaves waits for its last steps to be durable

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
    const bool is_of_another_job = shard_ != nullptr && hello.token != job_.token;
    if (is_of_another_job && !hello.takes_over) check_free();
    before = quorum_.members().incarnation(hello.rank);
    welcome.incarnation = quorum_.greet(hello.rank, hello.incarnation, life_, time_.now(), is_of_another_job);
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
    standing = {values_.are_durable && job_.is_settled, job_.id, present(), job_.facts, job_.token};
  }
  reply(session, standing);
}

// Another job's worker of the same rank would be fenced.
void ServerCore::check_free() const {
  const auto ranks = present();
  if (ranks.empty()) return;
  throw Occupied("another job trains on these parameter servers (" + name_of_worker(ranks.front()) +
                 " gives signs of life); give this one servers of its own, or takeover=True to end that one");
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
    const auto has_begun = [&] { return values_.are_durable && job_.is_settled; };
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
