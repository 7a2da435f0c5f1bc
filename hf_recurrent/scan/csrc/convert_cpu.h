// Rows of 16-bit numbers to float and back, on CPUs: by the processor's instructions where it has them (AVX-512, F16C), since
// compilers find none of them in the integer forms of recurrence.h, of which a vector takes nine or more to round. Not inlined:
// every loop of every cell calls them, and would be compiled for a third longer.
#pragma once
#include <stdint.h>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#include "independent.h"
#include "recurrence.h"

#define HFR_SHARED __attribute__((noinline)) inline

namespace {

template <class T>
void widen_each(const T* __restrict__ from, float* __restrict__ to, int64_t n) {
  HFR_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) to[i] = hfr::load(from[i]);
}

template <class T>
void narrow_each(const float* __restrict__ from, T* __restrict__ to, int64_t n) {
  HFR_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) hfr::store(from[i], to[i]);
}

// Rounds to nearest, ties to even; NaN stays NaN. AVX-512 makes zero of what is below the least normal number, 1.2e-38.
HFR_SHARED void narrow(const float* from, hfr::BFloat16* to, int64_t n) {
#if defined(__AVX512BF16__) && defined(__AVX512VL__) && defined(__AVX512BW__)
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m512bh rounded = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + i + 16), _mm512_loadu_ps(from + i));
    _mm512_storeu_si512(to + i, reinterpret_cast<__m512i>(rounded));
  }
  for (; i < n; i += 16) {
    const __mmask16 some = n - i < 16 ? (1u << (n - i)) - 1 : 0xffffu;
    const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(some, from + i));
    _mm256_mask_storeu_epi16(to + i, some, reinterpret_cast<__m256i>(rounded));
  }
#else
  narrow_each(from, to, n);
#endif
}

HFR_SHARED void widen(const hfr::Float16* from, float* to, int64_t n) {
  int64_t i = 0;
#ifdef __AVX512F__
  for (; i + 16 <= n; i += 16) {
    _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
  }
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
#endif
  widen_each(from + i, to + i, n - i);
}

HFR_SHARED void narrow(const float* from, hfr::Float16* to, int64_t n) {
  int64_t i = 0;
#ifdef __AVX512F__
  for (; i + 16 <= n; i += 16) {
    const __m256i rounded = _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), rounded);
  }
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    const __m128i rounded = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), rounded);
  }
#endif
  narrow_each(from + i, to + i, n - i);
}

}  // namespace
