// The short causal depthwise convolution of convolution.h for GPUs, compiled by NVRTC (hf_recurrent.scan.convolution_cuda).
//
// Memory bounds it: x is read and y written forward, x and dy are read and dx written backward. A thread takes kWidth channels
// and walks kSteps positions, with the inputs under the taps in registers; the loads of kAhead positions are in flight. The
// inputs just before them, which another warp reads too, come from the cache. The flags of a warp's positions are read once, a
// lane each, and voted on: most positions are neither padding nor the first of a document, and such tiles are walked without
// a branch. Backward walks on past its positions until no input of them is under a tap, and computes those few g again, so
// that each gradient is written once, by one thread; those of the weights are summed over a block's warps and, in a fixed
// order, by the caller over blocks.
//
// HFR_TYPE, HFR_TAPS, HFR_WIDTH (channels of a thread), HFR_SILU (0 or 1).
#include "convolution.h"
#include "device.h"

namespace hfr {

typedef HFR_TYPE T;
typedef StateOf<T>::type State;
typedef Packed<T, HFR_WIDTH> Few;

constexpr int kTaps = HFR_TAPS, kWidth = HFR_WIDTH, kRows = 4, kThreads = kRows * kWarp;
constexpr int kSteps = kWarp;  // of a thread: so that a warp votes on their flags at once
constexpr int kAhead = sizeof(T) == 8 ? 4 : 8, kAheadBack = sizeof(T) == 2 ? 8 : 4;

struct Problem {
  Index batch, length, channels, blocks;  // blocks: of kRows kSteps positions, in a row of the batch
  const T* x;
  Index x_b, x_l;              // strides; channels lie side by side
  const T* state;              // (batch, taps - 1, channels), or null for zeros
  const unsigned char* flags;  // (batch, length), or null
  const T* weight;             // (channels, taps)
  const T* bias;               // (channels), or null
};

// Arguments of kernels are pointers and 64-bit integers only.
#define HFR_CONVOLUTION                                                                                                  \
  Index batch, Index length, Index channels, Index blocks, const T *x, Index x_b, Index x_l, const T *state,             \
      const unsigned char *flags, const T *weight, const T *bias
#define HFR_CONVOLUTION_ARGUMENTS {batch, length, channels, blocks, x, x_b, x_l, state, flags, weight, bias}

// A block's weights, and at last its biases.
struct Weights {
  Vector<State, kWidth> of[kTaps + 1][kWarp];

  HFR_DEVICE void read(const Problem& p) {
    for (int i = threadIdx.x; i < (kTaps + 1) * kWarp * kWidth; i += kThreads) {
      const int j = i / (kWarp * kWidth), c = i % (kWarp * kWidth);
      const Index channel = Index(blockIdx.x) * kWarp * kWidth + c;
      State value = State(0);
      if (channel < p.channels && j < kTaps) value = load(p.weight[channel * kTaps + j]);
      if (channel < p.channels && j == kTaps && p.bias) value = load(p.bias[channel]);
      of[j][c / kWidth].v[c % kWidth] = value;
    }
    __syncthreads();
  }

  HFR_DEVICE State get(int j, int c) const { return of[j][threadIdx.x % kWarp].v[c]; }
};

// Where a thread stands: one row of the batch, some positions, some channels; and the inputs under its taps.
struct Walk {
  const Problem& p;
  const Weights& weights;
  Index b, group;  // of kWidth channels
  int begin, end;  // without a position where there is nothing for this thread
  // Flags of the kWarp positions from `begin` on, and of those before them, a bit each.
  unsigned masked, dropped, masked_before, dropped_before;
  Taps<int, kTaps> taps;
  State values[kTaps][kWidth];

