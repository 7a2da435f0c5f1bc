// The loops of elementwise.h for CPUs: each thread takes a run of positions, whose channels are contiguous.
#include <vector>

#include "elementwise.h"
#include "independent.h"
#include "rows.h"

namespace {

using namespace hfr;

constexpr int kMostInputs = 3;

struct Problem {
  int64_t batch, length, channels, threads;
  Rows inputs[kMostInputs];
  const char* d;                   // (channels) in the state type, or null for ones
  const char* m;                   // (batch, channels) in the state type, or null for ones
  char* out;                       // forward: (batch, length, channels) contiguous
  Rows grad_out;                   // backward only, as are the following
  char* grad_inputs[kMostInputs];  // contiguous
  char* grad_d;  // (threads, channels) in the state type: the sums of each thread's positions, zero before; where it skips
};

template <class F, class T, class State>
void forward_row(const T* x, const T* y, const T* z, const State* d, const State* m, T* __restrict__ out, int64_t n) {
  HFR_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) store(F::forward(load(x[i]), load(y[i]), load(z[i]), d[i], m[i]), out[i]);
}

template <class F, class T, class State>
void backward_row(const T* x, const T* y, const T* z, const State* d, const State* m, const T* grad, T* __restrict__ grad_x,
                  T* __restrict__ grad_y, T* __restrict__ grad_z, State* __restrict__ grad_d, int64_t n) {
  HFR_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    State dx, dy, dz;
    const State dd = F::backward(load(x[i]), load(y[i]), load(z[i]), d[i], m[i], load(grad[i]), dx, dy, dz);
    store(dx, grad_x[i]);
    store(dy, grad_y[i]);
    if constexpr (F::kInputs == 3) store(dz, grad_z[i]);
    if constexpr (F::kSkips) grad_d[i] += dd;
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
      const T *x = row<T>(p.inputs[0], b, t), *y = row<T>(p.inputs[1], b, t), *z = y;
      if constexpr (F::kInputs == 3) z = row<T>(p.inputs[2], b, t);
      const State* m = p.m ? reinterpret_cast<const State*>(p.m) + b * n : ones.data();
      if (!backwards) {
        forward_row<F>(x, y, z, d, m, reinterpret_cast<T*>(p.out) + r * n, n);
        continue;
      }
      T* grads[kMostInputs] = {};
      for (int i = 0; i < F::kInputs; ++i) grads[i] = reinterpret_cast<T*>(p.grad_inputs[i]) + r * n;
      State* grad_d = F::kSkips ? reinterpret_cast<State*>(p.grad_d) + thread * n : nullptr;
      backward_row<F>(x, y, z, d, m, row<T>(p.grad_out, b, t), grads[0], grads[1], grads[2], grad_d, n);
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
    case 2: return run<SiluGate, HFR_STORAGE>(*p, backwards);
    case 3: return run<SkipSiluGate, HFR_STORAGE>(*p, backwards);
  }
  return 1;
}

extern "C" int64_t hfr_problem_size() { return sizeof(Problem); }
