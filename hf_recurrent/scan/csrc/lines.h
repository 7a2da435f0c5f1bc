// Memory that the CPU kernels ask for before they need it, and that they write past the caches.
#pragma once
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace hfr {

constexpr int64_t kLine = 64;         // bytes of a cache line
constexpr int64_t kStream = 1 << 22;  // bytes of an output from which on it is written past the caches

// Asks for the lines of n elements, to be read or (write) overwritten soon.
template <bool write, class T>
void request(const T* from, int64_t n) {
  const char* line = reinterpret_cast<const char*>(from);
  for (int64_t i = 0; i < n * (int64_t)sizeof(T); i += kLine) __builtin_prefetch(line + i, write);
  __asm__ volatile("");  // an effect: GCC removes the calls of a function that does nothing but ask
}

#ifdef __SSE2__
constexpr bool kCanStream = true;
#else
constexpr bool kCanStream = false;
#endif

// Whole lines to memory without reading them first, past the caches: for tensors that no cache would hold anyway.
inline void stream(const void* from, void* to, int64_t bytes) {
#if defined(__AVX512F__)
  for (int64_t i = 0; i < bytes / 64; ++i) {
    _mm512_stream_si512(static_cast<__m512i*>(to) + i, _mm512_load_si512(static_cast<const __m512i*>(from) + i));
  }
#elif defined(__AVX__)
  for (int64_t i = 0; i < bytes / 32; ++i) {
    _mm256_stream_si256(static_cast<__m256i*>(to) + i, _mm256_load_si256(static_cast<const __m256i*>(from) + i));
  }
#elif defined(__SSE2__)
  for (int64_t i = 0; i < bytes / 16; ++i) {
    _mm_stream_si128(static_cast<__m128i*>(to) + i, _mm_load_si128(static_cast<const __m128i*>(from) + i));
  }
#else
  memcpy(to, from, bytes);
#endif
}

// Whether an output of so many bytes, in rows of `row_bytes`, is: large, and of whole lines.
inline bool is_streamed(const void* output, int64_t row_bytes, int64_t bytes) {
  return kCanStream && bytes >= kStream && row_bytes % kLine == 0 && reinterpret_cast<uintptr_t>(output) % kLine == 0;
}

// Before another thread reads what was streamed.
inline void finish_streams() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace hfr
