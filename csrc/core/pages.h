// Large memory, by the size of its pages.
#pragma once

#include <cstddef>
#include <memory>

namespace muster {

/// Huge: of 2 MiB, or ordinary ones where the system has none free. Reads at random and passes over much memory then
/// wait less for addresses to be looked up.
enum class Pages { ordinary, huge };

struct FreePages {
  void operator()(std::byte* memory) const noexcept;
};
using PagesMemory = std::unique_ptr<std::byte[], FreePages>;

/// `bytes`, none of them written yet, from where a huge page begins. Throws std::bad_alloc.
PagesMemory allocate_pages(size_t bytes, Pages pages);

/// Has what of memory was never written, in whole huge pages, come on such ones. No-op for little memory, and where the
/// system does not do it.
void prefer_huge_pages(void* memory, size_t bytes) noexcept;

}  // namespace muster
