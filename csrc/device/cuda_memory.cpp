// Memory over several CUDA devices, by the virtual memory management of CUDA's driver: physical memory of each device,
// mapped one after the other (https://docs.nvidia.com/cuda/cuda-driver-api, "Virtual Memory Management").
#include "device/cuda_memory.h"

#include <ATen/Context.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "core/log.h"
#include "muster/error.h"

namespace muster {

namespace {

/// Those of the driver's functions that are used: the library is not linked, so that muster loads where there is none.
struct Driver {
  decltype(&cuDeviceGetAttribute) get_attribute;
  decltype(&cuMemGetAllocationGranularity) granularity;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) free;
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
  decltype(&cuGetErrorString) describe;

  void check(CUresult result, const char* what) const {
    if (result == CUDA_SUCCESS) return;
    const char* problem = nullptr;
    describe(result, &problem);
    throw CommError(std::string(what) + " failed: " + (problem == nullptr ? "an unknown error" : problem));
  }
};

template <class Function>
void find_function(const char* name, Function& function) {
  constexpr unsigned kVersion = 12000;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  check_cuda(cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result), name);
  if (result != cudaDriverEntryPointSuccess) throw CommError(std::string("CUDA's driver has no ") + name);
  function = reinterpret_cast<Function>(found);
}

const Driver& driver() {
  static const Driver found = [] {
    Driver functions{};
    find_function("cuDeviceGetAttribute", functions.get_attribute);
    find_function("cuMemGetAllocationGranularity", functions.granularity);
    find_function("cuMemAddressReserve", functions.reserve);
    find_function("cuMemAddressFree", functions.free);
    find_function("cuMemCreate", functions.create);
    find_function("cuMemRelease", functions.release);
    find_function("cuMemMap", functions.map);
    find_function("cuMemUnmap", functions.unmap);
    find_function("cuMemSetAccess", functions.set_access);
    find_function("cuGetErrorString", functions.describe);
    return functions;
  }();
  return found;
}

CUmemAllocationProp properties_on(c10::Device device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device.index();
  return properties;
}

