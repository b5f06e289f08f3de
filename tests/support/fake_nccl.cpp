#include "support/fake_nccl.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>

#include "comm/nccl/communicator.h"
#include "comm/nccl/in_process.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/kernels.h"
#include "muster/error.h"

namespace muster::testing {

using namespace comm::nccl;

namespace {

constexpr Status kInternalError = 3;
constexpr Status kInvalidUsage = 5;

char host_stream_tag = 0;
Stream host_stream() { return &host_stream_tag; }

kernels::DType dtype_of(DataType type) {
  switch (type) {
    case DataType::i8:
      return kernels::DType::i8;
    case DataType::u8:
      return kernels::DType::u8;
    case DataType::i32:
      return kernels::DType::i32;
    case DataType::i64:
      return kernels::DType::i64;
    case DataType::f16:
      return kernels::DType::f16;
    case DataType::f64:
      return kernels::DType::f64;
    case DataType::bf16:
      return kernels::DType::bf16;
    default:
      return kernels::DType::f32;
  }
}

kernels::Reduction reduction_of(Reduction op) {
  return op == Reduction::min   ? kernels::Reduction::min
         : op == Reduction::max ? kernels::Reduction::max
                                : kernels::Reduction::sum;
}

// This thread's open group.
thread_local int group_depth = 0;
thread_local int group_calls = 0;
thread_local std::vector<Comm> group_comms;

// This thread's current stream, where it is not the thread itself.
thread_local Stream own_stream = nullptr;

bool is_in_group(Comm comm) { return std::count(group_comms.begin(), group_comms.end(), comm) > 0; }

}  // namespace

struct FakeNccl::Flag {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_set = false;

  void set() {
    const std::lock_guard lock(mutex);
    is_set = true;
    changed.notify_all();
  }
  bool get() {
    const std::lock_guard lock(mutex);
    return is_set;
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return is_set; });
  }
};

namespace {

/// A cudaEvent_t: what it was last recorded as.
struct FakeEvent {
  std::mutex mutex;
  std::shared_ptr<void> recorded;
};

}  // namespace

struct FakeNccl::FakeStream {
  explicit FakeStream(FakeNccl& the_world) : world(the_world), thread([this] { run(); }) {}
  ~FakeStream() {
    push({});
    thread.join();
  }
  void push(std::function<void()> task) {
    if (std::this_thread::get_id() == thread.get_id()) {  // within a task, which is where it belongs
      task();
      return;
    }
    const std::lock_guard lock(mutex);
    tasks.push_back(std::move(task));
    changed.notify_all();
  }
  void run() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return !tasks.empty(); });
        task = std::move(tasks.front());
        tasks.pop_front();
      }
      if (!task) return;
      {
        std::unique_lock lock(world.mutex_);
        world.changed_.wait(lock, [&] { return !world.is_held_; });
      }
      task();
    }
  }

  FakeNccl& world;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  std::thread thread;
};

struct FakeNccl::Operation {
  std::string name;  // a collective's; "send" and "receive" go between two
  const void* source = nullptr;
  void* destination = nullptr;
  size_t count = 0;  // elements, or bytes
  DataType type = DataType::u8;
  Reduction reduction = Reduction::sum;
  int peer = 0;
  FakeStream* stream = nullptr;

  bool is_collective() const { return name != "send" && name != "receive"; }
};

struct FakeNccl::FakeComm {
  std::string id;
  int rank = 0;
  int size = 0;
  int polls_left = 0;
  std::string awaited;  // the group that is complete before it has started, or has split
  Comm* child = nullptr;
  Comm made_child = nullptr;
  bool is_started = false;
  bool is_blocking = false;
  bool is_finalizing = false;
  bool is_aborted = false;
  bool is_over = false;
  uint64_t issued = 0;
  std::vector<Operation> grouped;  // launched, not on their stream yet
};

struct FakeNccl::Meeting {
  std::vector<Operation> parts;
  int here = 0;
  int left = 0;
  bool is_done = false;
};

