#include "strategy/step_errors.h"

#include <algorithm>
#include <exception>
#include <string>

#include "comm/peer_memory.h"
#include "core/with_parameters.h"
#include "device/kernel_status.h"
#include "muster/error.h"

namespace muster {

namespace {

std::string told(const CommError& error, Parameters left, const StepPlace& place) {
  const auto step = std::to_string(place.step);
  return error.what() + (left == Parameters::torn
                             ? ". Parameters and optimizer state here may be partly those before step " + step +
                                   " and partly those after it: go on from what was saved last"
                             : ". Parameters and optimizer state here are whole, those before step " + step);
}

}  // namespace

bool StepErrors::has_ended(const comm::CommunicatorPtr& group) const {
  return session_.divides_steps() && group && group->peer_memory() != nullptr && group->peer_memory()->has_ended();
}

// Where each element is stepped by one process for all, those that fail see whether somebody had begun. Elsewhere a
// process steps for itself, but others' shards come later, devices do what was enqueued before the failure was seen,
// and what servers sent may be of two steps.
bool StepErrors::may_be_torn(const StepPlace& place) const {
  if (are_torn_ || is_streamed(session_.topology().devices.front()) || sets_.has_servers()) return true;
  if (place.in_update && (place.num_updated > 0 || session_.options().shard_optimizer)) return true;
  const auto& groups = session_.groups().gradients;
  return session_.divides_steps() && std::any_of(groups.begin(), groups.end(), [](const auto& group) {
           return group->peer_memory()->may_have_stores();
         });
}

Parameters StepErrors::note_left(const StepPlace& place) {
  are_torn_ = may_be_torn(place);
  return are_torn_ ? Parameters::torn : Parameters::whole;
}

void StepErrors::rethrow(const StepPlace& place) {
  const auto error = std::current_exception();
  const auto& groups = session_.groups();
  if (place.has_tail && has_ended(groups.workers)) {
    // Those who are past what failed here would store into this process.
    for (const auto& group : groups.gradients) {
      group->abort("rank " + std::to_string(session_.topology().rank) +
                   " failed in the exchange that follows a window");
    }
  }
  if (!groups.gradients.empty() && has_ended(groups.gradients.front()) && !session_.busy()) sets_.leave_memory();
  try {
    std::rethrow_exception(error);
  } catch (const KnowsParameters&) {
    std::rethrow_exception(error);
  } catch (const PeerLost& lost) {
    const auto left = note_left(place);
    throw WithParameters<PeerLost>(left, lost.rank(), told(lost, left, place));
  } catch (const Timeout& late) {
    const auto left = note_left(place);
    throw WithParameters<Timeout>(left, told(late, left, place));
  } catch (const CommError& failed) {
    const auto left = note_left(place);
    throw WithParameters<CommError>(left, told(failed, left, place));
  } catch (...) {
    std::rethrow_exception(error);
  }
}

}  // namespace muster
