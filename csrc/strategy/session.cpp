#include "strategy/session.h"

#include <unistd.h>

#include <string>
#include <utility>

#include "comm/hosts/communicator.h"
#include "job/call_watch.h"
#include "muster/error.h"
#include "window/divided_update.h"

namespace muster {

namespace {

void check_outside_steps() {
  if (current_replica()) throw InvalidArgument("step(), run() and flush() cannot be called inside a step");
}

}  // namespace

Session::Session(Topology topology, Groups groups, StrategyOptions options, std::shared_ptr<ReplicaPool> pool,
                 uint64_t seed)
    : process_(::getpid()),
      topology_(std::move(topology)),
      groups_(std::move(groups)),
      options_(options),
      pool_(std::move(pool)),
      divides_steps_(muster::divides_steps(topology_, groups_, options_)),
      registry_(topology_.devices),
      streams_(topology_.devices, seed) {
  if (!groups_.calls) return;
  const auto fail = [this](const std::string& reason) {
    abort_groups(reason);
    groups_.workers->abort(reason);
  };
  groups_.calls->begin([this] { return gate_.is_occupied(); }, fail);
}

Session::~Session() {
  if (groups_.calls) groups_.calls->end();
}

comm::Communicator& Session::workers(std::string_view call) {
  check_process();
  check_open();
  note_call(call);
  return *groups_.workers;
}

comm::Communicator& Session::to_prepare() {
  check_open();
  note_call("prepare()");
  return groups_.to_prepare();
}

void Session::note_call(std::string_view call) {
  if (groups_.calls) groups_.calls->note_call(call);
}

void Session::balance_parts() {
  if (topology_.local_replicas() > 1) balancer_ = std::make_unique<Balancer>(topology_.local_replicas());
}

int Session::current_local_replica() const {
  const auto context = current_replica();
  return context && context->strategy == this ? context->local_replica : -1;
}

void Session::abort_groups(const std::string& reason) noexcept {
  for (const auto* of_replicas : {&groups_.gradients, &groups_.step, &groups_.control}) {
    for (const auto& group : *of_replicas) group->abort(reason);
  }
}

// A child would take its parent's place in what ranks tell one another.
void Session::check_process() const {
  if (topology_.num_workers == 1 || ::getpid() == process_) return;
  throw InvalidArgument("a process that worker " + std::to_string(topology_.rank) +
                        " has forked is no worker; call the strategy in worker " + std::to_string(topology_.rank) +
                        ", and start workers by a launcher (muster run, torchrun)");
}

CallGate::Pass Session::enter() {
  check_process();
  return gate_.enter();
}

CallGate::Pass Session::enter_alone(const char* what) {
  check_process();
  check_outside_steps();
  auto pass = gate_.enter_alone(what);
  note_call(std::string(what) + "()");
  return pass;
}

void Session::check_open() const {
  if (closed()) throw InvalidArgument("the strategy is closed; make a new one");
}

void Session::check_callable() const {
  check_open();
  check_outside_steps();
  if (busy()) throw CommError("a step that was interrupted is still running in a replica; wait for it, or exit");
}

void Session::close(const std::function<void()>& last, const std::function<void()>& poll) {
  if (current_local_replica() >= 0) {
    throw InvalidArgument("close() was called inside a step of the strategy; call stop() there, and close() after it");
  }
  gate_.close(
      [&] {
        if (groups_.calls) groups_.calls->end();
        if (busy()) abort_interrupted();
        pool_->stop(poll);
        last();
        if (groups_.lost) groups_.lost->leave();
      },
      poll);
}

void Session::leave() noexcept {
  gate_.shut();
  if (busy()) abort_interrupted();
  pool_->release();
}

// A replica that an interrupt left behind may be waiting for a peer that does not come.
void Session::abort_interrupted() noexcept {
  abort_groups("rank " + std::to_string(topology_.rank) + " was interrupted in a step and closed its strategy");
}

}  // namespace muster