void FakeNccl::note(const std::string& entry) { log_.push_back(entry); }

void FakeNccl::enqueue_work(const std::string& name, const std::string& entry, Stream stream,
                            std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    note(entry);
    if (failures_.erase(name) > 0) throw CommError("the fake " + name + " failed");
  }
  static_cast<FakeStream*>(stream)->push(std::move(task));
}

void FakeNccl::fail_next(const std::string& name, Status status) {
  const std::lock_guard lock(mutex_);
  failures_[name] = status;
}
void FakeNccl::set_async_error(int rank, Status status) {
  const std::lock_guard lock(mutex_);
  async_errors_[rank] = status;
}
void FakeNccl::hang(int rank) {
  const std::lock_guard lock(mutex_);
  hanging_.insert(rank);
}
void FakeNccl::hold_streams(bool held) {
  const std::lock_guard lock(mutex_);
  is_held_ = held;
  changed_.notify_all();
}
void FakeNccl::hold_groups(bool held) {
  const std::lock_guard lock(mutex_);
  are_groups_held_ = held;
  changed_.notify_all();
}
void FakeNccl::hold_graphs(bool held) {
  const std::lock_guard lock(mutex_);
  are_graphs_held_ = held;
  changed_.notify_all();
}
std::vector<std::string> FakeNccl::log() {
  const std::lock_guard lock(mutex_);
  return log_;
}
std::vector<int> FakeNccl::max_ctas() {
  const std::lock_guard lock(mutex_);
  return ctas_;
}

int FakeNccl::count(const std::string& entry) {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(std::count(log_.begin(), log_.end(), entry));
}
int FakeNccl::live_events() {
  const std::lock_guard lock(mutex_);
  return live_events_;
}
int FakeNccl::live_streams() {
  const std::lock_guard lock(mutex_);
  return live_streams_;
}

void FakeNccl::run_on_stream(std::function<void()> task) {
  if (own_stream == nullptr) own_stream = device().create_stream();
  static_cast<FakeStream*>(own_stream)->push(std::move(task));
}

void FakeNccl::join_stream() { device().destroy_stream(std::exchange(own_stream, nullptr)); }

// --- operations ----------------------------------------------------------------------------------------------------

// Every call on a communicator starts here.
Status FakeNccl::begin(const char* name, Comm handle) {
  auto& comm = *static_cast<FakeComm*>(handle);
  note(std::string(name) + " " + std::to_string(comm.rank));
  ++group_calls;
  if (const auto found = failures_.find(name); found != failures_.end()) {
    const Status status = found->second;
    failures_.erase(found);
    return status;
  }
  if (comm.is_over || comm.is_aborted || (comm.polls_left > 0 && !is_in_group(handle))) return kInvalidUsage;
  if (group_depth > 0 && !is_in_group(handle)) group_comms.push_back(handle);
  return kSuccess;
}

Status FakeNccl::enqueue(const char* name, Comm handle, Operation operation) {
  const std::lock_guard lock(mutex_);
  if (const Status status = begin(name, handle); status != kSuccess) return status;
  auto& comm = *static_cast<FakeComm*>(handle);
  operation.name = name;
  comm.grouped.push_back(std::move(operation));
  if (comm.is_blocking) return kSuccess;
  comm.polls_left = polls;
  return kInProgress;
}

void FakeNccl::flush(FakeComm& comm) {
  if (comm.grouped.empty()) return;
  const uint64_t first = comm.issued;
  for (const Operation& op : comm.grouped) comm.issued += op.is_collective() ? 1 : 0;
  FakeStream* const stream = comm.grouped[0].stream;
  stream->push([this, &comm, first, operations = std::move(comm.grouped)] { execute(comm, first, operations); });
  comm.grouped.clear();
}

