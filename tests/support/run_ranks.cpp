#include "support/run_ranks.h"

#include <ATen/Parallel.h>
#include <arpa/inet.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <exception>
#include <mutex>
#include <thread>

#include "net/rendezvous.h"

namespace muster::testing {
namespace {

std::string report(int rank, const std::string& what) { return "rank " + std::to_string(rank) + ": " + what + "\n"; }

// A group whose rank failed a check would leave the others waiting.
void run_body(const Body& body, comm::Communicator& group) {
  try {
    body(group);
  } catch (const std::exception& error) {
    group.abort(std::string("a test's rank failed: ") + error.what());
    throw;
  }
}

}  // namespace

void check_failed(const char* file, int line, const std::string& what) {
  throw CheckFailed(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

std::string run_threads(int n, const std::function<void(int)>& body) {
  std::mutex mutex;
  std::string failures;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        const std::lock_guard lock(mutex);
        failures += report(rank, error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return failures;
}

std::string run_processes(int n, const std::function<void(int)>& body,
                          const std::function<void(const std::vector<pid_t>&)>& meanwhile, Seconds limit) {
  struct Child {
    pid_t pid;
    int pipe;
  };
  std::vector<Child> children;
  for (int rank = 0; rank < n; ++rank) {
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("no pipe");
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::close(ends[0]);
      at::set_num_threads(1);  // the pool's threads did not follow the fork
      int status = 0;
      try {
        body(rank);
      } catch (const std::exception& error) {
        const std::string what = error.what();
        status = ::write(ends[1], what.data(), what.size()) < 0 ? 2 : 1;
      }
      ::_exit(status);
    }
    ::close(ends[1]);
    children.push_back({pid, ends[0]});
  }
  if (meanwhile) {
    std::vector<pid_t> pids;
    for (const Child& child : children) pids.push_back(child.pid);
    meanwhile(pids);
  }
  const auto deadline = std::chrono::steady_clock::now() + limit;
  std::string failures;
  for (int rank = 0; rank < n; ++rank) {
    const Child& child = children[static_cast<size_t>(rank)];
    std::string said;
    char buffer[4096];
    bool is_late = false;
    for (;;) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
      pollfd polled{child.pipe, POLLIN, 0};
      if (left.count() <= 0 || ::poll(&polled, 1, static_cast<int>(left.count())) == 0) {
        is_late = true;
        ::kill(child.pid, SIGKILL);
        break;
      }
      const ssize_t got = ::read(child.pipe, buffer, sizeof(buffer));
      if (got <= 0) break;
      said.append(buffer, static_cast<size_t>(got));
    }
    ::close(child.pipe);
    int status = 0;
    ::waitpid(child.pid, &status, 0);
    if (is_late) {
      failures += report(rank, "did not end in time");
    } else if (status != 0 && !(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)) {
      failures += report(rank, said.empty() ? "ended with wait status " + std::to_string(status) : said);
    }
  }
  return failures;
}

std::string free_address() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  const bool is_bound = ::bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                        ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  ::close(fd);
  if (!is_bound) throw std::runtime_error("no free port");
  return "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
}

std::shared_ptr<comm::HostMesh> make_mesh(const std::string& address, int worker, int workers, int replicas,
                                          comm::Milliseconds timeout) {
  Cluster cluster;
  cluster.rank = worker;
  cluster.num_workers = workers;
  cluster.address = address;
  comm::HostMesh::Options options;
  options.rank = worker;
  options.num_workers = workers;
  options.replicas = replicas;
  options.timeout = timeout;
  return comm::HostMesh::connect(*net::open_store(cluster, Seconds(30)), options);
}

std::string Local::run(int size, const Body& body, comm::Milliseconds timeout) {
  std::vector<comm::CommunicatorPtr> group = comm::make_local(size, timeout);
  return run_threads(size, [&](int rank) { run_body(body, *group[static_cast<size_t>(rank)]); });
}

namespace {

std::string run_workers(int workers, const std::function<int(int)>& replicas_of, const Body& body,
                        comm::Milliseconds timeout) {
  const std::string address = free_address();
  return run_processes(workers, [&](int worker) {
    const auto mesh = make_mesh(address, worker, workers, replicas_of(worker), timeout);
    std::vector<comm::CommunicatorPtr> handles = mesh->make_group("test");
    if (handles.size() == 1) {
      run_body(body, *handles[0]);
      return;
    }
    const std::string failures =
        run_threads(static_cast<int>(handles.size()), [&](int r) { run_body(body, *handles[static_cast<size_t>(r)]); });
    if (!failures.empty()) throw CheckFailed(failures);
  });
}

}  // namespace

std::string Host::run(int size, const Body& body, comm::Milliseconds timeout) {
  return run_workers(size, [](int) { return 1; }, body, timeout);
}

std::string HostWithReplicas::run(int size, const Body& body, comm::Milliseconds timeout) {
  return run_workers(2, [size](int worker) { return worker == 0 ? (size + 1) / 2 : size / 2; }, body, timeout);
}

}  // namespace muster::testing
