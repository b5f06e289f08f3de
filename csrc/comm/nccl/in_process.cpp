#include "comm/nccl/in_process.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "comm/nccl/plan.h"
#include "comm/nccl/roll.h"
#include "device/kernel_dtype.h"
#include "kernels/cuda/cuda_kernels.h"

namespace muster::comm::nccl {
namespace {

constexpr Status kFailed = 1;        // ncclUnhandledCudaError
constexpr Status kInvalidUsage = 5;  // ncclInvalidUsage
constexpr uintptr_t kNcclAlignment = 16;

at::ScalarType scalar_type_of(DataType type) {
  switch (type) {
    case DataType::i8:
      return at::kChar;
    case DataType::u8:
      return at::kByte;
    case DataType::i32:
      return at::kInt;
    case DataType::i64:
      return at::kLong;
    case DataType::f16:
      return at::kHalf;
    case DataType::f64:
      return at::kDouble;
    case DataType::bf16:
      return at::kBFloat16;
    default:
      return at::kFloat;
  }
}

ReduceOp op_of(Reduction reduction) {
  return reduction == Reduction::min ? ReduceOp::min : reduction == Reduction::max ? ReduceOp::max : ReduceOp::sum;
}

/// Memory on a device.
template <class Data>
struct Place {
  Data* data;
  int device;
};
using Source = Place<const std::byte>;
using Destination = Place<std::byte>;

/// destinations[d][i] = the reduction over sources s of sources[s][i], for i in [0, count).
struct Job {
  at::ScalarType dtype;
  ReduceOp op;
  int64_t count;
  std::vector<Source> sources;
  std::vector<Destination> destinations;
};

/// What a table's functions share. Externally synchronised, but for allocate and free, which are thread-safe.
class Group : public std::enable_shared_from_this<Group> {
 public:
  Group(const DeviceApi& device, c10::DeviceType type, const std::vector<int>& ordinals)
      : device_(device), type_(type), ordinals_(ordinals), ranks_(ordinals.size()) {}
  ~Group() {
    for (const Rank& rank : ranks_) {
      if (rank.reached != nullptr) device_.destroy_event(rank.reached);
    }
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  /// Gives the rank's handle.
  Status start(Comm* comm, int size, int rank);
  static Status add(Comm comm, const Operation& operation);
  Status end();
  std::string describe_last();

  Status allocate(void** data, size_t bytes);
  Status free(void* data);

 private:
  struct Rank {
    std::vector<Operation> operations;  // of the open group
    Event reached = nullptr;
  };

  int ordinal_of(int rank) const { return ordinals_[static_cast<size_t>(rank)]; }
  Source source_of(int rank, const Operation& own, size_t offset = 0) const {
    return {static_cast<const std::byte*>(own.source) + offset, ordinal_of(rank)};
  }
  Destination destination_of(int rank, const Operation& own, size_t offset = 0) const {
    return {static_cast<std::byte*>(own.destination) + offset, ordinal_of(rank)};
  }

  Status fail(Status status, const std::string& problem);
  void run(const Plan& plan, int leader, Stream stream) const;
  void run_collective(const std::vector<Operation>& parts, int leader, Stream stream) const;
  void reduce(Job job, int leader, Stream stream) const;
  void reduce_here(const Job& job, int ordinal, Stream stream) const;
  void order(int before, Stream first, int after, Stream second) const;
  void copy(const Destination& to, const Source& from, size_t bytes, Stream stream) const;

  const DeviceApi device_;
  const c10::DeviceType type_;
  const std::vector<int> ordinals_;
  std::vector<Rank> ranks_;
  std::mutex mutex_;
  std::string problem_;                 // guarded by mutex_; the last one
  std::map<void*, at::Tensor> memory_;  // guarded by mutex_
};

Status Group::start(Comm* comm, int size, int rank) {
  if (size != static_cast<int>(ranks_.size()) || rank < 0 || rank >= size) {
    return fail(kInvalidUsage, "the group has " + std::to_string(ranks_.size()) + " ranks and no rank " +
                                   std::to_string(rank) + " of " + std::to_string(size));
  }
  Rank& own = ranks_[static_cast<size_t>(rank)];
  if (own.reached == nullptr) own.reached = device_.create_event();
  *comm = &own;
  return kSuccess;
}

Status Group::add(Comm comm, const Operation& operation) {
  static_cast<Rank*>(comm)->operations.push_back(operation);
  return kSuccess;
}

Status Group::fail(Status status, const std::string& problem) {
  const std::lock_guard lock(mutex_);
  problem_ = problem;
  return status;
}

std::string Group::describe_last() {
  const std::lock_guard lock(mutex_);
  return problem_;
}

// --- memory --------------------------------------------------------------------------------------------------------

Status Group::allocate(void** data, size_t bytes) {
  try {
    const auto options = at::TensorOptions().dtype(at::kByte).device(type_);
    at::Tensor tensor = at::empty({static_cast<int64_t>(bytes)}, options);
    const std::lock_guard lock(mutex_);
    *data = tensor.mutable_data_ptr();
    memory_[*data] = std::move(tensor);
    return kSuccess;
  } catch (const std::exception& error) {
    return fail(kFailed, error.what());
  }
}

Status Group::free(void* data) {
  at::Tensor tensor;
  {
    const std::lock_guard lock(mutex_);
    const auto found = memory_.find(data);
    if (found == memory_.end()) return kInvalidUsage;
    tensor = std::move(found->second);
    memory_.erase(found);
  }
  return kSuccess;
}

// --- running -------------------------------------------------------------------------------------------------------

Status Group::end() {
  try {
    std::vector<std::vector<Operation>> operations;
    for (Rank& rank : ranks_) operations.push_back(std::exchange(rank.operations, {}));
    const auto first = std::find_if(operations.begin(), operations.end(), [](const auto& own) { return !own.empty(); });
    if (first == operations.end()) return kSuccess;
    const Plan plan = make_plan(operations);
    const int leader = static_cast<int>(first - operations.begin());
    const Stream stream = first->front().stream;
    const auto for_each_other = [&](const auto& function) {
      for (int r = leader + 1; r < static_cast<int>(operations.size()); ++r) {
        const auto& own = operations[static_cast<size_t>(r)];
        if (!own.empty()) function(r, own.front().stream);
      }
    };
    for_each_other([&](int rank, Stream own) { order(rank, own, leader, stream); });
    run(plan, leader, stream);
    for_each_other([&](int rank, Stream own) { order(leader, stream, rank, own); });
    return kSuccess;
  } catch (const std::exception& error) {
    return fail(kFailed, error.what());
  }
}

void Group::order(int before, Stream first, int after, Stream second) const {
  const Event reached = ranks_[static_cast<size_t>(before)].reached;
  {
    const DeviceScope scope(device_, ordinal_of(before));
    device_.record(reached, first);
  }
  const DeviceScope scope(device_, ordinal_of(after));
  device_.stream_wait(second, reached);
}

void Group::run(const Plan& plan, int leader, Stream stream) const {
  const DeviceScope scope(device_, ordinal_of(leader));
  for (const std::vector<Operation>& parts : plan.collectives) run_collective(parts, leader, stream);
  for (const Transfer& transfer : plan.transfers) {
    copy({static_cast<std::byte*>(transfer.destination), ordinal_of(transfer.receiver)},
         {static_cast<const std::byte*>(transfer.source), ordinal_of(transfer.sender)}, transfer.bytes, stream);
  }
}

void Group::run_collective(const std::vector<Operation>& parts, int leader, Stream stream) const {
  const Operation& any = parts[0];
  const int size = static_cast<int>(parts.size());
  const auto part = [&](int rank) -> const Operation& { return parts[static_cast<size_t>(rank)]; };
  const at::ScalarType dtype = scalar_type_of(any.type);
  const size_t bytes = any.count * c10::elementSize(dtype);
  Job job{dtype, op_of(any.reduction), static_cast<int64_t>(any.count), {}, {}};
  switch (any.kind) {
    case CallKind::all_reduce:
    case CallKind::reduce:
      for (int r = 0; r < size; ++r) {
        job.sources.push_back(source_of(r, part(r)));
        if (any.peer == kEveryRank || any.peer == r) job.destinations.push_back(destination_of(r, part(r)));
      }
      reduce(std::move(job), leader, stream);
      break;
    case CallKind::reduce_scatter:
      for (int d = 0; d < size; ++d) {
        job.sources.clear();
        for (int s = 0; s < size; ++s) job.sources.push_back(source_of(s, part(s), static_cast<size_t>(d) * bytes));
        job.destinations = {destination_of(d, part(d))};
        reduce(job, leader, stream);
      }
      break;
    case CallKind::broadcast:
      for (int d = 0; d < size; ++d) {
        copy(destination_of(d, part(d)), source_of(any.peer, part(any.peer)), bytes, stream);
      }
      break;
    default:
      for (int d = 0; d < size; ++d) {
        for (int s = 0; s < size; ++s) {
          copy(destination_of(d, part(d), static_cast<size_t>(s) * bytes), source_of(s, part(s)), bytes, stream);
        }
      }
  }
}

void Group::reduce(Job job, int leader, Stream stream) const {
  const int ordinal = ordinal_of(leader);
  device_.with_stream(stream, ordinal, [self = shared_from_this(), job = std::move(job), ordinal, stream] {
    self->reduce_here(job, ordinal, stream);
  });
}

// On the current stream and device, which are these.
void Group::reduce_here(const Job& job, int ordinal, Stream stream) const {
  const auto options = at::TensorOptions().dtype(job.dtype).device(type_);
  const size_t bytes = static_cast<size_t>(job.count) * c10::elementSize(job.dtype);
  const auto tensor_at = [&](const std::byte* data) {
    return at::from_blob(const_cast<std::byte*>(data), {job.count}, options);
  };
  std::vector<at::Tensor> terms;
  std::vector<const void*> sources;
  for (const Source& source : job.sources) {
    const bool is_here = source.device == ordinal;
    terms.push_back(is_here ? tensor_at(source.data) : at::empty({job.count}, options));
    sources.push_back(terms.back().const_data_ptr());
    if (!is_here) copy({static_cast<std::byte*>(terms.back().mutable_data_ptr()), ordinal}, source, bytes, stream);
  }
  std::vector<at::Tensor> results;
  std::vector<void*> destinations;
  at::Tensor passed_on;  // to other devices
  for (const Destination& destination : job.destinations) {
    if (destination.device == ordinal) {
      results.push_back(tensor_at(destination.data));
    } else if (!passed_on.defined()) {
      passed_on = results.emplace_back(at::empty({job.count}, options));
    } else {
      continue;
    }
    destinations.push_back(results.back().mutable_data_ptr());
  }
  const auto is_aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % kNcclAlignment == 0; };
  if (job.op == ReduceOp::sum && (job.dtype == at::kFloat || job.dtype == at::kDouble || job.dtype == at::kBFloat16) &&
      sources.size() <= kernels::cuda::kMaxPeers && std::all_of(sources.begin(), sources.end(), is_aligned) &&
      std::all_of(destinations.begin(), destinations.end(), is_aligned)) {
    device_.tree_sum(kernel_dtype(job.dtype), sources, destinations, static_cast<size_t>(job.count), stream);
  } else {
    const at::Tensor value = reduce_along_tree(std::move(terms), job.op);
    for (const at::Tensor& result : results) result.copy_(value);
  }
  for (const Destination& destination : job.destinations) {
    if (destination.device == ordinal) continue;
    copy(destination, {static_cast<const std::byte*>(passed_on.const_data_ptr()), ordinal}, bytes, stream);
  }
}

void Group::copy(const Destination& to, const Source& from, size_t bytes, Stream stream) const {
  if (to.data != from.data) device_.copy(to.data, to.device, from.data, from.device, bytes, stream);
}

}  // namespace

NcclApi make_in_process_api(const DeviceApi& device, c10::DeviceType type, const std::vector<int>& ordinals) {
  const auto group = std::make_shared<Group>(device, type, ordinals);
  const auto succeed = [](Comm) { return kSuccess; };
  NcclApi api;
  api.get_unique_id = [](UniqueId* id) {
    id->fill('\0');
    return kSuccess;
  };
  api.start = [group](Comm* comm, int size, const UniqueId&, int rank, int) { return group->start(comm, size, rank); };
  api.async_error = [](Comm, Status* status) {
    *status = kSuccess;
    return kSuccess;
  };
  api.finalize = succeed;
  api.destroy = succeed;
  api.abort = succeed;
  api.group_start = [] { return kSuccess; };
  api.group_end = [group] { return group->end(); };
  api.allocate = [group](void** data, size_t bytes) { return group->allocate(data, bytes); };
  api.free = [group](void* data) { return group->free(data); };
  api.reduce = [](const void* in, void* out, size_t count, DataType type, Reduction op, int root, Comm comm, Stream s) {
    const CallKind kind = root == kEveryRank ? CallKind::all_reduce : CallKind::reduce;
    return Group::add(comm, {kind, in, out, count, type, op, root, s});
  };
  api.reduce_scatter = [](const void* in, void* out, size_t count, DataType type, Reduction op, Comm comm, Stream s) {
    return Group::add(comm, {CallKind::reduce_scatter, in, out, count, type, op, 0, s});
  };
  api.broadcast = [](const void* in, void* out, size_t bytes, int root, Comm comm, Stream s) {
    return Group::add(comm, {CallKind::broadcast, in, out, bytes, DataType::u8, Reduction::sum, root, s});
  };
  api.all_gather = [](const void* in, void* out, size_t bytes, Comm comm, Stream s) {
    return Group::add(comm, {CallKind::all_gather, in, out, bytes, DataType::u8, Reduction::sum, 0, s});
  };
  api.send = [](const void* in, size_t bytes, int peer, Comm comm, Stream s) {
    return Group::add(comm, {CallKind::send, in, nullptr, bytes, DataType::u8, Reduction::sum, peer, s});
  };
  api.receive = [](void* out, size_t bytes, int peer, Comm comm, Stream s) {
    return Group::add(comm, {CallKind::receive, nullptr, out, bytes, DataType::u8, Reduction::sum, peer, s});
  };
  api.describe = [group](Status, Comm) { return group->describe_last(); };
  return api;
}

}  // namespace muster::comm::nccl
