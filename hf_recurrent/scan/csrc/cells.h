// The cells: what surrounds the recurrence h_t = a_t h_{t-1} + b_t, fused with it. Each has
//   coefficients(x, a, b)            x: this position's inputs;
//   forward(x, h_prev) -> h          = a h_prev + b;
//   backward(x, h_prev, g, dx) -> c  g: the whole gradient of h_t (its own and what came from t + 1);
//                                    dx: the gradients of x; c: the gradient of h_{t-1}.
// and, where not the state itself is given but a number read from it,
//   read(x, h) -> y                  also at padding, where h is the state that passes;
//   read_back(x, h, dy, dx) -> g     g: what comes to the gradient of h; dx: the gradient of what y alone reads.
// All are scalar functions of one channel; the loops of scan_cpu.h and scan_cuda.cu run them over time and channels.
// x and dx have `inputs` numbers, and where the cell is `timed` one more: what the position's channels have in common, a real
// number, of whose gradient the loops form the sum over the channels. Its first input is a rate, constant over time, and x ends
// with its inverse (`Rate`). `apart`: most of its work is for both parts of complex inputs at once (scan_cpu.h says what for).
// Cells compute exponentials and angles with a `Math` of recurrence.h, real ones of inputs from `first_gate` on; `With<Math>` is
// the same cell with another.
#pragma once
#include "recurrence.h"

namespace hfr {

// Of a cell that gives its state: y = h.
template <class T>
struct GivesState {
  using State = T;
  static constexpr bool reads = false;
  static constexpr bool timed = false;
  static constexpr bool apart = false;

  template <int n>
  HFR_INLINE static T read(const T (&)[n], T h) { return h; }
  template <int n, int m>
  HFR_INLINE static T read_back(const T (&)[n], T, T dy, T (&)[m]) { return dy; }
};

// What h is kept as for backward, where the tensors hold T: as narrow as they are, with two numbers for a complex state.
template <class T, class State> struct SavedAs { using type = T; };
template <class T, class U> struct SavedAs<T, Complex<U>> { using type = Complex<T>; };
template <class T, class U> struct SavedAs<Complex<T>, Complex<U>> { using type = Complex<T>; };

// h = a h' + b.  dL/db = g;  dL/da = g conj(h');  dL/dh' = g conj(a)  (PyTorch's convention for complex gradients).
template <class T>
struct LinearCell : GivesState<T> {
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
template <class Math, bool positive, class T>
HFR_INLINE void candidate(T x, T& value, T& slope) {
  value = x;
  slope = T(1);
  if (positive) {
    T s, complement;
    logistic<Math>(x, s, complement);
    value = x >= T(0) ? x + T(0.5) : s;
    slope = x >= T(0) ? T(1) : s * complement;
  }
}

// minGRU (arXiv 2410.01201): z = sigma(gate), h = (1 - z) h' + z c.  With a = 1 - z = sigma(-gate):
//   dL/dh' = g a;   dL/dgate = g (c - h') z a;   dL/dhidden = g z c'(hidden).
template <class T, bool positive, class Math = Exact>
struct MinGRUCell : GivesState<T> {
  template <class Other>
  using With = MinGRUCell<T, positive, Other>;
  static constexpr int first_gate = positive ? 0 : 1;
  static constexpr int inputs = 2;  // hidden, gate
  static constexpr int backward_inputs = 2;
  static constexpr bool first_may_be_constant = false;

  HFR_INLINE static void coefficients(const T (&x)[2], T& a, T& b) {
    T c, slope, z;
    candidate<Math, positive>(x[0], c, slope);
    logistic<Math>(x[1], z, a);
    b = z * c;
  }

  HFR_INLINE static T forward(const T (&x)[2], T h) {
    T a, b;
    coefficients(x, a, b);
    return a * h + b;
  }

