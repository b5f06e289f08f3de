// The table of NCCL's functions, and groups that are made with it. The only file that sees NCCL's header.
#include "comm/nccl/api.h"

#include <dlfcn.h>
#include <nccl.h>

#include <cstring>
#include <string>

#include "comm/nccl/communicator.h"
#include "comm/nccl/cuda_device.h"
#include "comm/nccl/nccl.h"

namespace muster::comm {
namespace nccl {
namespace {

static_assert(kSuccess == ncclSuccess && kInProgress == ncclInProgress);
static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId));
static_assert(int(DataType::i8) == ncclInt8 && int(DataType::u8) == ncclUint8 && int(DataType::i32) == ncclInt32 &&
              int(DataType::i64) == ncclInt64 && int(DataType::f16) == ncclFloat16 &&
              int(DataType::f32) == ncclFloat32 && int(DataType::f64) == ncclFloat64 &&
              int(DataType::bf16) == ncclBfloat16);
static_assert(int(Reduction::sum) == ncclSum && int(Reduction::max) == ncclMax && int(Reduction::min) == ncclMin);

constexpr int kSymmetricWindow = 1;  // NCCL_WIN_COLL_SYMMETRIC, where the header has windows

ncclComm_t comm_of(Comm comm) { return static_cast<ncclComm_t>(comm); }
cudaStream_t stream_of(Stream stream) { return static_cast<cudaStream_t>(stream); }
ncclDataType_t type_of(DataType type) { return static_cast<ncclDataType_t>(type); }
ncclRedOp_t nccl_op_of(Reduction reduction) { return static_cast<ncclRedOp_t>(reduction); }

Status start(Comm* comm, int size, const UniqueId& id, int rank, int max_ctas) {
  ncclUniqueId unique{};
  std::memcpy(&unique, id.data(), sizeof(unique));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  if (max_ctas > 0) config.maxCTAs = max_ctas;
  return ncclCommInitRankConfig(reinterpret_cast<ncclComm_t*>(comm), size, unique, rank, &config);
}

// The parent is not blocking: its async_error says when the child is there.
Status split(Comm comm, int rank, Comm* child) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  return ncclCommSplit(comm_of(comm), /*color=*/0, rank, reinterpret_cast<ncclComm_t*>(child), &config);
}

// Looked up by name, since the NCCL that is loaded may be newer or older than the header: windows came with 2.27. In
// that library itself: Python's extension modules are not in the global scope.
void find_windows(NcclApi& api) {
  void* const library = ::dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return;
  using Add = Status (*)(Comm, void*, size_t, Window*, int);
  using Remove = Status (*)(Comm, Window);
  const auto add = reinterpret_cast<Add>(::dlsym(library, "ncclCommWindowRegister"));
  const auto remove = reinterpret_cast<Remove>(::dlsym(library, "ncclCommWindowDeregister"));
  if (add == nullptr || remove == nullptr) return;
  api.register_window = [add](Comm comm, void* data, size_t bytes, Window* window) {
    return add(comm, data, bytes, window, kSymmetricWindow);
  };
  api.deregister_window = remove;
}

std::string describe(Status status, Comm comm) {
  const std::string text = ncclGetErrorString(static_cast<ncclResult_t>(status));
  const char* const last = ncclGetLastError(comm_of(comm));
  return last != nullptr && *last != '\0' ? text + " (" + last + ")" : text;
}

NcclApi nccl_api() {
  NcclApi api;
  api.get_unique_id = [](UniqueId* id) { return ncclGetUniqueId(reinterpret_cast<ncclUniqueId*>(id->data())); };
  api.start = start;
  api.split = split;
  api.async_error = [](Comm comm, Status* status) {
    ncclResult_t result = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm_of(comm), &result);
    *status = result;
    return asked;
  };
  api.finalize = [](Comm comm) { return ncclCommFinalize(comm_of(comm)); };
  api.destroy = [](Comm comm) { return ncclCommDestroy(comm_of(comm)); };
  api.abort = [](Comm comm) { return ncclCommAbort(comm_of(comm)); };
  api.group_start = [] { return ncclGroupStart(); };
  api.group_end = [] { return ncclGroupEnd(); };
  api.allocate = [](void** data, size_t bytes) { return ncclMemAlloc(data, bytes); };
  api.free = [](void* data) { return ncclMemFree(data); };
  find_windows(api);
  api.reduce = [](const void* send, void* receive, size_t count, DataType type, Reduction op, int root, Comm comm,
                  Stream s) {
    if (root == kEveryRank) {
      return ncclAllReduce(send, receive, count, type_of(type), nccl_op_of(op), comm_of(comm), stream_of(s));
    }
    return ncclReduce(send, receive, count, type_of(type), nccl_op_of(op), root, comm_of(comm), stream_of(s));
  };
  api.reduce_scatter = [](const void* send, void* receive, size_t count, DataType type, Reduction op, Comm comm,
                          Stream s) {
    return ncclReduceScatter(send, receive, count, type_of(type), nccl_op_of(op), comm_of(comm), stream_of(s));
  };
  api.broadcast = [](const void* send, void* receive, size_t bytes, int root, Comm comm, Stream s) {
    return ncclBroadcast(send, receive, bytes, ncclUint8, root, comm_of(comm), stream_of(s));
  };
  api.all_gather = [](const void* send, void* receive, size_t bytes, Comm comm, Stream s) {
    return ncclAllGather(send, receive, bytes, ncclUint8, comm_of(comm), stream_of(s));
  };
  api.send = [](const void* data, size_t bytes, int peer, Comm comm, Stream s) {
    return ncclSend(data, bytes, ncclUint8, peer, comm_of(comm), stream_of(s));
  };
  api.receive = [](void* data, size_t bytes, int peer, Comm comm, Stream s) {
    return ncclRecv(data, bytes, ncclUint8, peer, comm_of(comm), stream_of(s));
  };
  api.describe = describe;
  return api;
}

}  // namespace
}  // namespace nccl

bool has_nccl() noexcept { return true; }

std::vector<CommunicatorPtr> make_nccl(c10d::Store& store, int first_rank, int size,
                                       const std::vector<c10::Device>& devices,
                                       const std::vector<NcclOptions>& options) {
  return nccl::make_communicators(nccl::nccl_api(), nccl::cuda_device_api(), store, first_rank, size,
                                  nccl::cuda_devices(devices), options);
}

CommunicatorPtr make_nccl(c10d::Store& store, int rank, int size, c10::Device device, const NcclOptions& options) {
  return make_nccl(store, rank, size, std::vector<c10::Device>{device}, std::vector<NcclOptions>{options})[0];
}

}  // namespace muster::comm
