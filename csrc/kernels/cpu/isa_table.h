// What one instruction set offers. The files isa_*.cpp are compiled once per instruction set and export what is
// declared here; dispatch.cpp picks this machine's. Only declarations: an inline function here could be emitted with
// instructions that the machine lacks.
#pragma once

#include "kernels/kernels.h"

namespace muster::kernels {

struct IsaTable {
  void (*tree_reduce)(DType, Reduction, const void* const*, int, void* const*, int, size_t) noexcept;
  void (*pack)(const PackItem*, size_t, bool, double) noexcept;
  void (*grad_stats)(const StatsSegment*, size_t) noexcept;
  void (*divide_with_stats)(DType, void*, size_t, double, double*) noexcept;
  void (*sum_with_stats)(DType, const void* const*, int, void*, size_t, double*) noexcept;
  void (*narrow)(DType, void*, const float*, size_t) noexcept;
  void (*sum_widened)(DType, const void* const*, int, float*, size_t) noexcept;
  void (*sum_scaled)(DType, const void* const*, const double*, int, void*, size_t) noexcept;
};

struct StepTable {
  void (*adam)(const StepArguments&, const AdamGroup*) noexcept;
  void (*sgd)(const StepArguments&, const SgdGroup*) noexcept;
  void (*adagrad)(const StepArguments&, const AdagradGroup*) noexcept;
  void (*rowwise_adagrad)(const StepArguments&, const RowwiseAdagradGroup*) noexcept;
};

/// As stream_copy(), in order, of whole cache lines; the destination is where one begins.
using StreamLines = void (*)(char* to, const char* from, size_t bytes) noexcept;

/// Whether passes over large memory are faster with hints: prefetches of what comes, and stores past the caches. On
/// Intel's processors by about a tenth; on AMD's, whose own prefetching needs no help, they are as much slower, but for
/// long copies alone (copy_for).
bool gains_from_hints() noexcept;

namespace baseline {
extern const IsaTable kTable;
extern const StepTable kSteps;
extern const StreamLines kStreamLines;
}  // namespace baseline
namespace avx2 {
extern const IsaTable kTable;
extern const StepTable kSteps;
extern const StreamLines kStreamLines;
}  // namespace avx2
namespace avx512 {
extern const IsaTable kTable;
extern const StepTable kSteps;
extern const StreamLines kStreamLines;
}  // namespace avx512

}  // namespace muster::kernels