void FakeNccl::execute(FakeComm& comm, uint64_t first, const std::vector<Operation>& operations) {
  uint64_t number = first;
  for (const Operation& op : operations) {
    if (op.name == "send") {
      const std::lock_guard lock(mutex_);
      const auto* const data = static_cast<const char*>(op.source);
      mail_[comm.id + " " + std::to_string(comm.rank) + " " + std::to_string(op.peer)].emplace_back(data,
                                                                                                    data + op.count);
      changed_.notify_all();
    } else if (op.is_collective()) {
      meet(comm, number++, op);
    }
  }
  for (const Operation& op : operations) {
    if (op.name != "receive") continue;
    std::unique_lock lock(mutex_);
    auto& box = mail_[comm.id + " " + std::to_string(op.peer) + " " + std::to_string(comm.rank)];
    changed_.wait(lock, [&] { return !box.empty() || comm.is_aborted; });
    if (comm.is_aborted) return;
    std::memcpy(op.destination, box.front().data(), std::min(op.count, box.front().size()));
    box.pop_front();
  }
}

void FakeNccl::meet(FakeComm& comm, uint64_t number, const Operation& operation) {
  std::unique_lock lock(mutex_);
  std::shared_ptr<Meeting>& entry = meetings_[{comm.id, number}];
  if (!entry) entry = std::make_shared<Meeting>();
  Meeting& meeting = *entry;
  meeting.parts.resize(static_cast<size_t>(comm.size));
  meeting.parts[static_cast<size_t>(comm.rank)] = operation;
  if (++meeting.here == comm.size) {
    const Operation& any = meeting.parts[0];
    const auto size = static_cast<size_t>(comm.size);
    std::vector<std::vector<char>> inputs;  // destinations may be sources
    const bool reduces = any.name == "all_reduce" || any.name == "reduce" || any.name == "reduce_scatter";
    const size_t width = reduces ? kernels::size_of(dtype_of(any.type)) : 1;
    const size_t terms = any.name == "reduce_scatter" ? size : 1;
    std::vector<const void*> sources;
    for (const Operation& part : meeting.parts) {
      const auto* const data = static_cast<const char*>(part.source);
      inputs.emplace_back(data, data + part.count * width * terms);
    }
    for (const auto& input : inputs) sources.push_back(input.data());
    for (size_t r = 0; r < size; ++r) {
      if (any.name == "reduce" && r != static_cast<size_t>(any.peer)) continue;
      void* const out = meeting.parts[r].destination;
      if (reduces) {
        std::vector<const void*> own;
        const size_t offset = terms > 1 ? r * any.count * width : 0;
        for (const auto& input : inputs) own.push_back(input.data() + offset);
        kernels::tree_reduce(dtype_of(any.type), reduction_of(any.reduction), own.data(), comm.size, &out, 1,
                             any.count);
      } else if (any.name == "broadcast") {
        const auto& source = inputs[static_cast<size_t>(any.peer)];
        std::memcpy(out, source.data(), source.size());
      } else {
        for (size_t s = 0; s < size; ++s) {
          std::memcpy(static_cast<char*>(out) + s * any.count, inputs[s].data(), any.count);
        }
      }
    }
    meeting.is_done = true;
    changed_.notify_all();
  }
  changed_.wait(lock, [&] { return meeting.is_done || comm.is_aborted; });
  if (++meeting.left == comm.size) meetings_.erase({comm.id, number});
}

// --- the tables ----------------------------------------------------------------------------------------------------

