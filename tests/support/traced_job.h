// Workers and servers in processes of their own, while every update leaves a trace.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/protocol/plan.h"
#include "server/worker/surroundings.h"
#include "support/folder.h"

namespace muster::testing {

inline constexpr int kMaxLives = 400;  ///< of all workers
inline constexpr uint32_t kTracedServers = 2;
inline constexpr int64_t kTracedWidth = 512;    ///< elements of each parameter, and rows, that hold traces
inline constexpr int64_t kTracesOfSteps = 256;  ///< and from here on those of steps

/// What processes tell one another, in memory that they share.
struct Board {
  struct Life {
    std::atomic<uint64_t> begun;  ///< the last step that was pushed
    std::atomic<uint64_t> acked;  ///< that was applied
    std::atomic<uint64_t> durable;
    std::atomic<uint64_t> first;  ///< the step before the first
    std::atomic<int> finished;
  };
  std::atomic<int> stop;
  std::atomic<int> servers_down;
  Life lives[kMaxLives];
  // Of a death that is asked for:
  std::atomic<uint64_t> occurrences;  ///< of its moment
  std::atomic<int64_t> killed_at;     ///< in ms of the steady clock; 0: not yet
  std::atomic<pid_t> servers[kTracedServers];
  std::atomic<pid_t> workers[2];
};

/// A job whose workers take 1 from one element of each parameter, and from one row of a table, with every step.
struct TracedJob {
  TracedJob(uint32_t workers, uint32_t staleness);
  ~TracedJob();
  TracedJob(const TracedJob&) = delete;
  TracedJob& operator=(const TracedJob&) = delete;

  /// A server at its name, with its folder, until servers_down.
  pid_t fork_server(uint32_t index) const;
  /// A worker until `stop`, or so many steps: exit status 0; 1 where it ends with an error that says what to do, 2 with
  /// another. An error is printed, unless it says what to do about a death that was asked for.
  pid_t fork_worker(uint32_t rank, int life) const;

  /// What was taken from each element, of all parameters and of the table.
  std::vector<std::vector<float>> read_counts() const;

  server::Plan plan;
  std::vector<std::string> names;
  Folder folder;
  Board* const board;
  bool cuts = false;          ///< connections, now and then
  uint64_t number = 0;        ///< of the job, which a launcher starts again with a greater one
  uint64_t steps = 0;         ///< of a synchronous job in all, else of each life; 0: until `stop`
  bool traces_ranks = false;  ///< and steps; else lives, each in its element
  std::chrono::milliseconds patience{20'000};
  /// A worker's, and what a server's process does besides; null: the usual.
  std::function<std::shared_ptr<server::Surroundings>(uint32_t rank)> surroundings;
  std::function<void(uint32_t server)> at_server;

 private:
  void work(uint32_t rank, int life) const;
};

/// Waits for a process, and returns its status.
int end_of(pid_t process);

}  // namespace muster::testing
