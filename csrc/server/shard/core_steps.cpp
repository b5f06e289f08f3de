// What a step is made of, and dealt batches.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "core/log.h"
#include "kernels/cpu/stream_copy.h"
#include "server/shard/server_core.h"

namespace muster::server {

namespace {

std::string goes_on(uint32_t rank, uint64_t step, uint64_t slowest) {
  return "worker " + std::to_string(rank) + " goes on after step " + std::to_string(step) +
         ", the slowest live worker has completed " + std::to_string(slowest);
}

}  // namespace

void ServerCore::check_members(const std::vector<uint32_t>& members) {
  const bool is_valid = !members.empty() && std::is_sorted(members.begin(), members.end()) &&
                        std::adjacent_find(members.begin(), members.end()) == members.end() &&
                        members.back() < kMaxWorkers;
  if (!is_valid) throw InvalidArgument("a step's members are not ascending ranks");
}

void ServerCore::write(Session& session, net::Frame& frame) {
  const auto request = decode<Write>(frame.message);
  begin_writing(session)->write(request.chunk, request.part, frame.payload);
  reply(session, Done{});
}

void ServerCore::sum(Session& session, Shard& shard, const Sum& request, Time deadline) {
  check_members(request.members);
  reply(session, Partials{shard.sum(session.rank, request.step, request.members, deadline)});
}

void ServerCore::recall(Session& session, const Decision& decision) {
  {
    const Lock lock(mutex_);
    quorum_.recall(decision, time_.now());
    changed_.notify_all();
  }
  reply(session, Done{});
}

void ServerCore::read(Session& session, Shard& shard, const Read& request, Time deadline) {
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
void ServerCore::send_values(Session& session, Shard& shard, const Read& request, Time deadline) {
  constexpr std::chrono::milliseconds kPatience{5};
  shard.read(request.chunk, request.part, request.at_least, deadline, [&](Bytes own, uint64_t steps) {
    const auto rest = session.channel->begin_send(Values::kType, encode(Values{request.chunk, steps}), own, kPatience);
    session.copy.assign(rest.begin(), rest.end());
  });
  session.channel->end_send(session.copy, reply_deadline());
}

std::byte* ServerCore::place_for(Session& session, bool shares, uint64_t place, size_t bytes) {
  if (!shares) {
    session.copy.resize(bytes);
    return session.copy.data();
  }
  std::byte* const to = session.channel->reach(place, bytes);
  if (to == nullptr) throw InvalidArgument("values were asked to go to memory that is not shared");
  return to;
}

std::vector<uint32_t> ServerCore::note_push(const Shard& shard, uint64_t step, bool is_fresh) {
  const Lock lock(mutex_);
  ++(is_fresh ? stats_.pushes : stats_.duplicates);
  return is_fresh && shard.plan().is_synchronous() ? quorum_.members().pushers(step) : std::vector<uint32_t>();
}

void ServerCore::hold(Session& session, Shard& shard, const Push& request, net::Frame& frame) {
  check_step(request.step);
  const bool is_fresh = shard.hold(session.rank, session.incarnation, request, frame.payload, std::move(frame.owner));
  const auto pushers = note_push(shard, request.step, is_fresh);
  reply(session, Pushed{request.step, request.chunk, is_fresh});
  if (!pushers.empty()) shard.sum_early(request.chunk, request.step, pushers);
}

void ServerCore::commit(Session& session, const Commit& request, Time deadline) {
  check_step(request.step);
  std::shared_ptr<const std::string> answer;
  std::optional<Quorum::Progress> progress;  // of a worker that steps on its own
  {
    Lock lock(mutex_);
    const uint64_t before = quorum_.step_of_joiner();
    quorum_.commit(session.rank, session.incarnation, request, time_.now());
    if (quorum_.step_of_joiner() != before) changed_.notify_all();
    time_.wait_until(lock, changed_, deadline, [&] {
      if (stopping_) throw CommError("the parameter server ends; start it again, or end the job");
      quorum_.members().check(session.rank, session.incarnation);
      answer = quorum_.encoded_decision(session.rank, request.step);
      return answer != nullptr;
    });
    if (answer == nullptr) {
      throw Timeout("step " + std::to_string(request.step) + " waits for " +
                    quorum_.missing(session.rank, request.step) +
                    "; look at their logs, and raise timeout if they are slow");
    }
    if (!shard_->plan().is_synchronous()) progress = quorum_.progress(session.rank);
  }
  if (progress) log(LogLevel::debug, goes_on(session.rank, progress->own, progress->slowest));
  session.channel->send(Decision::kType, *answer, {}, reply_deadline());
}

void ServerCore::apply(Session& session, Shard& shard, const Apply& request, Time deadline) {
  check_step(request.step);
  check_members(request.members);
  {
    const Lock lock(mutex_);
    quorum_.members().check_member(session.rank, session.incarnation);
    dealer_.finish(session.rank, request.batches);
  }
  if (request.cut.is_due && snapshots_.are_kept() && shard.plan().is_synchronous()) {
    cuts_.begin(shard.members(), request.step, request.cut.keep);
  }
  const auto seniors = await_seniors(session, shard, request, deadline);
  if (seniors) shard.commands().note_command(request);  // which may name other members
  shard.apply(session.rank, session.incarnation, seniors ? *seniors : request, deadline);
  reply(session, Applied{request.step, durable(session, shard)});
}

// A worker that joined may have other hyperparameters: its schedules began with it.
std::shared_ptr<const Apply> ServerCore::await_seniors(const Session& session, Shard& shard, const Apply& request,
                                                       Time deadline) {
  if (!shard.plan().is_synchronous()) return nullptr;
  // A snapshot may hold the step, but not its command; and where nothing is to be stepped nobody comes again.
  const auto is_made = [&] { return shard.members().empty() || made_by(shard).first >= request.step; };
  Lock lock(mutex_);
  if (is_made() || !quorum_.members().has_senior(session.rank, request.members, request.step)) {
    lock.unlock();
    shard.commands().note_command(request);
    lock.lock();
    changed_.notify_all();
    return nullptr;
  }
  time_.wait_until(lock, changed_, deadline, [&] {
    return stopping_ || is_made() || shard.commands().commanded() >= request.step ||
           !quorum_.members().has_senior(session.rank, request.members, request.step);
  });
  return shard.commands().command_of(request.step);
}

// Who comes back after a restart says what it was dealt, and which step was decided last.
bool ServerCore::is_up_to_date() const {
  const auto& members = quorum_.members();
  return !members.awaits_unknown(time_.now()) && !members.awaits_return();
}

void ServerCore::await_all_back(Lock& lock, Time deadline) {
  time_.wait_until(lock, changed_, deadline, [&] { return stopping_ || is_up_to_date(); });
  if (!stopping_ && !is_up_to_date()) throw Timeout(lacks_return());
}

std::string ServerCore::lacks_return() const {
  const auto rank = quorum_.members().awaits_return();
  return "parameter server 0 started again, and " + (rank ? name_of_worker(*rank) : "a worker") +
         ", which knows what it has forgotten, has not called anything of its strategy since; look at its log. Raise "
         "timeout if it does something else for so long, and do not have it wait for this worker there";
}

void ServerCore::tell_passes(Session& session, Time deadline) {
  Passes passes;
  {
    Lock lock(mutex_);
    await_all_back(lock, deadline);
    passes.passes = dealer_.progress();
  }
  reply(session, passes);
}

void ServerCore::deal(Session& session, const Deal& request, Time deadline) {
  Dealt dealt;
  {
    Lock lock(mutex_);
    await_all_back(lock, deadline);
    quorum_.members().check_member(session.rank, session.incarnation);
    dealt = dealer_.deal(session.rank, session.incarnation, request);
    quorum_.note_rests(session.rank, session.incarnation, dealt.state != Dealt::State::dealt);
    changed_.notify_all();
  }
  reply(session, dealt);
}

}  // namespace muster::server
