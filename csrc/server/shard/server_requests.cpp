// What a server answers.
#include <algorithm>
#include <utility>

#include "core/log.h"
#include "core/memory_limit.h"
#include "kernels/cpu/stream_copy.h"
#include "server/shard/session.h"

namespace muster::server {

namespace {

std::string goes_on(uint32_t rank, uint64_t step, uint64_t slowest) {
  return "worker " + std::to_string(rank) + " goes on after step " + std::to_string(step) +
         ", the slowest live worker has completed " + std::to_string(slowest);
}

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

Quorum::Rules ParameterServer::rules_of(const Plan& plan) {
  return {plan.workers, plan.staleness, std::chrono::milliseconds(plan.heartbeat_ms),
          std::chrono::milliseconds(plan.timeout_ms)};
}

void ParameterServer::answer(Session& session, net::Frame& frame) {
  {
    const Lock lock(mutex_);
    ++stats_.requests;
    if (session.is_known) quorum_.touch(session.rank, session.incarnation, Clock::now());
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
  const auto deadline = Clock::now() + std::chrono::milliseconds(shard->plan().timeout_ms);
  switch (frame.type) {
    case Write::kType: {
      const auto request = decode<Write>(frame.message);
      shard->write(request.chunk, request.part, frame.payload);
      return reply(session, Done{});
    }
    case Read::kType:
      return read(session, *shard, decode<Read>(frame.message), deadline);
    case Start::kType:
      decode<Start>(frame.message);
      return start(session);
    case Join::kType:
      return join(session, *shard, decode<Join>(frame.message), deadline);
    case Push::kType:
      return hold(session, *shard, decode<Push>(frame.message), frame);
    case Commit::kType:
      return commit(session, decode<Commit>(frame.message), deadline);
    case Decision::kType:
      return recall(session, decode<Decision>(frame.message));
    case Sum::kType: {
      const auto request = decode<Sum>(frame.message);
      check_members(request.members);
      return reply(session, Partials{shard->sum(request.step, request.members, deadline)});
    }
    case Apply::kType:
      return apply(session, *shard, decode<Apply>(frame.message), deadline);
    case Deal::kType:
      return deal(session, decode<Deal>(frame.message));
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

void ParameterServer::check_members(const std::vector<uint32_t>& members) {
  const bool is_valid = !members.empty() && std::is_sorted(members.begin(), members.end()) &&
                        std::adjacent_find(members.begin(), members.end()) == members.end() &&
                        members.back() < kMaxWorkers;
  if (!is_valid) throw InvalidArgument("a step's members are not ascending ranks");
}

void ParameterServer::greet(Session& session, const Hello& hello) {
  Welcome welcome{life_, 0};
  {
    const Lock lock(mutex_);
    welcome.incarnation = quorum_.greet(hello.rank, hello.incarnation, Clock::now());
    if (hello.incarnation == 0) dealer_.take_back(hello.rank);
    session.rank = hello.rank;
    session.lane = hello.lane;
    session.incarnation = welcome.incarnation;
    session.is_known = true;
    for (const auto& other : sessions_) {
      if (other.get() == &session || !other->is_known || other->rank != session.rank) continue;
      if (other->lane == session.lane || other->incarnation < session.incarnation) other->channel->close();
    }
    changed_.notify_all();
  }
  if (const auto shard = this->shard()) shard->wake();
  reply(session, welcome);
}

void ParameterServer::inquire(Session& session) {
  Standing standing;
  {
    const Lock lock(mutex_);
    standing.started = started_;
    standing.job = job_.id;
    standing.facts = job_.facts;
    for (const auto& other : sessions_) {
      if (!other->is_known || other->is_over || !quorum_.is_member(other->rank, other->incarnation)) continue;
      const auto beating = beating_.find(other->rank);
      // Others may be waiting for an answer, and not notice that their worker is gone.
      const bool tells = other->beats || beating == beating_.end() || beating->second != other->incarnation;
      if (tells) standing.present.push_back(other->rank);
    }
  }
  auto& present = standing.present;
  std::sort(present.begin(), present.end());
  present.erase(std::unique(present.begin(), present.end()), present.end());
  reply(session, standing);
}

std::vector<uint32_t> ParameterServer::begin_job(const Configure& request) {
  job_.id = request.job;
  job_.facts = request.facts;
  dealer_ = Dealer();
  job_.is_new = true;
  const auto fenced = quorum_.begin_anew(rules_of(request.plan), Clock::now());
  for (const auto& other : sessions_) {
    if (other->is_known && std::find(fenced.begin(), fenced.end(), other->rank) != fenced.end()) {
      other->channel->close();
    }
  }
  changed_.notify_all();
  return fenced;
}

void ParameterServer::configure(Session& session, const Configure& request) {
  request.plan.validate();
  check_memory(request.plan, request.server);
  if (request.server >= request.plan.servers) throw InvalidArgument("a server's index is not below their number");
  Configured configured;
  std::vector<uint32_t> fenced;
  {
    const Lock lock(mutex_);
    if (request.job < job_.id) {
      throw Fenced("worker " + std::to_string(session.rank) +
                   " belongs to a job that another one on the same parameter servers has ended; start its workers "
                   "again, on servers of their own");
    }
    if (!shard_) {
      job_.id = request.job;
      job_.facts = request.facts;
      index_ = request.server;
      shard_ = std::make_shared<Shard>(request.plan, index_,
                                       [this](uint32_t rank, uint64_t step) { return may_push(rank, step); });
      quorum_.configure(rules_of(request.plan), Clock::now());
    } else if (const std::string difference = shard_->plan().describe_difference(request.plan); !difference.empty()) {
      throw LayoutMismatch(
          "worker " + std::to_string(session.rank) +
          " trains another model than the parameter server holds (there: the worker's): " + difference);
    } else if (request.server != index_) {
      throw InvalidArgument("this is server " + std::to_string(index_) + ", not " + std::to_string(request.server) +
                            "; give all workers the servers in one order");
    }
    if (request.job > job_.id) fenced = begin_job(request);
    configured.started = started_;
  }
  const auto shard = this->shard();
  for (const uint32_t rank : fenced) shard->drop_pushes(rank);
  if (!fenced.empty()) shard->wake();
  reply(session, configured);
}

// Nobody has the initial values but the chief: they are durable before anybody steps.
void ParameterServer::start(Session& session) {
  {
    const Lock lock(mutex_);
    is_filled_ = true;
  }
  snapshot();
  {
    const Lock lock(mutex_);
    started_ = true;
    changed_.notify_all();
  }
  reply(session, Done{});
}

void ParameterServer::recall(Session& session, const Decision& decision) {
  {
    const Lock lock(mutex_);
    quorum_.recall(decision);
    changed_.notify_all();
  }
  reply(session, Done{});
}

bool ParameterServer::may_push(uint32_t rank, uint64_t step) const {
  const Lock lock(mutex_);
  return quorum_.may_push(rank, step);
}

void ParameterServer::join(Session& session, Shard& shard, const Join& request, Deadline deadline) {
  Joined joined{request.step};
  bool is_first = false;
  {
    Lock lock(mutex_);
    if (!changed_.wait_until(lock, deadline, [&] { return started_ || stopping_ || quorum_.is_gone(kChief); })) {
      throw Timeout("the chief did not send the initial values in time; look at its log");
    }
    if (!started_ && quorum_.is_gone(kChief)) {
      throw PeerLost(kChief, "the chief left before it had sent the initial values; look at its log");
    }
    if (stopping_) throw CommError("the parameter server ends; start it again, or end the job");
    // A job that is started again begins its passes anew.
    if (quorum_.live().empty()) dealer_ = Dealer();
    is_first = std::exchange(job_.is_new, false) && !request.returns && shard.plan().is_synchronous();
    if (is_first) quorum_.begin_at(request.step);
    if (index_ == 0) joined = {quorum_.step_of_joiner(), dealer_.newest()};
    quorum_.join(session.rank, session.incarnation, joined.step, Clock::now());
    had_members_ = true;
  }
  // The job before may have ended between a decision and its step, which the next one would be kept waiting for; and
  // it must not return, with an older snapshot.
  if (is_first && shard.skip_to(joined.step)) snapshot();
  reply(session, joined);
}

void ParameterServer::read(Session& session, Shard& shard, const Read& request, Deadline deadline) {
  if (!request.shares) return send_values(session, shard, request, deadline);
  Values values{request.chunk, 0};
  net::Bytes payload;
  shard.read(request.chunk, request.part, request.at_least, deadline, [&](Bytes own, uint64_t steps) {
    values.steps = steps;
    std::byte* const to = place_for(session, /*shares=*/true, request.place, own.size());
    const auto copy = kernels::copy_for(static_cast<size_t>(shard.parameter_bytes()));
    copy(to, own.data(), own.size());
    payload = {to, own.size()};
  });
  reply(session, values, {&payload, 1});
}

// From where they are, while nobody may change them; what the worker does not read at once is copied.
void ParameterServer::send_values(Session& session, Shard& shard, const Read& request, Deadline deadline) {
  constexpr std::chrono::milliseconds kPatience{5};
  shard.read(request.chunk, request.part, request.at_least, deadline, [&](Bytes own, uint64_t steps) {
    const auto rest = session.channel->begin_send(Values::kType, encode(Values{request.chunk, steps}), own, kPatience);
    session.copy.assign(rest.begin(), rest.end());
  });
  session.channel->end_send(session.copy, reply_deadline());
}

std::byte* ParameterServer::place_for(Session& session, bool shares, uint64_t place, size_t bytes) {
  if (!shares) {
    session.copy.resize(bytes);
    return session.copy.data();
  }
  std::byte* const to = session.channel->reach(place, bytes);
  if (to == nullptr) throw InvalidArgument("values were asked to go to memory that is not shared");
  return to;
}

std::vector<uint32_t> ParameterServer::note_push(const Shard& shard, uint64_t step, bool is_fresh) {
  const Lock lock(mutex_);
  ++(is_fresh ? stats_.pushes : stats_.duplicates);
  return is_fresh && shard.plan().is_synchronous() ? quorum_.pushers(step) : std::vector<uint32_t>();
}

void ParameterServer::hold(Session& session, Shard& shard, const Push& request, net::Frame& frame) {
  const bool is_fresh = shard.hold(session.rank, session.incarnation, request, frame.payload, std::move(frame.owner));
  const auto pushers = note_push(shard, request.step, is_fresh);
  reply(session, Pushed{request.step, request.chunk, is_fresh});
  if (!pushers.empty()) shard.sum_early(request.chunk, request.step, pushers);
}

void ParameterServer::commit(Session& session, const Commit& request, Deadline deadline) {
  Decision decision;
  Quorum::Progress progress;
  {
    Lock lock(mutex_);
    quorum_.commit(session.rank, session.incarnation, request);
    changed_.notify_all();
    for (;;) {
      if (stopping_) throw CommError("the parameter server ends; start it again, or end the job");
      quorum_.check(session.rank, session.incarnation);
      if (auto known = quorum_.decision(session.rank, request.step)) {
        decision = std::move(*known);
        break;
      }
      if (changed_.wait_until(lock, deadline) == std::cv_status::timeout &&
          !quorum_.decision(session.rank, request.step)) {
        throw Timeout("step " + std::to_string(request.step) + " waits for " +
                      quorum_.missing(session.rank, request.step) +
                      "; look at their logs, and raise timeout if they are slow");
      }
    }
    progress = quorum_.progress(session.rank);
  }
  log(LogLevel::debug, goes_on(session.rank, progress.own, progress.slowest));
  reply(session, decision);
}

void ParameterServer::apply(Session& session, Shard& shard, const Apply& request, Deadline deadline) {
  check_members(request.members);
  {
    const Lock lock(mutex_);
    dealer_.finish(session.rank, request.batches);
  }
  const auto seniors = await_seniors(session, shard, request, deadline);
  shard.apply(session.rank, session.incarnation, seniors ? *seniors : request, deadline);
  reply(session, Applied{request.step, durable(session, shard)});
}

// A worker that joined may have other hyperparameters: its schedules began with it.
std::shared_ptr<const Apply> ParameterServer::await_seniors(const Session& session, Shard& shard, const Apply& request,
                                                            Deadline deadline) {
  if (!shard.plan().is_synchronous()) return nullptr;
  Lock lock(mutex_);
  if (!quorum_.has_senior(session.rank, request.members)) {
    lock.unlock();
    shard.note_command(request);
    lock.lock();
    changed_.notify_all();
    return nullptr;
  }
  changed_.wait_until(lock, deadline, [&] {
    return stopping_ || shard.commanded() >= request.step || !quorum_.has_senior(session.rank, request.members);
  });
  return shard.command_of(request.step);
}

void ParameterServer::deal(Session& session, const Deal& request) {
  Dealt dealt;
  {
    const Lock lock(mutex_);
    quorum_.check(session.rank, session.incarnation);
    dealt = dealer_.deal(session.rank, session.incarnation, request);
    quorum_.note_rests(session.rank, session.incarnation, dealt.state != Dealt::State::dealt);
    changed_.notify_all();
  }
  reply(session, dealt);
}

void ParameterServer::beat(Session& session, Shard& shard, const Beat& request) {
  {
    const Lock lock(mutex_);
    session.beats = true;
    beating_[session.rank] = session.incarnation;
  }
  if (request.wants_snapshot) {
    const Lock lock(snapshots_.mutex);
    snapshots_.is_wanted = true;
    snapshots_.changed.notify_all();
  }
  reply(session, Beaten{durable(session, shard)});
}

void ParameterServer::leave(Session& session, Shard& shard) {
  {
    const Lock lock(mutex_);
    quorum_.leave(session.rank, session.incarnation);
    dealer_.take_back(session.rank);
    changed_.notify_all();
  }
  shard.wake();
  session.leaves = true;
  reply(session, Done{});
}

uint64_t ParameterServer::durable(const Session& session, Shard& shard) const {
  const bool owns_any = !shard.chunks().empty() || shard.tables().num_tables() > 0;
  if (config_.snapshots.empty() || !owns_any) return shard.least_step(session.rank, session.incarnation);
  const Lock lock(snapshots_.mutex);
  if (shard.plan().is_synchronous()) return snapshots_.durable_step;
  const auto found = snapshots_.durable.find(session.rank);
  return found != snapshots_.durable.end() && found->second.first == session.incarnation ? found->second.second : 0;
}

}  // namespace muster::server
