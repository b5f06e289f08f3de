#include "kernels/cuda/device.h"

namespace muster::kernels::cuda {
namespace {

constexpr unsigned kThreads = 256;

struct Gathering {
  BufferPlan plan;
  BufferSums sums;
  const double* weight;
  double share;
  int rank;
  int size;
};

struct Scattering {
  BufferPlan plan;
  BufferSums sums;
  const double* total_weight;
  bool is_mean;
  int size;
};

/// Through fp32, as torch rounds an fp64 number.
template <class T>
MUSTER_DEVICE T rounded(double value) {
  if constexpr (sizeof(T) == sizeof(double)) {
    return value;
  } else {
    return narrow<T>(static_cast<float>(value));
  }
}

/// An integer's halves, each exact in fp64.
MUSTER_DEVICE double upper_word(int64_t value) { return static_cast<double>(static_cast<int32_t>(value >> 32)); }
MUSTER_DEVICE double lower_word(int64_t value) { return static_cast<double>(static_cast<uint32_t>(value)); }
MUSTER_DEVICE int64_t integer_of(const double* words) {
  const uint64_t upper = static_cast<uint64_t>(static_cast<int64_t>(words[0]));
  return static_cast<int64_t>(upper << 32 | static_cast<uint64_t>(words[1]));
}

MUSTER_DEVICE double* words_of(const BufferPlan& plan, const BufferSums& sums, int rank, uint64_t integer) {
  return sums.words + 2 * (static_cast<uint64_t>(rank) * plan.num_integers + integer);
}

// --- gathering -----------------------------------------------------------------------------------------------------

/// `place`: of the first of n elements, in the arrays of its kind.
template <class T>
MUSTER_DEVICE void gather_averaged(const Gathering& g, const T* values, uint64_t place, uint32_t n) {
  const double own = MUSTER_MUTATE(buffers_without_weight, g.weight == nullptr ? 1 : *g.weight, 1);
  const double weight = own * g.share;
  for (uint32_t i = threadIdx.x; i < n; i += kThreads) {
    const double value = static_cast<double>(widen(values[i]));
    const bool is_as_noted = MUSTER_MUTATE(buffers_always_written, value == g.sums.noted[place + i], false);
    g.sums.sums[place + i] = weight > 0 ? value * weight : 0;
    g.sums.writers[place + i] = is_as_noted ? 0 : 1;
  }
}

template <class T>
MUSTER_DEVICE void gather_integers(const Gathering& g, const T* values, uint64_t place, uint32_t n) {
  for (uint32_t i = threadIdx.x; i < n; i += kThreads) {
    const int64_t value = static_cast<int64_t>(values[i]);
    if (g.sums.words == nullptr) {
      g.sums.integers[place + i] = value;
      continue;
    }
    for (int rank = 0; rank < g.size; ++rank) {
      double* words = words_of(g.plan, g.sums, rank, place + i);
      const bool is_own = rank == g.rank && g.share > 0;
      words[0] = is_own ? upper_word(value) : 0;
      words[1] = is_own ? lower_word(value) : 0;
    }
  }
}

// --- scattering ----------------------------------------------------------------------------------------------------

template <class T>
MUSTER_DEVICE void scatter_averaged(const Scattering& s, T* values, uint64_t place, uint32_t n) {
  const double total = *s.total_weight;
  for (uint32_t i = threadIdx.x; i < n; i += kThreads) {
    const bool was_written = MUSTER_MUTATE(buffers_take_what_nobody_wrote, s.sums.writers[place + i] > 0, true);
    if (total > 0 && was_written) {
      const double sum = s.sums.sums[place + i];
      values[i] = rounded<T>(s.is_mean ? sum / total : sum);
    }
    s.sums.noted[place + i] = static_cast<double>(widen(values[i]));
  }
}

template <class T>
MUSTER_DEVICE void scatter_integers(const Scattering& s, T* values, uint64_t place, uint32_t n) {
  if (!(*s.total_weight > 0)) return;
  for (uint32_t i = threadIdx.x; i < n; i += kThreads) {
    if (s.sums.words == nullptr) {
      values[i] = static_cast<T>(s.sums.integers[place + i]);
      continue;
    }
    int64_t largest = integer_of(words_of(s.plan, s.sums, 0, place + i));
    const int ranks = s.is_mean ? s.size : 1;
    for (int rank = 1; rank < ranks; ++rank) {
      const int64_t value = integer_of(words_of(s.plan, s.sums, rank, place + i));
      if (MUSTER_MUTATE(buffers_take_the_last_integer, value > largest, true)) largest = value;
    }
    values[i] = static_cast<T>(largest);
  }
}

// --- all of a replica's buffers ------------------------------------------------------------------------------------

struct Gather {
  template <class T>
  static MUSTER_MEMBER void run(const Gathering& g, T* values, uint64_t place, uint32_t n) {
    if constexpr (std::is_integral_v<T>) {
      gather_integers(g, values, place, n);
    } else {
      gather_averaged(g, values, place, n);
    }
  }
};

struct Scatter {
  template <class T>
  static MUSTER_MEMBER void run(const Scattering& s, T* values, uint64_t place, uint32_t n) {
    if constexpr (std::is_integral_v<T>) {
      scatter_integers(s, values, place, n);
    } else {
      scatter_averaged(s, values, place, n);
    }
  }
};

template <class Work, class T, class Arguments>
MUSTER_DEVICE void work_on(const Arguments& arguments, const BufferSegment& segment, uint32_t index) {
  const uint64_t first = uint64_t{index} * kTile;
  const uint64_t left = segment.n - first;
  const uint32_t n = static_cast<uint32_t>(left < kTile ? left : kTile);
  Work::run(arguments, static_cast<T*>(segment.values) + first, segment.place + first, n);
}

template <class Work, class Arguments>
MUSTER_KERNEL void __launch_bounds__(kThreads) buffer_kernel(MUSTER_GRID_CONSTANT(Arguments) arguments) {
  for (uint32_t c = blockIdx.x; c < arguments.plan.num_chunks; c += gridDim.x) {
    const Chunk chunk = arguments.plan.chunks[c];
    const BufferSegment segment = arguments.plan.segments[chunk.item];
    switch (segment.dtype) {
      case DType::f32:
        work_on<Work, float>(arguments, segment, chunk.index);
        break;
      case DType::f64:
        work_on<Work, double>(arguments, segment, chunk.index);
        break;
      case DType::bf16:
        work_on<Work, BFloat16>(arguments, segment, chunk.index);
        break;
      case DType::f16:
        work_on<Work, Half>(arguments, segment, chunk.index);
        break;
      case DType::i64:
        work_on<Work, int64_t>(arguments, segment, chunk.index);
        break;
      case DType::i32:
        work_on<Work, int32_t>(arguments, segment, chunk.index);
        break;
      case DType::i16:
        work_on<Work, int16_t>(arguments, segment, chunk.index);
        break;
      case DType::i8:
        work_on<Work, int8_t>(arguments, segment, chunk.index);
        break;
      default:
        work_on<Work, uint8_t>(arguments, segment, chunk.index);
    }
  }
}

}  // namespace

Status gather_buffers(const BufferPlan& plan, const BufferSums& sums, const double* weight, double share, int rank,
                      int size, Stream stream) noexcept {
  return launch_over(plan.num_chunks, 8, buffer_kernel<Gather, Gathering>, kThreads, stream,
                     Gathering{plan, sums, weight, share, rank, size});
}

Status scatter_buffers(const BufferPlan& plan, const BufferSums& sums, const double* total_weight, bool is_mean,
                       int size, Stream stream) noexcept {
  return launch_over(plan.num_chunks, 8, buffer_kernel<Scatter, Scattering>, kThreads, stream,
                     Scattering{plan, sums, total_weight, is_mean, size});
}

}  // namespace muster::kernels::cuda
