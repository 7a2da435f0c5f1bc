// GateLoop's layer between its projections for CPUs, with heads of one channel and polar transitions, for a few positions,
// forward only: a = f(alpha) exp(i g(beta)),  h = a h' + k v,  out = q Re(h) silu(gate).
#include <math.h>
#include <string.h>

#include "recurrence.h"
#include "rows.h"

namespace {

using namespace hfr;

struct Problem {
  int64_t batch, length, channels;
  int64_t exponential, tanh;  // f: exp(-exp(.)), else the logistic function;  g: pi tanh(.), else the identity
  const uint8_t* flags;       // (batch, length) contiguous, or null
  Rows qkv;                   // (batch, length, 3 channels)
  Rows transition;            // (batch, length, 2 channels): alpha, beta
  Rows gate;                  // (batch, length, channels), or null for none
  char* state;                // (batch, channels) complex, in the state type: in h_{-1}, out the final state
  char* out;                  // (batch, length, channels) contiguous
};

inline float e(float x) { return expf(x); }
inline double e(double x) { return exp(x); }
inline float hyperbolic(float x) { return tanhf(x); }
inline double hyperbolic(double x) { return ::tanh(x); }
inline Complex<float> polar(float size, float angle) { return {size * cosf(angle), size * sinf(angle)}; }
inline Complex<double> polar(double size, double angle) { return {size * cos(angle), size * sin(angle)}; }

template <class T>
void run(const Problem& p) {
  using State = typename StateOf<T>::type;
  const int64_t n = p.channels;
  for (int64_t b = 0; b < p.batch; ++b) {
    Complex<State>* h = reinterpret_cast<Complex<State>*>(p.state) + b * n;
    for (int64_t t = 0; t < p.length; ++t) {
      const uint8_t flags = p.flags ? p.flags[b * p.length + t] : 0;
      if (flags & kDrop) memset(static_cast<void*>(h), 0, n * sizeof(*h));
      const T *q = row<T>(p.qkv, b, t), *k = q + n, *v = k + n;
      const T *alpha = row<T>(p.transition, b, t), *beta = alpha + n;
      const T* gate = p.gate.data ? row<T>(p.gate, b, t) : nullptr;
      T* out = reinterpret_cast<T*>(p.out) + (b * p.length + t) * n;
      for (int64_t i = 0; i < n; ++i) {
        State size, complement, opened = State(1);
        if (!(flags & kMasked)) {
          logistic(load(alpha[i]), size, complement);
          if (p.exponential) size = e(-e(load(alpha[i])));
          const State angle = p.tanh ? State(3.14159265358979323846) * hyperbolic(load(beta[i])) : load(beta[i]);
          h[i] = polar(size, angle) * h[i] + Complex<State>(load(k[i]) * load(v[i]));
        }
        if (gate) {
          logistic(load(gate[i]), opened, complement);
          opened = opened * load(gate[i]);
        }
        store(load(q[i]) * h[i].re * opened, out[i]);
      }
    }
  }
}

}  // namespace

// HFR_STORAGE as in scan_cpu.cpp.
extern "C" int hfr_gateloop(const Problem* p) {
  run<HFR_STORAGE>(*p);
  return 0;
}

extern "C" int64_t hfr_problem_size() { return sizeof(Problem); }
