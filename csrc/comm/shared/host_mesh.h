// The processes of one host that form groups over shared memory: who they are, how memory reaches them, and whether
// they live.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/shared/space.h"
#include "net/shared_segment.h"
#include "net/unix_socket.h"

namespace muster::comm {

/// A connection from this worker to every other, over abstract Unix sockets; the kernel closes it when a process ends,
/// however it ends. Made once per job and shared by its groups. Thread-safe, except that make_group is collective.
/// A mesh, its groups and their tensors belong to the process that made them: a forked child must not use them (its
/// copies do nothing when they are destroyed).
class HostMesh : public std::enable_shared_from_this<HostMesh> {
 public:
  struct Options {
    int rank = 0;  ///< of this worker
    int num_workers = 1;
    int replicas = 1;  ///< that live in this worker; may differ between workers
    Milliseconds timeout{600'000};
    /// What workers and replicas are called in messages and errors: their numbers in the job, where that has others on
    /// other hosts. Empty: as they are numbered here.
    std::vector<int> worker_names = {};
    std::vector<int> replica_names = {};
  };

  /// Collective over workers; `store` is theirs alone. Throws InvalidArgument when a worker is on another host (or in
  /// a container with another network), AuthError when one runs as another user, Timeout naming missing workers.
  static std::shared_ptr<HostMesh> connect(c10d::Store& store, const Options& options);

  ~HostMesh();

  int rank() const noexcept { return options_.rank; }
  int num_workers() const noexcept { return options_.num_workers; }
  /// Of the whole job. Replica indices count worker by worker.
  int num_replicas() const noexcept { return first_replica_.back(); }
  /// Index of the first replica of `worker`; for num_workers(), the number of all replicas.
  int first_replica(int worker) const { return first_replica_.at(static_cast<size_t>(worker)); }
  int worker_of(int replica) const noexcept;
  int name_of_worker(int worker) const { return named(worker, options_.worker_names); }
  int name_of_replica(int replica) const { return named(replica, options_.replica_names); }
  Milliseconds timeout() const noexcept { return options_.timeout; }

  /// Collective over workers, in the same order on each. A group over all replicas of the job; returns the handles of
  /// this worker's replicas, whose ranks are their replica indices. Names are unique within a mesh. The handles keep
  /// the mesh alive.
  std::vector<CommunicatorPtr> make_group(const std::string& name);

  /// Collective over workers, in the same order on each. Zeroed memory (more than 0 bytes) that all of them map; it is
  /// gone when the last one has unmapped it. Throws CommError when there is no memory, or workers ask for different
  /// sizes.
  net::Mapping share_memory(size_t bytes);

  /// The first worker that ended without saying so. Does not block.
  std::optional<shared::LostWorker> find_lost();

 private:
  struct Peer {
    net::UnixSocket socket;
    net::FileDescriptor process;  // readable once it ends: a forked child can keep the socket of a dead parent open
    bool has_left = false;
    bool is_lost = false;
    std::deque<net::Message> inbox;
  };

  explicit HostMesh(const Options& options) : options_(options) {}
  static int named(int number, const std::vector<int>& names) {
    return names.empty() ? number : names.at(static_cast<size_t>(number));
  }
  void meet(c10d::Store& store);
  void link(const std::vector<std::string>& names);
  void admit(int worker, net::UnixSocket socket, const net::PeerCredentials& credentials);
  void receive_all();  // mutex_ held
  net::Message receive_from(int worker, const std::string& kind, net::Deadline deadline);
  void send_to(int worker, const std::string& kind, const std::vector<int>& descriptors, net::Deadline deadline);
  PeerLost lost_while(const std::string& kind, int worker) const;  // mutex_ held

  const Options options_;
  int owner_process_ = 0;
  int num_memories_ = 0;  // shared so far
  uint64_t job_ = 0;
  std::vector<int> first_replica_;
  std::mutex mutex_;
  std::vector<Peer> peers_;  // by worker, one's own unused; inboxes and flags guarded by mutex_
};

}  // namespace muster::comm
