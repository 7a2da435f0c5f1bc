// Number types of the recurrence h_t = a_t h_{t-1} + b_t, for host and device compilers alike.
//
// Storage types are what tensors hold (float, double, BFloat16, Float16, Complex<float>, Complex<double>); the state type is
// what the recurrence is carried in: float for every 16- and 32-bit real, otherwise the storage type itself.
// No includes: this file must compile under NVRTC, which has none.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define HFR_INLINE __host__ __device__ __forceinline__
#elif defined(_MSC_VER)
#define HFR_INLINE __forceinline
#else
#define HFR_INLINE inline __attribute__((always_inline))
#endif

namespace hfr {

HFR_INLINE float float_from_bits(unsigned int bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

HFR_INLINE unsigned int bits_from_float(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  unsigned int bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

HFR_INLINE unsigned int low_bits(double value) {
#ifdef __CUDA_ARCH__
  return (unsigned int)__double2loint(value);
#else
  unsigned long long bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return (unsigned int)bits;
#endif
}

#ifdef __CUDACC_RTC__
HFR_INLINE float square_root(float x) { return sqrtf(x); }
HFR_INLINE double square_root(double x) { return sqrt(x); }
#else
HFR_INLINE float square_root(float x) { return __builtin_sqrtf(x); }
HFR_INLINE double square_root(double x) { return __builtin_sqrt(x); }
#endif

// x y + z, rounded once: only where the processor has an instruction for it.
#if defined(__CUDA_ARCH__)
#define HFR_FUSED 1
HFR_INLINE float fused(float x, float y, float z) { return __fmaf_rn(x, y, z); }
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define HFR_FUSED 1
HFR_INLINE float fused(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
#endif

// What happens at a position besides the cell (one byte per row and position, made by hf_recurrent.scan.ops):
// padding, which the state passes through; the state before it is zero.
enum Flags : unsigned char { kMasked = 1, kDrop = 2 };

// ---- complex numbers ------------------------------------------------------------------------------------------------

template <class T>
struct Complex {
  T re, im;
  Complex() = default;
  HFR_INLINE Complex(T re_, T im_ = T(0)) : re(re_), im(im_) {}
};

template <class T>
HFR_INLINE Complex<T> operator+(Complex<T> x, Complex<T> y) { return {x.re + y.re, x.im + y.im}; }
template <class T>
HFR_INLINE Complex<T> operator-(Complex<T> x, Complex<T> y) { return {x.re - y.re, x.im - y.im}; }
template <class T>
HFR_INLINE Complex<T> operator*(Complex<T> x, Complex<T> y) {
  return {x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re};
}
template <class T>
HFR_INLINE Complex<T> operator*(T x, Complex<T> y) { return {x * y.re, x * y.im}; }
template <class T>
HFR_INLINE Complex<T> plus_real(Complex<T> x, T y) { return {x.re + y, x.im}; }
template <class T>
HFR_INLINE T plus_real(T x, T y) { return x + y; }
// a h + x, of which h is known last: two operations follow it, where x added to the product makes it three.
template <class T>
HFR_INLINE Complex<T> step_real(Complex<T> a, Complex<T> h, T x) {
  return {a.re * h.re + (x - a.im * h.im), a.re * h.im + a.im * h.re};
}
template <class T>
HFR_INLINE T step_real(T a, T h, T x) { return a * h + x; }
template <class T>
HFR_INLINE Complex<T> conj(Complex<T> x) { return {x.re, -x.im}; }
template <class T>
HFR_INLINE T conj(T x) { return x; }
template <class T>
HFR_INLINE T real(Complex<T> x) { return x.re; }
template <class T>
HFR_INLINE T real(T x) { return x; }

HFR_INLINE bool is_zero(float x) { return x == 0; }
HFR_INLINE bool is_zero(double x) { return x == 0; }
template <class T>
HFR_INLINE bool is_zero(Complex<T> x) { return x.re == 0 && x.im == 0; }

HFR_INLINE bool is_finite(float x) { return x - x == 0; }
HFR_INLINE bool is_finite(double x) { return x - x == 0; }
template <class T>
HFR_INLINE bool is_finite(Complex<T> x) { return is_finite(x.re) && is_finite(x.im); }

// ---- 16-bit storage -------------------------------------------------------------------------------------------------

struct BFloat16 { unsigned short bits; };
struct Float16 { unsigned short bits; };

HFR_INLINE float to_float(BFloat16 x) { return float_from_bits((unsigned int)x.bits << 16); }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
// GPUs have instructions for the conversions.
HFR_INLINE float to_float(Float16 x) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
  return value;
}

HFR_INLINE void from_float(float x, BFloat16& out) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(x)); }
HFR_INLINE void from_float(float x, Float16& out) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(x)); }
#else
// Integer forms of the conversions: branch-free, so that a compiler without native 16-bit types still vectorises them.
HFR_INLINE float to_float(Float16 x) {
  // The exponent is moved by a multiplication with 2^112, which also normalises subnormals; 31 becomes 255 (inf, NaN).
  unsigned int magnitude = (unsigned int)(x.bits & 0x7fffu) << 13;
  unsigned int bits = bits_from_float(float_from_bits(magnitude) * 5.192296858534828e33f);
  bits |= magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
  return float_from_bits(bits | ((unsigned int)(x.bits & 0x8000u) << 16));
}

