// The choice of instruction set. Outside of this folder only tests that compare them know it; everything else calls
// kernels.h.
#pragma once

#include <cstddef>

#include "kernels/cpu/isa_table.h"

namespace muster::kernels {

struct NamedTable {
  const char* name;
  const IsaTable* table;
  const StepTable* steps;
  StreamLines stream_lines;
};

/// The tables that this machine can run, best last. Sets `count`. Thread-safe.
const NamedTable* usable_tables(size_t& count) noexcept;
const NamedTable& best_table() noexcept;

}  // namespace muster::kernels