  HFR_DEVICE Walk(const Problem& problem, const Weights& its_weights, Index item)
      : p(problem), weights(its_weights), b(item / p.blocks), masked(0), dropped(0), masked_before(0), dropped_before(0) {
    group = Index(blockIdx.x) * kWarp + threadIdx.x % kWarp;
    begin = int(item % p.blocks * (kRows * kSteps)) + threadIdx.x / kWarp * kSteps;
    const int length = int(p.length);
    end = begin + kSteps < length ? begin + kSteps : length;
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      taps.at[j] = taps.kNowhere;
      fill(values[j], State(0));
    }
  }

  HFR_DEVICE unsigned char read_flag(int t) const { return p.flags ? p.flags[b * p.length + t] : 0; }

  // In all lanes of a warp, those without channels too.
  HFR_DEVICE void vote() {
    if (!p.flags) return;
    const int t = begin + threadIdx.x % kWarp, before = t - kWarp;
    const unsigned char own = t < end ? read_flag(t) : 0, other = begin < end && before >= 0 ? read_flag(before) : 0;
    masked = __ballot_sync(0xffffffffu, own & kMasked), dropped = __ballot_sync(0xffffffffu, own & kDrop);
    masked_before = __ballot_sync(0xffffffffu, other & kMasked), dropped_before = __ballot_sync(0xffffffffu, other & kDrop);
  }

  HFR_DEVICE unsigned char flag_before(int t) const {
    const int bit = t - (begin - kWarp);
    if (bit < 0) return read_flag(t);
    return (masked_before >> bit & 1 ? kMasked : 0) | (dropped_before >> bit & 1 ? kDrop : 0);
  }

  HFR_DEVICE bool is_masked(int t) const { return masked >> (t - begin) & 1; }
  HFR_DEVICE bool is_dropped(int t) const { return dropped >> (t - begin) & 1; }
  HFR_DEVICE bool is_plain(int t, int count) const {
    return t + count <= end && !((masked | dropped) >> (t - begin) & ((1u << count) - 1));
  }
  HFR_DEVICE bool is_all_masked() const { return !(~masked & (0xffffffffu >> (kWarp - (end - begin)))); }

  HFR_DEVICE Index groups() const { return p.channels / kWidth; }
  HFR_DEVICE bool has_channels() const { return group < groups(); }

  HFR_DEVICE const T* input(int t) const { return p.x + b * p.x_b + t * p.x_l + group * kWidth; }

  // Of a contiguous (batch, count, channels) tensor, counted in groups: the compiler then sees that they are aligned, and
  // writes them at once.
  HFR_DEVICE Index place(Index count, Index i) const { return (b * count + i) * groups() + group; }

  HFR_DEVICE void look_back() {
    taps.look_back([this](int t) { return flag_before(t); }, begin, p.state, kTaps);
#pragma unroll
    for (int j = 1; j < kTaps; ++j) {
      const int at = taps.at[j];
      if (at == taps.kNowhere) continue;
      Few few;
      few.read(at >= 0 ? input(at) : p.state + place(kTaps - 1, kTaps - 1 + at) * kWidth);
#pragma unroll
      for (int c = 0; c < kWidth; ++c) values[j][c] = few.get(c);
    }
  }

  HFR_DEVICE void drop() {
#pragma unroll
    for (int j = 1; j < kTaps; ++j) {
      taps.at[j] = taps.kNowhere;
      fill(values[j], State(0));
    }
  }

  HFR_DEVICE void push(int t, const Few& x) {
    taps.push(t, kTaps);
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
#pragma unroll
      for (int j = 0; j + 1 < kTaps; ++j) values[j][c] = values[j + 1][c];
      values[kTaps - 1][c] = x.get(c);
    }
  }

  HFR_DEVICE State sum(int c) const {
    State s = weights.get(kTaps, c);
#pragma unroll
    for (int j = 0; j < kTaps; ++j) s += weights.get(j, c) * values[j][c];
    return s;
  }
};

// ---- forward ---------------------------------------------------------------------------------------------------------

struct Forward : Walk {
  T* out;
  using Walk::Walk;

  HFR_DEVICE void write(int t, const State (&y)[kWidth]) const {
    Few(y).write(out, place(p.length, t));
  }

