#include "kernels/cuda/device.h"

namespace muster::kernels::cuda {
namespace {

constexpr unsigned kThreads = 256;

struct Arguments {
  const void* sources[kMaxPackSources];
  const PackSlot* slots;
  const Chunk* chunks;
  void* bucket;
  double factor;
  const double* gate;
  uint32_t num_chunks;
  uint32_t first_slot;
  uint32_t num_sources;
};
static_assert(sizeof(Arguments) <= 32764, "what CUDA 12.1 takes as parameters");

template <bool kAccumulate, class Source, class Destination, class T>
MUSTER_DEVICE void pack_one(Source source, Destination& destination, T factor) {
  const T value = widen(source) * factor;
  destination = narrow<Destination>(kAccumulate ? widen(destination) + value : value);
}

/// kAhead vectors, a stride apart: all are read before the first is written, to keep enough loads in flight.
template <bool kAccumulate, int kN, int kAhead, class Source, class Destination, class T>
MUSTER_DEVICE void pack_vectors(const Source* __restrict__ source, Destination* __restrict__ destination, T factor) {
  constexpr uint32_t kStride = kThreads * kN;
  Pack<Source, kN> in[kAhead];
  Pack<Destination, kN> out[kAhead];
  MUSTER_UNROLL
  for (int a = 0; a < kAhead; ++a) {
    in[a] = load<kN>(source + a * kStride);
    if (kAccumulate) out[a] = load<kN>(destination + a * kStride);
  }
  MUSTER_UNROLL
  for (int a = 0; a < kAhead; ++a) {
    MUSTER_UNROLL
    for (int k = 0; k < kN; ++k) pack_one<kAccumulate>(in[a].v[k], out[a].v[k], factor);
    store(destination + a * kStride, out[a]);
  }
}

/// `n` elements by one block.
template <bool kAccumulate, class Source, class Destination, class T>
MUSTER_DEVICE void pack_chunk(const Source* source, Destination* destination, uint32_t n, T factor) {
  constexpr int kN =
      static_cast<int>(kVectorBytes / (sizeof(Source) < sizeof(Destination) ? sizeof(Source) : sizeof(Destination)));
  constexpr int kAhead = kN > 4 ? 2 : 4;
  constexpr uint32_t kStride = kThreads * kN;
  const bool is_vector = MUSTER_MUTATE(pack_misaligned_load, (is_aligned<Source, kN>(source)), true) &&
                         is_aligned<Destination, kN>(destination);
  const uint32_t whole = is_vector ? n / kN * kN : 0;
  uint32_t i = threadIdx.x * kN;
  for (; i + (kAhead - 1) * kStride < whole; i += kAhead * kStride) {
    pack_vectors<kAccumulate, kN, kAhead>(source + i, destination + i, factor);
  }
  for (; i < whole; i += kStride) pack_vectors<kAccumulate, kN, 1>(source + i, destination + i, factor);
  const uint32_t tail = MUSTER_MUTATE(pack_short_tail, whole, n % kN == 0 ? whole : whole + 1);
  for (uint32_t j = tail + threadIdx.x; j < n; j += kThreads) pack_one<kAccumulate>(source[j], destination[j], factor);
}

template <class Destination>
MUSTER_DEVICE void write_zeros(Destination* destination, uint32_t n) {
  constexpr int kN = static_cast<int>(kVectorBytes / sizeof(Destination));
  const Pack<Destination, kN> zeros{};
  const uint32_t whole = is_aligned<Destination, kN>(destination) ? n / kN * kN : 0;
  for (uint32_t i = threadIdx.x * kN; i < whole; i += kThreads * kN) store(destination + i, zeros);
  for (uint32_t i = whole + threadIdx.x; i < n; i += kThreads) destination[i] = zeros.v[0];
}

template <bool kAccumulate, class Source, class Destination>
MUSTER_DEVICE void pack_slot(const void* source, Destination* destination, uint64_t first, uint32_t n, double factor) {
  using T = decltype(widen(Destination{}));
  pack_chunk<kAccumulate>(static_cast<const Source*>(source) + first, destination + first, n, static_cast<T>(factor));
}

template <bool kAccumulate, class Destination>
MUSTER_KERNEL void __launch_bounds__(kThreads, 4) pack_kernel(MUSTER_GRID_CONSTANT(Arguments) arguments) {
  const double gate = arguments.gate == nullptr ? 1.0 : *arguments.gate;
  const bool is_open = MUSTER_MUTATE(pack_ignores_its_gate, gate != 0, true);
  const double factor = MUSTER_MUTATE(pack_ignores_its_share, arguments.factor * gate, arguments.factor);
  for (uint32_t c = blockIdx.x; c < arguments.num_chunks; c += gridDim.x) {
    const Chunk chunk = arguments.chunks[c];
    const uint32_t item = chunk.item - arguments.first_slot;
    if (item >= arguments.num_sources) continue;  // another launch's
    const PackSlot slot = arguments.slots[chunk.item];
    const uint64_t first = uint64_t{chunk.index} * kTile;
    const uint32_t n = static_cast<uint32_t>(slot.n - first < kTile ? slot.n - first : kTile);
    const void* source = is_open ? arguments.sources[item] : nullptr;
    Destination* destination = static_cast<Destination*>(arguments.bucket) + slot.offset;
    if (source == nullptr) {
      if (!kAccumulate) write_zeros(destination + first, n);
    } else if constexpr (sizeof(Destination) == sizeof(double)) {
      pack_slot<kAccumulate, double>(source, destination, first, n, factor);
    } else if (slot.source_dtype == DType::f32) {
      pack_slot<kAccumulate, float>(source, destination, first, n, factor);
    } else if (slot.source_dtype == DType::bf16) {
      pack_slot<kAccumulate, BFloat16>(source, destination, first, n, factor);
    } else {
      pack_slot<kAccumulate, Half>(source, destination, first, n, factor);
    }
  }
}

template <class Destination>
Status pack_into(bool accumulate, const Arguments& arguments, Stream stream) noexcept {
  return launch_over(arguments.num_chunks, 8,
                     accumulate ? pack_kernel<true, Destination> : pack_kernel<false, Destination>, kThreads, stream,
                     arguments);
}

}  // namespace

Status pack(const PackPlan& plan, const void* const* sources, void* bucket, bool accumulate, double factor,
            const double* gate, Stream stream) noexcept {
  Arguments arguments;
  arguments.slots = plan.slots;
  arguments.chunks = plan.chunks;
  arguments.num_chunks = plan.num_chunks;
  arguments.bucket = bucket;
  arguments.factor = factor;
  arguments.gate = gate;
  for (uint32_t first = 0; first < plan.num_slots; first += kMaxPackSources) {
    const uint32_t left = plan.num_slots - first;
    arguments.first_slot = first;
    arguments.num_sources = left < kMaxPackSources ? left : kMaxPackSources;
    for (uint32_t i = 0; i < arguments.num_sources; ++i) arguments.sources[i] = sources[first + i];
    Status status;
    switch (plan.bucket_dtype) {
      case DType::f32:
        status = pack_into<float>(accumulate, arguments, stream);
        break;
      case DType::f64:
        status = pack_into<double>(accumulate, arguments, stream);
        break;
      case DType::bf16:
        status = pack_into<BFloat16>(accumulate, arguments, stream);
        break;
      default:
        status = {Status::Code::invalid, "a bucket is f32, f64 or bf16"};
    }
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace muster::kernels::cuda
