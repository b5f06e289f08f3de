// Requests of a worker to all servers that survive lost connections and restarted servers.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "net/shared_segment.h"
#include "server/protocol/protocol.h"
#include "server/worker/batch_book.h"
#include "server/worker/client_config.h"
#include "server/worker/link.h"
#include "server/worker/push_log.h"
#include "server/worker/replay.h"

namespace muster::server {

inline constexpr std::chrono::milliseconds kBetweenTries{10};  ///< to connect

/// Externally synchronised; usable after an error. A request that meets a lost connection connects again, has what the
/// server lacks sent again, and is sent anew; one that waits does so for all servers. Throws as ServerClient.
class Requests {
 public:
  using Clock = Surroundings::Clock;

  /// Connects to all servers and compares plans with them. `config` and `replay` must outlive it; `memory` is shared
  /// with servers, where it is not null.
  Requests(const ClientConfig& config, Replay& replay, std::shared_ptr<net::Arena> memory);

  size_t num_servers() const noexcept { return links_.size(); }
  Link& link(size_t server) noexcept { return *links_[server]; }
  uint64_t incarnation() const noexcept { return incarnation_; }
  /// Whether all servers hold values already.
  bool is_started() const noexcept { return is_started_; }
  /// The chief's: `tell` tells all servers with what the job begins, and is called again where one of them, which may
  /// have forgotten it, started again meanwhile. `gives_values`: by values of its own.
  void begin(const std::function<void()>& tell, bool gives_values);
  /// The chief's: where the job began after another one, tells all servers where it goes on. Throws CheckpointError
  /// where they have no step in common. No-op after begin().
  void resume();
  /// Done of all servers. Workers come in by server 0, which is told when all others have answered.
  template <class Message>
  void tell_all(const Message& message);
  /// Server 0 said after which step this worker comes in; servers that it connects to again are told, and of the last
  /// decision, once it has joined all.
  void note_join_step(uint64_t step) noexcept {
    joined_at_ = step;
    is_running_ = true;
  }
  void note_joined() noexcept { is_started_ = has_joined_ = true; }
  void note_decision(const Decision& decision);
  /// Of the last decision, where that is the step's.
  Cut cut_of(uint64_t step) const {
    return last_decision_ && last_decision_->step == step ? last_decision_->cut : Cut();
  }
  /// The answers to Apply, by server.
  void note_applied(const std::vector<Applied>& answers);
  /// Up to which step all servers have this worker's pushes in snapshots.
  Durable durable() const noexcept;
  BatchBook& batches() noexcept { return batches_; }

  /// When a wait that begins here is a Timeout.
  Clock::time_point limit() const;
  /// What a wait that begins here calls every 50 ms or so: the thread's WaitHook, and other lost connections are made
  /// again. Throws Timeout.
  std::function<void()> between();

  /// The log's entry of a step, once it has room; beyond its bound where no snapshot that servers are to take would
  /// make any.
  PushLog::Entry& entry_of(uint64_t step);
  /// What `take` gives, once the log has room.
  template <class F>
  auto wait_for_log(const F& take);

  /// One server's answer. `meanwhile` is called once the request is sent.
  template <class Answer, class Message>
  Answer call(size_t server, const Message& message, const std::function<void()>& meanwhile = {});
  /// All servers' answers, by server.
  template <class Answer, class Message>
  std::vector<Answer> call_all(const Message& message, const std::function<void()>& meanwhile = {});
  /// Calls `ask(server, i)`, which sends on a lane for chunks, for i below each server's count, and waits for all
  /// answers; asks a server anew whose connection was lost meanwhile.
  void ask_all(const std::vector<size_t>& counts, const std::function<void(size_t server, size_t i)>& ask);
  /// What `request` gives, which is called again each time that the server's connection was lost.
  template <class F>
  auto retried(size_t server, const F& request);

  /// Whether a server stayed away, or is another one, and is not waited for again.
  bool has_lost_one() const noexcept { return has_lost_one_; }
  /// Leaves all servers in good order.
  void leave();
  /// Leaves after an error, before the worker has joined: others wait for its values, or for it. Waits for the servers
  /// no longer than the heartbeat's time.
  void give_up() noexcept;

