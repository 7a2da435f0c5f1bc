// What the kernels for GPUs share: how time is divided, and how what a piece of it makes of a state is put together.
//
// Time is walked in "flow": positions in the order in which the state (forward) or its gradient (backward) passes them.
//
// Where the blocks are too few to fill the GPU, time is also split into segments of whole tiles, by reduce-then-scan: one
// kernel finds what each segment makes of the state that enters it, and the blocks of the next put together what entered
// theirs. The inputs are then read twice: (2 + 3) / 3 of the bytes forward, (2 + 5) / 5 backward; so time is split only where
// that pays. A block has 32 KiB in flight, and memory of 4 TB/s that answers after 0.8 us needs 3.2 MB in flight, 100 blocks:
// on 132 multiprocessors. Fewer blocks reach their share of that; 5/3 of the bytes at full speed is the better bargain below
// 60 blocks. So: where there is less than half a block for each multiprocessor (hf_recurrent.scan.cuda_kernels). One row of
// 1024 channels in 128 narrow blocks, each of 8 channels and read once, was measured on an H200: 0.64 of the copy's speed in
// float32 and 0.46 in bfloat16, where two passes reach 0.61 and 0.60. scan_cuda.cu can also read such rows once, in tiles that
// many blocks take in turn (HFR_ONCE), which has not been measured yet.
#pragma once
#include "cells.h"

namespace hfr {

typedef long long Index;  // of elements: tensors may have more than 2^31

#define HFR_DEVICE __device__ __forceinline__

constexpr int kWarp = 32;

// A (batch, length, channels) tensor: strides in elements.
template <class T>
struct View {
  const T* data;
  Index b, l, d;
};

// N elements that are loaded and stored by one instruction; a single one is aligned as PyTorch aligns it.
template <class T, int N>
struct alignas(N * sizeof(T)) Vector {
  T v[N];
};

// Two 16-bit numbers in one register.
template <class U>
HFR_DEVICE unsigned pair_of(float low, float high) {
  U first, second;
  from_float(low, first), from_float(high, second);
  return first.bits | (unsigned)second.bits << 16;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <>
HFR_DEVICE unsigned pair_of<BFloat16>(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

template <>
HFR_DEVICE unsigned pair_of<Float16>(float low, float high) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
#endif

// The number in a half of a register.
template <class U>
HFR_DEVICE float half_of(unsigned pair, int j) {
  U x;
  x.bits = (unsigned short)(pair >> 16 * j);
  return to_float(x);
}

// N numbers of a tensor side by side, moved by one instruction: between memory and what they are computed with. Those of 16 bits
// stay in pairs, as they come, until they are used: whoever takes them apart waits for their loads.
template <class U, int N, bool paired = sizeof(U) == 2 && N % 2 == 0>
struct Packed {
  typedef typename StateOf<U>::type Number;
  Vector<U, N> raw;

  Packed() = default;
  HFR_DEVICE explicit Packed(const Number (&x)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) store(x[j], raw.v[j]);
  }
  HFR_DEVICE Number get(int j) const { return load(raw.v[j]); }
  HFR_DEVICE void read(const U* from, Index i = 0) { raw = reinterpret_cast<const Vector<U, N>*>(from)[i]; }
  HFR_DEVICE void write(U* to, Index i) const { reinterpret_cast<Vector<U, N>*>(to)[i] = raw; }
};

template <class U, int N>
struct Packed<U, N, true> {
  typedef Vector<unsigned, N / 2> Pairs;
  Pairs raw;

  Packed() = default;
  HFR_DEVICE explicit Packed(const float (&x)[N]) {
#pragma unroll
    for (int j = 0; j < N; j += 2) raw.v[j / 2] = pair_of<U>(x[j], x[j + 1]);
  }
  HFR_DEVICE float get(int j) const { return half_of<U>(raw.v[j / 2], j % 2); }
  HFR_DEVICE void read(const U* from, Index i = 0) { raw = reinterpret_cast<const Pairs*>(from)[i]; }
  HFR_DEVICE void write(U* to, Index i) const { reinterpret_cast<Pairs*>(to)[i] = raw; }
};

// Complex numbers of two 16-bit ones.
template <class U, int N>
struct ComplexPairs {
  typedef Vector<unsigned, N> Pairs;
  Pairs raw;

  ComplexPairs() = default;
  HFR_DEVICE explicit ComplexPairs(const Complex<float> (&x)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) raw.v[j] = pair_of<U>(x[j].re, x[j].im);
  }
  HFR_DEVICE Complex<float> get(int j) const { return {half_of<U>(raw.v[j], 0), half_of<U>(raw.v[j], 1)}; }
  HFR_DEVICE void read(const Complex<U>* from, Index i = 0) { raw = reinterpret_cast<const Pairs*>(from)[i]; }
  HFR_DEVICE void write(Complex<U>* to, Index i) const { reinterpret_cast<Pairs*>(to)[i] = raw; }
};

template <int N>
struct Packed<Complex<BFloat16>, N, false> : ComplexPairs<BFloat16, N> {
  using ComplexPairs<BFloat16, N>::ComplexPairs;
};
template <int N>
struct Packed<Complex<Float16>, N, false> : ComplexPairs<Float16, N> {
  using ComplexPairs<Float16, N>::ComplexPairs;
};

// state -> product * state + sum. `cut`: the state was dropped on the way, whatever it was. A product that has overflowed
// says nothing of a state of zero.
template <class State>
HFR_DEVICE State passed_on(State state, State product, State sum, bool cut) {
  return cut || is_zero(state) ? sum : product * state + sum;
}

// Where a block stands: one row of the batch and one segment of time.
struct Work {
  Index b, segment, begin, end;