  HFR_DEVICE void visit(int t, const Few& x) {
    push(t, x);
    State y[kWidth];
#pragma unroll
    for (int c = 0; c < kWidth; ++c) y[c] = HFR_SILU ? silu(sum(c)) : sum(c);
    write(t, y);
  }

  HFR_DEVICE void run(T* new_state) {
    if (begin >= end) return;
    if (end == p.length || !is_all_masked()) look_back();
    for (int t = begin; t < end;) {
      Few x[kAhead];
      if (is_plain(t, kAhead)) {
#pragma unroll
        for (int u = 0; u < kAhead; ++u) x[u].read(input(t + u));
#pragma unroll
        for (int u = 0; u < kAhead; ++u) visit(t + u, x[u]);
        t += kAhead;
        continue;
      }
      if (is_masked(t)) {
        State zeros[kWidth];
        fill(zeros, State(0));
        write(t, zeros);
      } else {
        if (is_dropped(t)) drop();
        x[0].read(input(t));
        visit(t, x[0]);
      }
      ++t;
    }
    if (end != p.length) return;
#pragma unroll
    for (int j = 1; j < kTaps; ++j) Few(values[j]).write(new_state, place(kTaps - 1, j - 1));
  }
};

// ---- backward --------------------------------------------------------------------------------------------------------

struct Backward : Walk {
  const T* grad_out;
  Index grad_b, grad_l;
  const T* grad_new_state;
  T *grad_x, *grad_state;
  State grads[kTaps][kWidth];            // of the inputs under the taps
  State grad_weight[kTaps + 1][kWidth];  // of the bias last

  HFR_DEVICE Backward(const Problem& problem, const Weights& its_weights, Index item) : Walk(problem, its_weights, item) {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) fill(grads[j], State(0));
#pragma unroll
    for (int j = 0; j <= kTaps; ++j) fill(grad_weight[j], State(0));
  }

  HFR_DEVICE bool is_mine(int at) const { return at < 0 ? begin == 0 && at != taps.kNowhere : at >= begin && at < end; }

  HFR_DEVICE bool any_is_mine() const {
    bool any = false;
#pragma unroll
    for (int j = 1; j < kTaps; ++j) any = any || is_mine(taps.at[j]);
    return any;
  }

  HFR_DEVICE void write(int at, const State (&grad)[kWidth]) const {
    if (at >= 0) {
      Few(grad).write(grad_x, place(p.length, at));
    } else {
      Few(grad).write(grad_state, place(kTaps - 1, kTaps - 1 + at));
    }
  }

  // The input under tap j gets no more.
  HFR_DEVICE void retire(int j) const {
    if (is_mine(taps.at[j])) write(taps.at[j], grads[j]);
  }

  HFR_DEVICE void retire_all() const {
#pragma unroll
    for (int j = 1; j < kTaps; ++j) retire(j);
  }

  HFR_DEVICE void visit(int t, const Few& x, const Few& dy, bool mine) {
    push(t, x);
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
#pragma unroll
      for (int j = 0; j + 1 < kTaps; ++j) grads[j][c] = grads[j + 1][c];
      grads[kTaps - 1][c] = State(0);
      const State g = HFR_SILU ? dy.get(c) * silu_slope(sum(c)) : dy.get(c);
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        grads[j][c] += weights.get(j, c) * g;
        if (mine) grad_weight[j][c] += g * values[j][c];
      }
      if (mine) grad_weight[kTaps][c] += g;
    }
    retire(0);
  }

  HFR_DEVICE const T* slope(int t) const { return grad_out + b * grad_b + t * grad_l + group * kWidth; }

  HFR_DEVICE void run() {
    if (begin >= end) return;
    if (begin == 0 || !is_all_masked()) look_back();  // the state is that thread's, even if all its positions are padding
    for (int t = begin; t < end;) {
      Few x[kAheadBack], dy[kAheadBack];
      if (is_plain(t, kAheadBack)) {
#pragma unroll
        for (int u = 0; u < kAheadBack; ++u) x[u].read(input(t + u)), dy[u].read(slope(t + u));
#pragma unroll
        for (int u = 0; u < kAheadBack; ++u) visit(t + u, x[u], dy[u], true);
        t += kAheadBack;
        continue;
      }
      if (is_masked(t)) {
        State zeros[kWidth];
        fill(zeros, State(0));
        write(t, zeros);
      } else {
        if (is_dropped(t)) retire_all(), drop();
        x[0].read(input(t)), dy[0].read(slope(t));
        visit(t, x[0], dy[0], true);
      }
      ++t;
    }
    int t = end;
    for (; t < p.length && any_is_mine(); ++t) {
      const unsigned char flags = read_flag(t);
      if (flags & kMasked) continue;
      if (flags & kDrop) {
        retire_all(), drop();
        break;
      }
      Few x, dy;
      x.read(input(t)), dy.read(slope(t));
      visit(t, x, dy, false);
    }
    if (t == p.length) {
#pragma unroll
      for (int j = 1; j < kTaps; ++j) {
        if (!is_mine(taps.at[j])) continue;
        Few left;
        left.read(grad_new_state, place(kTaps - 1, j - 1));
#pragma unroll
        for (int c = 0; c < kWidth; ++c) grads[j][c] += left.get(c);
      }
    }
    retire_all();
  }
};