NcclApi FakeNccl::nccl() {
  NcclApi api;
  api.get_unique_id = [this](UniqueId* id) -> Status {
    const std::lock_guard lock(mutex_);
    const std::string text = "group " + std::to_string(ids_++);
    std::copy(text.begin(), text.end(), id->begin());
    return kSuccess;
  };
  api.start = [this](Comm* out, int size, const UniqueId& id, int rank, int max_ctas) -> Status {
    const std::lock_guard lock(mutex_);
    auto comm = std::make_shared<FakeComm>();
    ctas_.push_back(max_ctas);
    comm->id = id.data();
    comm->rank = rank;
    comm->size = size;
    comm->polls_left = polls;
    comm->awaited = comm->id;
    *out = comm.get();
    groups_[comm->id].push_back(comm.get());
    comms_.push_back(std::move(comm));
    note("start " + std::to_string(rank));
    ++group_calls;
    return kInProgress;
  };
  if (has_split) {
    api.split = [this](Comm handle, int rank, Comm* out) -> Status {
      const std::lock_guard lock(mutex_);
      if (const Status status = begin("split", handle); status != kSuccess) return status;
      auto& parent = *static_cast<FakeComm*>(handle);
      auto comm = std::make_shared<FakeComm>();
      comm->id = parent.id + "'s child";
      comm->rank = rank;
      comm->size = parent.size;
      comm->is_started = comm->is_blocking = true;
      groups_[comm->id].push_back(comm.get());
      parent.awaited = comm->id;
      parent.is_started = false;
      parent.polls_left = polls;
      parent.child = out;
      parent.made_child = comm.get();
      comms_.push_back(std::move(comm));
      return kInProgress;
    };
  }
  api.async_error = [this](Comm handle, Status* status) -> Status {
    const std::lock_guard lock(mutex_);
    auto& comm = *static_cast<FakeComm*>(handle);
    if (comm.is_over || comm.is_aborted) return kInvalidUsage;
    *status = kSuccess;
    if (const auto found = async_errors_.find(comm.rank); found != async_errors_.end()) *status = found->second;
    if (*status != kSuccess) return kSuccess;
    if (comm.polls_left > 0) --comm.polls_left;
    if (!comm.is_started) comm.is_started = groups_[comm.awaited].size() == static_cast<size_t>(comm.size);
    const bool is_held = comm.is_finalizing && are_graphs_held_;
    if (comm.polls_left > 0 || !comm.is_started || hanging_.count(comm.rank) > 0 || is_held) {
      *status = kInProgress;
    } else {
      if (comm.child != nullptr) *std::exchange(comm.child, nullptr) = comm.made_child;
      flush(comm);
    }
    return kSuccess;
  };
  api.finalize = [this](Comm handle) -> Status {
    std::unique_lock lock(mutex_);
    const Status status = begin("finalize", handle);
    auto& comm = *static_cast<FakeComm*>(handle);
    comm.is_finalizing = true;
    if (comm.is_blocking) {
      changed_.wait(lock, [&] { return !are_graphs_held_; });
      return status;
    }
    comm.polls_left = polls;
    return status == kSuccess ? kInProgress : status;
  };
  api.destroy = [this](Comm handle) -> Status {
    const std::lock_guard lock(mutex_);
    const Status status = begin("destroy", handle);
    static_cast<FakeComm*>(handle)->is_over = true;
    return status;
  };
  api.abort = [this](Comm handle) -> Status {
    std::unique_lock lock(mutex_);
    auto& comm = *static_cast<FakeComm*>(handle);
    note("abort " + std::to_string(comm.rank));
    comm.is_aborted = true;
    comm.grouped.clear();
    changed_.notify_all();
    changed_.wait(lock, [&] { return !are_graphs_held_; });
    return kSuccess;
  };
  api.group_start = []() -> Status {
    if (group_depth++ == 0) group_calls = 0;
    return kSuccess;
  };
  api.group_end = [this]() -> Status {
    std::unique_lock lock(mutex_);
    if (--group_depth > 0) return kInProgress;
    note("group " + std::to_string(group_calls));
    Status status = kSuccess;
    for (const Comm handle : std::exchange(group_comms, {})) {
      auto& comm = *static_cast<FakeComm*>(handle);
      if (!comm.is_blocking) {
        status = kInProgress;
        continue;
      }
      changed_.wait(lock, [&] { return !are_groups_held_ || comm.is_aborted; });
      if (comm.is_aborted) return kInternalError;
      flush(comm);
    }
    return status;
  };
  api.allocate = [this](void** data, size_t bytes) -> Status {
    const std::lock_guard lock(mutex_);
    note("allocate " + std::to_string(bytes));
    if (failures_.erase("allocate") > 0) return 1;
    *data = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    return *data == nullptr ? 1 : kSuccess;
  };
  api.free = [this](void* data) -> Status {
    const std::lock_guard lock(mutex_);
    note("free");
    std::free(data);
    return kSuccess;
  };
  if (has_windows) {
    api.register_window = [this](Comm handle, void* data, size_t, Window* window) -> Status {
      const std::lock_guard lock(mutex_);
      *window = data;
      const Status status = begin("register", handle);
      auto& comm = *static_cast<FakeComm*>(handle);
      if (comm.is_blocking) return status;
      comm.polls_left = polls;
      return status == kSuccess ? kInProgress : status;
    };
    api.deregister_window = [this](Comm handle, Window) -> Status {
      const std::lock_guard lock(mutex_);
      return begin("deregister", handle);
    };
  }
  const auto stream_of = [](Stream stream) { return static_cast<FakeStream*>(stream); };
  api.reduce = [=, this](const void* in, void* out, size_t n, DataType type, Reduction op, int root, Comm comm,
                         Stream s) {
    return enqueue(root == kEveryRank ? "all_reduce" : "reduce", comm, {"", in, out, n, type, op, root, stream_of(s)});
  };
  api.reduce_scatter = [=, this](const void* in, void* out, size_t n, DataType type, Reduction op, Comm comm,
                                 Stream s) {
    return enqueue("reduce_scatter", comm, {"", in, out, n, type, op, 0, stream_of(s)});
  };
  api.broadcast = [=, this](const void* in, void* out, size_t bytes, int root, Comm comm, Stream s) {
    return enqueue("broadcast", comm, {"", in, out, bytes, DataType::u8, Reduction::sum, root, stream_of(s)});
  };
  api.all_gather = [=, this](const void* in, void* out, size_t bytes, Comm comm, Stream s) {
    return enqueue("all_gather", comm, {"", in, out, bytes, DataType::u8, Reduction::sum, 0, stream_of(s)});
  };
  api.send = [=, this](const void* in, size_t bytes, int peer, Comm comm, Stream s) {
    return enqueue("send", comm, {"", in, nullptr, bytes, DataType::u8, Reduction::sum, peer, stream_of(s)});
  };
  api.receive = [=, this](void* out, size_t bytes, int peer, Comm comm, Stream s) {
    return enqueue("receive", comm, {"", nullptr, out, bytes, DataType::u8, Reduction::sum, peer, stream_of(s)});
  };
  api.describe = [](Status status, Comm) { return "fake status " + std::to_string(status); };
  return api;
}

