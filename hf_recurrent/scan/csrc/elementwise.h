// What comes after a recurrence, elementwise, for host and device compilers alike. Each function reads two or three tensors
// (kInputs; where there are two, z means nothing) and two vectors d (where it skips) and m over the channels:
//   forward(x, y, z, d, m) -> o;   backward(x, y, z, d, m, g, dx, dy, dz) -> this element's share of the gradient of d.
// m scales the output (dropout) and has no gradient.
#pragma once
#include "recurrence.h"

namespace hfr {

// o = m gelu(x + d y), with gelu(u) = u sigma(2 sqrt(2/pi) (u + 0.044715 u^3)): the tanh approximation, by the identity
// (1 + tanh(v)) / 2 = sigma(2 v).
template <class T>
struct SkipGelu {
  static constexpr int kInputs = 2;
  static constexpr bool kSkips = true;

  HFR_INLINE static void gelu(T u, T& value, T& slope) {
    // Beyond +-12 sigma is 0 or 1 to the last bit; without the bounds u^3 overflows.
    T v = u > T(12) ? T(12) : u;
    v = v < T(-12) ? T(-12) : v;
    T square = v * v, s, complement;
    logistic(v * (T(1.5957691216057308) + T(0.07135481627260025) * square), s, complement);
    value = u * s;
    slope = s + v * s * complement * (T(1.5957691216057308) + T(0.21406444881780076) * square);
  }

  HFR_INLINE static T forward(T x, T y, T, T d, T m) {
    T value, slope;
    gelu(x + d * y, value, slope);
    return m * value;
  }

  HFR_INLINE static T backward(T x, T y, T, T d, T m, T g, T& dx, T& dy, T&) {
    T value, slope;
    gelu(x + d * y, value, slope);
    dx = g * m * slope;
    dy = d * dx;
    return dx * y;
  }
};

// o = m x sigma(y)
template <class T>
struct Gate {
  static constexpr int kInputs = 2;
  static constexpr bool kSkips = false;

  HFR_INLINE static T forward(T x, T y, T, T, T m) {
    T s, complement;
    logistic(y, s, complement);
    return m * x * s;
  }

  HFR_INLINE static T backward(T x, T y, T, T, T m, T g, T& dx, T& dy, T&) {
    T s, complement;
    logistic(y, s, complement);
    dx = g * m * s;
    dy = dx * x * complement;
    return T(0);
  }
};

// o = m x silu(y)
template <class T>
struct SiluGate {
  static constexpr int kInputs = 2;
  static constexpr bool kSkips = false;

  HFR_INLINE static T forward(T x, T y, T, T, T m) { return m * x * silu(y); }

  HFR_INLINE static T backward(T x, T y, T, T, T m, T g, T& dx, T& dy, T&) {
    dx = g * m * silu(y);
    dy = g * m * x * silu_slope(y);
    return T(0);
  }
};

// o = m (x + d y) silu(z)
template <class T>
struct SkipSiluGate {
  static constexpr int kInputs = 3;
  static constexpr bool kSkips = true;

  HFR_INLINE static T forward(T x, T y, T z, T d, T m) { return m * (x + d * y) * silu(z); }

  HFR_INLINE static T backward(T x, T y, T z, T d, T m, T g, T& dx, T& dy, T& dz) {
    dx = g * m * silu(z);
    dy = d * dx;
    dz = g * m * (x + d * y) * silu_slope(z);
    return dx * y;
  }
};

}  // namespace hfr
