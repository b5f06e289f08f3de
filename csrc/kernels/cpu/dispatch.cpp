#include "kernels/cpu/dispatch.h"

#include "kernels/cpu/norm_partials.h"

namespace muster::kernels {
namespace {

struct Choice {
  NamedTable tables[3];
  size_t count = 0;
  bool gains_from_hints = true;

  Choice() noexcept {
    tables[count++] = {"baseline", &baseline::kTable, &baseline::kSteps, baseline::kStreamLines};
#ifdef MUSTER_X86_ISA
    __builtin_cpu_init();
    gains_from_hints = !__builtin_cpu_is("amd");
    const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (has_avx2) tables[count++] = {"avx2", &avx2::kTable, &avx2::kSteps, avx2::kStreamLines};
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      tables[count++] = {"avx512", &avx512::kTable, &avx512::kSteps, avx512::kStreamLines};
    }
#endif
  }
};

const Choice& choice() noexcept {
  static const Choice instance;
  return instance;
}

}  // namespace

const NamedTable* usable_tables(size_t& count) noexcept {
  count = choice().count;
  return choice().tables;
}

bool gains_from_hints() noexcept { return choice().gains_from_hints; }

const NamedTable& best_table() noexcept { return choice().tables[choice().count - 1]; }

size_t size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
    case DType::i16:
      return 2;
    default:
      return 1;
  }
}

void tree_reduce(DType dtype, Reduction reduction, const void* const* sources, int num_sources,
                 void* const* destinations, int num_destinations, size_t n) noexcept {
  best_table().table->tree_reduce(dtype, reduction, sources, num_sources, destinations, num_destinations, n);
}

void grad_stats(const StatsSegment* segments, size_t count, double norm_type) noexcept {
  if (norm_type == 2) return best_table().table->grad_stats(segments, count);
  for (size_t k = 0; k < count; ++k) take_norm_partials(segments[k], norm_type);
}

void divide_with_stats(DType dtype, void* values, size_t n, double divisor, double* partials) noexcept {
  best_table().table->divide_with_stats(dtype, values, n, divisor, partials);
}

void narrow(DType dtype, void* destination, const float* source, size_t n) noexcept {
  best_table().table->narrow(dtype, destination, source, n);
}

void adam_step(const StepArguments& arguments, const AdamGroup* groups) noexcept {
  best_table().steps->adam(arguments, groups);
}

void sgd_step(const StepArguments& arguments, const SgdGroup* groups) noexcept {
  best_table().steps->sgd(arguments, groups);
}

void adagrad_step(const StepArguments& arguments, const AdagradGroup* groups) noexcept {
  best_table().steps->adagrad(arguments, groups);
}

void rowwise_adagrad_step(const StepArguments& arguments, const RowwiseAdagradGroup* groups) noexcept {
  best_table().steps->rowwise_adagrad(arguments, groups);
}

}  // namespace muster::kernels
