#include "server/shard/server.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "core/log.h"
#include "core/make_thread.h"
#include "muster/error.h"

namespace muster::server {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kWatch{20};
constexpr milliseconds kHello{5'000};  // that a connection has to say whose it is
constexpr int kMaxStrangers = 64;      // connections that have not said it yet; further ones wait for their turn

std::unique_ptr<SnapshotStore> store_of(const ServerConfig& config) {
  return config.snapshots.empty() ? nullptr : open_snapshot_folder(config.snapshots);
}

}  // namespace

ParameterServer::ParameterServer(ServerConfig config)
    : config_(std::move(config)),
      process_(::getpid()),
      listener_(net::listen_on_host(config_.name)),
      core_(store_of(config_), config_.snapshot_every, time_) {
  watch_thread_ = make_thread("watches a server's workers", [this] { watch(); });
  try {
    core_.restore();
    part_thread_ = make_thread("keeps a server's part of a checkpoint", [this] {
      while (core_.wait_for_part()) core_.keep_part();
    });
    if (config_.snapshots.empty()) return;
    snapshot_thread_ = make_thread("keeps a server's snapshots", [this] {
      while (core_.wait_for_snapshot()) core_.keep_snapshot();
    });
  } catch (...) {
    end();
    throw;
  }
}

ParameterServer::~ParameterServer() { end(); }

bool ParameterServer::is_own() const noexcept { return ::getpid() == process_; }

void ParameterServer::end() {
  {
    const Lock lock(mutex_);
    stopping_ = true;
  }
  core_.stop();
  watch_thread_.join();
  if (snapshot_thread_.joinable()) snapshot_thread_.join();
  if (part_thread_.joinable()) part_thread_.join();
  for (const auto& connection : connections_) connection->thread.join();
}

void ParameterServer::watch() noexcept {
  auto last_look = Clock::now();
  bool cannot_accept = false;  // which was logged
  for (;;) {
    try {
      if (accept()) cannot_accept = false;
    } catch (const std::exception& error) {
      if (!std::exchange(cannot_accept, true)) {
        log(LogLevel::error, std::string("a parameter server cannot serve a new connection: ") + error.what());
      }
      std::this_thread::sleep_for(kWatch);
    }
    {
      const Lock lock(mutex_);
      if (stopping_) return;
    }
    const auto now = Clock::now();
    core_.expire(now - std::exchange(last_look, now));
    reap();
  }
}

// At most one connection, and none while too many have not said whose they are. Returns whether one came and is served.
bool ParameterServer::accept() {
  const auto count_strangers = [&] {
    const Lock lock(mutex_);
    return std::count_if(connections_.begin(), connections_.end(),
                         [](const auto& connection) { return !connection->session.is_known && !connection->is_over; });
  };
  if (count_strangers() >= kMaxStrangers) {
    std::this_thread::sleep_for(kWatch);
    return false;
  }
  auto channel = listener_->accept(Clock::now() + kWatch);
  if (!channel) return false;
  auto connection = std::make_unique<Connection>(std::move(channel));
  connection->hello = Clock::now() + kHello;
  const Lock lock(mutex_);
  if (stopping_) return false;
  auto& kept = *connections_.emplace_back(std::move(connection));
  try {
    kept.thread = make_thread("serves it, so that it is closed", [this, &kept] { serve(kept); });
  } catch (...) {
    connections_.pop_back();
    throw;
  }
  return true;
}

void ParameterServer::reap() {
  std::list<std::unique_ptr<Connection>> over;
  {
    const Lock lock(mutex_);
    for (auto connection = connections_.begin(); connection != connections_.end();) {
      const auto next = std::next(connection);
      if ((*connection)->is_over) over.splice(over.end(), connections_, connection);
      connection = next;
    }
  }
  for (const auto& connection : over) connection->thread.join();
}

void ParameterServer::serve(Connection& connection) noexcept {
  auto& session = connection.session;
  core_.attach(session);
  try {
    net::Frame frame;
    const auto is_late = [&] { return !session.is_known && Clock::now() >= connection.hello; };
    while (!session.leaves && !is_late() &&
           session.channel->receive(frame, session.is_known ? Deadline::max() : connection.hello)) {
      core_.answer(session, frame);
    }
  } catch (const std::exception& error) {
    const std::string who = session.is_known ? name_of_worker(session.rank) : "somebody";
    log(LogLevel::debug, "a connection of " + who + " ended: " + error.what());
  }
  core_.detach(session);
  session.channel->close();
  connection.is_over = true;
}

}  // namespace muster::server
