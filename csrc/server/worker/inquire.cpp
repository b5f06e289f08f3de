#include <chrono>
#include <thread>

#include "core/wait_hook.h"
#include "server/worker/client.h"

namespace muster::server {

std::optional<Standing> inquire(const std::string& name, std::chrono::milliseconds patience) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + patience;
  for (;;) {
    net::Frame frame;
    bool is_answered = false;
    try {
      const auto channel = net::connect_on_host(name, nullptr, deadline);
      channel->send(Inquire::kType, encode(Inquire{}), {}, deadline);
      is_answered = channel->receive(frame, deadline);
    } catch (const CommError&) {
      is_answered = false;
    }
    if (is_answered) return Link::expect<Standing>(frame);
    if (Clock::now() > deadline) return std::nullopt;
    WaitHook::call();
    std::this_thread::sleep_for(kBetweenTries);
  }
}

}  // namespace muster::server