DeviceApi FakeNccl::device() {
  DeviceApi api;
  api.exchange_device = [](int) { return 0; };
  api.restore_device = [](int) {};
  api.identity = [](int) { return std::string(); };
  api.current_stream = [](int) { return own_stream != nullptr ? own_stream : host_stream(); };
  api.is_capturing = [this](Stream) {
    const std::lock_guard lock(mutex_);
    return is_capturing;
  };
  api.permit_during_capture = [] {};
  api.create_stream = [this]() -> Stream {
    const std::lock_guard lock(mutex_);
    ++live_streams_;
    return new FakeStream(*this);
  };
  api.destroy_stream = [this](Stream stream) {
    delete static_cast<FakeStream*>(stream);
    const std::lock_guard lock(mutex_);
    --live_streams_;
  };
  api.create_event = [this]() -> Event {
    const std::lock_guard lock(mutex_);
    ++live_events_;
    return new FakeEvent;
  };
  api.destroy_event = [this](Event event) {
    delete static_cast<FakeEvent*>(event);
    const std::lock_guard lock(mutex_);
    --live_events_;
  };
  api.record = [](Event event, Stream stream) {
    auto flag = std::make_shared<Flag>();
    {
      auto& own = *static_cast<FakeEvent*>(event);
      const std::lock_guard lock(own.mutex);
      own.recorded = flag;
    }
    if (stream == host_stream()) {
      flag->set();
    } else {
      static_cast<FakeStream*>(stream)->push([flag] { flag->set(); });
    }
  };
  const auto flag_of = [](Event event) {
    auto& own = *static_cast<FakeEvent*>(event);
    const std::lock_guard lock(own.mutex);
    return std::static_pointer_cast<Flag>(own.recorded);
  };
  api.stream_wait = [flag_of](Stream stream, Event event) {
    const auto flag = flag_of(event);
    if (stream == host_stream()) {
      flag->wait();
    } else {
      static_cast<FakeStream*>(stream)->push([flag] { flag->wait(); });
    }
  };
  api.query = [flag_of](Event event) { return flag_of(event)->get(); };
  api.synchronize = [] {};
  api.release_cached = [this] {
    const std::lock_guard lock(mutex_);
    note("release_cached");
  };
  api.with_stream = [](Stream stream, int, std::function<void()> function) {
    static_cast<FakeStream*>(stream)->push(std::move(function));
  };
  api.copy = [this](void* to, int to_device, const void* from, int from_device, size_t bytes, Stream stream) {
    enqueue_work("copy", "copy " + std::to_string(to_device) + " " + std::to_string(from_device), stream,
                 [=] { std::memcpy(to, from, bytes); });
  };
  api.tree_sum = [this](kernels::DType dtype, const std::vector<const void*>& sources,
                        const std::vector<void*>& destinations, size_t n, Stream stream) {
    const auto is_served = [](const auto& buffers) {
      return !buffers.empty() && buffers.size() <= kernels::cuda::kMaxPeers &&
             std::all_of(buffers.begin(), buffers.end(),
                         [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; });
    };
    const bool has_kernel =
        dtype == kernels::DType::f32 || dtype == kernels::DType::f64 || dtype == kernels::DType::bf16;
    if (!has_kernel || !is_served(sources) || !is_served(destinations)) return;  // the result shows it
    enqueue_work("tree_sum", "tree_sum " + std::to_string(sources.size()), stream, [=] {
      kernels::tree_reduce(dtype, kernels::Reduction::sum, sources.data(), static_cast<int>(sources.size()),
                           destinations.data(), static_cast<int>(destinations.size()), n);
    });
  };
  api.push_range = [](const char*) {};
  api.pop_range = [] {};
  return api;
}

