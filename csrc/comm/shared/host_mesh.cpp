#include "comm/shared/host_mesh.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>

#include "comm/shared/control.h"
#include "core/flat_layout.h"
#include "core/plain_text.h"
#include "core/wait_hook.h"
#include "muster/error.h"
#include "net/rendezvous.h"

namespace muster::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kHello = "muster-mesh-1 ";
constexpr const char* kGoodbye = "goodbye";
constexpr std::chrono::milliseconds kWaitSlice{50};  // between looks at signals, the dead and the deadline
constexpr int kMaxReplicasPerWorker = 200;           // their arenas travel in one message

struct Endpoint {
  std::string socket;
  std::string host;
  int replicas = 0;
};

// False at the deadline. Calls the thread's WaitHook now and then.
bool wait_for_input(const net::UnixSocket& socket, net::Deadline deadline) {
  while (!net::wait_readable({socket.get()}, std::min(deadline, Clock::now() + kWaitSlice))) {
    if (Clock::now() >= deadline) return false;
    WaitHook::call();
  }
  return true;
}

std::string write(const Endpoint& endpoint) {
  return endpoint.socket + " " + endpoint.host + " " + std::to_string(endpoint.replicas);
}

Endpoint read(const std::string& text) {
  Endpoint endpoint;
  TextReader(text) >> endpoint.socket >> endpoint.host >> endpoint.replicas;
  return endpoint;
}

}  // namespace

std::shared_ptr<HostMesh> HostMesh::connect(c10d::Store& store, const Options& options) {
  if (options.replicas < 1 || options.replicas > kMaxReplicasPerWorker) {
    throw InvalidArgument("a worker holds 1 to " + std::to_string(kMaxReplicasPerWorker) + " replicas, not " +
                          std::to_string(options.replicas));
  }
  const std::shared_ptr<HostMesh> mesh(new HostMesh(options));
  mesh->owner_process_ = getpid();
  mesh->meet(store);
  return mesh;
}

void HostMesh::meet(c10d::Store& store) {
  const net::Deadline deadline = Clock::now() + options_.timeout;
  const auto key = [](int worker) { return "mesh/" + std::to_string(worker); };
  const Endpoint mine{"muster-" + net::random_name(), net::host_identity(), options_.replicas};
  const net::UnixListener listener(mine.socket);
  net::set_text(store, key(rank()), write(mine));

  std::vector<std::string> keys, who;
  for (int w = 0; w < num_workers(); ++w) {
    keys.push_back(key(w));
    who.push_back("worker " + std::to_string(name_of_worker(w)));
  }
  std::vector<Endpoint> endpoints;
  std::string all;
  for (const std::string& text : net::get_texts(store, keys, who, options_.timeout)) {
    endpoints.push_back(read(text));
    all += text + "\n";
  }
  job_ = stable_hash(all);
  first_replica_.assign(1, 0);
  for (int w = 0; w < num_workers(); ++w) {
    if (endpoints[static_cast<size_t>(w)].host != endpoints[0].host) {
      throw InvalidArgument(
          "workers " + std::to_string(name_of_worker(0)) + " and " + std::to_string(name_of_worker(w)) +
          " are on different hosts (or in containers with networks of their own). Run parameter "
          "servers and their workers on one host, or use MultiWorkerMirroredStrategy, which several hosts may share, "
          "as it is or over a process group of yours (process_group= in Python)");
    }
    first_replica_.push_back(first_replica_.back() + endpoints[static_cast<size_t>(w)].replicas);
  }
  if (num_replicas() > shared::kMaxRanks) {
    throw InvalidArgument("a group on one host has at most " + std::to_string(shared::kMaxRanks) + " replicas, not " +
                          std::to_string(num_replicas()));
  }

  // Each worker calls those before it and is called by those after it; a call succeeds as soon as the other listens.
  peers_.resize(static_cast<size_t>(num_workers()));
  for (int w = 0; w < rank(); ++w) {
    net::UnixSocket socket = net::UnixSocket::connect(endpoints[static_cast<size_t>(w)].socket, deadline);
    const net::PeerCredentials credentials = socket.credentials();
    if (credentials.uid != geteuid()) {
      throw AuthError("worker " + std::to_string(name_of_worker(w)) + " runs as user " +
                      std::to_string(credentials.uid) + ", this one as " + std::to_string(geteuid()) +
                      "; run all workers of a host as one user");
    }
    socket.send(kHello + std::to_string(job_) + " " + std::to_string(rank()), {}, deadline);
    admit(w, std::move(socket), credentials);
  }
  while (std::count_if(peers_.begin(), peers_.end(), [](const Peer& p) { return static_cast<bool>(p.socket); }) <
         num_workers() - 1) {
    WaitHook::call();
    std::optional<net::UnixSocket> socket = listener.accept(std::min(deadline, Clock::now() + kWaitSlice));
    if (!socket) {
      if (Clock::now() < deadline) continue;
      std::string missing;
      for (int w = rank() + 1; w < num_workers(); ++w) {
        if (!peers_[static_cast<size_t>(w)].socket)
          missing += (missing.empty() ? "" : ", ") + who[static_cast<size_t>(w)];
      }
      throw Timeout("no connection from " + missing + " within " + std::to_string(options_.timeout.count()) +
                    " ms; look at its log");
    }
    const net::PeerCredentials credentials = socket->credentials();
    if (credentials.uid != geteuid()) continue;
    net::Message hello;
    const net::Deadline patience = std::min(deadline, Clock::now() + std::chrono::seconds(5));
    if (!wait_for_input(*socket, patience) || socket->receive(hello) != net::UnixSocket::Status::message) continue;
    TextReader text(hello.bytes);
    std::string word;
    uint64_t job = 0;
    int worker = -1;
    text >> word >> job >> worker;
    const bool is_expected = word + " " == kHello && job == job_ && worker > rank() && worker < num_workers();
    if (is_expected && !peers_[static_cast<size_t>(worker)].socket) admit(worker, std::move(*socket), credentials);
  }
}

