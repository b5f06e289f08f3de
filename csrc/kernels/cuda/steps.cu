#include "kernels/cuda/step_chunk.h"

namespace muster::kernels::cuda {
namespace {

/// The parameter, or its master copy with it.
template <class T>
struct LocalParameter {
  T* wide;
  void* low;  // the chunk's first element, or null
  DType low_dtype;

  template <int kN>
  MUSTER_MEMBER bool is_aligned() const {
    return cuda::is_aligned<T, kN>(wide) &&
           (low == nullptr || cuda::is_aligned<BFloat16, kN>(static_cast<const BFloat16*>(low)));
  }

  template <int kN>
  MUSTER_MEMBER Pack<T, kN> load(uint32_t i) const {
    if (MUSTER_MUTATE(step_reads_the_copy_alone, low == nullptr, true)) return cuda::load<kN>(wide + i);
    return load_master<kN>(wide + i, low_dtype, low, i);
  }

  template <int kN>
  MUSTER_MEMBER void store(uint32_t i, const Pack<T, kN>& values) const {
    cuda::store(wide + i, values);
    if (low != nullptr) store_low(low_dtype, low, i, values);
  }
};

/// The same, stored to other devices, too.
template <class T>
struct CopiedParameter {
  LocalParameter<T> own;
  void* const* copies;  // of the segment
  uint32_t num_copies;
  uint64_t first;  // the chunk's, within the segment

  template <int kN>
  MUSTER_MEMBER bool is_aligned() const {
    bool is_vector = own.template is_aligned<kN>();
    for (uint32_t k = 0; k < num_copies; ++k) {
      is_vector =
          is_vector && (own.low == nullptr ? cuda::is_aligned<T, kN>(static_cast<const T*>(copies[k]))
                                           : cuda::is_aligned<BFloat16, kN>(static_cast<const BFloat16*>(copies[k])));
    }
    return is_vector;
  }

  template <int kN>
  MUSTER_MEMBER Pack<T, kN> load(uint32_t i) const {
    return own.template load<kN>(i);
  }

  template <int kN>
  MUSTER_MEMBER void store(uint32_t i, const Pack<T, kN>& values) const {
    own.store(i, values);
    const uint32_t end = MUSTER_MUTATE(step_forgets_a_copy, num_copies, num_copies - 1);
    for (uint32_t k = 0; k < end; ++k) {
      if (own.low != nullptr) {
        store_low(own.low_dtype, copies[k], first + i, values);
      } else {
        cuda::store(static_cast<T*>(copies[k]) + first + i, values);
      }
    }
  }
};

/// A block takes a run of chunks, so that a parameter's factors are computed about once a block.
template <class Optimizer, class T, bool kCopies>
MUSTER_KERNEL void __launch_bounds__(kStepThreads, sizeof(T) == sizeof(float) ? 3 : 2)
    step_kernel(MUSTER_GRID_CONSTANT(StepPlan) plan, const typename Optimizer::Group* groups) {
  MUSTER_SHARED SegmentFactors<Optimizer, T> factors;
  const uint32_t begin = static_cast<uint32_t>(uint64_t{plan.num_chunks} * blockIdx.x / gridDim.x);
  const uint32_t end = static_cast<uint32_t>(uint64_t{plan.num_chunks} * (blockIdx.x + 1) / gridDim.x);
  for (uint32_t c = begin; c < end; ++c) {
    const Chunk chunk = plan.chunks[c];
    const StepSegment& segment = plan.segments[chunk.item];
    if (c == begin || chunk.item != plan.chunks[c - 1].item) {
      share_factors<Optimizer, T>(factors, *plan.scalars, segment.used, groups[segment.group],
                                  [&] { return step_count(segment.step); });
    }
    const uint64_t first = uint64_t{chunk.index} * kTile;
    ChunkElements<T> elements;
    elements.n = static_cast<uint32_t>(segment.n - first < kTile ? segment.n - first : kTile);
    elements.gradient = static_cast<T*>(segment.gradient) + first;
    for (int k = 0; k < 3; ++k) {
      elements.state[k] = segment.state[k] == nullptr ? nullptr : static_cast<T*>(segment.state[k]) + first;
    }
    const LocalParameter<T> parameter{static_cast<T*>(segment.parameter) + first,
                                      segment.low == nullptr ? nullptr : static_cast<uint16_t*>(segment.low) + first,
                                      segment.low_dtype};
    if constexpr (kCopies) {
      const CopiedParameter<T> copied{parameter, plan.copies + uint64_t{chunk.item} * plan.num_copies, plan.num_copies,
                                      first};
      step_chunk<Optimizer>(elements, factors, plan.keep_gradient, copied);
    } else {
      step_chunk<Optimizer>(elements, factors, plan.keep_gradient, parameter);
    }
  }
}

template <class Optimizer, class T>
Status step_of(const StepPlan& plan, const typename Optimizer::Group* groups, Stream stream) noexcept {
  const auto kernel = plan.num_copies > 0 ? step_kernel<Optimizer, T, true> : step_kernel<Optimizer, T, false>;
  return launch_waves(plan.num_chunks, 2, kernel, kStepThreads, stream, plan, groups);
}

template <class Optimizer>
Status step(const StepPlan& plan, const typename Optimizer::Group* groups, Stream stream) noexcept {
  switch (plan.dtype) {
    case DType::f32:
      return step_of<Optimizer, float>(plan, groups, stream);
    case DType::f64:
      return step_of<Optimizer, double>(plan, groups, stream);
    default:
      return {Status::Code::invalid, "an optimizer steps in f32 or f64"};
  }
}

}  // namespace

bool is_built() noexcept { return true; }

Status check_code(int& capability) noexcept { return find_code(step_kernel<Sgd, float, false>, capability); }

bool is_capturing(Stream stream) noexcept { return is_captured(stream); }

Status adam_step(const StepPlan& plan, const AdamGroup* groups, Stream stream) noexcept {
  return step<Adam>(plan, groups, stream);
}
Status sgd_step(const StepPlan& plan, const SgdGroup* groups, Stream stream) noexcept {
  return step<Sgd>(plan, groups, stream);
}
Status adagrad_step(const StepPlan& plan, const AdagradGroup* groups, Stream stream) noexcept {
  return step<Adagrad>(plan, groups, stream);
}

}  // namespace muster::kernels::cuda
