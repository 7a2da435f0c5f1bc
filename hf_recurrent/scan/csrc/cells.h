// The cells: what surrounds the recurrence h_t = a_t h_{t-1} + b_t, fused with it. Each has
//   forward(x, h_prev) -> h          x: this position's inputs;
//   backward(x, h_prev, g, dx) -> c  g: the whole gradient of h_t (its own and what came from t + 1);
//                                    dx: the gradients of x; c: the gradient of h_{t-1}.
// All are scalar functions of one channel; the loops of scan_cpu.cpp and scan_cuda.cu run them over time and channels.
#pragma once
#include "recurrence.h"

namespace hfr {

// h = a h' + b.  dL/db = g;  dL/da = g conj(h');  dL/dh' = g conj(a)  (PyTorch's convention for complex gradients).
template <class T>
struct LinearCell {
  using State = T;
  static constexpr int inputs = 2;  // a, b

  HFR_INLINE static T forward(const T (&x)[2], T h) { return x[0] * h + x[1]; }

  HFR_INLINE static T backward(const T (&x)[2], T h, T g, T (&dx)[2]) {
    dx[0] = g * conj(h);
    dx[1] = g;
    return g * conj(x[0]);
  }
};

// minGRU (arXiv 2410.01201): z = sigma(gate), h = (1 - z) h' + z c, with the candidate c = hidden (vanilla), or
// c = g(hidden), g(x) = x + 1/2 for x >= 0 and sigma(x) below (positive: the paper's log-space variant).
// With a = 1 - z = sigma(-gate):
//   dL/dh' = g a;   dL/dgate = g (c - h') z a;   dL/dhidden = g z c',  c' = 1 | (x >= 0 ? 1 : sigma(x) sigma(-x)).
template <class T, bool positive>
struct MinGRUCell {
  using State = T;
  static constexpr int inputs = 2;  // hidden, gate

  HFR_INLINE static void candidate(T x, T& value, T& slope) {
    value = x;
    slope = T(1);
    if (positive) {
      T s, complement;
      logistic(x, s, complement);
      value = x >= T(0) ? x + T(0.5) : s;
      slope = x >= T(0) ? T(1) : s * complement;
    }
  }

  HFR_INLINE static T forward(const T (&x)[2], T h) {
    T c, slope, z, a;
    candidate(x[0], c, slope);
    logistic(x[1], z, a);
    return a * h + z * c;
  }

  HFR_INLINE static T backward(const T (&x)[2], T h, T g, T (&dx)[2]) {
    T c, slope, z, a;
    candidate(x[0], c, slope);
    logistic(x[1], z, a);
    dx[0] = g * z * slope;
    dx[1] = g * (c - h) * z * a;
    return g * a;
  }
};

}  // namespace hfr
