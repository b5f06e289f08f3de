#include <ATen/ops/from_blob.h>
#include <unistd.h>

#include <algorithm>
#include <limits>

#include "comm/shared/group.h"
#include "comm/shared/host_mesh.h"
#include "net/shared_segment.h"

namespace muster::comm {
namespace {

using namespace shared;

constexpr int kOffsetBits = 48;  // an address is the arena's rank above an offset

// Address space, not memory: an arena may hold all that the machine has, and the arenas of several strategies fit into
// the 47 bits of a process.
size_t arena_capacity(int ranks) {
  const size_t physical = static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t share = (size_t{1} << 43) / static_cast<size_t>(ranks);
  return std::min(physical, share) / net::Arena::kPage * net::Arena::kPage + kStagingBytes;
}

/// The arenas of all ranks, of which those of the worker's own replicas are allocated from here.
class HostSpace final : public SharedSpace {
 public:
  HostSpace(std::shared_ptr<HostMesh> mesh, net::Mapping control)
      : SharedSpace(mesh->num_replicas(), /*crosses_processes=*/true),
        mesh_(std::move(mesh)),
        control_(std::move(control)),
        capacity_(arena_capacity(mesh_->num_replicas())),
        own_(static_cast<size_t>(size())),
        mapped_(static_cast<size_t>(size())),
        bases_(static_cast<size_t>(size())) {}

  /// The descriptor of a new arena for own rank `rank`.
  int make_arena(int rank) {
    const auto r = static_cast<size_t>(rank);
    own_[r] = std::make_shared<net::Arena>(capacity_);
    own_[r]->allocate(kStagingBytes);  // at offset 0
    bases_[r] = own_[r]->data();
    return own_[r]->fd();
  }
  void map_arena(int rank, int fd) {
    const auto r = static_cast<size_t>(rank);
    mapped_[r] = net::Mapping(fd, capacity_);
    bases_[r] = mapped_[r].data();
  }

  ControlBlock& control() noexcept override { return *reinterpret_cast<ControlBlock*>(control_.data()); }
  int worker_of(int rank) const noexcept override { return mesh_->name_of_worker(mesh_->worker_of(rank)); }
  int name_of(int rank) const noexcept override { return mesh_->name_of_replica(rank); }

  // The tensor keeps its arena alone alive, neither the group nor the mesh.
  at::Tensor allocate(int rank, int64_t numel, at::ScalarType dtype) override {
    const std::shared_ptr<net::Arena>& arena = own_[static_cast<size_t>(rank)];
    std::byte* const data = arena->allocate(static_cast<size_t>(numel) * c10::elementSize(dtype));
    return at::from_blob(
        data, {numel}, [arena, data](void*) { arena->release(data); }, at::TensorOptions().dtype(dtype));
  }

  at::Tensor allocate_common(int64_t bytes) override {
    const auto mapping = std::make_shared<net::Mapping>(mesh_->share_memory(static_cast<size_t>(bytes)));
    return at::from_blob(mapping->data(), {bytes}, [mapping](void*) {}, at::TensorOptions(at::kByte));
  }

  std::optional<uint64_t> address_of(int rank, const void* data, size_t bytes) const noexcept override {
    const auto* const first = static_cast<const std::byte*>(data);
    const auto in = [&](size_t r) {
      return own_[r] && first >= own_[r]->data() && first + bytes <= own_[r]->data() + own_[r]->capacity();
    };
    auto owner = static_cast<size_t>(rank);
    if (!in(owner)) {
      owner = 0;
      while (owner < own_.size() && !in(owner)) ++owner;
      if (owner == own_.size()) return std::nullopt;
    }
    return (static_cast<uint64_t>(owner) << kOffsetBits) | static_cast<uint64_t>(first - own_[owner]->data());
  }
  std::byte* at(int, uint64_t address) const noexcept override {
    return bases_[address >> kOffsetBits] + (address & ((uint64_t{1} << kOffsetBits) - 1));
  }
  std::byte* staging(int rank) const noexcept override { return bases_[static_cast<size_t>(rank)]; }

