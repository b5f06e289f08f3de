#include "kernels/cpu/dispatch.h"

namespace muster::kernels {
namespace {

struct Choice {
  NamedTable tables[3];
  size_t count = 0;

  Choice() noexcept {
    tables[count++] = {"baseline", &baseline::kTable, &baseline::kSteps};
#ifdef MUSTER_X86_ISA
    __builtin_cpu_init();
    const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (has_avx2) tables[count++] = {"avx2", &avx2::kTable, &avx2::kSteps};
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      tables[count++] = {"avx512", &avx512::kTable, &avx512::kSteps};
    }
#endif
  }
};

const Choice& choice() noexcept {
  static const Choice instance;
  return instance;
}

const NamedTable& best() noexcept {
  const Choice& c = choice();
  return c.tables[c.count - 1];
}

}  // namespace

const NamedTable* usable_tables(size_t& count) noexcept {
  count = choice().count;
  return choice().tables;
}

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
  best().table->tree_reduce(dtype, reduction, sources, num_sources, destinations, num_destinations, n);
}

void pack(const PackItem* items, size_t count, bool accumulate, double factor) noexcept {
  best().table->pack(items, count, accumulate, factor);
}

void grad_stats(const StatsSegment* segments, size_t count) noexcept { best().table->grad_stats(segments, count); }

void divide_with_stats(DType dtype, void* values, size_t n, double divisor, double* partials) noexcept {
  best().table->divide_with_stats(dtype, values, n, divisor, partials);
}

void scale(DType dtype, void* values, size_t n, double factor) noexcept {
  best().table->scale(dtype, values, n, factor);
}

void adam_step(const StepArguments& arguments, const AdamGroup* groups) noexcept {
  best().steps->adam(arguments, groups);
}

void sgd_step(const StepArguments& arguments, const SgdGroup* groups) noexcept { best().steps->sgd(arguments, groups); }

void adagrad_step(const StepArguments& arguments, const AdagradGroup* groups) noexcept {
  best().steps->adagrad(arguments, groups);
}

}  // namespace muster::kernels
