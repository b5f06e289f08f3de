// One chunk of an optimizer step by one block, for the step kernels and reduce_step.
#pragma once

#include "kernels/cuda/device.h"
#include "kernels/step_math.h"

namespace muster::kernels::cuda {

inline constexpr unsigned kStepThreads = 256;

// --- optimizers ----------------------------------------------------------------------------------------------------
// Factors are what a parameter's elements share; choose() hands run() the update of one element for them, chosen once a
// chunk. kStates: how many of the three states the update reads and writes.

template <bool kDecoupled, bool kAmsgrad, class T>
struct AdamUpdate {
  static constexpr int kStates = kAmsgrad ? 3 : 2;
  AdamFactors<T> factors;

  MUSTER_MEMBER void operator()(T& p, T& m, T& v, T& v_max, T g) const {
    adam_element<kDecoupled, kAmsgrad>(p, m, v, v_max, g, factors);
  }
};

struct Adam {
  using Group = AdamGroup;
  template <class T>
  struct Factors {
    AdamFactors<T> factors;
    bool decoupled, amsgrad;
  };

  template <class T>
  MUSTER_DEVICE Factors<T> factors(const AdamGroup& group, uint64_t step) {
    return {adam_factors<T>(group, step), group.decoupled, group.amsgrad};
  }

  template <class T, class Run>
  MUSTER_DEVICE void choose(const Factors<T>& f, const Run& run) {
    if (f.decoupled) {
      f.amsgrad ? run(AdamUpdate<true, true, T>{f.factors}) : run(AdamUpdate<true, false, T>{f.factors});
    } else {
      f.amsgrad ? run(AdamUpdate<false, true, T>{f.factors}) : run(AdamUpdate<false, false, T>{f.factors});
    }
  }
};

template <bool kMomentum, bool kNesterov, class T>
struct SgdUpdate {
  static constexpr int kStates = kMomentum ? 1 : 0;
  SgdFactors<T> factors;

  MUSTER_MEMBER void operator()(T& p, T& buffer, T&, T&, T g) const {
    sgd_element<kMomentum, kNesterov>(p, buffer, g, factors);
  }
};

struct Sgd {
  using Group = SgdGroup;
  template <class T>
  struct Factors {
    SgdFactors<T> factors;
    bool has_momentum, nesterov;
  };

  template <class T>
  MUSTER_DEVICE Factors<T> factors(const SgdGroup& group, uint64_t step) {
    return {sgd_factors<T>(group, step), group.momentum != 0, group.nesterov};
  }

  template <class T, class Run>
  MUSTER_DEVICE void choose(const Factors<T>& f, const Run& run) {
    if (!f.has_momentum) {
      run(SgdUpdate<false, false, T>{f.factors});
    } else {
      f.nesterov ? run(SgdUpdate<true, true, T>{f.factors}) : run(SgdUpdate<true, false, T>{f.factors});
    }
  }
};

template <class T>
struct AdagradUpdate {
  static constexpr int kStates = 1;
  AdagradFactors<T> factors;

  MUSTER_MEMBER void operator()(T& p, T& sum, T&, T&, T g) const { adagrad_element(p, sum, g, factors); }
};

struct Adagrad {
  using Group = AdagradGroup;
  template <class T>
  struct Factors {
    AdagradFactors<T> factors;
  };

  template <class T>
  MUSTER_DEVICE Factors<T> factors(const AdagradGroup& group, uint64_t step) {
    return {adagrad_factors<T>(group, step)};
  }

