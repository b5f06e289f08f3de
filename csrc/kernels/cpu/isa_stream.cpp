// Compiled once per instruction set, as isa_kernels.cpp, which says what such a file may hold.
#include "kernels/cpu/isa_table.h"

#if defined(__SSE2__)
#include <immintrin.h>  // functions that are always inlined
#endif

namespace muster::kernels::MUSTER_ISA {
namespace {

void stream_lines(char* to, const char* from, size_t bytes) noexcept {
#if defined(__AVX__)
  for (size_t k = 0; k < bytes; k += sizeof(__m256i)) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + k),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + k)));
  }
#elif defined(__SSE2__)
  for (size_t k = 0; k < bytes; k += sizeof(__m128i)) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + k), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + k)));
  }
#else
  __builtin_memcpy(to, from, bytes);
#endif
}

}  // namespace

extern const StreamLines kStreamLines = &stream_lines;

}  // namespace muster::kernels::MUSTER_ISA