 private:
  void connect_all();
  void tell_leave(const std::function<void()>& between);
  void connect(size_t server, bool is_first);
  Configured try_to_connect(size_t server);
  void join_again(size_t server);
  /// Tells server 0, started again, that this worker is there, once.
  void return_to_first();
  std::function<void()> between_returning(size_t server);
  void check_lives(size_t server, bool has_started_again, const Configured& configured);
  [[noreturn]] void lose(size_t server, const std::string& why);
  void check_started() const;
  void check_origins() const;
  void settle();
  void check_snapshots();
  std::string name_of(size_t server) const;
  void recover(size_t server);
  void heal();
  void wait_a_slice(Clock::time_point deadline);
  /// The answers to `message`, which was sent on the links whose connects() are `sent` (0: it was not).
  template <class Answer, class Message>
  std::vector<Answer> receive_all(const Message& message, const std::vector<uint64_t>& sent);
  template <class Message>
  std::vector<uint64_t> send_all(const Message& message);
  /// Calls `request`; where it throws, answers that are under way are forgotten with their connections, and what the
  /// caller pushed is its own again.
  template <class F>
  auto whole(const F& request);

  const ClientConfig& config_;
  Replay& replay_;
  const std::shared_ptr<net::Arena> memory_;
  std::vector<std::unique_ptr<Link>> links_;  // by server
  std::vector<bool> healing_;                 // likewise
  uint64_t incarnation_ = 0;
  uint64_t joined_at_ = 0;
  uint64_t last_cut_ = 0;  // the last step that this worker knows to be cut
  bool is_started_ = false;
  bool is_running_ = false;  // the job: all servers know what it began with
  bool has_joined_ = false;
  bool is_first_told_ = false;  // see return_to_first
  bool has_lost_one_ = false;   // a server, which is not waited for again
  std::optional<Decision> last_decision_;
  std::vector<Configured> configured_;  // by server, of the last connection before the job ran
  BatchBook batches_;
};

template <class F>
auto Requests::whole(const F& request) {
  try {
    return request();
  } catch (...) {
    for (const auto& link : links_) link->disconnect();
    replay_.log().take_lent();
    throw;
  }
}

template <class F>
auto Requests::retried(size_t server, const F& request) {
  return whole([&] {
    for (;;) {
      try {
        return request();
      } catch (const LinkBroken&) {
        if (links_[server]->is_broken()) recover(server);
      }
    }
  });
}

template <class Answer, class Message>
Answer Requests::call(size_t server, const Message& message, const std::function<void()>& meanwhile) {
  return retried(server, [&] {
    links_[server]->send(message);
    if (meanwhile) meanwhile();
    return links_[server]->template receive<Answer>(between());
  });
}

template <class Message>
std::vector<uint64_t> Requests::send_all(const Message& message) {
  std::vector<uint64_t> sent(links_.size());
  for (size_t s = 0; s < links_.size(); ++s) {
    try {
      links_[s]->send(message);
      sent[s] = links_[s]->connects();
    } catch (const LinkBroken&) {
      continue;  // receive_all sends it again
    }
  }
  return sent;
}

template <class Answer, class Message>
std::vector<Answer> Requests::receive_all(const Message& message, const std::vector<uint64_t>& sent) {
  std::vector<Answer> answers;
  for (size_t s = 0; s < links_.size(); ++s) {
    try {
      if (sent[s] == links_[s]->connects()) {
        answers.push_back(links_[s]->template receive<Answer>(between()));
        continue;
      }
    } catch (const LinkBroken&) {
      if (links_[s]->is_broken()) recover(s);
    }
    answers.push_back(call<Answer>(s, message));
  }
  return answers;
}

template <class Answer, class Message>
std::vector<Answer> Requests::call_all(const Message& message, const std::function<void()>& meanwhile) {
  return whole([&] {
    const auto sent = send_all(message);
    if (meanwhile) meanwhile();
    return receive_all<Answer>(message, sent);
  });
}

template <class Message>
void Requests::tell_all(const Message& message) {
  std::vector<size_t> others(links_.size(), 1);
  others.front() = 0;
  ask_all(others, [&](size_t s, size_t) {
    links_[s]->send_chunk(
        0, Message::kType, encode(message), {}, {}, [](const net::Frame& answer) { Link::expect<Done>(answer); },
        between());
  });
  call<Done>(0, message);
}

// Near the log's bound servers are asked for snapshots; at it the worker waits for them.
template <class F>
auto Requests::wait_for_log(const F& take) {
  if (replay_.log().is_half_full()) {
    for (const auto& link : links_) link->want_snapshot();
  }
  const auto deadline = limit();
  for (;;) {
    if (auto* const taken = take()) return taken;
    config_.surroundings->sleep(kBetweenTries);
    wait_a_slice(deadline);
    heal();
    check_snapshots();
    replay_.log().release(durable().newest);
  }
}

}  // namespace muster::server
