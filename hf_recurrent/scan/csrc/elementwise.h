// What comes after a recurrence, elementwise. Each function reads two tensors x, y and two vectors d, m over the channels:
//   forward(x, y, d, m) -> o;   backward(x, y, d, m, g, dx, dy) -> this element's share of the gradient of d.
// m scales the output (dropout) and has no gradient.
#pragma once
#include "recurrence.h"

namespace hfr {

// o = m gelu(x + d y), with gelu(u) = u sigma(2 sqrt(2/pi) (u + 0.044715 u^3)): the tanh approximation, by the identity
// (1 + tanh(v)) / 2 = sigma(2 v).
template <class T>
struct SkipGelu {
  HFR_INLINE static void gelu(T u, T& value, T& slope) {
    // Beyond +-12 sigma is 0 or 1 to the last bit; without the bounds u^3 overflows.
    T v = u > T(12) ? T(12) : u;
    v = v < T(-12) ? T(-12) : v;
    T square = v * v, s, complement;
    logistic(v * (T(1.5957691216057308) + T(0.07135481627260025) * square), s, complement);
    value = u * s;
    slope = s + v * s * complement * (T(1.5957691216057308) + T(0.21406444881780076) * square);
  }

  HFR_INLINE static T forward(T x, T y, T d, T m) {
    T value, slope;
    gelu(x + d * y, value, slope);
    return m * value;
  }

  HFR_INLINE static T backward(T x, T y, T d, T m, T g, T& dx, T& dy) {
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
  HFR_INLINE static T forward(T x, T y, T, T m) {
    T s, complement;
    logistic(y, s, complement);
    return m * x * s;
  }

  HFR_INLINE static T backward(T x, T y, T, T m, T g, T& dx, T& dy) {
    T s, complement;
    logistic(y, s, complement);
    dx = g * m * s;
    dy = dx * x * complement;
    return T(0);
  }
};

}  // namespace hfr
