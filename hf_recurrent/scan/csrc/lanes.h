// Vectors as wide as the registers of the processor that is compiled for, for the CPU kernels that keep states in them.
#pragma once
#include <stdint.h>
#include <string.h>

#include <type_traits>
#include <utility>

namespace hfr {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif

template <class Real>
struct Vector {
  static constexpr int kLanes = kBytes / sizeof(Real);
  typedef Real type __attribute__((vector_size(kBytes)));
  typedef std::conditional_t<sizeof(Real) == 4, int32_t, int64_t> Index;
  typedef Index Indices __attribute__((vector_size(kBytes)));

  static type load(const Real* from) {
    type x;
    memcpy(&x, from, sizeof x);
    return x;
  }
  static void store(type x, Real* to) { memcpy(to, &x, sizeof x); }
  static type all(Real x) { return x - type{}; }  // not 0 + x, which is another number for -0

  // The sum over the lanes of each of as many vectors as there are lanes, in turn.
  template <int count = kLanes>
  static type sums(const type* x) {
    if constexpr (count == 1) {
      return *x;
    } else {
      return pairs(sums<count / 2>(x), sums<count / 2>(x + count / 2), std::make_integer_sequence<int, kLanes>());
    }
  }

 private:
  template <int... lane>
  static type pairs(type x, type y, std::integer_sequence<int, lane...>) {
#ifdef __clang__
    return __builtin_shufflevector(x, y, 2 * lane...) + __builtin_shufflevector(x, y, 2 * lane + 1 ...);
#else
    return __builtin_shuffle(x, y, Indices{2 * lane...}) + __builtin_shuffle(x, y, Indices{2 * lane + 1 ...});
#endif
  }
};

}  // namespace hfr