// --- backends of the typed suite -----------------------------------------------------------------------------------

std::string Nccl::run(int size, const Body& body, comm::Milliseconds timeout) {
  FakeNccl fake;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const std::vector<comm::CommunicatorPtr> control = comm::make_local(size, Seconds(60));
  return run_threads(size, [&](int rank) {
    comm::NcclOptions options;
    options.timeout = timeout;
    options.control = control[static_cast<size_t>(rank)];
    options.check = true;
    const auto handles =
        make_communicators(fake.nccl(), fake.device(), *store, rank, size, {c10::Device(c10::kCPU)}, {options});
    body(*handles[0]);
  });
}

namespace {

/// All ranks in this process, over these tables.
std::string run_together(const NcclApi& nccl, const DeviceApi& device, int size, const Body& body,
                         comm::Milliseconds timeout) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<comm::NcclOptions> options;
  for (const comm::CommunicatorPtr& control : comm::make_local(size, Seconds(60))) {
    options.emplace_back().timeout = timeout;
    options.back().control = control;
    options.back().blocking = false;
  }
  const std::vector<c10::Device> devices(static_cast<size_t>(size), c10::Device(c10::kCPU));
  const auto handles = make_communicators(nccl, device, *store, 0, size, devices, options);
  return run_threads(size, [&](int rank) { body(*handles[static_cast<size_t>(rank)]); });
}

}  // namespace

std::string NcclOneProcess::run(int size, const Body& body, comm::Milliseconds timeout) {
  FakeNccl fake;
  return run_together(fake.nccl(), fake.device(), size, body, timeout);
}

std::string DeviceLocal::run(int size, const Body& body, comm::Milliseconds timeout) {
  FakeNccl fake;
  const std::vector<int> ordinals(static_cast<size_t>(size), 0);
  return run_together(make_in_process_api(fake.device(), c10::kCPU, ordinals), fake.device(), size, body, timeout);
}

}  // namespace muster::testing
