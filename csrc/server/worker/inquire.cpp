#include "core/wait_hook.h"
#include "server/worker/client.h"

namespace muster::server {

std::optional<Standing> inquire(const std::string& name, std::chrono::milliseconds patience,
                                Surroundings& surroundings) {
  auto deadline = surroundings.now() + patience;
  for (;;) {
    net::Frame frame;
    bool is_answered = false;
    try {
      const auto channel = surroundings.connect(name, nullptr, deadline);
      channel->send(Inquire::kType, encode(Inquire{}), {}, deadline);
      is_answered = channel->receive(frame, deadline);
    } catch (const CommError&) {
      is_answered = false;
    }
    if (is_answered && frame.type == Busy::kType) {
      deadline = surroundings.now() + patience;
    } else if (is_answered) {
      return Link::expect<Standing>(frame);
    }
    if (surroundings.now() > deadline) return std::nullopt;
    WaitHook::call();
    surroundings.sleep(kBetweenTries);
  }
}

}  // namespace muster::server
