#include "net/rendezvous.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "core/make_thread.h"
#include "core/wait_hook.h"
#include "muster/error.h"
#include "net/tcp.h"

namespace muster::net {
namespace {

using Clock = std::chrono::steady_clock;

std::vector<uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }
std::string to_text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

// What a WaitHook threw.
struct Interruption : std::exception {
  explicit Interruption(std::exception_ptr thrown) : error(std::move(thrown)) {}
  std::exception_ptr error;
};

void call_wait_hook() {
  try {
    WaitHook::call();
  } catch (...) {
    throw Interruption(std::current_exception());
  }
}

// Errors of a store become ours.
template <class F>
auto guarded(const F& call) -> decltype(call()) {
  try {
    return call();
  } catch (const Interruption& interruption) {
    std::rethrow_exception(interruption.error);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    const std::string what = e.what();
    throw CommError("the rendezvous store failed: " + what.substr(0, what.find('\n')) +
                    ". Check that worker 0 (or the launcher that hosts the store) is alive and reachable");
  }
}

[[noreturn]] void throw_unhosted(const HostPort& at, const std::string& why) {
  throw InvalidArgument("rank 0 cannot host the rendezvous at " + at.host + ":" + at.port + ": " + why +
                        "; choose a free MASTER_PORT and a MASTER_ADDR of rank 0's host");
}

// Nothing where somebody listens there already.
FileDescriptor listen_on(const HostPort& at) {
  std::string why;
  const Addresses addresses = resolve(at, why);
  if (!addresses) {
    throw InvalidArgument("the rendezvous address " + at.host + " cannot be resolved: " + why +
                          "; set MASTER_ADDR to a name or address of rank 0's host");
  }
  int error = 0;
  FileDescriptor listener;
  for (const addrinfo* a = addresses.get(); a != nullptr && !listener; a = a->ai_next) {
    FileDescriptor fd(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol));
    const int on = 1;
    if (fd && ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
        ::bind(fd.get(), a->ai_addr, a->ai_addrlen) == 0 && ::listen(fd.get(), SOMAXCONN) == 0) {
      listener = std::move(fd);
    } else if (error != EADDRINUSE) {
      error = errno;
    }
  }
  if (!listener && error != EADDRINUSE) throw_unhosted(at, std::strerror(error));
  return listener;
}

class Backoff {
 public:
  explicit Backoff(Clock::time_point deadline) : deadline_(deadline) {}
  /// Sleeps a little longer each time, and calls the thread's WaitHook; false at the deadline. Within guarded().
  bool pause() {
    call_wait_hook();
    const auto left = deadline_ - Clock::now();
    if (left <= Clock::duration::zero()) return false;
    std::this_thread::sleep_for(std::min<Clock::duration>(left, delay_));
    delay_ = std::min(delay_ * 2, std::chrono::milliseconds(50));
    return true;
  }

 private:
  Clock::time_point deadline_;
  std::chrono::milliseconds delay_{1};
};

[[noreturn]] void throw_unreachable(const Cluster& cluster, const std::string& why) {
  throw Timeout("worker " + std::to_string(cluster.rank) + " cannot reach the rendezvous at " + cluster.address + ": " +
                why + ". Start rank 0, and check the address and the firewall");
}

// What a store does when it connects cannot be interrupted: it should find somebody there.
void await_listener(const Cluster& cluster, const HostPort& at, std::chrono::milliseconds timeout) {
  const Clock::time_point deadline = Clock::now() + timeout;
  std::string why;
  for (Backoff backoff(deadline);;) {
    const Addresses addresses = resolve(at, why);
    for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
      int error = 0;
      if (try_to_connect(*a, deadline, error, call_wait_hook)) return;
      why = std::strerror(error);
    }
    if (!backoff.pause()) throw_unreachable(cluster, why);
  }
}

// Whether a socket of this process accepts connections at the port.
bool listens_itself(uint16_t port) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    const int fd = std::stoi(entry.path().filename().string());
    int accepts = 0;
    socklen_t size = sizeof(accepts);
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &accepts, &size) != 0 || accepts == 0) continue;
    sockaddr_in6 bound{};  // the port is where that of IPv4 is
    size = sizeof(bound);
    if (::getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size) != 0) continue;
    if ((bound.sin6_family == AF_INET || bound.sin6_family == AF_INET6) && ntohs(bound.sin6_port) == port) return true;
  }
  return false;
}

