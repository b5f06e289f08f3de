// The only door from a kernel to the machine: nvcc, or the emulation of tests/support, which runs the same source on
// the host. Kernels use what is here, the arithmetic headers, threadIdx.x and its kin, __syncthreads() and nothing
// else. A floating-point sum has one order, whatever the grid: no atomics on numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/cuda_kernels.h"
#include "kernels/math.h"

#if defined(__CUDACC__)

#include <cuda_runtime.h>

#include <cuda/atomic>

#define MUSTER_KERNEL static __global__
#define MUSTER_DEVICE static __device__ __forceinline__
/// A member function of what a kernel uses.
#define MUSTER_MEMBER __device__ __forceinline__
#define MUSTER_SHARED __shared__
/// A kernel parameter that every thread reads in place.
#define MUSTER_GRID_CONSTANT(...) const __grid_constant__ __VA_ARGS__
#define MUSTER_UNROLL _Pragma("unroll")

namespace muster::kernels::cuda {

template <class T>
MUSTER_DEVICE T load_acquire_system(T* p) {
  return ::cuda::atomic_ref<T, ::cuda::thread_scope_system>(*p).load(::cuda::std::memory_order_acquire);
}

template <class T>
MUSTER_DEVICE void store_release_system(T* p, T value) {
  ::cuda::atomic_ref<T, ::cuda::thread_scope_system>(*p).store(value, ::cuda::std::memory_order_release);
}

MUSTER_DEVICE void spin_pause() { __nanosleep(20); }

MUSTER_DEVICE void check_access(const void*, size_t) {}

/// Of a call that was made just now. CUDA keeps an error until somebody asks for the last one: torch would take it for
/// its own kernel's.
inline Status status_of(cudaError_t error) noexcept {
  if (error == cudaSuccess) return {};
  static_cast<void>(cudaGetLastError());
  return {Status::Code::failed, cudaGetErrorString(error)};
}

inline bool is_captured(Stream stream) noexcept {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone;
}

/// Multiprocessors of the current device.
inline Status count_multiprocessors(unsigned& count) noexcept {
  int device = 0;
  int value = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device);
  count = static_cast<unsigned>(value);
  return status_of(error);
}

/// Blocks of the kernel that run on one multiprocessor of the current device at the same time.
template <class... Parameters>
Status count_resident(void (*kernel)(Parameters...), unsigned threads, unsigned& count) noexcept {
  int value = 0;
  const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&value, reinterpret_cast<const void*>(kernel),
                                                                          static_cast<int>(threads), 0);
  count = static_cast<unsigned>(value);
  return status_of(error);
}

/// Whether this build has code of the kernel for the current device, and the device's capability (90 for 9.0).
template <class... Parameters>
Status find_code(void (*kernel)(Parameters...), int& capability) noexcept {
  int device = 0;
  int major = 0;
  int minor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error != cudaSuccess) return status_of(error);
  capability = 10 * major + minor;
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  Status status = status_of(error);
  const bool is_missing = error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
                          error == cudaErrorUnsupportedPtxVersion;
  if (is_missing) status.code = Status::Code::not_built;
  return status;
}

}  // namespace muster::kernels::cuda

#else
#include "support/cuda_emulation.h"
#endif

// What a mutant (tests/support/cuda_mutations.h) does otherwise; nothing in any other build.
#ifndef MUSTER_MUTANTS
#define MUSTER_MUTATE(name, normal, mutated) (normal)
#endif

namespace muster::kernels::cuda {

struct Shape {
  unsigned blocks;
  unsigned threads;
  bool cooperative = false;  ///< all blocks run at the same time
};

/// Enqueues a kernel; the arguments are copied.
template <class... Parameters>
Status launch(void (*kernel)(Parameters...), Shape shape, Stream stream,
              const std::type_identity_t<Parameters>&... arguments) noexcept {
#if defined(__CUDACC__)
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.blocks);
  config.blockDim = dim3(shape.threads);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  config.attrs = &attribute;
  config.numAttrs = shape.cooperative ? 1 : 0;
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  return status_of(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers));
#else
  static_cast<void>(stream);
  emulation::parameter_bytes = (sizeof(Parameters) + ... + 0);
  ++emulation::launches, ++emulation::all_launches;
  const char* problem =
      emulation::run_grid(shape.blocks, shape.threads, shape.cooperative, [&] { kernel(arguments...); });
  return problem == nullptr ? Status{} : Status{Status::Code::failed, problem};
#endif
}

/// Launches over `units` of work, at most `per_multiprocessor` blocks on each; none when there is no work.
template <class... Parameters>
Status launch_over(uint64_t units, unsigned per_multiprocessor, void (*kernel)(Parameters...), unsigned threads,
                   Stream stream, const std::type_identity_t<Parameters>&... arguments) noexcept {
  if (units == 0) return {};
  unsigned blocks = 0;
  if (const Status status = count_multiprocessors(blocks); !status.ok()) return status;
  blocks *= per_multiprocessor;
  return launch(kernel, {units < blocks ? static_cast<unsigned>(units) : blocks, threads}, stream, arguments...);
}

/// Launches over `units` of work that blocks share evenly, in at most so many waves: the last one is as full as the
/// others, so that no multiprocessor is idle before the end.
template <class... Parameters>
Status launch_waves(uint64_t units, unsigned waves, void (*kernel)(Parameters...), unsigned threads, Stream stream,
                    const std::type_identity_t<Parameters>&... arguments) noexcept {
  unsigned resident = 0;
  if (const Status status = count_resident(kernel, threads, resident); !status.ok()) return status;
  return launch_over(units, waves * (resident == 0 ? 1 : resident), kernel, threads, stream, arguments...);
}

// --- memory --------------------------------------------------------------------------------------------------------

inline constexpr size_t kVectorBytes = 16;

// noexcept: gcc 12 crashes where its thread sanitizer meets an aggregate from a call that might throw.

/// N elements, accessed 16 bytes at a time (fewer when they are fewer).
template <class T, int N>
struct alignas(sizeof(T) * N < kVectorBytes ? sizeof(T) * N : kVectorBytes) Pack {
  T v[N];
};

template <class T, int N>
MUSTER_DEVICE bool is_aligned(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % alignof(Pack<T, N>) == 0;
}

template <int N, class T>
MUSTER_DEVICE Pack<T, N> load(const T* p) noexcept {
  check_access(p, alignof(Pack<T, N>));
  return *reinterpret_cast<const Pack<T, N>*>(p);
}

template <class T, int N>
MUSTER_DEVICE void store(T* p, const Pack<T, N>& values) noexcept {
  check_access(p, alignof(Pack<T, N>));
  *reinterpret_cast<Pack<T, N>*>(p) = values;
}

}  // namespace muster::kernels::cuda
