// The cells: what surrounds the recurrence h_t = a_t h_{t-1} + b_t, fused with it. Each has
//   coefficients(x, a, b)            x: this position's inputs;
//   forward(x, h_prev) -> h          = a h_prev + b;
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
  static constexpr int backward_inputs = 1;  // the first so many are all that backward reads
  static constexpr bool first_may_be_constant = true;  // over time: its gradient is then summed inside the kernel

  HFR_INLINE static void coefficients(const T (&x)[2], T& a, T& b) { a = x[0], b = x[1]; }

  HFR_INLINE static T forward(const T (&x)[2], T h) { return x[0] * h + x[1]; }

  HFR_INLINE static T backward(const T (&x)[2], T h, T g, T (&dx)[2]) {
    dx[0] = g * conj(h);
    dx[1] = g;
    return g * conj(x[0]);
  }
};

// The candidate of minGRU and minLSTM and its slope: c = x (vanilla), or c = g(x), g(x) = x + 1/2 for x >= 0 and
// sigma(x) below (positive: the papers' log-space variant); g' = 1 for x >= 0 and sigma(x) sigma(-x) below.
template <bool positive, class T>
HFR_INLINE void candidate(T x, T& value, T& slope) {
  value = x;
  slope = T(1);
  if (positive) {
    T s, complement;
    logistic(x, s, complement);
    value = x >= T(0) ? x + T(0.5) : s;
    slope = x >= T(0) ? T(1) : s * complement;
  }
}

// minGRU (arXiv 2410.01201): z = sigma(gate), h = (1 - z) h' + z c.  With a = 1 - z = sigma(-gate):
//   dL/dh' = g a;   dL/dgate = g (c - h') z a;   dL/dhidden = g z c'(hidden).
template <class T, bool positive>
struct MinGRUCell {
  using State = T;
  static constexpr int inputs = 2;  // hidden, gate
  static constexpr int backward_inputs = 2;
  static constexpr bool first_may_be_constant = false;

  HFR_INLINE static void coefficients(const T (&x)[2], T& a, T& b) {
    T c, slope, z;
    candidate<positive>(x[0], c, slope);
    logistic(x[1], z, a);
    b = z * c;
  }

  HFR_INLINE static T forward(const T (&x)[2], T h) {
    T a, b;
    coefficients(x, a, b);
    return a * h + b;
  }

  HFR_INLINE static T backward(const T (&x)[2], T h, T g, T (&dx)[2]) {
    T c, slope, z, a;
    candidate<positive>(x[0], c, slope);
    logistic(x[1], z, a);
    dx[0] = g * z * slope;
    dx[1] = g * (c - h) * z * a;
    return g * a;
  }
};

// minLSTM (arXiv 2410.01201): f = sigma(forget), i = sigma(input), h = f/(f+i) h' + i/(f+i) c.
// The weights are a = I / (F + I) and b = F / (F + I) with F = 1 + e^-forget and I = 1 + e^-input, both divided by the
// largest of the three exponentials, so that two shut gates keep their proportion.
//   dL/dh' = g a;  dL/dhidden = g b c';  dL/dforget = g (h' - c) a b sigma(-forget);  dL/dinput = g (c - h') a b sigma(-input).
template <class T, bool positive>
struct MinLSTMCell {
  using State = T;
  static constexpr int inputs = 3;  // hidden, forget, input
  static constexpr int backward_inputs = 3;
  static constexpr bool first_may_be_constant = false;

  HFR_INLINE static void weights(T forget, T input, T& a, T& b, T& forget_shut, T& input_shut) {
    // A gate of -inf as the most negative number, so that the differences below stay defined.
    forget = forget < T(-3e38) ? T(-3e38) : forget;
    input = input < T(-3e38) ? T(-3e38) : input;
    T least = forget < input ? forget : input;
    T largest = least < T(0) ? -least : T(0);
    T one = exponential(-largest);
    T f = exponential(-forget - largest), i = exponential(-input - largest);
    T scale = T(1) / (one + f + one + i);
    a = (one + i) * scale;
    b = (one + f) * scale;
    forget_shut = f * scale;  // b sigma(-forget)
    input_shut = i * scale;   // a sigma(-input)
  }

  HFR_INLINE static void coefficients(const T (&x)[3], T& a, T& b) {
    T c, slope, forget_shut, input_shut;
    candidate<positive>(x[0], c, slope);
    weights(x[1], x[2], a, b, forget_shut, input_shut);
    b = b * c;
  }

  HFR_INLINE static T forward(const T (&x)[3], T h) {
    T a, b;
    coefficients(x, a, b);
    return a * h + b;
  }

  HFR_INLINE static T backward(const T (&x)[3], T h, T g, T (&dx)[3]) {
    T c, slope, a, b, forget_shut, input_shut;
    candidate<positive>(x[0], c, slope);
    weights(x[1], x[2], a, b, forget_shut, input_shut);
    dx[0] = g * b * slope;
    dx[1] = g * (h - c) * a * forget_shut;
    dx[2] = g * (c - h) * b * input_shut;
    return g * a;
  }
};

// Longhorn (arXiv 2407.14207, section 3, the diagonal form): a state of channels x m with
//   eps = beta / (1 + beta kk),  beta = sigma(dt),  kk = sum_m k_m^2;   S_m = (1 - eps k_m^2) S'_m + eps x k_m.
// With e = eps and p = eps x the update is S_m = S'_m + k_m r, r = p - e k_m S'_m, so for the whole gradient g of S_m:
//   dL/dp += g k_m;   dL/de -= g k_m^2 S'_m;   dL/dk_m += g (r - e k_m S'_m);   dL/dS'_m = g (1 - e k_m^2),
// and from them dL/dx = e dL/dp, dL/deps = dL/de + x dL/dp, dL/dbeta = dL/deps (eps / beta)^2, dL/dkk = -eps^2 dL/deps.
template <class T>
struct LonghornCell {
  HFR_INLINE static T rate(T dt, T kk, T& beta, T& beta_slope) {
    T complement;
    logistic(dt, beta, complement);
    beta_slope = beta * complement;
    return beta / (T(1) + beta * kk);
  }

  HFR_INLINE static T forward(T s, T e, T p, T k) { return s + k * (p - e * k * s); }

  // Adds to dp and de, returns the gradient of S' and, in dk, this channel's share of that of k.
  HFR_INLINE static T backward(T s, T e, T p, T k, T g, T& dp, T& de, T& dk) {
    T gk = g * k, eks = e * k * s;
    dp += gk;
    de -= gk * k * s;
    dk = g * (p - eks - eks);
    return g - e * k * gk;
  }
};

}  // namespace hfr
