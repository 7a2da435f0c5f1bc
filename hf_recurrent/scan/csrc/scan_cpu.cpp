// The loops for CPUs: threads over batch x blocks of channels, time in sequence, vectors across channels.
// Tensors are channel-last (batch, length, channels), so a position's channels are contiguous and every cache line is used
// once; the state of a block stays in the L1 cache. Compiled at first use, called through the two C functions at the end.
#include <stdint.h>
#include <string.h>

#include <utility>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "cells.h"

namespace {

using namespace hfr;

constexpr int kMaxInputs = 3;
constexpr int64_t kBlock = 2048;  // channels a thread takes at once: their float32 state is a quarter of a 32 KiB L1 cache

// Strides count elements, in the order batch, length, channels.
struct Tensor {
  char* data;
  int64_t stride[3];
};

struct Problem {
  int64_t batch, length, channels;
  int64_t reverse, threads;
  int64_t sum_first;         // backward: the gradient of inputs[0] is summed over time, into (batch, channels) of the state type
  const uint8_t* flags;      // (batch, length) contiguous, or null
  Tensor inputs[kMaxInputs];
  Tensor h;                  // (batch, length, channels), contiguous: written forward, read backward
  Tensor grad_h;             // backward only
  char* initial;             // backward: (batch, channels) contiguous in the state type, or null for zero
  char* state;               // forward: in h_{-1}, out the final state; backward: in its gradient, out that of h_{-1}
  char* grad_inputs[kMaxInputs];  // backward only: contiguous
};

template <class T>
const T* at(const Tensor& x, int64_t b, int64_t t, int64_t d) {
  return reinterpret_cast<const T*>(x.data) + b * x.stride[0] + t * x.stride[1] + d * x.stride[2];
}

// One position's channels, contiguous: the tensor's own memory, or a copy where channels are strided or broadcast.
template <class T>
const T* row(const Tensor& x, int64_t b, int64_t t, int64_t d, int64_t n, T* copy) {
  const T* from = at<T>(x, b, t, d);
  if (x.stride[2] == 1) return from;
  for (int64_t i = 0; i < n; ++i) copy[i] = from[i * x.stride[2]];
  return copy;
}

// The inputs of a position, one pointer each; Indices is 0 ... inputs - 1.
template <class T>
struct Rows { const T* x[kMaxInputs]; };

template <class Cell, class T, size_t... I>
void forward_row(const Rows<T> rows, typename Cell::State* __restrict__ state, T* __restrict__ h, int64_t n,
                 std::index_sequence<I...>) {
  using State = typename Cell::State;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    State x[] = {load(rows.x[I][i])...};
    State s = Cell::forward(x, state[i]);
    state[i] = s;
    store(s, h[i]);
  }
}

// P is the storage type of h_prev: T for a row of h, the state type for the initial state.
template <class Cell, bool sum_first, class T, class P, size_t... I>
void backward_row(const Rows<T> rows, const P* __restrict__ h_prev, const T* __restrict__ grad_h,
                  typename Cell::State* __restrict__ carry, typename Cell::State* __restrict__ sum, T* const (&grads)[kMaxInputs],
                  int64_t n, std::index_sequence<I...>) {
  using State = typename Cell::State;
  T* grad[] = {grads[I]...};
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    State x[] = {load(rows.x[I][i])...};
    State dx[sizeof...(I)];
    carry[i] = Cell::backward(x, load(h_prev[i]), carry[i] + load(grad_h[i]), dx);
    if constexpr (sum_first) sum[i] = sum[i] + dx[0];
    ((sum_first && I == 0 ? void() : store(dx[I], grad[I][i])), ...);
  }
}

template <class Cell, class T>
struct Block {
  using State = typename Cell::State;
  static constexpr auto kIndices = std::make_index_sequence<Cell::inputs>();

  const Problem& p;
  const int64_t b, d, n;  // the row of the batch, the first channel and their number
  T copies[kMaxInputs + 1][kBlock];

  Block(const Problem& problem, int64_t batch_row, int64_t first, int64_t size)
      : p(problem), b(batch_row), d(first), n(size) {}

  uint8_t flags(int64_t t) const { return p.flags ? p.flags[b * p.length + t] : 0; }

  Rows<T> inputs(int64_t t) {
    Rows<T> rows;
    for (int i = 0; i < Cell::inputs; ++i) rows.x[i] = row(p.inputs[i], b, t, d, n, copies[i]);
    return rows;
  }

  void forward() {
    State* state = reinterpret_cast<State*>(p.state) + b * p.channels + d;
    for (int64_t step = 0; step < p.length; ++step) {
      int64_t t = p.reverse ? p.length - 1 - step : step;
      if (flags(t) & kDrop) memset(static_cast<void*>(state), 0, n * sizeof(State));
      T* h = const_cast<T*>(at<T>(p.h, b, t, d));
      if (flags(t) & kMasked) {
        for (int64_t i = 0; i < n; ++i) store(state[i], h[i]);
      } else {
        forward_row<Cell, T>(inputs(t), state, h, n, kIndices);
      }
    }
  }

