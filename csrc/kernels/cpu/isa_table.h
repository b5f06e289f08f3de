// What one instruction set offers. isa_kernels.cpp is compiled once per instruction set and exports one table each;
// dispatch.cpp picks the table of this machine. Only declarations: an inline function here could be emitted with
// instructions that the machine lacks.
#pragma once

#include "kernels/kernels.h"

namespace muster::kernels {

struct IsaTable {
  void (*tree_reduce)(DType, Reduction, const void* const*, int, void* const*, int, size_t) noexcept;
  void (*pack)(const PackItem*, size_t, bool) noexcept;
  void (*divide_with_stats)(DType, void*, size_t, double, double*) noexcept;
  void (*scale)(DType, void*, size_t, double) noexcept;
};

namespace baseline {
extern const IsaTable kTable;
}
namespace avx2 {
extern const IsaTable kTable;
}
namespace avx512 {
extern const IsaTable kTable;
}

}  // namespace muster::kernels
