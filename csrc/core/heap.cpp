#include "core/heap.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace muster {

namespace {

// Larger blocks than that still go back: what is not needed again in every step is often one of them, as a dataset.
constexpr int kLargestKept = 1 << 30;

std::atomic<bool> is_tuned{false};

bool is_left_alone() {
  const char* const wish = std::getenv("MUSTER_KEEP_FREED_MEMORY");
  if (wish != nullptr && std::string_view(wish) == "0") return true;
  for (const char* name : {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_"}) {
    if (std::getenv(name) != nullptr) return true;
  }
  const char* const tunables = std::getenv("GLIBC_TUNABLES");
  return tunables != nullptr && std::string_view(tunables).find("glibc.malloc.") != std::string_view::npos;
}

bool tune_heap() {
#ifdef __GLIBC__
  constexpr int kNever = -1;
  constexpr int kHeapOfThread = 64 << 20;  // what glibc reserves at once for other threads than the first
  return !is_left_alone() && mallopt(M_MMAP_THRESHOLD, kLargestKept) == 1 && mallopt(M_TRIM_THRESHOLD, kNever) == 1 &&
         mallopt(M_TOP_PAD, kHeapOfThread) == 1;
#else
  return false;
#endif
}

}  // namespace

void keep_freed_memory() {
  static const bool keeps = tune_heap();
  is_tuned = keeps;
}

bool keeps_freed_memory() noexcept { return is_tuned; }

void return_freed_memory() {
#ifdef __GLIBC__
  if (keeps_freed_memory()) malloc_trim(0);
#endif
}

void return_shared_pages(void* data, size_t bytes) noexcept {
#ifdef MADV_REMOVE
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_REMOVE);  // refused for private memory
#endif
}

}  // namespace muster