  HFR_INLINE static T backward(const T (&x)[2], T h, T g, T (&dx)[2]) {
    T c, slope, z, a;
    candidate<Math, positive>(x[0], c, slope);
    logistic<Math>(x[1], z, a);
    dx[0] = g * z * slope;
    dx[1] = g * (c - h) * z * a;
    return g * a;
  }
};

// minLSTM (arXiv 2410.01201): f = sigma(forget), i = sigma(input), h = f/(f+i) h' + i/(f+i) c.
// The weights are a = I / (F + I) and b = F / (F + I) with F = 1 + e^-forget and I = 1 + e^-input, both divided by the
// largest of the three exponentials, so that two shut gates keep their proportion (only where a gate is below -kWithin).
//   dL/dh' = g a;  dL/dhidden = g b c';  dL/dforget = g (h' - c) a b sigma(-forget);  dL/dinput = g (c - h') a b sigma(-input).
template <class T, bool positive, class Math = Exact>
struct MinLSTMCell : GivesState<T> {
  template <class Other>
  using With = MinLSTMCell<T, positive, Other>;
  static constexpr int first_gate = positive ? 0 : 1;
  static constexpr int inputs = 3;  // hidden, forget, input
  static constexpr int backward_inputs = 3;
  static constexpr bool first_may_be_constant = false;

  HFR_INLINE static void weights(T forget, T input, T& a, T& b, T& forget_shut, T& input_shut) {
    T largest = T(0), one = T(1);
    if (!Math::within) {
      // A gate of -inf as the most negative number, so that the differences below stay defined.
      forget = forget < T(-3e38) ? T(-3e38) : forget;
      input = input < T(-3e38) ? T(-3e38) : input;
      T least = forget < input ? forget : input;
      largest = least < T(-kWithin) ? -least : T(0);
      one = Math::exponential(-largest);
    }
    T f = Math::exponential(-forget - largest), i = Math::exponential(-input - largest);
    T scale = reciprocal(one + f + one + i);
    a = (one + i) * scale;
    b = (one + f) * scale;
    forget_shut = f * scale;  // b sigma(-forget)
    input_shut = i * scale;   // a sigma(-input)
  }

  HFR_INLINE static void coefficients(const T (&x)[3], T& a, T& b) {
    T c, slope, forget_shut, input_shut;
    candidate<Math, positive>(x[0], c, slope);
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
    candidate<Math, positive>(x[0], c, slope);
    weights(x[1], x[2], a, b, forget_shut, input_shut);
    dx[0] = g * b * slope;
    dx[1] = g * (h - c) * a * forget_shut;
    dx[2] = g * (c - h) * b * input_shut;
    return g * a;
  }
};

// GateLoop with a state of one number for each channel (arXiv 2311.01927, d_h = 1), from its projections to its output:
//   h = a h' + k v,   y = q Re h,   a by a transition below.
// For the whole gradient g of h, of which dy q comes from y:  dL/dq = dy Re h;  dL/dk = v Re g;  dL/dv = k Re g;
// dL/da = g conj(h');  dL/dh' = g conj(a).  h follows from h', so that h' is all that backward needs besides the inputs.
// Bytes for each channel and position, float32 (bfloat16): forward 5 numbers in, y out, 24 (12), and h for backward, 8 (4);
// backward 6 numbers and h in, 5 out, 52 (26). In single operations forward alone moves 96 (150): a magnitude, a phase,
// their complex product, k v and its complex copy, the scan, and the product with q, all of them in float32.
template <class T, class Transition>
struct GateLoopCell {
  template <class Other>
  using With = GateLoopCell<T, typename Transition::template With<Other>>;
  static constexpr int first_gate = 3;
  using State = typename Transition::State;
  static constexpr int inputs = 3 + Transition::inputs;  // q, k, v, and the transition's
  static constexpr int backward_inputs = inputs;
  static constexpr bool first_may_be_constant = false;
  static constexpr bool reads = true;
  static constexpr bool timed = false;
  static constexpr bool apart = false;

  HFR_INLINE static void coefficients(const T (&x)[inputs], State& a, State& b) {
    a = Transition(x + 3).a;
    b = State(x[1] * x[2]);
  }

