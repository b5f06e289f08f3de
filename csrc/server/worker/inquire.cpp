#include <algorithm>

#include "core/wait_hook.h"
#include "server/worker/absence.h"
#include "server/worker/client.h"

namespace muster::server {

namespace {

constexpr std::chrono::milliseconds kBetweenHooks{50};  // calls of the WaitHook

}  // namespace

std::optional<Standing> inquire(const std::string& name, std::chrono::milliseconds patience,
                                Surroundings& surroundings) {
  Absence absence(surroundings.now(), patience);
  for (;;) {
    net::Frame frame;
    bool is_answered = false;
    try {
      const auto deadline = surroundings.now() + patience;
      const auto channel = surroundings.connect(name, nullptr, deadline);
      channel->send(Inquire::kType, encode(Inquire{}), {}, deadline);
      while (!channel->wait_input(std::min(deadline, surroundings.now() + kBetweenHooks)) &&
             surroundings.now() < deadline) {
        WaitHook::call();
      }
      is_answered = channel->receive(frame, deadline);
      if (!is_answered) absence.note_gone(surroundings.now());
    } catch (const Timeout&) {
      absence.note_silent();
    } catch (const CommError&) {
      absence.note_gone(surroundings.now());
    }
    if (is_answered && frame.type != Busy::kType) return Link::expect<Standing>(frame);
    if (is_answered) absence.note_busy(surroundings.now());
    if (absence.is_over(surroundings.now())) return std::nullopt;
    WaitHook::call();
    surroundings.sleep(kBetweenTries);
  }
}

}  // namespace muster::server