  template <class T, class Run>
  MUSTER_DEVICE void choose(const Factors<T>& f, const Run& run) {
    run(AdagradUpdate<T>{f.factors});
  }
};

// --- what a block knows of a segment ---------------------------------------------------------------------------------

/// In shared memory, written by one thread when the block comes to another segment.
template <class Optimizer, class T>
struct SegmentFactors {
  typename Optimizer::template Factors<T> optimizer;
  T divisor;
  Clipping<T> clipping;
  bool is_changed;
};

/// By the whole block. `step` gives the count of this step.
template <class Optimizer, class T, class Step>
MUSTER_DEVICE void share_factors(SegmentFactors<Optimizer, T>& shared, const StepScalars& scalars, const double* used,
                                 const typename Optimizer::Group& group, const Step& step) {
  MUSTER_MUTATE(factors_overtake_their_readers, __syncthreads(), void());
  if (threadIdx.x == 0) {
    shared.optimizer = Optimizer::template factors<T>(group, step());
    shared.divisor = static_cast<T>(scalars.divisor);
    shared.clipping = step_clipping<T>(scalars, group.maximize);
    shared.is_changed = is_stepped(scalars, used);
  }
  MUSTER_MUTATE(factors_not_awaited, __syncthreads(), void());
}

// --- one chunk -----------------------------------------------------------------------------------------------------

/// Where a chunk's elements lie but for those of the parameter, see step_chunk.
template <class T>
struct ChunkElements {
  T* gradient;
  T* state[3];
  uint32_t n;
};

/// Everything is read before anything is written: pointers may alias for all that the compiler knows.
template <int kN, class T, class Update, class Parameter>
MUSTER_DEVICE void step_pack(const ChunkElements<T>& e, uint32_t i, T divisor, const Clipping<T>& clipping,
                             bool keep_gradient, const Update& update, const Parameter& parameter) {
  Pack<T, kN> g = load<kN>(e.gradient + i);
  Pack<T, kN> p = parameter.template load<kN>(i);
  Pack<T, kN> s[3]{};
  MUSTER_UNROLL
  for (int k = 0; k < Update::kStates; ++k) s[k] = load<kN>(e.state[k] + i);
  MUSTER_UNROLL
  for (int j = 0; j < kN; ++j) {
    g.v[j] = g.v[j] / divisor;
    update(p.v[j], s[0].v[j], s[1].v[j], s[2].v[j], clipped(g.v[j], clipping));
  }
  if (keep_gradient) store(e.gradient + i, g);
  MUSTER_UNROLL
  for (int k = 0; k < Update::kStates; ++k) store(e.state[k] + i, s[k]);
  parameter.store(i, p);
}

template <class T, class Update, class Parameter>
MUSTER_DEVICE void step_elements(const ChunkElements<T>& e, T divisor, const Clipping<T>& clipping, bool keep_gradient,
                                 const Update& update, const Parameter& parameter) {
  constexpr int kN = static_cast<int>(kVectorBytes / sizeof(T));
  bool is_vector = is_aligned<T, kN>(e.gradient) && parameter.template is_aligned<kN>();
  for (int k = 0; k < Update::kStates; ++k) {
    is_vector = is_vector && MUSTER_MUTATE(step_misaligned_load, (is_aligned<T, kN>(e.state[k])), true);
  }
  const uint32_t whole = is_vector ? e.n / kN * kN : 0;
  for (uint32_t i = threadIdx.x * kN; i < whole; i += kStepThreads * kN) {
    step_pack<kN>(e, i, divisor, clipping, keep_gradient, update, parameter);
  }
  const uint32_t end = MUSTER_MUTATE(step_short_tail, e.n, e.n % kN == 0 ? e.n : e.n - 1);
  for (uint32_t i = whole + threadIdx.x; i < end; i += kStepThreads) {
    step_pack<1>(e, i, divisor, clipping, keep_gradient, update, parameter);
  }
}

/// By the whole block. parameter.load<kN>(i) is what the elements from i on are stepped from, parameter.store(i, pack)
/// stores them stepped, parameter.is_aligned<kN>() says whether it has packs of kN.
template <class Optimizer, class T, class Parameter>
MUSTER_DEVICE void step_chunk(const ChunkElements<T>& e, const SegmentFactors<Optimizer, T>& factors,
                              bool keep_gradient, const Parameter& parameter) {
  const T divisor = factors.divisor;
  if (factors.is_changed) {
    const Clipping<T> clipping = factors.clipping;
    Optimizer::template choose<T>(factors.optimizer, [&](const auto& update) {
      step_elements(e, divisor, clipping, keep_gradient, update, parameter);
    });
  } else if (keep_gradient) {
    for (uint32_t i = threadIdx.x; i < e.n; i += kStepThreads) e.gradient[i] = e.gradient[i] / divisor;
  }
}

/// `master` from `i` on, but for elements that the parameter of low precision is newer in.
template <int kN, class Low, class T>
MUSTER_DEVICE Pack<T, kN> load_master(const T* master, const Low* low) {
  Pack<T, kN> values = load<kN>(master);
  const Pack<Low, kN> rounded = load<kN>(low);
  MUSTER_UNROLL
  for (int j = 0; j < kN; ++j) values.v[j] = current_master(values.v[j], rounded.v[j]);
  return values;
}

template <int kN, class T>
MUSTER_DEVICE Pack<T, kN> load_master(const T* master, DType dtype, const void* low, uint64_t i) {
  return dtype == DType::bf16 ? load_master<kN>(master, static_cast<const BFloat16*>(low) + i)
                              : load_master<kN>(master, static_cast<const Half*>(low) + i);
}

/// Rounds a pack to a low-precision copy.
template <class Low, class T, int kN>
MUSTER_DEVICE void store_low(void* low, uint64_t i, const Pack<T, kN>& values) {
  Pack<Low, kN> rounded;
  MUSTER_UNROLL
  for (int j = 0; j < kN; ++j) rounded.v[j] = narrow<Low>(static_cast<float>(values.v[j]));
  store(static_cast<Low*>(low) + i, rounded);
}

template <class T, int kN>
MUSTER_DEVICE void store_low(DType dtype, void* low, uint64_t i, const Pack<T, kN>& values) {
  dtype == DType::bf16 ? store_low<BFloat16>(low, i, values) : store_low<Half>(low, i, values);
}

}  // namespace muster::kernels::cuda
