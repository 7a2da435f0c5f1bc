// The functions of elementwise.h for GPUs, compiled by NVRTC (hf_recurrent.scan.elementwise_cuda).
//
// Memory bounds them. A thread takes kWidth channels, 16 bytes, of kSteps positions; the loads of a few of them are in flight.
// The gradient of d is summed over a block's positions, and in a fixed order by the caller over blocks.
//
// HFR_TYPE, HFR_FUNCTION (its name in elementwise.h), HFR_WIDTH (channels of a thread).
#include "device.h"
#include "elementwise.h"

namespace hfr {

typedef HFR_TYPE T;
typedef StateOf<T>::type State;
typedef HFR_FUNCTION<State> Function;
typedef Packed<T, HFR_WIDTH> Few;

constexpr int kWidth = HFR_WIDTH, kInputs = Function::kInputs, kMostInputs = 3;
constexpr int kRows = 4, kThreads = kRows * kWarp;
constexpr int kSteps = 16;  // positions of a thread
constexpr int kAhead = 4, kAheadBack = sizeof(T) == 8 ? 4 : 2;  // whose loads are in flight

// Of a (batch, length, channels) tensor whose channels lie side by side.
struct Strided {
  const T* data;
  Index b, l;
};

struct Problem {
  Index batch, length, channels;
  Strided inputs[kMostInputs];
  const State* d;  // (channels), where the function skips
  const State* m;  // (batch, channels), or null for ones
};

// Arguments of kernels are pointers and 64-bit integers only.
#define HFR_ELEMENTWISE                                                                                                  \
  Index batch, Index length, Index channels, const T *x, Index x_b, Index x_l, const T *y, Index y_b, Index y_l, const T *z, \
      Index z_b, Index z_l, const State *d, const State *m
#define HFR_ELEMENTWISE_ARGUMENTS \
  { batch, length, channels, {{x, x_b, x_l}, {y, y_b, y_l}, {z, z_b, z_l}}, d, m }

// Where a thread stands: some positions, counted through the batch, and some channels.
struct Walk {
  const Problem& p;
  Index group;  // of kWidth channels
  Index place, end;
  Index b, t;
  State d[kWidth];

  HFR_DEVICE Walk(const Problem& problem) : p(problem), place(0), end(0), b(0), t(0) {
    group = Index(blockIdx.x) * kWarp + threadIdx.x % kWarp;
    fill(d, State(1));
    if (!Function::kSkips || !has_channels()) return;
#pragma unroll
    for (int c = 0; c < kWidth; ++c) d[c] = p.d[group * kWidth + c];
  }

  HFR_DEVICE Index groups() const { return p.channels / kWidth; }
  HFR_DEVICE bool has_channels() const { return group < groups(); }

  HFR_DEVICE void go_to(Index item) {
    place = (item * kRows + threadIdx.x / kWarp) * kSteps;
    const Index all = p.batch * p.length;
    end = place + kSteps < all ? place + kSteps : all;
    b = place / p.length, t = place % p.length;
  }

  HFR_DEVICE void advance() {
    ++place;
    if (++t == p.length) t = 0, ++b;
  }

  HFR_DEVICE Few read(const Strided& x) const {
    Few few;
    few.read(x.data + b * x.b + t * x.l + group * kWidth);
    return few;
  }

  HFR_DEVICE State scale(int c) const { return p.m ? p.m[b * p.channels + group * kWidth + c] : State(1); }

  // Counted in groups: the compiler then sees that they are aligned, and writes them at once.
  HFR_DEVICE void write(T* out, const State (&values)[kWidth]) const { Few(values).write(out, place * groups() + group); }

  // Calls visit(numbers) at each position, with those of the `count` tensors.
  template <int ahead_of, int count, class Visit>
  HFR_DEVICE void each(const Strided (&tensors)[count], const Visit& visit) {
    while (place < end) {
      Few few[ahead_of][count];
      Walk ahead = *this;
#pragma unroll
      for (int u = 0; u < ahead_of; ++u) {
        if (ahead.place >= end) break;
#pragma unroll
        for (int i = 0; i < count; ++i) few[u][i] = ahead.read(tensors[i]);
        ahead.advance();
      }
#pragma unroll
      for (int u = 0; u < ahead_of; ++u) {
        if (place >= end) break;
        visit(few[u]);
        advance();
      }
    }
  }
};

// The shares of the gradient of d of a block's warps.
struct Sums {
  State of[kRows][kWarp][kWidth];

  HFR_DEVICE void write(const Walk& walk, const State (&sum)[kWidth], Index item, State* grad_d) {
    const int lane = threadIdx.x % kWarp, row = threadIdx.x / kWarp;
#pragma unroll
    for (int c = 0; c < kWidth; ++c) of[row][lane][c] = sum[c];
    __syncthreads();
    for (int c = row; walk.has_channels() && c < kWidth; c += kRows) {
      State total = of[0][lane][c];
#pragma unroll
      for (int other = 1; other < kRows; ++other) total += of[other][lane][c];
      grad_d[item * walk.p.channels + walk.group * kWidth + c] = total;
    }
    __syncthreads();
  }
};

}  // namespace hfr

using namespace hfr;

extern "C" __global__ void __launch_bounds__(kThreads) elementwise_forward(HFR_ELEMENTWISE, T* out) {
  const Problem p = HFR_ELEMENTWISE_ARGUMENTS;
  Walk walk(p);
  if (!walk.has_channels()) return;
  for (Index item = blockIdx.y; item * kRows * kSteps < p.batch * p.length; item += gridDim.y) {
    walk.go_to(item);
    walk.each<kAhead>(p.inputs, [&](const Few(&x)[kMostInputs]) {
      State o[kWidth];
#pragma unroll
      for (int c = 0; c < kWidth; ++c) o[c] = Function::forward(x[0].get(c), x[1].get(c), x[2].get(c), walk.d[c], walk.scale(c));
      walk.write(out, o);
    });
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
elementwise_backward(HFR_ELEMENTWISE, const T* grad, Index grad_b, Index grad_l, T* grad_x, T* grad_y, T* grad_z,
                     State* grad_d) {
  __shared__ Sums sums;
  const Problem p = HFR_ELEMENTWISE_ARGUMENTS;
  Walk walk(p);
  for (Index item = blockIdx.y; item * kRows * kSteps < p.batch * p.length; item += gridDim.y) {
    State sum[kWidth];
    fill(sum, State(0));
    walk.go_to(item);
    const Strided tensors[kMostInputs + 1] = {p.inputs[0], p.inputs[1], p.inputs[2], {grad, grad_b, grad_l}};
    if (walk.has_channels()) {
      walk.each<kAheadBack>(tensors, [&](const Few(&x)[kMostInputs + 1]) {
        State dx[kWidth], dy[kWidth], dz[kWidth];
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
          sum[c] += Function::backward(x[0].get(c), x[1].get(c), x[2].get(c), walk.d[c], walk.scale(c), x[3].get(c), dx[c],
                                       dy[c], dz[c]);
        }
        walk.write(grad_x, dx);
        walk.write(grad_y, dy);
        if (kInputs == 3) walk.write(grad_z, dz);
      });
    }
    if (Function::kSkips) sums.write(walk, sum, item, grad_d);
  }
}
