// Compiled once per instruction set, under the rules of isa_kernels.cpp.
#include "kernels/cpu/isa_table.h"
#include "kernels/step_math.h"

namespace muster::kernels::MUSTER_ISA {
namespace {

// Passes over a piece that follow one another find it in the first cache. Short, so that reading ahead makes no bursts.
constexpr size_t kPiece = 64;
// The processor's own prefetching ends at the page, which several arrays reach at once.
constexpr size_t kAhead = 512;
constexpr size_t kLineBytes = 64;

template <class T>
void divide(T* out, const T* in, T divisor, size_t n) noexcept {
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) out[i] = in[i] / divisor;
}

template <class S, class T>
void narrow_all(S* out, const T* in, size_t n) noexcept {
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) out[i] = narrow<S>(static_cast<float>(in[i]));
}

template <class S, class T>
void take_written(T* master, const S* low, size_t n) noexcept {
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) master[i] = current_master(master[i], low[i]);
}

/// Calls with this type of low precision.
template <class F>
MUSTER_HOST_DEVICE void with_low(DType dtype, const F& function) noexcept {
  dtype == DType::bf16 ? function(BFloat16{}) : function(Half{});
}

// 1 / divisor where multiplying by it gives the bits of the division, else 0: powers of two well inside T's range.
template <class T>
T exact_inverse(T divisor) noexcept {
  const auto bits = bits_as<uint64_t>(static_cast<double>(divisor));
  const int exponent = static_cast<int>((bits >> 52) & 0x7ffu) - 1023;
  const int limit = sizeof(T) == sizeof(float) ? 120 : 1000;
  const bool is_exact = (bits & 0xfffffffffffffull) == 0 && exponent > -limit && exponent < limit;
  return is_exact ? 1 / divisor : 0;
}

// What a step reads of a segment, fetched before its turn where that is of use.
template <class T>
class Prefetch {
 public:
  explicit Prefetch(const StepSegment& segment) noexcept : n_(segment.n) {
    if (!gains_from_hints()) return;
    const void* const read[] = {segment.gradient, segment.parameter, segment.state[0], segment.state[1],
                                segment.state[2]};
    for (const void* array : read) {
      if (array != nullptr) arrays_[count_++] = static_cast<const T*>(array);
    }
  }

  // For the piece at `begin`: the one that lies kAhead beyond it.
  void operator()(size_t begin) const noexcept {
    if (count_ == 0 || begin + kAhead + kPiece > n_) return;
    for (size_t i = begin + kAhead; i < begin + kAhead + kPiece; i += kLineBytes / sizeof(T)) {
      for (int a = 0; a < count_; ++a) __builtin_prefetch(arrays_[a] + i);
    }
  }

 private:
  const T* arrays_[5];
  int count_ = 0;
  size_t n_;
};

// One segment's arrays from one index on; clipped(gradient * inverse, clipping) is what its step reads.
template <class T>
struct Piece {
  const T* gradient;
  T* parameter;
  T* state[3];
  size_t n;
  T inverse;
  Clipping<T> clipping;
};

// `update(segment)` gives what updates the pieces of that segment.
template <class T, class Update>
MUSTER_HOST_DEVICE void step_segment(const StepSegment& segment, const StepScalars& scalars, bool keep_gradient,
                                     bool maximize, const Update& update) noexcept {
  const bool is_changed = is_stepped(scalars, segment.used);
  if (!is_changed && !keep_gradient) return;
  const auto divisor = static_cast<T>(scalars.divisor);
  const T inverse = exact_inverse(divisor);
  const Prefetch<T> prefetch(segment);
  alignas(64) T scratch[kPiece];
  for (size_t begin = 0; begin < segment.n; begin += kPiece) {
    const size_t n = segment.n - begin < kPiece ? segment.n - begin : kPiece;
    prefetch(begin);
    T* gradient = static_cast<T*>(segment.gradient) + begin;
    T* parameter = static_cast<T*>(segment.parameter) + begin;
    Piece<T> piece{gradient, parameter, {}, n, inverse, step_clipping<T>(scalars, maximize)};
    if (keep_gradient || inverse == 0) {
      T* mean = keep_gradient ? gradient : scratch;
      divide(mean, gradient, divisor, n);
      piece.gradient = mean;
      piece.inverse = 1;
    }
    if (!is_changed) continue;
    for (int s = 0; s < 3; ++s) {
      if (segment.state[s] != nullptr) piece.state[s] = static_cast<T*>(segment.state[s]) + begin;
    }
    if (segment.low == nullptr) {
      update(piece);
      continue;
    }
    with_low(segment.low_dtype, [&](auto kind) {
      auto* const low = static_cast<decltype(kind)*>(segment.low) + begin;
      take_written(parameter, low, n);
      update(piece);
      narrow_all(low, parameter, n);
    });
  }
}