  template <bool sum_first>
  void backward() {
    State zero[kBlock];
    memset(static_cast<void*>(zero), 0, n * sizeof(State));
    State* carry = reinterpret_cast<State*>(p.state) + b * p.channels + d;
    const State* initial = p.initial ? reinterpret_cast<const State*>(p.initial) + b * p.channels + d : zero;
    State* sum = reinterpret_cast<State*>(p.grad_inputs[0]) + b * p.channels + d;
    for (int64_t step = p.length - 1; step >= 0; --step) {
      int64_t t = p.reverse ? p.length - 1 - step : step;
      const T* grad_h = row(p.grad_h, b, t, d, n, copies[kMaxInputs]);
      T* grads[kMaxInputs];
      for (int i = 0; i < Cell::inputs; ++i) {
        grads[i] = sum_first && i == 0 ? nullptr : reinterpret_cast<T*>(p.grad_inputs[i]) + (b * p.length + t) * p.channels + d;
      }
      auto run = [&](auto* h_prev) {
        backward_row<Cell, sum_first>(inputs(t), h_prev, grad_h, carry, sum, grads, n, kIndices);
      };
      if (flags(t) & kMasked) {
        for (int64_t i = 0; i < n; ++i) carry[i] = carry[i] + load(grad_h[i]);
        for (int i = sum_first; i < Cell::inputs; ++i) memset(static_cast<void*>(grads[i]), 0, n * sizeof(T));
      } else if (flags(t) & kDrop) {
        run(zero);
      } else if (step == 0) {
        run(initial);
      } else {
        run(at<T>(p.h, b, p.reverse ? t + 1 : t - 1, d));
      }
      if (flags(t) & kDrop) memset(static_cast<void*>(carry), 0, n * sizeof(State));
    }
  }
};

// Blocks of whole rows of channels where the batch alone keeps the threads busy; otherwise the channels are split, but not
// into pieces under a page: two cores that walk the same pages side by side fetch each other's lines and end up slower than
// one core alone (measured at 1 x 65536 x 256 float32: 12 ms on two, 7 ms on one).
constexpr int64_t kPage = 4096;

template <class T, class Run>
void parallel(const Problem& p, Run run) {
  int64_t pieces = (p.channels + kBlock - 1) / kBlock;
  while (p.batch * pieces % p.threads && p.batch * pieces < 4 * p.threads &&
         p.channels * (int64_t)sizeof(T) / (pieces + 1) >= kPage) {
    ++pieces;
  }
  int64_t size = (p.channels + pieces - 1) / pieces;
  size = (size + 15) / 16 * 16;
  if (size > kBlock) size = kBlock;
  pieces = (p.channels + size - 1) / size;
#pragma omp parallel for schedule(static) num_threads(p.threads) if (p.threads > 1)
  for (int64_t item = 0; item < p.batch * pieces; ++item) {
    int64_t d = item % pieces * size;
    run(item / pieces, d, p.channels - d < size ? p.channels - d : size);
  }
}

// A large new tensor costs more in page faults than in arithmetic: ask for huge pages before the first touch.
void prefer_huge_pages(const void* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t huge = 1 << 21;
  uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + huge - 1) & ~(huge - 1);
  uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(huge - 1);
  if (end > begin + 4 * huge) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

template <class Cell, class T>
int run(const Problem& p, int backwards) {
  int64_t bytes = p.batch * p.length * p.channels * sizeof(T);
  if (!backwards) prefer_huge_pages(p.h.data, bytes);
  for (int i = p.sum_first; backwards && i < Cell::inputs; ++i) prefer_huge_pages(p.grad_inputs[i], bytes);
  parallel<T>(p, [&](int64_t b, int64_t d, int64_t n) {
    Block<Cell, T> block(p, b, d, n);
    if (!backwards) {
      block.forward();
    } else if (!p.sum_first) {
      block.template backward<false>();
    } else if constexpr (Cell::first_may_be_constant) {
      block.template backward<true>();
    }
  });
  return 0;
}

enum CellId { kLinear, kMinGRUVanilla, kMinGRUPositive, kMinLSTMVanilla, kMinLSTMPositive };
enum TypeId { kFloat, kDouble, kBFloat16, kFloat16, kComplexFloat, kComplexDouble };

template <class T>
int run_real(int cell, const Problem& p, int backwards) {
  using State = typename StateOf<T>::type;
  switch (cell) {
    case kLinear: return run<LinearCell<State>, T>(p, backwards);
    case kMinGRUVanilla: return run<MinGRUCell<State, false>, T>(p, backwards);
    case kMinGRUPositive: return run<MinGRUCell<State, true>, T>(p, backwards);
    case kMinLSTMVanilla: return run<MinLSTMCell<State, false>, T>(p, backwards);
    case kMinLSTMPositive: return run<MinLSTMCell<State, true>, T>(p, backwards);
  }
  return 1;
}

}  // namespace

// Returns 0, or 1 for a pair of cell and type that has no kernel.
extern "C" int hfr_scan(int cell, int type, int backwards, const Problem* problem) {
  const Problem& p = *problem;
  switch (type) {
    case kFloat: return run_real<float>(cell, p, backwards);
    case kDouble: return run_real<double>(cell, p, backwards);
    case kBFloat16: return run_real<BFloat16>(cell, p, backwards);
    case kFloat16: return run_real<Float16>(cell, p, backwards);
    case kComplexFloat: return cell == kLinear ? run<LinearCell<Complex<float>>, Complex<float>>(p, backwards) : 1;
    case kComplexDouble: return cell == kLinear ? run<LinearCell<Complex<double>>, Complex<double>>(p, backwards) : 1;
  }
  return 1;
}

// The size of Problem as this compiler laid it out: the caller checks its own against it.
extern "C" int64_t hfr_problem_size() { return sizeof(Problem); }
