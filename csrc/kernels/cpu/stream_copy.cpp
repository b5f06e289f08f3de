#include "kernels/cpu/stream_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "kernels/cpu/dispatch.h"

namespace muster::kernels {

namespace {

#if defined(__SSE2__)

constexpr size_t kLine = 64;
// Intel's processors fetch ahead within a page and for few at once: several pages side by side keep them busy. On AMD's
// that takes three times as long as one page after the other.
constexpr size_t kPage = 4096;
constexpr size_t kPages = 4;
constexpr size_t kAhead = 512;

void stream_line(char* to, const char* from) noexcept {
  for (size_t k = 0; k < kLine; k += sizeof(__m128i)) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + k), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + k)));
  }
}

// As StreamLines.
void stream_pages(char* to, const char* from, size_t bytes) noexcept {
  size_t i = 0;
  for (; i + kPages * kPage <= bytes; i += kPages * kPage) {
    for (size_t k = i; k < i + kPage; k += kLine) {
      for (size_t at = k; at < k + kPages * kPage; at += kPage) {
        __builtin_prefetch(from + at + kAhead);
        stream_line(to + at, from + at);
      }
    }
  }
  for (; i < bytes; i += kLine) stream_line(to + i, from + i);
}

}  // namespace

void stream_copy(void* destination, const void* source, size_t bytes) noexcept {
  auto* to = static_cast<char*>(destination);
  const auto* from = static_cast<const char*>(source);
  const size_t before_line = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  const size_t head = std::min(bytes, before_line);
  std::memcpy(to, from, head);
  const auto stream = gains_from_hints() ? &stream_pages : best_table().stream_lines;
  const size_t lines = (bytes - head) / kLine * kLine;
  stream(to + head, from + head, lines);
  const size_t end = head + lines;
  std::memcpy(to + end, from + end, bytes - end);
  _mm_sfence();  // such stores are not ordered with those after them
}

#else

}  // namespace

void stream_copy(void* destination, const void* source, size_t bytes) noexcept {
  std::memcpy(destination, source, bytes);
}

#endif

namespace {

void plain_copy(void* destination, const void* source, size_t bytes) noexcept {
  std::memcpy(destination, source, bytes);
}

}  // namespace

bool is_streamed(size_t bytes) noexcept { return bytes > kStreamedBytes && gains_from_hints(); }

Copy copy_for(size_t bytes) noexcept {
  return is_streamed(bytes) || bytes > kUncachedBytes ? &stream_copy : &plain_copy;
}

}  // namespace muster::kernels
