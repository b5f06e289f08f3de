#include "support/virtual_time.h"

#include <algorithm>
#include <utility>

#include "muster/error.h"

namespace muster::testing {

void VirtualTime::listen(const std::string& name, Serve serve) { servers_[name].serve = std::move(serve); }

void VirtualTime::end(const std::string& name) { servers_.erase(name); }

std::chrono::milliseconds VirtualTime::passed() const {
  return std::chrono::duration_cast<std::chrono::milliseconds>(now_ - begin_);
}

void VirtualTime::sleep(std::chrono::milliseconds duration) {
  const auto until = now_ + duration;
  while (now_ < until) go_on(until);
}

std::unique_ptr<net::Channel> VirtualTime::connect(const std::string& name, std::shared_ptr<net::Arena>,
                                                   net::Deadline) {
  const auto server = servers_.find(name);
  if (server == servers_.end()) throw CommError("nobody listens at '" + name + "'");
  auto ends = connect_in_memory({std::shared_ptr<void>(), this});  // not owned: this owns one end
  server->second.channels.push_back(std::move(ends.callee));
  return std::move(ends.caller);
}

bool VirtualTime::wait(std::unique_lock<std::mutex>& lock, net::Deadline deadline,
                       const std::function<bool()>& is_ready) {
  while (!is_ready()) {
    if (deadline <= now_) return false;
    lock.unlock();
    go_on(deadline);
    lock.lock();
  }
  return true;
}

bool VirtualTime::serve_all() {
  bool has_served = false;
  for (auto& [name, server] : servers_) {
    for (size_t i = 0; server.serve && i < server.channels.size(); ++i) {
      net::Frame frame;
      while (server.channels[i] && server.channels[i]->wait_input(now_)) {
        has_served = true;
        if (server.channels[i]->receive(frame, now_)) {
          server.serve(*server.channels[i], frame);
        } else {
          server.channels[i].reset();
        }
      }
    }
  }
  return has_served;
}

void VirtualTime::go_on(net::Deadline until) {
  const bool has_served = serve_all();
  if (!has_served) {
    auto next = until;
    for (const auto& [pulse, due] : pulses_) next = std::min(next, due);
    now_ = std::max(now_, next);
  }
  for (auto& [pulse, due] : pulses_) {
    if (has_served || due <= now_) due = pulse->tick(now_).due;
  }
}

}  // namespace muster::testing