  HFR_DEVICE Work(Index item, Index length, Index segments, Index segment_length)
      : b(item / segments), segment(item % segments), begin(segment * segment_length), end(begin + segment_length) {
    if (end > length) end = length;
  }
};

// What the arguments of all scans begin with, as hf_recurrent.scan.cuda_kernels.Scan has it.
template <class State>
struct Scan {
  Index batch, length, channels, reverse;
  const unsigned char* flags;  // (batch, length), or null
  Index segments, segment_length;
  State *products, *sums;  // (segments, batch, one row's state): what each segment but one makes of a state
  unsigned char* cuts;     // (segments, batch)

  HFR_DEVICE Index position(Index step) const { return reverse ? length - 1 - step : step; }

  // Past the end of what is walked all is padding.
  HFR_DEVICE unsigned char flag(Index b, Index step, Index end) const {
    return step >= end ? kMasked : flags ? flags[b * length + position(step)] : 0;
  }
};

// Arguments of kernels are pointers and 64-bit integers only.
#define HFR_SCAN                                                                                                     \
  Index batch, Index length, Index channels, Index reverse, const unsigned char *flags, Index segments,             \
      Index segment_length, State *products, State *sums, unsigned char *cuts
#define HFR_SCAN_ARGUMENTS \
  { batch, length, channels, reverse, flags, segments, segment_length, products, sums, cuts }

// The state (or its gradient) that enters a segment, from what the segments from `first` on, up to it, make of `s`. `place`
// reads and writes one thread's n numbers of a state.
template <class Place, class Problem, class State, int n>
HFR_DEVICE void enter_segment(const Problem& p, const Place& place, Index b, Index first, Index segment, State (&s)[n]) {
  for (Index other = first; other != segment; other += first < segment ? 1 : -1) {
    const Index row = other * p.batch + b;
    State product[n], sum[n];
    place.read(p, p.products, row, product);
    place.read(p, p.sums, row, sum);
#pragma unroll
    for (int i = 0; i < n; ++i) s[i] = passed_on(s[i], product[i], sum[i], p.cuts[row]);
  }
}

template <class Place, class Problem, class State, int n>
HFR_DEVICE void leave_segment(const Problem& p, const Place& place, Index b, Index segment, const State (&product)[n],
                              const State (&sum)[n], bool cut) {
  const Index row = segment * p.batch + b;
  place.write(p, product, p.products, row);
  place.write(p, sum, p.sums, row);
  if (blockIdx.x == 0 && threadIdx.x == 0) p.cuts[row] = cut;
}

// In all threads of the block.
template <class State, int n>
HFR_DEVICE bool all_finite(const State (&s)[n]) {
  bool finite = true;
#pragma unroll
  for (int i = 0; i < n; ++i) finite = finite && is_finite(s[i]);
  return __syncthreads_and(finite);
}

template <class State, int n>
HFR_DEVICE void fill(State (&s)[n], State value) {
#pragma unroll
  for (int i = 0; i < n; ++i) s[i] = value;
}

// Sums v over the lanes of a warp that differ in the bits from `least` to below `end`. Halves are exchanged, so that each
// thread ends with n of the N sums (N a power of two), from `first` on, in v[0 ... n): (N - n) shuffles in place of N for each
// doubling. Those that `write` hold all sums once.
template <int least, int end, int N, class Real>
HFR_DEVICE void sum_over_lanes(Real (&v)[N], int& first, int& n, bool& write) {
  first = 0, n = N, write = true;
#pragma unroll
  for (int lanes = end / 2; lanes >= least; lanes /= 2) {
    const bool upper = threadIdx.x & lanes;
    if (n > 1) {
      n /= 2;
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        if (i >= n) break;
        const Real send = upper ? v[i] : v[i + n], keep = upper ? v[i + n] : v[i];
        v[i] = keep + __shfl_xor_sync(0xffffffffu, send, lanes);
      }
      if (upper) first += n;
    } else {
      v[0] += __shfl_xor_sync(0xffffffffu, v[0], lanes);
      write = write && !upper;
    }
  }
}

}  // namespace hfr