// Whether this is the process's first store of ours at the port, of whatever interface.
bool is_first_at(uint16_t port) {
  static std::mutex mutex;
  static std::set<uint16_t> ports;
  const std::lock_guard lock(mutex);
  return ports.insert(port).second;
}

// Hosts it, or shares the one that torch.distributed hosts there in this process, as it shares ours: each rendezvous of
// one launch is given the same port. What is shared is found by its port alone, so that one of another interface is
// not.
StorePtr host_tcp_store(const HostPort& at, c10d::TCPStoreOptions options) {
  options.isServer = true;
  options.multiTenant = true;
  const FileDescriptor listener = listen_on(at);
  if (listener) {
    options.multiTenant = is_first_at(options.port);
    // The store owns and closes the copy, which no program that is executed later may inherit: the port would stay
    // taken.
    options.masterListenFd = ::fcntl(listener.get(), F_DUPFD_CLOEXEC, 0);
    return guarded([&] { return c10::make_intrusive<c10d::TCPStore>(at.host, options); });
  }
  if (!listens_itself(options.port)) throw_unhosted(at, std::strerror(EADDRINUSE));
  try {
    return c10::make_intrusive<c10d::TCPStore>(at.host, options);
  } catch (const std::exception&) {
    throw_unhosted(at, std::strerror(EADDRINUSE));
  }
}

// What a store asks when it connects may never be answered, where something else has the port: on a thread of its own,
// which then stays.
StorePtr connect_to_store(const Cluster& cluster, const HostPort& at, const c10d::TCPStoreOptions& options) {
  const auto made = std::make_shared<std::promise<StorePtr>>();
  auto store = made->get_future();
  make_thread("asks at the meeting place", [made, host = at.host, options] {
    try {
      made->set_value(c10::make_intrusive<c10d::TCPStore>(host, options));
    } catch (...) {
      made->set_exception(std::current_exception());
    }
  }).detach();
  const Clock::time_point deadline = Clock::now() + options.timeout;
  while (guarded([&] {
    call_wait_hook();
    return store.wait_for(std::chrono::milliseconds(50)) != std::future_status::ready;
  })) {
    if (Clock::now() < deadline) continue;
    throw_unreachable(cluster,
                      "what listens there does not answer as a rendezvous does; another program may have the port");
  }
  return store.get();
}

StorePtr make_tcp_store(const Cluster& cluster, std::chrono::milliseconds timeout) {
  const HostPort at = split_address(cluster.address);
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::stoi(at.port));
  options.numWorkers = static_cast<size_t>(cluster.num_workers);
  options.waitWorkers = false;
  options.timeout = timeout;
  if (cluster.rank == 0 && !cluster.store_is_hosted) return host_tcp_store(at, options);
  guarded([&] { await_listener(cluster, at, timeout); });
  try {
    return connect_to_store(cluster, at, options);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    const std::string what = e.what();
    throw_unreachable(cluster, what.substr(0, what.find('\n')));
  }
}

/// Stores of this process by address and rank, and how often each was opened, by the name of the meeting.
struct OpenStores {
  struct Entry {
    std::mutex mutex;  // held while the store connects: by address and rank, as a thread may connect to another's store
    StorePtr store;    // guarded by mutex, as what follows
    std::map<std::string, int> opened = {};
  };
  std::mutex mutex;
  std::map<std::pair<std::string, int>, Entry> entries;  // guarded by mutex; an entry stays where it is
};

// Never destroyed: peers may still need a store while this process runs its static destructors.
OpenStores& open_stores() {
  static auto* const stores = new OpenStores;
  return *stores;
}

std::string list_missing(c10d::Store& store, const std::vector<std::string>& keys,
                         const std::vector<std::string>& who) {
  std::string missing;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!store.check({keys[i]})) missing += (missing.empty() ? "" : ", ") + who[i];
  }
  return missing;
}

// The address of this host's loopback that the rendezvous is at, as this host knows it; empty where it is at another.
std::string loopback_of(const Cluster& cluster) {
  try {
    const std::string own = address_towards(split_address(cluster.address));
    return is_loopback(own) ? own : "";
  } catch (const Error&) {
    return "";
  }
}