void HostMesh::admit(int worker, net::UnixSocket socket, const net::PeerCredentials& credentials) {
  Peer& peer = peers_[static_cast<size_t>(worker)];
  peer.socket = std::move(socket);
  peer.process = net::watch_process(credentials.pid);
}

HostMesh::~HostMesh() {
  if (getpid() != owner_process_) return;
  for (const Peer& peer : peers_) {
    if (!peer.socket || peer.is_lost || peer.has_left) continue;
    try {
      peer.socket.send(kGoodbye, {}, Clock::now());
    } catch (const Error&) {
      continue;  // a peer that does not read will see the end of the connection
    }
  }
}

int HostMesh::worker_of(int replica) const noexcept {
  return static_cast<int>(std::upper_bound(first_replica_.begin(), first_replica_.end(), replica) -
                          first_replica_.begin()) -
         1;
}

void HostMesh::receive_all() {
  std::vector<pollfd> polled;
  std::vector<Peer*> owners;
  for (Peer& peer : peers_) {
    if (!peer.socket || peer.has_left || peer.is_lost) continue;
    polled.push_back({peer.socket.get(), POLLIN, 0});
    polled.push_back({peer.process.get(), POLLIN, 0});
    owners.push_back(&peer);
  }
  if (polled.empty() || ::poll(polled.data(), polled.size(), 0) <= 0) return;
  for (size_t i = 0; i < owners.size(); ++i) {
    Peer& peer = *owners[i];
    const bool has_ended = polled[2 * i + 1].revents != 0;
    if (polled[2 * i].revents == 0 && !has_ended) continue;
    net::Message message;
    net::UnixSocket::Status status;
    while ((status = peer.socket.receive(message)) == net::UnixSocket::Status::message) {
      if (message.bytes == kGoodbye) {
        peer.has_left = true;
      } else {
        peer.inbox.push_back(std::move(message));
      }
      message = net::Message();
    }
    peer.is_lost = !peer.has_left && (status == net::UnixSocket::Status::end || has_ended);
  }
}

std::optional<shared::LostWorker> HostMesh::find_lost() {
  const std::lock_guard lock(mutex_);
  receive_all();
  for (int w = 0; w < num_workers(); ++w) {
    if (peers_[static_cast<size_t>(w)].is_lost)
      return shared::LostWorker{name_of_worker(w), "ended (it was killed, crashed or exited)"};
  }
  return std::nullopt;
}

PeerLost HostMesh::lost_while(const std::string& kind, int worker) const {
  const bool has_left = !peers_[static_cast<size_t>(worker)].is_lost && peers_[static_cast<size_t>(worker)].has_left;
  const int name = name_of_worker(worker);
  return {name, "worker " + std::to_string(name) +
                    (has_left ? " left: it closed its strategy, maybe after an error"
                              : " ended (it was killed, crashed or exited)") +
                    " while " + kind + " was being set up. Look at that worker's log and start the job again"};
}

void HostMesh::send_to(int worker, const std::string& kind, const std::vector<int>& descriptors,
                       net::Deadline deadline) {
  try {
    peers_[static_cast<size_t>(worker)].socket.send(kind, descriptors, deadline);
  } catch (const net::PeerGone&) {
    const std::lock_guard lock(mutex_);
    receive_all();  // its goodbye, if it said one
    throw lost_while(kind, worker);
  }
}

net::Message HostMesh::receive_from(int worker, const std::string& kind, net::Deadline deadline) {
  Peer& peer = peers_[static_cast<size_t>(worker)];
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      receive_all();
      const auto found = std::find_if(peer.inbox.begin(), peer.inbox.end(),
                                      [&](const net::Message& message) { return message.bytes == kind; });
      if (found != peer.inbox.end()) {
        net::Message message = std::move(*found);
        peer.inbox.erase(found);
        return message;
      }
      for (int w = 0; w < num_workers(); ++w) {
        const Peer& other = peers_[static_cast<size_t>(w)];
        if (other.is_lost || (w == worker && other.has_left)) throw lost_while(kind, w);
      }
    }
    if (Clock::now() >= deadline) {
      throw Timeout("worker " + std::to_string(name_of_worker(worker)) + " did not set up " + kind + " within " +
                    std::to_string(options_.timeout.count()) + " ms; look at its log");
    }
    WaitHook::call();
    net::wait_readable({peer.socket.get()}, std::min(deadline, Clock::now() + kWaitSlice));
  }
}

}  // namespace muster::comm
