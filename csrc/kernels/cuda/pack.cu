#include "kernels/cuda/device.h"

namespace muster::kernels::cuda {
namespace {

constexpr unsigned kThreads = 256;

struct Packing {
  const PackSlot* slots;
  const Chunk* chunks;
  void* bucket;
  double factor;
  const double* gate;
  uint32_t num_chunks;
  uint32_t first_slot;
  uint32_t num_sources;
};

/// What a launch passes, which costs time by its size.
template <uint32_t kCapacity>
struct Arguments {
  const void* sources[kCapacity];
  Packing packing;
};
static_assert(sizeof(Arguments<kMaxPackSources>) <= 32764, "what CUDA 12.1 takes as parameters");
constexpr uint32_t kFewSources = 64;
constexpr uint32_t kManySources = 512;

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

template <bool kAccumulate, class Destination, uint32_t kCapacity>
MUSTER_KERNEL void __launch_bounds__(kThreads, 4) pack_kernel(MUSTER_GRID_CONSTANT(Arguments<kCapacity>) arguments) {
  const Packing& packing = arguments.packing;
  const double gate = packing.gate == nullptr ? 1.0 : *packing.gate;
  const bool is_open = MUSTER_MUTATE(pack_ignores_its_gate, gate != 0, true);
  const double factor = MUSTER_MUTATE(pack_ignores_its_share, packing.factor * gate, packing.factor);
  for (uint32_t c = blockIdx.x; c < packing.num_chunks; c += gridDim.x) {
    const Chunk chunk = packing.chunks[c];
    const uint32_t item = chunk.item - packing.first_slot;
    if (item >= packing.num_sources) continue;  // another launch's
    const PackSlot slot = packing.slots[chunk.item];
    const uint64_t first = uint64_t{chunk.index} * kTile;
    const uint32_t n = static_cast<uint32_t>(slot.n - first < kTile ? slot.n - first : kTile);
    const void* source = is_open ? arguments.sources[item] : nullptr;
    Destination* destination = static_cast<Destination*>(packing.bucket) + slot.offset;
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

template <class Destination, uint32_t kCapacity>
Status launch_pack(const Packing& packing, const void* const* sources, bool accumulate, Stream stream) noexcept {
  Arguments<kCapacity> arguments;
  arguments.packing = packing;
  for (uint32_t i = 0; i < packing.num_sources; ++i) arguments.sources[i] = sources[i];
  return launch_over(
      packing.num_chunks, 8,
      accumulate ? pack_kernel<true, Destination, kCapacity> : pack_kernel<false, Destination, kCapacity>, kThreads,
      stream, arguments);
}

template <class Destination>
Status pack_into(const Packing& packing, const void* const* sources, bool accumulate, Stream stream) noexcept {
  if (packing.num_sources <= kFewSources) {
    return launch_pack<Destination, kFewSources>(packing, sources, accumulate, stream);
  }
  if (packing.num_sources <= kManySources) {
    return launch_pack<Destination, kManySources>(packing, sources, accumulate, stream);
  }
  return launch_pack<Destination, kMaxPackSources>(packing, sources, accumulate, stream);
}

}  // namespace

Status pack(const PackPlan& plan, const void* const* sources, void* bucket, bool accumulate, double factor,
            const double* gate, Stream stream) noexcept {
  Packing packing{plan.slots, plan.chunks, bucket, factor, gate, plan.num_chunks, 0, 0};
  for (uint32_t first = 0; first < plan.num_slots; first += kMaxPackSources) {
    const uint32_t left = plan.num_slots - first;
    packing.first_slot = first;
    packing.num_sources = left < kMaxPackSources ? left : kMaxPackSources;
    Status status;
    switch (plan.bucket_dtype) {
      case DType::f32:
        status = pack_into<float>(packing, sources + first, accumulate, stream);
        break;
      case DType::f64:
        status = pack_into<double>(packing, sources + first, accumulate, stream);
        break;
      case DType::bf16:
        status = pack_into<BFloat16>(packing, sources + first, accumulate, stream);
        break;
      default:
        status = {Status::Code::invalid, "a bucket is f32, f64 or bf16"};
    }
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace muster::kernels::cuda