template <class Group>
using SegmentStep = void(const StepArguments& a, const StepSegment& segment, const Group& group) noexcept;

template <class Group>
void step_all(const StepArguments& a, const Group* groups, SegmentStep<Group>* singles,
              SegmentStep<Group>* doubles) noexcept {
  SegmentStep<Group>* const step = a.dtype == DType::f64 ? doubles : singles;
  for (size_t k = 0; k < a.count; ++k) step(a, a.segments[k], groups[a.segments[k].group]);
}

// --- adam ----------------------------------------------------------------------------------------------------------

template <bool kDecoupled, bool kAmsgrad, class T>
void adam_piece(const Piece<T>& piece, const AdamFactors<T>& shared) noexcept {
  const AdamFactors<T> f = shared;
  const T* gradient = piece.gradient;
  T* p = piece.parameter;
  T* m = piece.state[0];
  T* v = piece.state[1];
  T* v_max = piece.state[2];
  const T inverse = piece.inverse;
  const Clipping<T> clipping = piece.clipping;
#pragma GCC ivdep
  for (size_t i = 0; i < piece.n; ++i) {
    const T g = clipped(gradient[i] * inverse, clipping);
    T unused = 0;
    adam_element<kDecoupled, kAmsgrad>(p[i], m[i], v[i], kAmsgrad ? v_max[i] : unused, g, f);
  }
}

template <class T>
void adam_segment(const StepArguments& a, const StepSegment& segment, const AdamGroup& group) noexcept {
  const AdamFactors<T> f = adam_factors<T>(group, step_count(segment.step));
  const auto run = [&](auto update) {
    step_segment<T>(segment, *a.scalars, a.keep_gradient, group.maximize,
                    [&](const Piece<T>& piece) { update(piece, f); });
  };
  if (group.decoupled) {
    group.amsgrad ? run(adam_piece<true, true, T>) : run(adam_piece<true, false, T>);
  } else {
    group.amsgrad ? run(adam_piece<false, true, T>) : run(adam_piece<false, false, T>);
  }
}

void adam(const StepArguments& a, const AdamGroup* groups) noexcept {
  step_all(a, groups, adam_segment<float>, adam_segment<double>);
}

// --- sgd -----------------------------------------------------------------------------------------------------------

template <bool kMomentum, bool kNesterov, class T>
void sgd_piece(const Piece<T>& piece, const SgdFactors<T>& shared) noexcept {
  const SgdFactors<T> f = shared;
  const T* gradient = piece.gradient;
  T* p = piece.parameter;
  T* buffer = piece.state[0];
  const T inverse = piece.inverse;
  const Clipping<T> clipping = piece.clipping;
#pragma GCC ivdep
  for (size_t i = 0; i < piece.n; ++i) {
    const T g = clipped(gradient[i] * inverse, clipping);
    T unused = 0;
    sgd_element<kMomentum, kNesterov>(p[i], kMomentum ? buffer[i] : unused, g, f);
  }
}

template <class T>
void sgd_segment(const StepArguments& a, const StepSegment& segment, const SgdGroup& group) noexcept {
  const SgdFactors<T> f = sgd_factors<T>(group, step_count(segment.step));
  const auto run = [&](auto update) {
    step_segment<T>(segment, *a.scalars, a.keep_gradient, group.maximize,
                    [&](const Piece<T>& piece) { update(piece, f); });
  };
  if (group.momentum == 0) {
    run(sgd_piece<false, false, T>);
  } else {
    group.nesterov ? run(sgd_piece<true, true, T>) : run(sgd_piece<true, false, T>);
  }
}

