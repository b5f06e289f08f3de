#include "strategy/step_errors.h"

#include <algorithm>
#include <exception>
#include <string>

#include "comm/peer_memory.h"
#include "core/with_parameters.h"
#include "device/kernel_status.h"
#include "muster/error.h"

namespace muster {

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
  const auto with_parameters = [&](const std::string& text) {
    are_torn_ = may_be_torn(place);
    const auto step = std::to_string(place.step);
    return text + (are_torn_ ? ". Parameters and optimizer state here may be partly those before step " + step +
                                   " and partly those after it: go on from what was saved last"
                             : ". Parameters and optimizer state here are whole, those before step " + step);
  };
  if (!groups.gradients.empty() && has_ended(groups.gradients.front()) && !session_.busy()) sets_.leave_memory();
  try {
    std::rethrow_exception(error);
  } catch (const KnowsParameters&) {
    std::rethrow_exception(error);
  } catch (const PeerLost& lost) {
    const auto text = with_parameters(lost.what());
    throw WithParameters<PeerLost>(are_torn_ ? Parameters::torn : Parameters::whole, lost.rank(), text);
  } catch (const Timeout& late) {
    const auto text = with_parameters(late.what());
    throw WithParameters<Timeout>(are_torn_ ? Parameters::torn : Parameters::whole, text);
  } catch (const CommError& failed) {
    const auto text = with_parameters(failed.what());
    throw WithParameters<CommError>(are_torn_ ? Parameters::torn : Parameters::whole, text);
  } catch (...) {
    std::rethrow_exception(error);
  }
}

}  // namespace muster
