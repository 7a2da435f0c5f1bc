// The loops of elementwise.h for CPUs: each thread takes a run of positions, whose channels are contiguous.
#include <vector>

#include "elementwise.h"
#include "independent.h"
#include "rows.h"

namespace {

using namespace hfr;

struct Problem {
  int64_t batch, length, channels, threads;
  Rows inputs[2];
  const char* d;          // (channels) in the state type, or null for ones
  const char* m;          // (batch, channels) in the state type, or null for ones
  char* out;              // forward: (batch, length, channels) contiguous
  Rows grad_out;          // backward only, as are the following
  char* grad_inputs[2];   // contiguous
  char* grad_d;           // (threads, channels) in the state type: the sums of each thread's positions, zero before
};

template <class F, class T, class State>
void forward_row(const T* x, const T* y, const State* d, const State* m, T* __restrict__ out, int64_t n) {
  HFR_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) store(F::forward(load(x[i]), load(y[i]), d[i], m[i]), out[i]);
}

template <class F, class T, class State>
void backward_row(const T* x, const T* y, const State* d, const State* m, const T* grad, T* __restrict__ grad_x,
                  T* __restrict__ grad_y, State* __restrict__ grad_d, int64_t n) {
  HFR_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    State dx, dy;
    grad_d[i] += F::backward(load(x[i]), load(y[i]), d[i], m[i], load(grad[i]), dx, dy);
    store(dx, grad_x[i]);
    store(dy, grad_y[i]);
  }
}

template <template <class> class Function, class T>
int run(const Problem& p, int backwards) {
  using State = typename StateOf<T>::type;
  using F = Function<State>;
  const int64_t n = p.channels, rows = p.batch * p.length;
  std::vector<State> ones(p.d && p.m ? 0 : n, State(1));
  const State* d = p.d ? reinterpret_cast<const State*>(p.d) : ones.data();
#pragma omp parallel for schedule(static) num_threads(p.threads) if (p.threads > 1)
  for (int64_t thread = 0; thread < p.threads; ++thread) {
    for (int64_t r = rows * thread / p.threads; r < rows * (thread + 1) / p.threads; ++r) {
      int64_t b = r / p.length, t = r % p.length;
      const T *x = row<T>(p.inputs[0], b, t), *y = row<T>(p.inputs[1], b, t);
      const State* m = p.m ? reinterpret_cast<const State*>(p.m) + b * n : ones.data();
      if (!backwards) {
        forward_row<F>(x, y, d, m, reinterpret_cast<T*>(p.out) + r * n, n);
      } else {
        backward_row<F>(x, y, d, m, row<T>(p.grad_out, b, t), reinterpret_cast<T*>(p.grad_inputs[0]) + r * n,
                        reinterpret_cast<T*>(p.grad_inputs[1]) + r * n, reinterpret_cast<State*>(p.grad_d) + thread * n, n);
      }
    }
  }
  return 0;
}

}  // namespace

// HFR_STORAGE as in scan_cpu.cpp. Returns 0, or 1 for a function that has no kernel.
extern "C" int hfr_elementwise(int function, int backwards, const Problem* p) {
  switch (function) {
    case 0: return run<SkipGelu, HFR_STORAGE>(*p, backwards);
    case 1: return run<Gate, HFR_STORAGE>(*p, backwards);
  }
  return 1;
}

extern "C" int64_t hfr_problem_size() { return sizeof(Problem); }
