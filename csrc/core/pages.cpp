#include "core/pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>

namespace muster {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kLeast = 2 * kHugePage;

constexpr size_t up_to_page(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

}  // namespace

void FreePages::operator()(std::byte* memory) const noexcept { std::free(memory); }

PagesMemory allocate_pages(size_t bytes, Pages pages) {
  const size_t whole = up_to_page(std::max<size_t>(bytes, 1));
  PagesMemory memory(static_cast<std::byte*>(std::aligned_alloc(kHugePage, whole)));
  if (!memory) throw std::bad_alloc();
  ::madvise(memory.get(), whole, pages == Pages::huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  return memory;
}

void prefer_huge_pages(void* memory, size_t bytes) noexcept {
  if (bytes < kLeast) return;
  const size_t begin = up_to_page(reinterpret_cast<size_t>(memory));
  const size_t end = (reinterpret_cast<size_t>(memory) + bytes) / kHugePage * kHugePage;
  ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace muster