  HFR_INLINE static State forward(const T (&x)[inputs], State h) {
    State a, b;
    coefficients(x, a, b);
    return a * h + b;
  }

  HFR_INLINE static T read(const T (&x)[inputs], State h) { return x[0] * real(h); }

  HFR_INLINE static State read_back(const T (&x)[inputs], State h, T dy, T (&dx)[inputs]) {
    dx[0] = dy * real(h);
    return State(dy * x[0]);
  }

  HFR_INLINE static State backward(const T (&x)[inputs], State h, State g, T (&dx)[inputs]) {
    const Transition transition(x + 3);
    dx[1] = real(g) * x[2];
    dx[2] = real(g) * x[1];
    transition.backward(g * conj(h), dx + 3);
    return g * conj(transition.a);
  }
};

// |a| and its slope: sigma(x), or exp(-exp(x)), of which nothing is left from x = 5 on.
template <class Math, bool exponential_, class T>
HFR_INLINE void magnitude(T x, T& value, T& slope) {
  if (exponential_) {
    const T e = Math::exponential(x > T(5) ? T(5) : x);
    value = Math::Any::exponential(-e);
    slope = -e * value;
  } else {
    T complement;
    logistic<Math>(x, value, complement);
    slope = value * complement;
  }
}

// a = f(alpha) exp(i g(beta)), g(x) = x or pi tanh(x), tanh(x) = sigma(2x) - sigma(-2x). With u = exp(i g):
//   dL/df = Re(conj(u) da);   dL/dg = Im(conj(a) da)   (PyTorch's convention: da = dL/dRe a + i dL/dIm a).
template <class T, bool exponential_, bool tanh_, class Math = Exact>
struct PolarTransition {
  template <class Other>
  using With = PolarTransition<T, exponential_, tanh_, Other>;
  using State = Complex<T>;
  static constexpr int inputs = 2;  // alpha, beta
  T size, size_slope, angle_slope;
  Complex<T> u, a;

  HFR_INLINE explicit PolarTransition(const T* x) {
    magnitude<Math, exponential_>(x[0], size, size_slope);
    T angle = x[1];
    angle_slope = T(1);
    if (tanh_) {
      T s, complement;
      logistic<Math>(x[1] + x[1], s, complement);
      angle = T(3.14159265358979324) * (s - complement);
      angle_slope = T(12.5663706143591730) * s * complement;
    }
    u = Math::unit(angle);
    a = size * u;
  }

  HFR_INLINE void backward(Complex<T> da, T* dx) const {
    const Complex<T> turned = conj(u) * da;
    dx[0] = turned.re * size_slope;
    dx[1] = turned.im * size * angle_slope;
  }
};

// a = f(alpha): the state is real.
template <class T, bool exponential_, class Math = Exact>
struct RealTransition {
  template <class Other>
  using With = RealTransition<T, exponential_, Other>;
  using State = T;
  static constexpr int inputs = 1;  // alpha
  T slope, a;

  HFR_INLINE explicit RealTransition(const T* x) { magnitude<Math, exponential_>(x[0], a, slope); }

  HFR_INLINE void backward(T da, T* dx) const { dx[0] = da * slope; }
};

// a = f(|c|) c / |c|, f(0) at c = 0. With u = c / |c| and conj(u) da = x + i y:  dL/dc = u (f' x + i y f / |c|), and at c = 0,
// where neither |c| nor its phase has a derivative, 0.
template <class T, bool exponential_, class Math = Exact>
struct CartesianTransition {
  template <class Other>
  using With = CartesianTransition<T, exponential_, Other>;
  using State = Complex<T>;
  static constexpr int inputs = 2;  // Re c, Im c
  T size, value, slope;
  Complex<T> u, a;

  HFR_INLINE explicit CartesianTransition(const T* x) {
    u = Math::direction(Complex<T>(x[0], x[1]), size);
    magnitude<Math, exponential_>(size, value, slope);
    a = value * u;
  }

