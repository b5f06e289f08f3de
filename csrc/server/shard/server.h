// A parameter server: listens, and serves each connection on a thread of its own.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "net/channel.h"
#include "server/shard/server_core.h"

namespace muster::server {

struct ServerConfig {
  std::string name;                      ///< abstract Unix name to listen at
  std::filesystem::path snapshots = {};  ///< a folder of its own; empty: none, and what is applied counts as durable
  std::chrono::milliseconds snapshot_every{30'000};
};

/// Thread-safe. One thread accepts connections and watches members, one writes snapshots,
/// one parts of checkpoints, and each connection has one;
/// all end with the object. docs/threading.md has its locks.
class ParameterServer {
 public:
  /// Listens, and takes up its newest good snapshot, if there is one; who asks meanwhile is told that it is busy.
  /// Throws CommError where the name is taken, CheckpointError where the snapshots are damaged or another process uses
  /// their folder.
  explicit ParameterServer(ServerConfig config);
  /// Stops: requests that wait fail, connections end.
  ~ParameterServer();
  ParameterServer(const ParameterServer&) = delete;
  ParameterServer& operator=(const ParameterServer&) = delete;

  /// Whether this process made it: a forked child's copy has no threads, and must not be asked or destroyed.
  bool is_own() const noexcept;
  bool is_deserted() const { return core_.is_deserted(); }
  void snapshot() { core_.snapshot(); }
  using Stats = ServerCore::Stats;
  Stats stats() const { return core_.stats(); }

 private:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;
  /// Its thread owns it.
  struct Connection {
    explicit Connection(std::unique_ptr<net::Channel> channel) : session(std::move(channel)) {}

    Session session;
    std::thread thread;
    Deadline hello;  // until when it has to be known
    std::atomic<bool> is_over{false};
  };

  void watch() noexcept;
  bool accept();
  void serve(Connection& connection) noexcept;
  void reap();
  void end();

  const ServerConfig config_;
  const pid_t process_;
  std::unique_ptr<net::ChannelListener> listener_;
  Timekeeper time_;
  ServerCore core_;

  std::mutex mutex_;
  // Guarded by mutex_:
  bool stopping_ = false;
  std::list<std::unique_ptr<Connection>> connections_;

  std::thread watch_thread_;
  std::thread snapshot_thread_;
  std::thread part_thread_;
};

}  // namespace muster::server
