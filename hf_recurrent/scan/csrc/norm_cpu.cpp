// RMSNorm of each position for CPUs, forward only: where gradients are wanted, PyTorch computes it.
#include "independent.h"
#include "recurrence.h"
#include "rows.h"

namespace {

using namespace hfr;

struct Problem {
  int64_t batch, length, channels, threads;
  int64_t wide;        // x is in the state type, not in the weights'
  Rows x;
  const char* weight;  // (channels)
  double eps;
  char* out;           // (batch, length, channels) contiguous, in the weights' type
};

// out = x / sqrt(mean(x^2) + eps) weight
template <class X, class T, class State>
void normalise(const X* x, const T* weight, State eps, T* __restrict__ out, int64_t n) {
  State sum = State(0);
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += load(x[i]) * load(x[i]);
  const State mean = sum / State(n) + eps;
  const State scale = State(1) / (sizeof(State) == 8 ? __builtin_sqrt(mean) : __builtin_sqrtf(mean));
  HFR_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) store(load(x[i]) * scale * load(weight[i]), out[i]);
}

template <class X, class T>
void run(const Problem& p) {
  using State = typename StateOf<T>::type;
  const int64_t n = p.channels, rows = p.batch * p.length;
#pragma omp parallel for schedule(static) num_threads(p.threads) if (p.threads > 1)
  for (int64_t r = 0; r < rows; ++r) {
    const X* x = row<X>(p.x, r / p.length, r % p.length);
    normalise(x, reinterpret_cast<const T*>(p.weight), State(p.eps), reinterpret_cast<T*>(p.out) + r * n, n);
  }
}

}  // namespace

// HFR_STORAGE, the type of the weights, as in scan_cpu.cpp.
extern "C" int hfr_rms_norm(const Problem* p) {
  if (p->wide) {
    run<typename StateOf<HFR_STORAGE>::type, HFR_STORAGE>(*p);
  } else {
    run<HFR_STORAGE, HFR_STORAGE>(*p);
  }
  return 0;
}

extern "C" int64_t hfr_problem_size() { return sizeof(Problem); }