  HFR_INLINE void backward(Complex<T> da, T* dx) const {
    const Complex<T> turned = conj(u) * da;
    const T inverse = size > T(0) ? T(1) / size : T(0);
    const Complex<T> dc = u * Complex<T>(size > T(0) ? turned.re * slope : T(0), turned.im * value * inverse);
    dx[0] = dc.re;
    dx[1] = dc.im;
  }
};

// GateLoop with heads of d_k x d_v states (arXiv 2311.01927, section 3.2):  H = diag(a) H' + k^T v,  y = Re(q H).
// Of the state h in row r and column c, with the gradient g' that comes to it from later positions and g its whole gradient:
//   h = a_r h' + k_r v_c,   y_c = sum_r q_r Re h,   g = g' + q_r dy_c;
//   dL/dq_r = sum_c dy_c Re h;   dL/dk_r = sum_c v_c Re g;   dL/dv_c = sum_r k_r Re g;   dL/da_r = sum_c g conj(h');
//   dL/dh' = g conj(a_r).
// State is N or Complex<N>, N a number or a vector of them.
template <class State, class N>
struct HeadCell {
  HFR_INLINE static State forward(State h, State a, N k, N v) { return step_real(a, h, k * v); }

  // This state's share of y.
  HFR_INLINE static N read(State h, N q) { return q * real(h); }

  // From later's gradient to the whole one; adds to dq. Also at padding, where h is the state that passes.
  HFR_INLINE static State read_back(State h, N q, N dy, State later, N& dq) {
    dq += dy * real(h);
    return plus_real(later, q * dy);
  }

  // From the whole gradient to that of h'; adds to dk, dv and da.
  HFR_INLINE static State backward(State h, State a, N k, N v, State g, N& dk, N& dv, State& da) {
    dk += real(g) * v;
    dv += real(g) * k;
    da = da + g * conj(h);
    return g * conj(a);
  }
};

// What S5's cell takes of a rate r, which is constant over time: r and 1 / r, the latter 0 where r is nothing beside 1 / t for
// any t: there (e^rt - 1) / r, the integral of e^rs over 0 to t, is t.
template <class T>
struct Rate {
  Complex<T> value, inverse;

  Rate() = default;
  HFR_INLINE explicit Rate(Complex<T> r) : value(r) {
    const double re = (double)r.re, im = (double)r.im, size_re = re < 0 ? -re : re, size_im = im < 0 ? -im : im;
    const double largest = size_re > size_im ? size_re : size_im;
    const double u = re / largest, v = im / largest, square = largest * (u * u + v * v);  // no larger than a number can be
    const bool rests = largest < (sizeof(T) > 4 ? 1e-150 : 1e-22);
    inverse = rests ? Complex<T>(T(0)) : Complex<T>(T(u / square), T(-v / square));
  }
};

// S5 at irregular times (arXiv 2208.04933, section 3.2): dh/dt = r h + u over the time t since the position before, over which u is
// held. With z = r t, and by zero-order hold or the bilinear transform (below) a, psi = t phi, slope = da/dz and
// psi_slope = dpsi/dr:
//   h = a h' + psi u;   dL/dh' = g conj(a);   dL/du = g conj(psi);   dL/dr = g conj(t slope h' + psi_slope u).
// Both have dpsi/dt = slope, so that dL/dt = Re(g conj(slope (r h' + u))), of all channels together.
// Bytes for each channel and position in float32: forward u in, h out, 16; backward u, h and g in, one gradient out, 32, as the
// linear cell with a constant a. In single operations a and psi are tensors too: forward z, e^z, e^z - 1, psi, its product with u
// and the scan move 120.
template <class T, template <class, class> class Hold, class Math = Exact>
struct S5Cell : GivesState<T> {
  template <class Other>
  using With = S5Cell<T, Hold, Other>;
  static constexpr int inputs = 2;  // r, u; then t, 1 / r
  static constexpr int backward_inputs = 2;
  static constexpr bool first_may_be_constant = true;
  static constexpr bool timed = true;
  static constexpr bool apart = true;
  using Real = decltype(T().re);
  using Discretised = Hold<Real, Math>;

