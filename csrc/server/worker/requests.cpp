#include "server/worker/requests.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/wait_hook.h"
#include "muster/error.h"

namespace muster::server {

using std::chrono::milliseconds;

Requests::Requests(const ClientConfig& config, Replay& replay, std::shared_ptr<net::Arena> memory)
    : config_(config), replay_(replay), memory_(std::move(memory)), healing_(config.servers.size()) {
  for (const auto& name : config_.servers) {
    links_.push_back(std::make_unique<Link>(
        Link::Config{name, config_.rank, config_.lanes, milliseconds(config_.plan.heartbeat_ms)}));
  }
  is_started_ = true;
  for (size_t s = 0; s < links_.size(); ++s) {
    connect(s, /*is_first=*/true);
    links_[s]->keep_alive();
  }
}

void Requests::note_applied(const std::vector<Applied>& answers) {
  for (size_t s = 0; s < links_.size(); ++s) links_[s]->note_durable(answers[s].durable);
  replay_.log().release(durable());
}

uint64_t Requests::durable() const noexcept {
  uint64_t durable = links_.front()->durable();
  for (const auto& link : links_) durable = std::min(durable, link->durable());
  return durable;
}

Requests::Clock::time_point Requests::limit() const {
  return Clock::now() + milliseconds(config_.plan.timeout_ms) * 3 / 2;
}

void Requests::wait_a_slice(Clock::time_point deadline) {
  if (Clock::now() > deadline) {
    throw Timeout("the parameter servers did not answer within the timeout; look at their logs and the other workers'");
  }
  WaitHook::call();
  heal();
}

std::function<void()> Requests::between() {
  return [this, deadline = limit()] { wait_a_slice(deadline); };
}

// Another server may wait for what this worker has to push again.
void Requests::heal() {
  if (!has_joined_) return;
  for (size_t s = 0; s < links_.size(); ++s) {
    if (!healing_[s] && links_[s]->has_ended()) recover(s);
  }
}

void Requests::connect(size_t server, bool is_first) {
  auto& link = *links_[server];
  const auto deadline = Clock::now() + config_.patience;
  const uint64_t life = link.life();
  std::string why = "nobody listens there";
  for (;;) {
    try {
      incarnation_ = link.connect(incarnation_, memory_);
      link.send(Configure{static_cast<uint32_t>(server), config_.plan, config_.job, config_.facts});
      const bool is_started = link.receive<Configured>(between()).started;
      if (is_first) {
        is_started_ = is_started_ && is_started;
      } else if (!is_started && (is_started_ || link.life() != life)) {
        lose(config_, server, "it started again without what it was given");
      }
      return;
    } catch (const LinkBroken& error) {
      why = error.what();
    }
    if (Clock::now() > deadline) lose(config_, server, why);
    std::this_thread::sleep_for(kBetweenTries);
    WaitHook::call();
  }
}

void Requests::recover(size_t server) {
  healing_[server] = true;
  const auto done = std::shared_ptr<void>(nullptr, [&](void*) { healing_[server] = false; });
  const auto deadline = limit();
  for (;;) {
    try {
      connect(server, /*is_first=*/false);
      if (has_joined_) {
        auto& link = *links_[server];
        if (server == 0 && last_decision_) {
          link.send(*last_decision_);
          link.receive<Done>(between());
        }
        link.send(Join{joined_at_, /*returns=*/true});
        link.receive<Joined>(between());
        replay_.resend(server, link, [this] { return between(); });
      }
      return;
    } catch (const LinkBroken& error) {
      if (Clock::now() > deadline) lose(config_, server, error.what());
    }
  }
}

void Requests::ask_all(const std::vector<size_t>& counts, const std::function<void(size_t, size_t)>& ask) {
  whole([&] {
    std::vector<uint64_t> asked(links_.size());  // over which connection; 0: none
    for (size_t s = 0; s < links_.size(); ++s) asked[s] = links_[s]->is_broken() ? 0 : links_[s]->connects();
    const size_t most = *std::max_element(counts.begin(), counts.end());
    for (size_t i = 0; i < most; ++i) {
      for (size_t s = 0; s < links_.size(); ++s) {
        if (i >= counts[s] || asked[s] != links_[s]->connects()) continue;
        try {
          ask(s, i);
        } catch (const LinkBroken&) {
          asked[s] = 0;  // all again, below
        }
      }
    }
    for (size_t s = 0; s < links_.size(); ++s) {
      if (counts[s] == 0) continue;
      retried(s, [&] {
        if (asked[s] != links_[s]->connects()) {
          asked[s] = links_[s]->connects();
          for (size_t i = 0; i < counts[s]; ++i) ask(s, i);
        }
        links_[s]->drain(between());
        return true;
      });
    }
    return true;
  });
}

PushLog::Entry& Requests::entry_of(uint64_t step) {
  replay_.log().release(durable());
  if (auto* known = replay_.log().find(step)) return *known;
  return *wait_for_log([&] { return replay_.log().open(step); });
}

void Requests::leave() {
  for (const auto& link : links_) {
    try {
      if (link->is_broken()) continue;
      link->send(Leave{});
      link->receive<Done>([] { WaitHook::call(); });
    } catch (const LinkBroken&) {
      continue;  // it knows by the silence
    }
  }
}

}  // namespace muster::server
