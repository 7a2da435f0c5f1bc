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
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

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
      return pair_sums(sums<count / 2>(x), sums<count / 2>(x + count / 2));
    }
  }

  // With the numbers of all vectors counted through, (lanes, count) to (count, lanes), count a power of two: each round halves
  // the places of those at even ones, and puts those at odd ones after them. And back.
  template <int count>
  static void turn(type (&x)[count]) {
    for (int round = 1; round < count; round *= 2) {
      type y[count];
      for (int i = 0; i < count / 2; ++i) {
        y[i] = evens(x[2 * i], x[2 * i + 1], kAll), y[i + count / 2] = odds(x[2 * i], x[2 * i + 1], kAll);
      }
      for (int i = 0; i < count; ++i) x[i] = y[i];
    }
  }

  template <int count>
  static void turn_back(type (&x)[count]) {
    for (int round = 1; round < count; round *= 2) {
      type y[count];
      for (int i = 0; i < count / 2; ++i) {
        y[2 * i] = mixed<0>(x[i], x[i + count / 2], kAll), y[2 * i + 1] = mixed<kLanes / 2>(x[i], x[i + count / 2], kAll);
      }
      for (int i = 0; i < count; ++i) x[i] = y[i];
    }
  }

 private:
  static constexpr auto kAll = std::make_integer_sequence<int, kLanes>();

  template <int... place>
  static type pick(type x, type y, std::integer_sequence<int, place...>) {
#ifdef __clang__
    return __builtin_shufflevector(x, y, place...);
#else
    return __builtin_shuffle(x, y, Indices{place...});
#endif
  }

  template <int... lane>
  static type evens(type x, type y, std::integer_sequence<int, lane...>) {
    return pick(x, y, std::integer_sequence<int, 2 * lane...>());
  }

  template <int... lane>
  static type odds(type x, type y, std::integer_sequence<int, lane...>) {
    return pick(x, y, std::integer_sequence<int, 2 * lane + 1 ...>());
  }

  // One of x, one of y, in turn, from lane `first` on.
  template <int first, int... lane>
  static type mixed(type x, type y, std::integer_sequence<int, lane...>) {
    return pick(x, y, std::integer_sequence<int, first + lane / 2 + lane % 2 * kLanes...>());
  }

  static type pair_sums(type x, type y) { return evens(x, y, kAll) + odds(x, y, kAll); }
};

}  // namespace hfr
