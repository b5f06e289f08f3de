// The real tables, and what is made with them. The only file of the backend that sees the headers of NCCL and CUDA.
#include "comm/nccl/api.h"

#include <c10/core/ScalarType.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <nccl.h>
#include <nvtx3/nvToolsExt.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/nccl/communicator.h"
#include "comm/nccl/in_process.h"
#include "comm/nccl/nccl.h"
#include "device/kernel_status.h"
#include "kernels/cuda/cuda_kernels.h"
#include "muster/error.h"

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
cudaEvent_t event_of(Event event) { return static_cast<cudaEvent_t>(event); }
ncclDataType_t type_of(DataType type) { return static_cast<ncclDataType_t>(type); }
ncclRedOp_t nccl_op_of(Reduction reduction) { return static_cast<ncclRedOp_t>(reduction); }

ncclConfig_t config_of(bool blocking, int max_ctas) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = blocking ? 1 : 0;
  if (max_ctas > 0) config.maxCTAs = max_ctas;
  return config;
}

Status start(Comm* comm, int size, const UniqueId& id, int rank, int max_ctas) {
  ncclUniqueId unique{};
  std::memcpy(&unique, id.data(), sizeof(unique));
  ncclConfig_t config = config_of(/*blocking=*/false, max_ctas);
  return ncclCommInitRankConfig(reinterpret_cast<ncclComm_t*>(comm), size, unique, rank, &config);
}

// The parent is not blocking: its async_error says when the child is there.
Status split(Comm comm, int rank, Comm* child, int max_ctas) {
  ncclConfig_t config = config_of(/*blocking=*/true, max_ctas);
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

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // told here; torch's next check need not find it
  throw CommError(std::string(what) + " failed: " + cudaGetErrorString(error) +
                  ". An earlier kernel may be at fault: run with CUDA_LAUNCH_BLOCKING=1 to find it");
}

// NCCL takes processes whose NCCL_HOSTID differs for hosts, and shares a GPU where it is told to.
std::string identity(int device) {
  if (const char* const shares = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE"); shares && std::string(shares) == "1") {
    return "";
  }
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  const char* const host = std::getenv("NCCL_HOSTID");
  std::string text = (host == nullptr ? std::string() : std::string(host)) + " GPU-";
  for (const char byte : properties.uuid.bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += kDigits[static_cast<unsigned char>(byte) / 16];
    text += kDigits[static_cast<unsigned char>(byte) % 16];
  }
  return text;
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
  api.all_reduce = [](const void* send, void* receive, size_t count, DataType type, Reduction op, Comm comm, Stream s) {
    return ncclAllReduce(send, receive, count, type_of(type), nccl_op_of(op), comm_of(comm), stream_of(s));
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

DeviceApi device_api() {
  DeviceApi api;
  api.identity = identity;
  api.exchange_device = [](int device) {
    const int previous = c10::cuda::current_device();
    if (device != previous) c10::cuda::set_device(static_cast<c10::DeviceIndex>(device));
    return previous;
  };
  api.restore_device = [](int device) {
    check(c10::cuda::MaybeSetDevice(static_cast<c10::DeviceIndex>(device)), "cudaSetDevice");
  };
  api.current_stream = [](int device) -> Stream {
    return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
  };
  api.is_capturing = [](Stream stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream_of(stream), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  };
  api.permit_during_capture = [] {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
  };
  api.create_stream = []() -> Stream {
    int lowest = 0;
    int highest = 0;
    check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest), "cudaStreamCreateWithPriority");
    return stream;
  };
  api.destroy_stream = [](Stream stream) { check(cudaStreamDestroy(stream_of(stream)), "cudaStreamDestroy"); };
  api.create_event = []() -> Event {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    return event;
  };
  api.destroy_event = [](Event event) { cudaEventDestroy(event_of(event)); };
  api.record = [](Event event, Stream stream) {
    check(cudaEventRecord(event_of(event), stream_of(stream)), "cudaEventRecord");
  };
  api.stream_wait = [](Stream stream, Event event) {
    check(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0), "cudaStreamWaitEvent");
  };
  api.query = [](Event event) {
    const cudaError_t error = cudaEventQuery(event_of(event));
    if (error == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    check(error, "cudaEventQuery");
    return true;
  };
  api.synchronize = [] { check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); };
  api.release_cached = [] { c10::cuda::CUDACachingAllocator::emptyCache(); };
  api.with_stream = [](Stream stream, int device, const std::function<void()>& function) {
    const c10::cuda::CUDAStreamGuard guard(
        c10::cuda::getStreamFromExternal(stream_of(stream), static_cast<c10::DeviceIndex>(device)));
    function();
  };
  api.copy = [](void* to, int to_device, const void* from, int from_device, size_t bytes, Stream stream) {
    if (to_device == from_device) {
      check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_of(stream)), "cudaMemcpyAsync");
    } else {
      check(cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, stream_of(stream)), "cudaMemcpyPeerAsync");
    }
  };
  api.tree_sum = [](kernels::DType dtype, const std::vector<const void*>& sources,
                    const std::vector<void*>& destinations, size_t n, Stream stream) {
    check_kernel(kernels::cuda::tree_sum(dtype, sources.data(), static_cast<int>(sources.size()), destinations.data(),
                                         static_cast<int>(destinations.size()), n, stream_of(stream)),
                 "tree_sum");
  };
  api.push_range = [](const char* name) { nvtxRangePushA(name); };
  api.pop_range = [] { nvtxRangePop(); };
  return api;
}

c10::Device with_index(c10::Device device) {
  if (!device.is_cuda()) {
    throw InvalidArgument("NCCL communicates between CUDA devices; got " + device.str() +
                          ", use the host backend for the CPU");
  }
  return device.has_index() ? device : c10::Device(c10::kCUDA, c10::cuda::current_device());
}

}  // namespace
}  // namespace nccl

bool has_nccl() noexcept { return true; }

std::vector<CommunicatorPtr> make_nccl(c10d::Store& store, int first_rank, int size,
                                       const std::vector<c10::Device>& devices,
                                       const std::vector<NcclOptions>& options) {
  std::vector<c10::Device> own;
  for (const c10::Device& device : devices) own.push_back(nccl::with_index(device));
  return nccl::make_communicators(nccl::nccl_api(), nccl::device_api(), store, first_rank, size, own, options);
}

std::vector<CommunicatorPtr> make_device_local(const std::vector<c10::Device>& devices,
                                               const std::vector<NcclOptions>& options) {
  std::vector<c10::Device> own;
  for (const c10::Device& device : devices) own.push_back(nccl::with_index(device));
  std::vector<int> ordinals;
  for (const c10::Device& device : own) ordinals.push_back(device.index());
  nccl::DeviceApi device = nccl::device_api();
  device.identity = nullptr;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  return nccl::make_communicators(nccl::make_in_process_api(device, c10::kCUDA, ordinals), device, *store, 0,
                                  static_cast<int>(own.size()), own, options);
}

CommunicatorPtr make_nccl(c10d::Store& store, int rank, int size, c10::Device device, const NcclOptions& options) {
  return make_nccl(store, rank, size, std::vector<c10::Device>{device}, std::vector<NcclOptions>{options})[0];
}

}  // namespace muster::comm
