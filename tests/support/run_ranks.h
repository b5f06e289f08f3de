// Runs the ranks of a test as threads or as forked processes, with a deadline, and reports what failed where.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/shared/host_mesh.h"

namespace muster::testing {

using Seconds = std::chrono::seconds;

/// Deadline of a whole run; sanitizers make everything slower.
inline constexpr Seconds kRunLimit{120};

/// Thrown by MUSTER_CHECK: Catch2's macros belong to the main thread of the main process alone.
class CheckFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] void check_failed(const char* file, int line, const std::string& what);

#define MUSTER_CHECK(condition)                                                        \
  do {                                                                                 \
    if (!(condition)) ::muster::testing::check_failed(__FILE__, __LINE__, #condition); \
  } while (false)

/// The message of the error of type E that `call` throws; fails the check when it throws none or another.
template <class E, class F>
std::string message_of(const F& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  }
  check_failed(__FILE__, __LINE__, "an error was expected and none was thrown");
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// Runs body(rank) in `n` threads. Returns "rank r: message" lines of what they threw; empty when all went well.
std::string run_threads(int n, const std::function<void(int rank)>& body);

/// The same in `n` forked processes; the caller must not hold other threads' locks. `meanwhile` runs in the caller,
/// with their process ids. A process that outlives `limit` is killed and reported; one that was killed before is not.
std::string run_processes(int n, const std::function<void(int rank)>& body,
                          const std::function<void(const std::vector<pid_t>&)>& meanwhile = {},
                          Seconds limit = kRunLimit);

/// This worker's end of a mesh of `workers`, over a store at `address`.
std::shared_ptr<comm::HostMesh> make_mesh(const std::string& address, int worker, int workers, int replicas = 1,
                                          comm::Milliseconds timeout = Seconds(60));

/// A loopback address "127.0.0.1:port" with a port that was free.
std::string free_address();

using Body = std::function<void(comm::Communicator&)>;

// A backend of the typed suite: run(size, body, timeout) runs body at each rank of a group and reports failures.
struct Local {
  static constexpr const char* kName = "local";
  static std::string run(int size, const Body& body, comm::Milliseconds timeout = Seconds(60));
};
struct Host {
  static constexpr const char* kName = "host";
  static std::string run(int size, const Body& body, comm::Milliseconds timeout = Seconds(60));
};
/// Two processes that share the ranks, as threads within each.
struct HostWithReplicas {
  static constexpr const char* kName = "host with replicas";
  static std::string run(int size, const Body& body, comm::Milliseconds timeout = Seconds(60));
};

}  // namespace muster::testing
