// The table of CUDA's functions, and groups that need no NCCL. Beside kernels/cuda and device/cuda_memory.cpp the
// only file that sees CUDA's headers.
#include "comm/nccl/cuda_device.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define MUSTER_HAS_NVTX 1
#endif

#include <cstdlib>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/nccl/communicator.h"
#include "comm/nccl/in_process.h"
#include "comm/nccl/nccl.h"
#include "device/cuda_memory.h"
#include "device/kernel_status.h"
#include "kernels/cuda/cuda_kernels.h"
#include "muster/error.h"

namespace muster::comm {
namespace nccl {
namespace {

cudaStream_t cuda_stream(Stream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t cuda_event(Event event) { return static_cast<cudaEvent_t>(event); }

// NCCL takes processes whose NCCL_HOSTID differs for hosts, and shares a GPU where it is told to.
std::string identity(int device) {
  if (const char* const shares = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE"); shares && std::string(shares) == "1") {
    return "";
  }
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  const char* const host = std::getenv("NCCL_HOSTID");
  std::string text = (host == nullptr ? std::string() : std::string(host)) + " GPU-";
  for (const char byte : properties.uuid.bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += kDigits[static_cast<unsigned char>(byte) / 16];
    text += kDigits[static_cast<unsigned char>(byte) % 16];
  }
  return text;
}

}  // namespace

DeviceApi cuda_device_api() {
  DeviceApi api;
  api.identity = identity;
  api.exchange_device = [](int device) {
    const int previous = c10::cuda::current_device();
    if (device != previous) c10::cuda::set_device(static_cast<c10::DeviceIndex>(device));
    return previous;
  };
  api.restore_device = [](int device) {
    check_cuda(c10::cuda::MaybeSetDevice(static_cast<c10::DeviceIndex>(device)), "cudaSetDevice");
  };
  api.current_stream = [](int device) -> Stream {
    return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
  };
  api.is_capturing = [](Stream stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(cuda_stream(stream), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  };
  api.permit_during_capture = [] {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
  };
  api.create_stream = []() -> Stream {
    int lowest = 0;
    int highest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest), "cudaStreamCreateWithPriority");
    return stream;
  };
  api.destroy_stream = [](Stream stream) { check_cuda(cudaStreamDestroy(cuda_stream(stream)), "cudaStreamDestroy"); };
  api.create_event = []() -> Event {
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    return event;
  };
  api.destroy_event = [](Event event) { cudaEventDestroy(cuda_event(event)); };
  api.record = [](Event event, Stream stream) {
    check_cuda(cudaEventRecord(cuda_event(event), cuda_stream(stream)), "cudaEventRecord");
  };
  api.stream_wait = [](Stream stream, Event event) {
    check_cuda(cudaStreamWaitEvent(cuda_stream(stream), cuda_event(event), 0), "cudaStreamWaitEvent");
  };
  api.query = [](Event event) {
    const cudaError_t error = cudaEventQuery(cuda_event(event));
    if (error == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    check_cuda(error, "cudaEventQuery");
    return true;
  };
  api.synchronize = [] { check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); };
  api.release_cached = [] { c10::cuda::CUDACachingAllocator::emptyCache(); };
  api.with_stream = [](Stream stream, int device, const std::function<void()>& function) {
    const c10::cuda::CUDAStreamGuard guard(
        c10::cuda::getStreamFromExternal(cuda_stream(stream), static_cast<c10::DeviceIndex>(device)));
    function();
  };
  api.copy = [](void* to, int to_device, const void* from, int from_device, size_t bytes, Stream stream) {
    if (to_device == from_device) {
      check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, cuda_stream(stream)), "cudaMemcpyAsync");
    } else {
      check_cuda(cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, cuda_stream(stream)),
                 "cudaMemcpyPeerAsync");
    }
  };
  api.tree_sum = [](kernels::DType dtype, const std::vector<const void*>& sources,
                    const std::vector<void*>& destinations, size_t n, Stream stream) {
    check_kernel(kernels::cuda::tree_sum(dtype, sources.data(), static_cast<int>(sources.size()), destinations.data(),
                                         static_cast<int>(destinations.size()), n, cuda_stream(stream)),
                 "tree_sum");
  };
#ifdef MUSTER_HAS_NVTX
  api.push_range = [](const char* name) { nvtxRangePushA(name); };
  api.pop_range = [] { nvtxRangePop(); };
#else  // profilers show no ranges
  api.push_range = [](const char*) {};
  api.pop_range = [] {};
#endif
  return api;
}

std::vector<c10::Device> cuda_devices(const std::vector<c10::Device>& devices) {
  std::vector<c10::Device> own;
  for (const c10::Device& device : devices) {
    if (!device.is_cuda()) {
      throw InvalidArgument("NCCL communicates between CUDA devices; got " + device.str() +
                            ", use the host backend for the CPU");
    }
    own.push_back(device.has_index() ? device : c10::Device(c10::kCUDA, c10::cuda::current_device()));
  }
  return own;
}

}  // namespace nccl

std::vector<CommunicatorPtr> make_device_local(const std::vector<c10::Device>& devices,
                                               const std::vector<NcclOptions>& options) {
  const auto own = nccl::cuda_devices(devices);
  std::vector<int> ordinals;
  for (const c10::Device& device : own) ordinals.push_back(device.index());
  nccl::DeviceApi device = nccl::cuda_device_api();
  device.identity = nullptr;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  return nccl::make_communicators(nccl::make_in_process_api(device, c10::kCUDA, ordinals), device, *store, 0,
                                  static_cast<int>(own.size()), own, options);
}

}  // namespace muster::comm