  std::optional<LostWorker> find_lost() override { return mesh_->find_lost(); }

 private:
  const std::shared_ptr<HostMesh> mesh_;
  net::Mapping control_;
  const size_t capacity_;
  std::vector<std::shared_ptr<net::Arena>> own_;  // by rank; null for other workers' ranks
  std::vector<net::Mapping> mapped_;              // by rank; of other workers' ranks
  std::vector<std::byte*> bases_;                 // by rank
};

}  // namespace

net::Mapping HostMesh::share_memory(size_t bytes) {
  const net::Deadline deadline = std::chrono::steady_clock::now() + options_.timeout;
  const std::string kind = "memory " + std::to_string(num_memories_++);
  if (rank() != 0) {
    const net::Message message = receive_from(0, kind, deadline);
    if (message.descriptors.size() != 1) {
      throw CommError("worker " + std::to_string(name_of_worker(0)) +
                      " sent no shared memory; run one version of Muster on all workers");
    }
    return net::Mapping(message.descriptors.front().get(), bytes);
  }
  const net::FileDescriptor segment = net::make_segment("muster-common", bytes);
  net::reserve(segment.get(), 0, bytes);
  for (int w = 1; w < num_workers(); ++w) {
    send_to(w, kind, {segment.get()}, deadline);
  }
  return net::Mapping(segment.get(), bytes);
}

// Worker 0 makes the control block; a message to every other worker carries it and the arenas of the sender's replicas.
std::vector<CommunicatorPtr> HostMesh::make_group(const std::string& name) {
  const net::Deadline deadline = std::chrono::steady_clock::now() + options_.timeout;
  const std::string kind = "group '" + name + "'";
  const size_t control_bytes = ControlBlock::bytes_for(num_replicas());
  net::FileDescriptor control;
  std::vector<net::Message> received(static_cast<size_t>(num_workers()));
  if (rank() == 0) {
    control = net::make_segment("muster-control", control_bytes);
    net::reserve(control.get(), 0, control_bytes);
  } else {
    received[0] = receive_from(0, kind, deadline);
    std::vector<net::FileDescriptor>& descriptors = received[0].descriptors;
    if (descriptors.empty()) {
      throw CommError("worker " + std::to_string(name_of_worker(0)) + " sent no control block for " + kind +
                      "; run one version of Muster on all workers");
    }
    control = std::move(descriptors.front());
    descriptors.erase(descriptors.begin());
  }
  const auto space = std::make_shared<HostSpace>(shared_from_this(), net::Mapping(control.get(), control_bytes));

  std::vector<int> offered;
  if (rank() == 0) offered.push_back(control.get());
  for (int r = first_replica(rank()); r < first_replica(rank() + 1); ++r) offered.push_back(space->make_arena(r));
  for (int w = 0; w < num_workers(); ++w) {
    if (w != rank()) send_to(w, kind, offered, deadline);
  }
  for (int w = 0; w < num_workers(); ++w) {
    if (w == rank()) continue;
    net::Message& message = received[static_cast<size_t>(w)];
    if (w != 0) message = receive_from(w, kind, deadline);
    if (static_cast<int>(message.descriptors.size()) != first_replica(w + 1) - first_replica(w)) {
      throw CommError("worker " + std::to_string(name_of_worker(w)) + " offered " +
                      std::to_string(message.descriptors.size()) + " arenas for " + kind +
                      "; run one version of Muster on all workers");
    }
    for (size_t i = 0; i < message.descriptors.size(); ++i) {
      space->map_arena(first_replica(w) + static_cast<int>(i), message.descriptors[i].get());
    }
    message.descriptors.clear();
  }
  std::vector<CommunicatorPtr> handles;
  for (int r = first_replica(rank()); r < first_replica(rank() + 1); ++r) {
    handles.push_back(make_shared_communicator(space, r, timeout()));
  }
  return handles;
}

}  // namespace muster::comm
