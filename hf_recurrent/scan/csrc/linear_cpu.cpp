// The products of a matrix with a few vectors for CPUs, forward only. A vector takes two operations a weight, so that memory
// bounds it: each weight is read once, in the order in which it lies there, asked for ahead, by as many threads as there are.
#include <stdint.h>
#include <string.h>

#include <type_traits>
#include <vector>

#include "lines.h"
#include "recurrence.h"
#include "rows.h"

namespace {

using namespace hfr;

struct Problem {
  int64_t rows, inputs, outputs, threads;
  const char* x;       // (rows, inputs), stride_x elements from row to row
  int64_t stride_x;
  const char* weight;  // (outputs, inputs) contiguous
  const char* bias;    // (outputs), or null
  char* out;           // (rows, outputs) contiguous
};

constexpr int64_t kAhead = 4096;  // bytes

template <class T, class State>
State product(const T* w, const State* x, int64_t n) {
  State sum = State(0);
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += load(w[i]) * x[i];
  return sum;
}

inline float as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

// Two weights at a time: compilers widen pairs by a shift and a mask, but single ones by slower shuffles. x: its numbers at
// even places, then those at odd ones; n is even.
inline float product_of_pairs(const char* w, const float* x, int64_t n) {
  const int64_t half = n / 2;
  const float *even = x, *odd = x + half;
  float sum = 0, other = 0;
#pragma omp simd reduction(+ : sum, other)
  for (int64_t i = 0; i < half; ++i) {
    uint32_t pair;
    memcpy(&pair, w + 4 * i, sizeof(pair));
    sum += as_float(pair << 16) * even[i];
    other += as_float(pair & 0xffff0000u) * odd[i];
  }
  return sum + other;
}

template <class T>
void run(const Problem& p) {
  using State = typename StateOf<T>::type;
  const int64_t n = p.inputs;
  const bool pairs = std::is_same<T, BFloat16>::value && n % 2 == 0 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;
  std::vector<State> wide(p.rows * n);
  for (int64_t r = 0; r < p.rows; ++r) {
    const T* x = reinterpret_cast<const T*>(p.x) + r * p.stride_x;
    for (int64_t i = 0; i < n; ++i) wide[r * n + (pairs ? i / 2 + (i % 2) * (n / 2) : i)] = load(x[i]);
  }
  const T* bias = reinterpret_cast<const T*>(p.bias);
#pragma omp parallel for schedule(static) num_threads(p.threads) if (p.threads > 1)
  for (int64_t o = 0; o < p.outputs; ++o) {
    const T* w = reinterpret_cast<const T*>(p.weight) + o * n;
    const char* bytes = reinterpret_cast<const char*>(w);
    request<false>(bytes + kAhead, n * sizeof(T));
    for (int64_t r = 0; r < p.rows; ++r) {  // after the first one, the weights are in the cache
      const State* x = wide.data() + r * n;
      State sum;
      if constexpr (std::is_same<T, BFloat16>::value) {
        sum = pairs ? product_of_pairs(bytes, x, n) : product(w, x, n);
      } else {
        sum = product(w, x, n);
      }
      store(bias ? sum + load(bias[o]) : sum, reinterpret_cast<T*>(p.out)[r * p.outputs + o]);
    }
  }
}

}  // namespace

// HFR_STORAGE as in scan_cpu.cpp.
extern "C" int hfr_linear(const Problem* p) {
  run<HFR_STORAGE>(*p);
  return 0;
}

extern "C" int64_t hfr_problem_size() { return sizeof(Problem); }
