// S5's matrices for CPUs, forward only. For a few positions a product with a matrix takes as long as reading the matrix does:
// these read B and C once, as they are stored, with real and imaginary parts side by side.
#include <math.h>
#include <stdint.h>

#include <complex>
#include <vector>

#include "recurrence.h"

namespace {

using namespace hfr;

struct Problem {
  int64_t rows, width, states, threads;
  int64_t bilinear;                           // drive: the bilinear transform, not zero-order hold
  double rescale;                             // drive: of the steps;  read: of the result
  const char *real, *imaginary, *log_step;    // drive: (states) each
  const char* matrix;                         // drive: B, (states, width, 2);  read: C, (width, states, 2)
  const char* in;                             // drive: (rows, width);  read: (rows, states) complex, in the state type
  char* a;                                    // drive: (states) complex, in the state type
  char* out;                                  // drive: (rows, states) complex, in the state type;  read: (rows, width)
};

// a = exp(Lambda Delta), gain = (a - 1) / Lambda, or those of the bilinear transform. In double precision throughout.
void discretise(double re, double im, double step, bool bilinear, std::complex<double>& a, std::complex<double>& gain) {
  const std::complex<double> pole(re, im);
  if (bilinear) {
    const std::complex<double> inverse = 1.0 / (1.0 - pole * (step / 2));
    a = inverse * (1.0 + pole * (step / 2));
    gain = inverse * step;
    return;
  }
  const double size = exp(re * step), angle = im * step, half = sin(angle / 2);
  a = std::complex<double>(size * cos(angle), size * sin(angle));
  // a - 1 without cancellation: expm1(x) cos(y) - 2 sin^2(y / 2)
  gain = std::complex<double>(expm1(re * step) * cos(angle) - 2 * half * half, a.imag()) / pole;
}

template <class T>
double at(const char* vector, int64_t i) {
  return load(reinterpret_cast<const T*>(vector)[i]);
}

// out = gain * (B u)
template <class T>
void drive(const Problem& p) {
  using State = typename StateOf<T>::type;
  const int64_t n = p.width;
  std::vector<State> u(p.rows * n);
  for (int64_t i = 0; i < p.rows * n; ++i) u[i] = load(reinterpret_cast<const T*>(p.in)[i]);
#pragma omp parallel for schedule(static) num_threads(p.threads) if (p.threads > 1)
  for (int64_t s = 0; s < p.states; ++s) {
    std::complex<double> a, gain;
    const double step = p.rescale * exp(at<T>(p.log_step, s));
    discretise(at<T>(p.real, s), at<T>(p.imaginary, s), step, p.bilinear, a, gain);
    reinterpret_cast<Complex<State>*>(p.a)[s] = Complex<State>(State(a.real()), State(a.imag()));
    const T* b = reinterpret_cast<const T*>(p.matrix) + s * n * 2;
    for (int64_t r = 0; r < p.rows; ++r) {
      const State* x = u.data() + r * n;
      State re = 0, im = 0;
#pragma omp simd reduction(+ : re, im)
      for (int64_t i = 0; i < n; ++i) {
        re += load(b[2 * i]) * x[i];
        im += load(b[2 * i + 1]) * x[i];
      }
      reinterpret_cast<Complex<State>*>(p.out)[r * p.states + s] =
          Complex<State>(State(gain.real()), State(gain.imag())) * Complex<State>(re, im);
    }
  }
}

// out = rescale * Re(C h)
template <class T>
void read(const Problem& p) {
  using State = typename StateOf<T>::type;
  const int64_t n = 2 * p.states;
  const State* in = reinterpret_cast<const State*>(p.in);
  std::vector<State> h(p.rows * n);
  for (int64_t i = 0; i < p.rows * n; ++i) h[i] = i % 2 ? -in[i] : in[i];
#pragma omp parallel for schedule(static) num_threads(p.threads) if (p.threads > 1)
  for (int64_t d = 0; d < p.width; ++d) {
    const T* c = reinterpret_cast<const T*>(p.matrix) + d * n;
    for (int64_t r = 0; r < p.rows; ++r) {
      const State* x = h.data() + r * n;
      State sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < n; ++i) sum += load(c[i]) * x[i];
      store(State(p.rescale) * sum, reinterpret_cast<T*>(p.out)[r * p.width + d]);
    }
  }
}

}  // namespace

// HFR_STORAGE as in scan_cpu.cpp.
extern "C" int hfr_s5_drive(const Problem* p) {
  drive<HFR_STORAGE>(*p);
  return 0;
}

extern "C" int hfr_s5_read(const Problem* p) {
  read<HFR_STORAGE>(*p);
  return 0;
}

extern "C" int64_t hfr_problem_size() { return sizeof(Problem); }