/// A range of addresses and what is mapped there.
class Range {
 public:
  Range(size_t bytes, const std::vector<c10::Device>& devices) : bytes_(bytes), devices_(devices) {
    driver().check(driver().reserve(&begin_, bytes_, 0, 0, 0), "cuMemAddressReserve");
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  ~Range() {
    try {
      int current = 0;
      if (cudaGetDevice(&current) == cudaErrorCudartUnloading) return;  // the process ends, and its memory with it
      for (const auto device : devices_) {
        const c10::cuda::CUDAGuard on_device(device);
        check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // kernels may still be at work on it
      }
      for (const auto& [first, count] : mapped_) driver().check(driver().unmap(first, count), "cuMemUnmap");
      driver().check(driver().free(begin_, bytes_), "cuMemAddressFree");
    } catch (const std::exception& error) {
      log(LogLevel::warning, std::string("memory over several devices was not given back: ") + error.what());
    }
  }

  void* data() const { return reinterpret_cast<void*>(begin_); }

  /// Maps memory of `device` behind what is there, with zeros.
  void append(c10::Device device, size_t bytes) {
    const auto properties = properties_on(device);
    CUmemGenericAllocationHandle handle{};
    CUresult result = driver().create(&handle, bytes, &properties, 0);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
      c10::cuda::CUDACachingAllocator::emptyCache();
      result = driver().create(&handle, bytes, &properties, 0);
    }
    TORCH_CHECK_WITH(OutOfMemoryError, result != CUDA_ERROR_OUT_OF_MEMORY, "no ", bytes, " bytes are left on ", device,
                     " for its part of the optimizer's state");
    driver().check(result, "cuMemCreate");
    const CUdeviceptr first = begin_ + end_;
    result = driver().map(first, bytes, 0, handle, 0);
    driver().release(handle);  // what is mapped keeps the memory
    driver().check(result, "cuMemMap");
    mapped_.emplace_back(first, bytes);
    end_ += bytes;
    std::vector<CUmemAccessDesc> access;
    for (const auto other : devices_) {
      access.push_back({properties_on(other).location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
    }
    driver().check(driver().set_access(first, bytes, access.data(), access.size()), "cuMemSetAccess");
    const c10::cuda::CUDAGuard on_device(device);
    check_cuda(cudaMemset(reinterpret_cast<void*>(first), 0, bytes), "cudaMemset");
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

 private:
  const size_t bytes_;
  const std::vector<c10::Device> devices_;
  CUdeviceptr begin_ = 0;
  size_t end_ = 0;
  std::vector<std::pair<CUdeviceptr, size_t>> mapped_;
};

// Enables it where all have it.
bool try_peer_access(const std::vector<c10::Device>& devices) {
  for (const auto device : devices) {
    int has_mapping = 0;
    driver().check(
        driver().get_attribute(&has_mapping, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device.index()),
        "cuDeviceGetAttribute");
    if (has_mapping == 0) return false;
    for (const auto peer : devices) {
      int can = 1;
      if (device != peer) {
        check_cuda(cudaDeviceCanAccessPeer(&can, device.index(), peer.index()), "cudaDeviceCanAccessPeer");
      }
      if (can == 0) return false;
    }
  }
  for (const auto device : devices) {
    for (const auto peer : devices) {
      if (device != peer) c10::cuda::CUDACachingAllocator::enablePeerAccess(device.index(), peer.index());
    }
  }
  // Memory that is mapped may be refused where cudaMalloc's is not, in a virtual machine say: here rather than in a
  // step.
  std::vector<DevicePart> pages;
  for (const auto device : devices) pages.push_back({device, int64_t{2} << 20});
  if (devices.size() > 1) cuda_zeros_over(pages, devices);
  return true;
}

// Users of NCCL set it where a machine has broken peer access.
bool is_refused() {
  const char* const refused = std::getenv("NCCL_P2P_DISABLE");
  return refused != nullptr && std::string(refused) == "1";
}

}  // namespace

void check_cuda(int error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw CommError(std::string(what) + " failed: " + cudaGetErrorString(static_cast<cudaError_t>(error)) +
                  ". An earlier kernel may be at fault: run with CUDA_LAUNCH_BLOCKING=1 to find it");
}

bool enable_cuda_peer_access(const std::vector<c10::Device>& devices) {
  static std::mutex mutex;
  static std::vector<std::pair<std::vector<c10::Device>, bool>> known;
  const std::lock_guard lock(mutex);
  for (const auto& [of, has_access] : known) {
    if (of == devices) return has_access;
  }
  bool has_access = false;
  try {
    at::globalContext().lazyInitDevice(at::kCUDA);  // torch's allocator, too, which may not have been used yet
    has_access = !is_refused() && try_peer_access(devices);
  } catch (const std::exception& error) {
    log(LogLevel::warning, std::string("GPUs are used without access to one another's memory: ") + error.what());
  }
  known.emplace_back(devices, has_access);
  return has_access;
}

at::Tensor cuda_zeros_over(const std::vector<DevicePart>& parts, const std::vector<c10::Device>& devices) {
  size_t page = 1;
  for (const auto device : devices) {
    const auto properties = properties_on(device);
    size_t own = 0;
    driver().check(driver().granularity(&own, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                   "cuMemGetAllocationGranularity");
    page = std::max(page, own);
  }
  const auto pages_of = [&](int64_t bytes) { return (static_cast<size_t>(bytes) + page / 2) / page; };
  int64_t bytes = 0;
  for (const auto& part : parts) bytes += part.bytes;
  const size_t num_pages = (static_cast<size_t>(bytes) + page - 1) / page;
  const auto range = std::make_shared<Range>(num_pages * page, devices);
  size_t mapped = 0;
  int64_t end = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    end += parts[i].bytes;
    const size_t until = i + 1 == parts.size() ? num_pages : std::min(pages_of(end), num_pages);
    if (until > mapped) range->append(parts[i].device, (until - mapped) * page);
    mapped = std::max(mapped, until);
  }
  // torch asks a pointer where it is, unless it is told, and some of these are on other devices.
  return at::from_blob(
      range->data(), {bytes}, {1}, [range](void*) {}, at::TensorOptions(at::kByte).device(devices.front()),
      devices.front());
}

}  // namespace muster
