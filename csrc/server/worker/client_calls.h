// How a client's requests survive lost connections.
#pragma once

#include <chrono>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "server/worker/client.h"

namespace muster::server {

inline constexpr std::chrono::milliseconds kBetweenTries{10};  // to connect

template <class F>
auto ServerClient::whole(const F& request) {
  try {
    return request();
  } catch (...) {
    for (const auto& link : links_) link->disconnect();
    log_->take_lent();
    throw;
  }
}

template <class F>
auto ServerClient::retried(size_t server, const F& request) {
  return whole([&] {
    for (;;) {
      try {
        return request();
      } catch (const LinkBroken&) {
        recover(server);
      }
    }
  });
}

template <class Answer, class Message>
Answer ServerClient::call(size_t server, const Message& message, const std::function<void()>& meanwhile) {
  return retried(server, [&] {
    links_[server]->send(message);
    if (meanwhile) meanwhile();
    return links_[server]->template receive<Answer>(between());
  });
}

template <class Message>
std::vector<uint64_t> ServerClient::send_all(const Message& message) {
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
std::vector<Answer> ServerClient::receive_all(const Message& message, const std::vector<uint64_t>& sent) {
  std::vector<Answer> answers;
  for (size_t s = 0; s < links_.size(); ++s) {
    try {
      if (sent[s] == links_[s]->connects()) {
        answers.push_back(links_[s]->template receive<Answer>(between()));
        continue;
      }
    } catch (const LinkBroken&) {
      recover(s);
    }
    answers.push_back(call<Answer>(s, message));
  }
  return answers;
}

template <class Answer, class Message>
std::vector<Answer> ServerClient::call_all(const Message& message, const std::function<void()>& meanwhile) {
  return whole([&] {
    const auto sent = send_all(message);
    if (meanwhile) meanwhile();
    return receive_all<Answer>(message, sent);
  });
}

// Near the log's bound servers are asked for snapshots; at it the worker waits for them.
template <class F>
auto ServerClient::wait_for_log(const F& take) {
  const auto want_snapshots = [&] {
    for (const auto& link : links_) link->want_snapshot();
  };
  if (log_->is_half_full()) want_snapshots();
  const auto deadline = limit();
  for (;;) {
    if (auto* const taken = take()) return taken;
    want_snapshots();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    wait_a_slice(deadline);
    log_->release(durable());
  }
}

}  // namespace muster::server