void sgd(const StepArguments& a, const SgdGroup* groups) noexcept {
  step_all(a, groups, sgd_segment<float>, sgd_segment<double>);
}

// --- adagrad -------------------------------------------------------------------------------------------------------

template <class T>
void adagrad_piece(const Piece<T>& piece, const AdagradFactors<T>& shared) noexcept {
  const AdagradFactors<T> f = shared;
  const T* gradient = piece.gradient;
  T* p = piece.parameter;
  T* sum = piece.state[0];
  const T inverse = piece.inverse;
  const Clipping<T> clipping = piece.clipping;
#pragma GCC ivdep
  for (size_t i = 0; i < piece.n; ++i) adagrad_element(p[i], sum[i], clipped(gradient[i] * inverse, clipping), f);
}

template <class T>
void adagrad_segment(const StepArguments& a, const StepSegment& segment, const AdagradGroup& group) noexcept {
  const AdagradFactors<T> f = adagrad_factors<T>(group, step_count(segment.step));
  step_segment<T>(segment, *a.scalars, a.keep_gradient, group.maximize,
                  [&](const Piece<T>& piece) { adagrad_piece(piece, f); });
}

void adagrad(const StepArguments& a, const AdagradGroup* groups) noexcept {
  step_all(a, groups, adagrad_segment<float>, adagrad_segment<double>);
}

// --- row-wise adagrad ------------------------------------------------------------------------------------------------

// kPiece is a multiple of kLanes: a piece begins at lane 0.
template <class T>
void add_squares(const Piece<T>& piece, double* lanes) noexcept {
  const T inverse = piece.inverse;
  const Clipping<T> clipping = piece.clipping;
  size_t i = 0;
  for (; i + kLanes <= piece.n; i += kLanes) {
#pragma GCC ivdep
    for (size_t l = 0; l < kLanes; ++l) {
      const auto g = static_cast<double>(clipped(piece.gradient[i + l] * inverse, clipping));
      lanes[l] = lanes[l] + g * g;
    }
  }
  for (size_t l = 0; i + l < piece.n; ++l) {
    const auto g = static_cast<double>(clipped(piece.gradient[i + l] * inverse, clipping));
    lanes[l] = lanes[l] + g * g;
  }
}

template <class T>
void rowwise_adagrad_piece(const Piece<T>& piece, T rate) noexcept {
  const T* gradient = piece.gradient;
  T* p = piece.parameter;
  const T inverse = piece.inverse;
  const Clipping<T> clipping = piece.clipping;
#pragma GCC ivdep
  for (size_t i = 0; i < piece.n; ++i) rowwise_adagrad_element(p[i], clipped(gradient[i] * inverse, clipping), rate);
}

template <class T>
void rowwise_adagrad_segment(const StepArguments& a, const StepSegment& segment,
                             const RowwiseAdagradGroup& group) noexcept {
  StepSegment row = segment;
  row.state[0] = nullptr;  // no array: pieces must not move along it
  T rate = 0;
  if (is_stepped(*a.scalars, segment.used) && segment.n > 0) {
    StepSegment read = row;
    read.low = nullptr;
    alignas(64) double lanes[kLanes] = {};
    step_segment<T>(read, *a.scalars, /*keep_gradient=*/false, /*maximize=*/false,
                    [&](const Piece<T>& piece) { add_squares(piece, lanes); });
    for (size_t half = kLanes / 2; half > 0; half /= 2) {
      for (size_t l = 0; l < half; ++l) lanes[l] = lanes[l] + lanes[l + half];
    }
    rate = rowwise_adagrad_rate(*static_cast<T*>(segment.state[0]), lanes[0] / static_cast<double>(segment.n), group,
                                step_count(segment.step));
  }
  step_segment<T>(row, *a.scalars, a.keep_gradient, group.maximize,
                  [&](const Piece<T>& piece) { rowwise_adagrad_piece(piece, rate); });
}

void rowwise_adagrad(const StepArguments& a, const RowwiseAdagradGroup* groups) noexcept {
  step_all(a, groups, rowwise_adagrad_segment<float>, rowwise_adagrad_segment<double>);
}

}  // namespace

extern const StepTable kSteps = {&adam, &sgd, &adagrad, &rowwise_adagrad};

}  // namespace muster::kernels::MUSTER_ISA