// Rank 0 often hosts the store and may end its process once it knows of a conflict: the others come first.
void await_informed(c10d::Store& store) {
  for (Backoff backoff(Clock::now() + std::chrono::seconds(2)); store.add("informed", 0) < store.add("arrived", 0);) {
    if (!backoff.pause()) return;
  }
}

}  // namespace

StorePtr open_store(const Cluster& cluster, std::chrono::milliseconds timeout) {
  cluster.validate();
  if (cluster.num_workers == 1) return c10::make_intrusive<c10d::HashStore>();
  StorePtr store;
  int generation = 0;
  {
    OpenStores& stores = open_stores();
    std::unique_lock stores_lock(stores.mutex);
    OpenStores::Entry& entry = stores.entries[{cluster.address, cluster.rank}];
    stores_lock.unlock();
    const std::lock_guard lock(entry.mutex);
    if (!entry.store) entry.store = make_tcp_store(cluster, timeout);
    generation = entry.opened[cluster.meeting]++;
    store = entry.store;
  }
  const char* restart = std::getenv("TORCHELASTIC_RESTART_COUNT");
  const std::string meeting = cluster.meeting.empty() ? "" : cluster.meeting + "/";
  const std::string prefix =
      std::string("muster/") + (restart ? restart : "0") + "/" + meeting + std::to_string(generation);
  StorePtr own = c10::make_intrusive<c10d::PrefixStore>(prefix, std::move(store));
  try {
    join(*own, cluster.rank, cluster.num_workers, timeout);
  } catch (const Timeout& late) {
    const std::string listens_at = cluster.rank == 0 && !cluster.store_is_hosted ? loopback_of(cluster) : "";
    if (listens_at.empty()) throw;
    throw Timeout(std::string(late.what()) + ". On other hosts they cannot: " + cluster.address + " is " + listens_at +
                  " here, this host's loopback; set MASTER_ADDR to an address by which all hosts reach this one, or " +
                  "mend /etc/hosts");
  }
  return own;
}

void join(c10d::Store& store, int rank, int num_workers, std::chrono::milliseconds timeout) {
  guarded([&] {
    const Clock::time_point deadline = Clock::now() + timeout;
    store.add("arrived", 1);  // before others can know of a conflict with this worker
    const std::string mine = std::to_string(num_workers);
    const std::string agreed = to_text(store.compareSet("world", to_bytes(""), to_bytes(mine)));
    if (agreed != mine) {
      set_text(store, "conflict",
               "worker " + std::to_string(rank) + " was started with " + mine + " workers, another with " + agreed);
    } else if (store.add("claim/" + std::to_string(rank), 1) > 1) {
      set_text(store, "conflict", "two workers were started with rank " + std::to_string(rank));
    }
    std::vector<std::string> keys, who;
    for (int r = 0; r < num_workers; ++r) {
      keys.push_back("joined/" + std::to_string(r));
      who.push_back("worker " + std::to_string(r));
    }
    set_text(store, keys[static_cast<size_t>(rank)], mine);
    for (Backoff backoff(deadline);;) {
      const bool is_complete = store.check(keys);
      if (store.check({"conflict"})) {
        const std::string conflict = to_text(store.get("conflict"));
        store.add("informed", 1);
        if (rank == 0) await_informed(store);
        throw InvalidArgument(conflict + "; give every worker the same number of workers and a rank of its own");
      }
      if (is_complete) return;
      if (!backoff.pause()) {
        throw Timeout("worker " + std::to_string(rank) + " waited " + std::to_string(timeout.count()) +
                      " ms for the others to join; missing: " + list_missing(store, keys, who) +
                      ". Start them, or raise `timeout`");
      }
    }
  });
}

void set_text(c10d::Store& store, const std::string& key, const std::string& value) {
  guarded([&] { store.set(key, to_bytes(value)); });
}

std::vector<std::string> get_texts(c10d::Store& store, const std::vector<std::string>& keys,
                                   const std::vector<std::string>& who, std::chrono::milliseconds timeout) {
  return guarded([&] {
    for (Backoff backoff(Clock::now() + timeout); !store.check(keys);) {
      if (!backoff.pause()) {
        throw Timeout("waited " + std::to_string(timeout.count()) + " ms for " + list_missing(store, keys, who) +
                      ". Look at the log of the missing workers, or raise `timeout`");
      }
    }
    std::vector<std::string> values;
    for (const std::string& key : keys) values.push_back(to_text(store.get(key)));
    return values;
  });
}

}  // namespace muster::net