  // Whether `With<ExactWithin>` computes the same, of times and of parts of rates up to these.
  HFR_INLINE static bool within(float time, float re, float im) { return time * re <= kNormal && time * im <= kFewTurns; }

  HFR_INLINE static void coefficients(const T (&x)[4], T& a, T& b) {
    const Discretised hold(x[2].re, x[0], x[3]);
    a = hold.a;
    b = hold.psi * x[1];
  }

  HFR_INLINE static T forward(const T (&x)[4], T h) {
    T a, b;
    coefficients(x, a, b);
    return a * h + b;
  }

  // What `backward` need not compute again where the coefficients are known.
  using Kept = typename Discretised::Power;

  HFR_INLINE static T decay(const T (&x)[4], Kept& kept) {
    kept = Discretised::power(x[2].re, x[0]);
    return Discretised(x[2].re, x[0], x[3], kept).a;
  }

  HFR_INLINE static T backward(const T (&x)[4], T h, T g, T (&dx)[3]) {
    return backward(x, h, g, dx, Discretised::power(x[2].re, x[0]));
  }

  HFR_INLINE static T backward(const T (&x)[4], T h, T g, T (&dx)[3], const Kept& kept) {
    const auto t = x[2].re;
    const Discretised hold(t, x[0], x[3], kept);
    dx[0] = g * conj(t * (hold.slope * h) + hold.psi_slope * x[1]);
    dx[1] = g * conj(hold.psi);
    dx[2] = T(real(g * conj(hold.slope * (x[0] * h + x[1]))));
    return g * conj(hold.a);
  }
};

// a = (1 + z/2) w and psi = t w, w = 1 / (1 - z/2). So a = 2 w - 1, da/dz = w^2 and dpsi/dr = (t w)^2 / 2.
template <class T, class Math>
struct Bilinear {
  using Power = Complex<T>;  // w
  Complex<T> a, psi, slope, psi_slope;

  HFR_INLINE static Power power(T t, Complex<T> rate) {
    const Complex<T> less = Complex<T>(T(1)) - T(0.5) * (t * rate);
    return Math::within ? reciprocal(less.re * less.re + less.im * less.im) * conj(less) : inverse(less);
  }

  HFR_INLINE Bilinear(T t, Complex<T> rate, Complex<T> inverse) : Bilinear(t, rate, inverse, power(t, rate)) {}

  HFR_INLINE Bilinear(T t, Complex<T> rate, Complex<T>, Power w) {
    a = w * (Complex<T>(T(1)) + T(0.5) * (t * rate));
    psi = t * w;
    slope = w * w;
    psi_slope = T(0.5) * (psi * psi);
  }
};

template <int n>
constexpr double kFactorial = n * kFactorial<n - 1>;
template <>
constexpr double kFactorial<0> = 1;

// The coefficients from the k-th on of psi(z) = sum (k + 1) / (k + 2)! z^k divided by z^2 - sum z + product, the polynomial with
// the roots z and conj(z): the last two of the quotient. So a polynomial with real coefficients takes real operations.
template <int k, int last, class T>
HFR_INLINE Complex<T> quotient(T sum, T product) {
  constexpr T term = T((k + 1) / kFactorial<k + 2>);
  if constexpr (k == last) {
    return {term, T(0)};
  } else {
    const Complex<T> next = quotient<k + 1, last>(sum, product);
    return {term + sum * next.re - product * next.im, next.re};
  }
}

template <class T>
struct ZeroOrderPower {  // e^z, and the real part of e^z - 1
  Complex<T> a;
  T less_one;
};

// a = e^z and psi = (e^z - 1) / r. With z = x + i y the real part of e^z - 1 is (e^x - 1) cos y + (cos y - 1), without
// cancellation. dpsi/dr = (t e^z - psi) / r would have it where |z|^2 < 1/2: there it is t^2 times the series of
// (e^z - (e^z - 1) / z) / z, of which what is left out is below the rounding.
template <class T, class Math>
struct ZeroOrderHold {
  using Power = ZeroOrderPower<T>;
  Complex<T> a, psi, slope, psi_slope;

