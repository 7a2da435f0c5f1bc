// The loops for CPUs: threads over batch x blocks of channels, time in sequence, vectors across channels.
// Tensors are channel-last (batch, length, channels), so a position's channels are contiguous and every cache line is used
// once; the state of a block stays in the L1 cache. Compiled at first use, called through the two C functions at the end.
#include <stdint.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "cells.h"

namespace {

using namespace hfr;

constexpr int kMaxInputs = 2;
constexpr int64_t kBlock = 2048;  // channels a thread takes at once: their float32 state is a quarter of a 32 KiB L1 cache

// What happens at a position besides the cell (one byte per row and position, made by hf_recurrent.scan.ops).
enum Flags : uint8_t { kMasked = 1, kDrop = 2 };  // padding: the state passes through | the state before it is zero

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

template <class Cell, class T>
void forward_row(const T* __restrict__ x0, const T* __restrict__ x1, typename Cell::State* __restrict__ state,
                 T* __restrict__ h, int64_t n) {
  using State = typename Cell::State;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    State x[2] = {load(x0[i]), load(x1[i])};
    State s = Cell::forward(x, state[i]);
    state[i] = s;
    store(s, h[i]);
  }
}

// P is the storage type of h_prev: T for a row of h, the state type for the initial state.
template <class Cell, bool sum_first, class T, class P, class G>
void backward_row(const T* __restrict__ x0, const T* __restrict__ x1, const P* __restrict__ h_prev,
                  const T* __restrict__ grad_h, typename Cell::State* __restrict__ carry, G* __restrict__ grad0,
                  T* __restrict__ grad1, int64_t n) {
  using State = typename Cell::State;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    State x[2] = {load(x0[i]), load(x1[i])};
    State dx[2];
    carry[i] = Cell::backward(x, load(h_prev[i]), carry[i] + load(grad_h[i]), dx);
    if constexpr (sum_first) {
      grad0[i] = grad0[i] + dx[0];
    } else {
      store(dx[0], grad0[i]);
    }
    store(dx[1], grad1[i]);
  }
}

template <class Cell, class T>
void forward_block(const Problem& p, int64_t b, int64_t d, int64_t n) {
  using State = typename Cell::State;
  T copies[kMaxInputs][kBlock];
  State* state = reinterpret_cast<State*>(p.state) + b * p.channels + d;
  for (int64_t step = 0; step < p.length; ++step) {
    int64_t t = p.reverse ? p.length - 1 - step : step;
    uint8_t flags = p.flags ? p.flags[b * p.length + t] : 0;
    if (flags & kDrop) memset(static_cast<void*>(state), 0, n * sizeof(State));
    T* h = const_cast<T*>(at<T>(p.h, b, t, d));
    if (flags & kMasked) {
      for (int64_t i = 0; i < n; ++i) store(state[i], h[i]);
    } else {
      forward_row<Cell, T>(row(p.inputs[0], b, t, d, n, copies[0]), row(p.inputs[1], b, t, d, n, copies[1]), state, h, n);
    }
  }
}

template <class Cell, bool sum_first, class T>
void backward_block(const Problem& p, int64_t b, int64_t d, int64_t n) {
  using State = typename Cell::State;
  T copies[kMaxInputs][kBlock], grad_copy[kBlock];
  State zero[kBlock];
  memset(static_cast<void*>(zero), 0, n * sizeof(State));
  State* carry = reinterpret_cast<State*>(p.state) + b * p.channels + d;
  const State* initial = p.initial ? reinterpret_cast<const State*>(p.initial) + b * p.channels + d : zero;
  State* sum = sum_first ? reinterpret_cast<State*>(p.grad_inputs[0]) + b * p.channels + d : nullptr;
  for (int64_t step = p.length - 1; step >= 0; --step) {
    int64_t t = p.reverse ? p.length - 1 - step : step;
    uint8_t flags = p.flags ? p.flags[b * p.length + t] : 0;
    int64_t offset = (b * p.length + t) * p.channels + d;
    const T* grad_h = row(p.grad_h, b, t, d, n, grad_copy);
    T* grad0 = reinterpret_cast<T*>(p.grad_inputs[0]) + offset;
    T* grad1 = reinterpret_cast<T*>(p.grad_inputs[1]) + offset;
    if (flags & kMasked) {
      for (int64_t i = 0; i < n; ++i) carry[i] = carry[i] + load(grad_h[i]);
      if (!sum_first) memset(static_cast<void*>(grad0), 0, n * sizeof(T));
      memset(static_cast<void*>(grad1), 0, n * sizeof(T));
    } else {
      const T* x0 = row(p.inputs[0], b, t, d, n, copies[0]);
      const T* x1 = row(p.inputs[1], b, t, d, n, copies[1]);
      auto run = [&](auto* h_prev) {
        if constexpr (sum_first) {
          backward_row<Cell, true>(x0, x1, h_prev, grad_h, carry, sum, grad1, n);
        } else {
          backward_row<Cell, false>(x0, x1, h_prev, grad_h, carry, grad0, grad1, n);
        }
      };
      if (flags & kDrop) {
        run(zero);
      } else if (step == 0) {
        run(initial);
      } else {
        run(at<T>(p.h, b, p.reverse ? t + 1 : t - 1, d));
      }
    }
    if (flags & kDrop) memset(static_cast<void*>(carry), 0, n * sizeof(State));
  }
}

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
void forward(const Problem& p) {
  prefer_huge_pages(p.h.data, p.batch * p.length * p.channels * sizeof(T));
  parallel<T>(p, [&](int64_t b, int64_t d, int64_t n) { forward_block<Cell, T>(p, b, d, n); });
}

template <class Cell, class T>
void backward(const Problem& p) {
  for (int i = p.sum_first ? 1 : 0; i < Cell::inputs; ++i) {
    prefer_huge_pages(p.grad_inputs[i], p.batch * p.length * p.channels * sizeof(T));
  }
  parallel<T>(p, [&](int64_t b, int64_t d, int64_t n) {
    if (p.sum_first) {
      backward_block<Cell, true, T>(p, b, d, n);
    } else {
      backward_block<Cell, false, T>(p, b, d, n);
    }
  });
}

enum CellId { kLinear = 0, kMinGRUVanilla = 1, kMinGRUPositive = 2 };
enum TypeId { kFloat = 0, kDouble = 1, kBFloat16 = 2, kFloat16 = 3, kComplexFloat = 4, kComplexDouble = 5 };

template <class Cell, class T>
int run(const Problem& p, int backwards) {
  if (backwards) {
    backward<Cell, T>(p);
  } else {
    forward<Cell, T>(p);
  }
  return 0;
}

template <class T>
int run_real(int cell, const Problem& p, int backwards) {
  using State = typename StateOf<T>::type;
  switch (cell) {
    case kLinear: return run<LinearCell<State>, T>(p, backwards);
    case kMinGRUVanilla: return run<MinGRUCell<State, false>, T>(p, backwards);
    case kMinGRUPositive: return run<MinGRUCell<State, true>, T>(p, backwards);
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