HFR_INLINE void from_float(float x, BFloat16& out) {
  unsigned int bits = bits_from_float(x);
  unsigned int rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
  unsigned int quiet = (bits >> 16) | 0x40u;
  out.bits = (unsigned short)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

HFR_INLINE void from_float(float x, Float16& out) {
  unsigned int bits = bits_from_float(x);
  unsigned int magnitude = bits & 0x7fffffffu;
  // Below 2^-14 the sum with 0.5 puts the rounded subnormal into the low mantissa bits.
  unsigned int subnormal = bits_from_float(float_from_bits(magnitude) + 0.5f) - 0x3f000000u;
  unsigned int normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;  // exponent - 112, ties to even
  unsigned int special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  unsigned int half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x47800000u ? special : half;
  out.bits = (unsigned short)(half | ((bits >> 16) & 0x8000u));
}
#endif

// ---- storage <-> state ----------------------------------------------------------------------------------------------

template <class Storage> struct StateOf { using type = Storage; };
template <> struct StateOf<BFloat16> { using type = float; };
template <> struct StateOf<Float16> { using type = float; };
template <class T> struct StateOf<Complex<T>> { using type = Complex<typename StateOf<T>::type>; };

template <class T> HFR_INLINE T load(T x) { return x; }
HFR_INLINE float load(BFloat16 x) { return to_float(x); }
HFR_INLINE float load(Float16 x) { return to_float(x); }
HFR_INLINE Complex<float> load(Complex<BFloat16> x) { return {to_float(x.re), to_float(x.im)}; }
HFR_INLINE Complex<float> load(Complex<Float16> x) { return {to_float(x.re), to_float(x.im)}; }

template <class T> HFR_INLINE void store(T x, T& out) { out = x; }
HFR_INLINE void store(float x, BFloat16& out) { from_float(x, out); }
HFR_INLINE void store(float x, Float16& out) { from_float(x, out); }
HFR_INLINE void store(Complex<float> x, Complex<BFloat16>& out) { from_float(x.re, out.re), from_float(x.im, out.im); }
HFR_INLINE void store(Complex<float> x, Complex<Float16>& out) { from_float(x.re, out.re), from_float(x.im, out.im); }

// ---- elementary functions -------------------------------------------------------------------------------------------

// 1 / x, on GPUs within 1 ulp for x from 1e-37 to 1e38.
#ifdef __CUDA_ARCH__
HFR_INLINE float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
#else
HFR_INLINE float reciprocal(float x) { return 1.0f / x; }
#endif
HFR_INLINE double reciprocal(double x) { return 1.0 / x; }

// exp(x) for |x| <= 87 by 2^n e^r, |r| <= ln(2)/2, with the polynomial of degree 6 whose largest relative error is the least
// (3e-9, so that rounding is all that is seen): within 1.5 ulp, branch-free, NaN stays NaN.
#ifdef __CUDA_ARCH__
// By the GPU's own 2^x (within 2 ulp): x log2(e) in two parts, of which the second, below one ulp of the first, enters as a
// factor 1 + ln(2) low.
HFR_INLINE float power_of_two(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

HFR_INLINE float exponential_within(float x) {
  const float high = x * 1.44269504f;
  const float low = __fmaf_rn(x, 1.44269504f, -high) + x * 1.92596303e-8f;
  const float power = power_of_two(high);
  return __fmaf_rn(power, low * 0.693147181f, power);
}
#else
HFR_INLINE float exponential_within(float x) {
  float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the integer part ends up in the low mantissa bits
  float n = shifted - 12582912.0f;
  float r = x - n * 0.693145752f;
  r = r - n * 1.42860677e-6f;
  float p = 1.38144672e-3f;
  p = p * r + 8.36878084e-3f;
  p = p * r + 4.16683927e-2f;
  p = p * r + 1.66665196e-1f;
  p = p * r + 4.9999994e-1f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  unsigned int scale = (bits_from_float(shifted) + 127u) << 23;
  return p * float_from_bits(scale);
}
#endif

// exp(x), the argument clamped to the range of normal floats, which the logistic function below cannot tell from the true
// values.
HFR_INLINE float exponential(float x) {
  x = x > 87.0f ? 87.0f : x;
  x = x < -87.0f ? -87.0f : x;
  return exponential_within(x);
}

#ifdef __CUDACC_RTC__
HFR_INLINE double exponential(double x) { return exp(x); }
#else
HFR_INLINE double exponential(double x) { return __builtin_exp(x); }
#endif

// exp(x) and exp(x) - 1 for |x| <= 87, each to full relative precision, by the polynomial above: with q = e^r - 1 they are
// 2^n q + 2^n and 2^n q + (2^n - 1), where 2^n - 1 has no sign that would cancel.
HFR_INLINE void exponentials_within(float x, float& value, float& less_one) {
  const float shifted = x * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  float r = x - n * 0.693145752f;
  r = r - n * 1.42860677e-6f;
  float q = 1.38144672e-3f;
  q = q * r + 8.36878084e-3f;
  q = q * r + 4.16683927e-2f;
  q = q * r + 1.66665196e-1f;
  q = q * r + 4.9999994e-1f;
  q = (q * r) * r + r;
  const float scale = float_from_bits((bits_from_float(shifted) + 127u) << 23);
  value = scale * q + scale;
  less_one = scale * q + (scale - 1.0f);
}

// The same for any x, infinite beyond that range.
HFR_INLINE void exponentials(float x, float& value, float& less_one) {
  exponentials_within(x > 87.0f ? 87.0f : x < -87.0f ? -87.0f : x, value, less_one);
  const float beyond = x > 87.0f ? float_from_bits(0x7f800000u) : 0.0f;
  value += beyond, less_one += beyond;
}

HFR_INLINE void exponentials(double x, double& value, double& less_one) {
#ifdef __CUDACC_RTC__
  value = exp(x), less_one = expm1(x);
#else
  value = __builtin_exp(x), less_one = __builtin_expm1(x);
#endif
}

// cos(x) + i sin(x) of x = r + quadrant pi/2, |r| <= pi/4, plus `nothing`, by polynomials of degree 7 and 8.
// cosine_less_one: cos(x) - 1, to full relative precision.
HFR_INLINE Complex<float> unit(float r, unsigned int quadrant, float nothing, float& cosine_less_one) {
  const float r2 = r * r;
  float sine = -1.95146316e-4f;
  sine = sine * r2 + 8.33215605e-3f;
  sine = sine * r2 - 1.66666545e-1f;
  sine = sine * r2 * r + r;
  float cosine = 2.44377298e-5f;
  cosine = cosine * r2 - 1.38873614e-3f;
  cosine = cosine * r2 + 4.16666467e-2f;
  const float fall = cosine * r2 * r2 - 0.5f * r2;
  cosine = fall + 1.0f;
  const float first = (quadrant & 1u) ? sine : cosine, second = (quadrant & 1u) ? cosine : sine;
  const Complex<float> u = {float_from_bits(bits_from_float(first) ^ ((quadrant + 1u) & 2u) << 30) + nothing,
                            float_from_bits(bits_from_float(second) ^ (quadrant & 2u) << 30) + nothing};
  cosine_less_one = (quadrant & 3u) ? u.re - 1.0f : fall;
  return u;
}

constexpr float kFewTurns = 32768;
#ifdef HFR_FUSED
// The same of x + rest for |x| <= kFewTurns, without double precision, which GPUs convert to slowly and vectors have half as
// many of: with fused operations two parts of pi/2 leave no more than 4e-11.
HFR_INLINE Complex<float> unit_of_few_turns(float x, float rest, float& cosine_less_one) {
  const float shifted = fused(x, 0.636619772f, 12582912.0f), n = shifted - 12582912.0f;
  const float r = fused(n, 4.37113883e-8f, fused(n, -1.57079637f, x)) + rest;
  return unit(r, bits_from_float(shifted), 0.0f, cosine_less_one);
}
#endif

// The same of x + rest for any x and a rest of 0.01 at most, within 2 ulp of the larger of the two, branch-free. The multiple of
// pi/2 nearest to x is taken off in double precision, in which one constant does for all |x| < 2^30; beyond, where neighbouring
// numbers lie more than twenty turns apart, it is NaN.
HFR_INLINE Complex<float> unit(float x, float rest, float& cosine_less_one) {
#ifdef __CUDA_ARCH__
  if (x < kFewTurns && x > -kFewTurns) return unit_of_few_turns(x, rest, cosine_less_one);
#endif
  const double rounding = 6755399441055744.0;  // 1.5 * 2^52: the integer part ends up in the low mantissa bits
  const double n = (double)x * 0.63661977236758134 + rounding;
  const float r = (float)((double)x - (n - rounding) * 1.5707963267948966) + rest;
  const float nothing = x < 1073741824.0f && x > -1073741824.0f ? 0.0f : float_from_bits(0x7fc00000u);
  return unit(r, low_bits(n), nothing, cosine_less_one);
}

// What rounding takes off x y (`product` is x y, rounded): of an angle of 27 a millionth, more than its sine is off. Where that
// is not `within` kFewTurns, up to 0.01.
template <bool within>
HFR_INLINE float rest_of_product(float x, float y, float product) {
#ifdef HFR_FUSED
  const float rest = fused(x, y, -product);
#else
  const float rest = (float)((double)x * (double)y - (double)product);
#endif
  if (within) return rest;
  const float below = rest < 0.01f ? rest : 0.01f;
  return below > -0.01f ? below : -0.01f;
}

template <bool within>
HFR_INLINE double rest_of_product(double, double, double) { return 0; }

// The same in double precision, by Taylor's series, of which the terms left out are below 5e-17.
HFR_INLINE Complex<double> unit(double x, double, double& cosine_less_one) {
  const double rounding = 6755399441055744.0;
  const double shifted = x * 0.63661977236758134 + rounding, n = shifted - rounding;
  // pi/2 in three parts, of which the first two have 33 bits: their products with n are exact to |x| = 2^20, and with fused
  // operations beyond.
  const double r = ((x - n * 1.5707963267341256) - n * 6.077100506303966e-11) - n * 2.0222662487959506e-21;
  const double r2 = r * r;
  double sine = 2.8114572543455206e-15;
  sine = sine * r2 - 7.647163731819816e-13;
  sine = sine * r2 + 1.6059043836821613e-10;
  sine = sine * r2 - 2.505210838544172e-08;
  sine = sine * r2 + 2.7557319223985893e-06;
  sine = sine * r2 - 0.0001984126984126984;
  sine = sine * r2 + 0.008333333333333333;
  sine = sine * r2 - 0.16666666666666666;
  sine = sine * r2 * r + r;
  double cosine = -1.5619206968586225e-16;
  cosine = cosine * r2 + 4.779477332387385e-14;
  cosine = cosine * r2 - 1.1470745597729725e-11;
  cosine = cosine * r2 + 2.08767569878681e-09;
  cosine = cosine * r2 - 2.755731922398589e-07;
  cosine = cosine * r2 + 2.48015873015873e-05;
  cosine = cosine * r2 - 0.001388888888888889;
  cosine = cosine * r2 + 0.041666666666666664;
  cosine = cosine * r2 - 0.5;
  const double fall = cosine * r2;
  cosine = fall + 1.0;
  const unsigned int quadrant = low_bits(shifted);
  const double first = (quadrant & 1u) ? sine : cosine, second = (quadrant & 1u) ? cosine : sine;
  const double nothing = x < 1073741824.0 && x > -1073741824.0 ? 0.0 : (double)float_from_bits(0x7fc00000u);
  const Complex<double> u = {((quadrant + 1u) & 2u ? -first : first) + nothing,
                             (quadrant & 2u ? -second : second) + nothing};
  cosine_less_one = (quadrant & 3u) ? u.re - 1.0 : fall;
  return u;
}

template <class T>
HFR_INLINE Complex<T> unit(T x) {
  T cosine_less_one;
  return unit(x, T(0), cosine_less_one);
}

// ---- complex directions ---------------------------------------------------------------------------------------------

// x / |x| and |x|; 1 and 0 for zero. The squares neither overflow nor vanish: both parts are first divided by the larger.
template <class T>
HFR_INLINE Complex<T> direction(Complex<T> x, T& size) {
  const T re = x.re < T(0) ? -x.re : x.re, im = x.im < T(0) ? -x.im : x.im;
  const T largest = re > im ? re : im, scale = largest > T(0) ? largest : T(1);
  const T u = largest > T(0) ? x.re / scale : T(1), v = x.im / scale;
  const T length = square_root(u * u + v * v);
  size = largest * length;
  return {u / length, v / length};
}

#ifdef __CUDA_ARCH__
// The same of |x| <= 1e37 by the GPU's own reciprocal square root (within 2 ulp), the parts first moved by a power of two. A
// subnormal |x| is 0.
HFR_INLINE Complex<float> direction_within(Complex<float> x, float& size) {
  const float re = x.re < 0 ? -x.re : x.re, im = x.im < 0 ? -x.im : x.im;
  const unsigned int exponent = bits_from_float(re > im ? re : im) & 0x7f800000u;
  const float scale = float_from_bits(0x7f000000u - exponent), u = scale * x.re, v = scale * x.im, square = u * u + v * v;
  float inverse;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(square));
  const bool zero = square == 0;
  size = zero ? 0.0f : square * inverse * float_from_bits(exponent);
  return {zero ? 1.0f : u * inverse, zero ? 0.0f : v * inverse};
}
#endif

// ---- how exactly ----------------------------------------------------------------------------------------------------

constexpr float kWithin = 40;
constexpr float kNormal = 80;  // whose exponentials are normal numbers, and their reciprocals

// What cells compute exponentials and angles with, their `Math`. `Any` is one as exact for arguments of any size. The first is
// to the type's own precision.
struct Exact {
  using Any = Exact;
  static constexpr bool within = false;

  template <class T>
  HFR_INLINE static T exponential(T x) { return hfr::exponential(x); }
  template <class T>
  HFR_INLINE static void exponentials(T x, T& value, T& less_one) { hfr::exponentials(x, value, less_one); }
  template <class T>
  HFR_INLINE static Complex<T> unit(T x) { return hfr::unit(x); }
  template <class T>
  HFR_INLINE static Complex<T> unit(T x, T rest, T& cosine_less_one) { return hfr::unit(x, rest, cosine_less_one); }
  template <class T>
  HFR_INLINE static Complex<T> direction(Complex<T> x, T& size) { return hfr::direction(x, size); }
};

// The same numbers for floats whose gates are at most kWithin, exponents kNormal and angles kFewTurns, without the clamps: of
// several in a row, compilers make branches, and leave the loop as it is.
struct ExactWithin {
  using Any = Exact;
  static constexpr bool within = true;

  HFR_INLINE static float exponential(float x) { return exponential_within(x); }
  HFR_INLINE static void exponentials(float x, float& value, float& less_one) { exponentials_within(x, value, less_one); }
  HFR_INLINE static Complex<float> unit(float x, float rest, float& cosine_less_one) {
#ifdef HFR_FUSED
    return unit_of_few_turns(x, rest, cosine_less_one);
#else
    return hfr::unit(x, rest, cosine_less_one);
#endif
  }
  HFR_INLINE static Complex<float> unit(float x) {
    float cosine_less_one;
    return unit(x, 0.0f, cosine_less_one);
  }
#ifdef __CUDA_ARCH__
  HFR_INLINE static Complex<float> direction(Complex<float> x, float& size) { return direction_within(x, size); }
#else
  HFR_INLINE static Complex<float> direction(Complex<float> x, float& size) { return hfr::direction(x, size); }
#endif
};

struct Short;

// For tensors of 16 bits whose gates and angles are at most kWithin, so that nothing overflows. exp(x) is 2^n 2^f, |f| <= 1/2,
// with 2^f = 1 + f q(f), q the polynomial of degree 3 whose largest relative error is the least: exp(x) and, near zero,
// 1 - exp(x) are within 2e-5 of themselves, a hundredth of bfloat16's rounding and a twelfth of float16's. It does not grow
// over time: where e is off by a factor 1 + d, so is (1 - a) / a with a = 1 / (1 + e) or e / (1 + e), and a is rounded as
// ever. So a state remembers 1 / (1 - a) steps to 2e-5, a long memory like a short one. Angles have no such complement and stay
// as exact as floats; only their quarter turns are taken off in single precision, pi/2 being two numbers, the first of 8 bits.
// GPUs have functions of their own, which are within 2e-6 there.
struct ShortWithin {
  using Any = Short;
  static constexpr bool within = true;

#ifdef __CUDA_ARCH__
  HFR_INLINE static float exponential(float x) { return power_of_two(x * 1.44269504f); }

  HFR_INLINE static Complex<float> unit(float x) {
    const float n = __fmaf_rn(x, 0.159154943f, 12582912.0f) - 12582912.0f;  // whole turns
    const float r = __fmaf_rn(n, 1.74845553e-7f, __fmaf_rn(n, -6.28318548f, x));
    return {__cosf(r), __sinf(r)};
  }

  HFR_INLINE static Complex<float> direction(Complex<float> x, float& size) { return direction_within(x, size); }
#else
  HFR_INLINE static float exponential(float x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: the integer part ends up in the low mantissa bits
    const float shifted = x * 1.44269504f + magic;
    const float f = x * 1.44269504f - (shifted - magic);
    float q = 9.61811095e-3f;
    q = q * f + 5.58372885e-2f;
    q = q * f + 2.40232527e-1f;
    q = q * f + 6.93136871e-1f;
    return float_from_bits(bits_from_float(q * f + 1.0f) + (bits_from_float(shifted) << 23));
  }

  HFR_INLINE static Complex<float> unit(float x) {
    const float magic = 12582912.0f;
    const float shifted = x * 0.636619772f + magic, n = shifted - magic;
    const float r = (x - n * 1.5703125f) - n * 4.83826795e-4f;
    float cosine_less_one;
    return hfr::unit(r, bits_from_float(shifted), 0.0f, cosine_less_one);
  }

  HFR_INLINE static Complex<float> direction(Complex<float> x, float& size) { return hfr::direction(x, size); }
#endif
};

// The same for any arguments: those within are computed alike, up to how a compiler fuses multiplications and sums.
struct Short {
  using Any = Short;
  static constexpr bool within = false;

  HFR_INLINE static float exponential(float x) {
    x = x > 87.0f ? 87.0f : x;
    x = x < -87.0f ? -87.0f : x;
    return ShortWithin::exponential(x);
  }

  HFR_INLINE static Complex<float> unit(float x) { return hfr::unit(x); }
  HFR_INLINE static Complex<float> direction(Complex<float> x, float& size) { return hfr::direction(x, size); }
};

// sigma(x) and sigma(-x) = 1 - sigma(x), both to full relative precision: the complement of a saturated gate is the decay
// that a long memory lives on, so it must not be formed by subtraction.
template <class Math = Exact, class T>
HFR_INLINE void logistic(T x, T& value, T& complement) {
  T limit = x < T(-87) && !Math::within && sizeof(T) > 4 ? T(-87) : x;  // keeps e finite, as `exponential` does a float's
  T e = Math::exponential(-limit);
  value = reciprocal(T(1) + e);
  complement = e * value;
}

// x sigma(x), and its derivative.
template <class T>
HFR_INLINE T silu(T x) {
  T value, complement;
  logistic(x, value, complement);
  return x * value;
}

template <class T>
HFR_INLINE T silu_slope(T x) {
  T value, complement;
  logistic(x, value, complement);
  return value + x * value * complement;
}

// ---- complex quotients ----------------------------------------------------------------------------------------------

// 1 / x, for |x| between 1e-9 and 1e28: moved by 2^30 both ways, so that the squares stay in a float's range.
template <class T>
HFR_INLINE Complex<T> inverse(Complex<T> x) {
  constexpr T scale = T(9.31322574615478516e-10);
  const T re = scale * x.re, im = scale * x.im, size = reciprocal(re * re + im * im);
  return {scale * (re * size), -scale * (im * size)};
}

}  // namespace hfr