  HFR_INLINE static Power power(T t, Complex<T> rate) {
    const Complex<T> z = t * rate;
    constexpr T gone = sizeof(T) > 4 ? T(-746) : T(-87);
    T growth, growth_less_one, cosine_less_one, angle = z.im;
    Math::exponentials(z.re, growth, growth_less_one);
    // Of what has decayed any phase will do. (A product, since GCC moves a choice past the conversions of `unit`, and then does
    // not vectorise.)
    if (!Math::within) angle = z.im * (z.re < gone ? T(0) : T(1));
    const Complex<T> turn = Math::unit(angle, rest_of_product<Math::within>(t, rate.im, z.im), cosine_less_one);
    return {growth * turn, growth_less_one * turn.re + cosine_less_one};
  }

  HFR_INLINE ZeroOrderHold(T t, Complex<T> rate, Complex<T> inverse) : ZeroOrderHold(t, rate, inverse, power(t, rate)) {}

  HFR_INLINE ZeroOrderHold(T t, Complex<T> rate, Complex<T> inverse, const Power& power) : a(power.a), slope(power.a) {
    const Complex<T> z = t * rate;
    const bool rests = (inverse.re == T(0)) & (inverse.im == T(0));
    psi = plus_real(Complex<T>(power.less_one, a.im) * inverse, rests ? t : T(0));
    const Complex<T> difference = (t * a - psi) * inverse;
    const T size = z.re * z.re + z.im * z.im;
    const Complex<T> rest = quotient<1, (sizeof(T) > 4 ? 16 : 8)>(z.re + z.re, size);
    const bool small = size < T(0.5);
    psi_slope.re = small ? t * t * (T(0.5) + z.re * rest.re - size * rest.im) : difference.re;
    psi_slope.im = small ? t * t * (z.im * rest.re) : difference.im;
  }
};

// Longhorn (arXiv 2407.14207, section 3, the diagonal form): a state of channels x m with
//   eps = beta / (1 + beta kk),  beta = sigma(dt),  kk = sum_m k_m^2;   S_m = (1 - eps k_m^2) S'_m + eps x k_m.
// With u = e^-dt, eps = 1 / (1 + u + kk). With e = eps and p = eps x the update is S_m = S'_m + k_m r, r = p - e k_m S'_m, so
// for the whole gradient g of S_m:
//   dL/dp += g k_m;   dL/de -= g k_m^2 S'_m;   dL/dk_m += g (r - e k_m S'_m);   dL/dS'_m = g (1 - e k_m^2),
// and from them dL/dx = e dL/dp, dL/deps = dL/de + x dL/dp, dL/ddt = u eps^2 dL/deps, dL/dkk = -eps^2 dL/deps.
template <class T>
struct LonghornCell {
  // eps, and its slope over dt.
  HFR_INLINE static T rate(T dt, T kk, T& slope) {
    T limit = sizeof(T) > 4 && dt < T(-87) ? T(-87) : dt;  // as in logistic; in float32 the exponential has that limit
    T u = exponential(-limit), e = reciprocal(T(1) + u + kk);
    slope = e * u * e;
    return e;
  }

  HFR_INLINE static T forward(T s, T e, T p, T k) { return s + k * (p - e * k * s); }

  // Adds to dp and de, returns the gradient of S' and, in dk, this channel's share of that of k.
  HFR_INLINE static T backward(T s, T e, T p, T k, T g, T& dp, T& de, T& dk) {
    T gk = g * k, ks = k * s;
    dp += gk;
    de -= gk * ks;
    dk = g * (p - (e + e) * ks);
    return g - e * gk * k;
  }
};

}  // namespace hfr