struct Sums {
  Vector<State, kWidth> of[kRows][kTaps + 1][kWarp];

  // Adds up those of a block's warps, and writes them: (batch, blocks, taps + 1, channels).
  HFR_DEVICE void write(const Backward& walk, Index item, State* grad_weight) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int j = 0; j <= kTaps; ++j) {
#pragma unroll
      for (int c = 0; c < kWidth; ++c) of[threadIdx.x / kWarp][j][lane].v[c] = walk.grad_weight[j][c];
    }
    __syncthreads();
    for (int j = threadIdx.x / kWarp; walk.has_channels() && j <= kTaps; j += kRows) {
      Vector<State, kWidth> sum = of[0][j][lane];
      for (int row = 1; row < kRows; ++row) {
#pragma unroll
        for (int c = 0; c < kWidth; ++c) sum.v[c] += of[row][j][lane].v[c];
      }
      reinterpret_cast<Vector<State, kWidth>*>(grad_weight)[(item * (kTaps + 1) + j) * walk.groups() + walk.group] = sum;
    }
    __syncthreads();
  }
};

}  // namespace hfr

using namespace hfr;

extern "C" __global__ void __launch_bounds__(kThreads) convolution_forward(HFR_CONVOLUTION, T* out, T* new_state) {
  __shared__ Weights weights;
  const Problem p = HFR_CONVOLUTION_ARGUMENTS;
  weights.read(p);
  for (Index item = blockIdx.y; item < p.batch * p.blocks; item += gridDim.y) {
    Forward walk(p, weights, item);
    walk.out = out;
    walk.vote();
    if (walk.has_channels()) walk.run(new_state);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 3)
convolution_backward(HFR_CONVOLUTION, const T* grad_out, Index grad_b, Index grad_l, const T* grad_new_state, T* grad_x,
                     T* grad_state, State* grad_weight) {
  __shared__ Weights weights;
  __shared__ Sums sums;
  const Problem p = HFR_CONVOLUTION_ARGUMENTS;
  weights.read(p);
  for (Index item = blockIdx.y; item < p.batch * p.blocks; item += gridDim.y) {
    Backward walk(p, weights, item);
    walk.grad_out = grad_out, walk.grad_b = grad_b, walk.grad_l = grad_l;
    walk.grad_new_state = grad_new_state, walk.grad_x = grad_x, walk.grad_state = grad_state;
    walk.vote();
    if (walk.has_channels()) walk.run();
    sums.write(walk, item, grad_weight);
  }
}
