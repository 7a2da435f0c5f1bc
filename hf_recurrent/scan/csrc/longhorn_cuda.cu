// Longhorn's loops for GPUs. Each channel has m states, all driven by the same k and q. A block takes kChannels channels of a
// row of the batch, kLanes neighbouring threads to a channel, each with kPer of its states in registers, and walks time in
// tiles of kSteps positions: k and q, and each channel's rate and push, are computed once into shared memory, while the next
// tile's loads are in flight. Nothing of the size batch x length x channels x m is ever written: backward starts each tile
// from a checkpoint of the state before it (m / kSteps numbers for each number of x, in memory of its own that lives no longer
// than the call), recomputes the tile's states into registers, and walks it back. The gradients of k and q, sums over all
// channels, are formed within warps, then over the warps of a block, then over blocks, always in the same order.
//
// What bounds it is arithmetic: for each channel and position at m = 16 about 100 instructions forward and 450 backward,
// against 6 and 10 bytes in bfloat16.
//
// Compiled by NVRTC for what the tensors hold, HFR_TYPE, and m, HFR_STATES.
#include "device.h"

using namespace hfr;

typedef HFR_TYPE T;
typedef StateOf<T>::type State;
typedef LonghornCell<State> Cell;

constexpr int kStates = HFR_STATES;
constexpr int kThreads = 128;
constexpr int kLanes = kStates <= 16 ? 4 : kStates <= 64 ? 8 : 16;
constexpr int kPerAtLeast = (kStates + kLanes - 1) / kLanes;
constexpr int kPer = kPerAtLeast <= 1 ? 1 : kPerAtLeast <= 2 ? 2 : kPerAtLeast <= 4 ? 4 : 8;
constexpr int kPadded = kLanes * kPer;  // states past m have keys and queries of zero, and stay zero
constexpr int kChannels = kThreads / kLanes;
constexpr int kSteps = kPer <= 4 ? 8 : 4;  // so that a tile's states fit into registers beside all else
constexpr int kBlocks = kPer * sizeof(State) <= 16 ? 3 : kPer * sizeof(State) <= 32 ? 2 : 1;  // to a multiprocessor, at least
constexpr int kWarps = kThreads / kWarp;
constexpr int kElements = (kSteps * kChannels + kThreads - 1) / kThreads;  // of a tile of x, to a thread
constexpr int kKeys = (kSteps * kStates + kThreads - 1) / kThreads;        // of a tile of k, to a thread
static_assert(kPadded >= kStates, "at most 128 states");
constexpr bool kFull = kStates == kPadded;  // every thread has states
constexpr int kWide = !kFull ? 1 : kPer * (int)sizeof(State) > 16 ? 16 / (int)sizeof(State) : kPer;

typedef Vector<State, kWide> Pack;  // states as they are read and written at once

struct Problem : Scan<State> {
  View<T> x, dt, k, q;
};

struct alignas(16) Shared {
  State k[kSteps][kPadded], q[kSteps][kPadded];
  State e[kSteps][kChannels], push[kSteps][kChannels], grad[kSteps][kChannels];
  State out[kSteps][kChannels], grad_e[kSteps][kChannels];  // out: o, or backward the gradient of push
  State sums[kWarps][kSteps][2 * kPadded];                   // backward: of the gradients of k and q
  State kk[kSteps], grad_kk[kSteps];
  unsigned char flags[kSteps];
};

// ---- a tile of the inputs --------------------------------------------------------------------------------------------

// What a tile is read for: the state's way (k, dt, x), the readout (q), its gradient (k, dt, q, grad_o), or both.
template <bool pushes, bool reads, bool grads>
struct Tile {
  T x[kElements], dt[kElements], grad[kElements];
  T k[kKeys], q[kKeys];
  unsigned char flag;

  HFR_DEVICE void fetch(const Problem& p, const View<T>& grad_o, Index b, Index start, Index end) {
    const Index first = (Index)blockIdx.x * kChannels;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int at = i * kThreads + threadIdx.x, step = at / kChannels;
      const Index d = first + at % kChannels;
      x[i] = dt[i] = grad[i] = T();
      if (step >= kSteps || start + step >= end || d >= p.channels) continue;
      const Index t = p.position(start + step);
      dt[i] = p.dt.data[b * p.dt.b + t * p.dt.l + d * p.dt.d];
      if (pushes) x[i] = p.x.data[b * p.x.b + t * p.x.l + d * p.x.d];
      if (grads) grad[i] = grad_o.data[b * grad_o.b + t * grad_o.l + d * grad_o.d];
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int at = i * kThreads + threadIdx.x, step = at / kStates, j = at % kStates;
      k[i] = q[i] = T();
      if (step >= kSteps || start + step >= end) continue;
      const Index t = p.position(start + step);
      k[i] = p.k.data[b * p.k.b + t * p.k.l + j * p.k.d];
      if (reads) q[i] = p.q.data[b * p.q.b + t * p.q.l + j * p.q.d];
    }
    if (threadIdx.x < kSteps) flag = p.flag(b, start + threadIdx.x, end);
  }

  // Into shared memory, ready to be walked. slope: for each of this thread's elements, that of its rate over dt.
  HFR_DEVICE void settle(Shared& shared, State (&slope)[kElements]) const {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int at = i * kThreads + threadIdx.x, step = at / kStates, j = at % kStates;
      if (step >= kSteps) continue;
      shared.k[step][j] = load(k[i]);
      if (reads) shared.q[step][j] = load(q[i]);
    }
    for (int at = threadIdx.x; at < kSteps * (kPadded - kStates); at += kThreads) {
      const int step = at / (kPadded - kStates + (kPadded == kStates)), j = kStates + at % (kPadded - kStates + (kPadded == kStates));
      shared.k[step][j] = shared.q[step][j] = State(0);
    }
    if (threadIdx.x < kSteps) shared.flags[threadIdx.x] = flag;
    __syncthreads();
    if (threadIdx.x < kSteps) {
      State kk = 0;
      for (int j = 0; j < kStates; ++j) kk += shared.k[threadIdx.x][j] * shared.k[threadIdx.x][j];
      shared.kk[threadIdx.x] = kk;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int at = i * kThreads + threadIdx.x, step = at / kChannels, channel = at % kChannels;
      if (step >= kSteps) continue;
      const State e = Cell::rate(load(dt[i]), shared.kk[step], slope[i]);
      shared.e[step][channel] = e;
      if (pushes) shared.push[step][channel] = e * load(x[i]);
      if (grads) shared.grad[step][channel] = load(grad[i]);
    }
    __syncthreads();
  }
};

// ---- one thread's states ---------------------------------------------------------------------------------------------

struct Place {
  int lane, channel;  // within the block
  Index d;

  HFR_DEVICE Place()
      : lane(threadIdx.x % kLanes), channel(threadIdx.x / kLanes), d((Index)blockIdx.x * kChannels + channel) {}

  // Of (rows, channels, m), from a multiple of 16 bytes on; states past m, and of channels past the last, are zero and stay out.
  HFR_DEVICE void read(const Problem& p, const State* from, Index row, State (&s)[kPer]) const {
#pragma unroll
    for (int i = 0; i < kPer; i += kWide) {
      Pack pack;
      fill(pack.v, State(0));
      if (from && exists(p, i)) pack = reinterpret_cast<const Pack*>(from)[at(p, row, i)];
#pragma unroll
      for (int j = 0; j < kWide; ++j) s[i + j] = pack.v[j];
    }
  }

  HFR_DEVICE void write(const Problem& p, const State (&s)[kPer], State* to, Index row) const {
#pragma unroll
    for (int i = 0; i < kPer; i += kWide) {
      Pack pack;
#pragma unroll
      for (int j = 0; j < kWide; ++j) pack.v[j] = s[i + j];
      if (exists(p, i)) reinterpret_cast<Pack*>(to)[at(p, row, i)] = pack;
    }
  }

  HFR_DEVICE bool exists(const Problem& p, int i) const {
    return d < p.channels && (kFull || lane * kPer + i < kStates);
  }

  // The number of the pack that begins with this thread's i-th state.
  HFR_DEVICE Index at(const Problem& p, Index row, int i) const {
    return ((row * p.channels + d) * kStates + lane * kPer + i) / kWide;
  }
};

// ---- forward ---------------------------------------------------------------------------------------------------------

// From step `from` on, writing from `begin` on: o, unless that is null, and checkpoints, unless they are.
HFR_DEVICE void walk(const Problem& p, Shared& shared, const Place& place, Index b, Index from, Index begin, Index end,
                     State (&s)[kPer], T* o, State* checkpoints) {
  const Index tiles = (p.length + kSteps - 1) / kSteps;
  const View<T> none = {};
  Tile<true, true, false> tile;
  tile.fetch(p, none, b, from, end);
  for (Index start = from; start < end; start += kSteps) {
    State slope[kElements];
    tile.settle(shared, slope);
    tile.fetch(p, none, b, start + kSteps, end);
    if (checkpoints && start >= begin) place.write(p, s, checkpoints, b * tiles + start / kSteps);
    const int count = end - start < kSteps ? (int)(end - start) : kSteps;
#pragma unroll 4
    for (int step = 0; step < count; ++step) {
      const int flag = shared.flags[step];
      const State e = shared.e[step][place.channel], push = shared.push[step][place.channel];
      State out = 0;
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        const int j = place.lane * kPer + i;
        if (flag & kDrop) s[i] = State(0);
        if (!(flag & kMasked)) s[i] = Cell::forward(s[i], e, push, shared.k[step][j]);
        out += s[i] * shared.q[step][j];
      }
      if (!o) continue;
#pragma unroll
      for (int lanes = 1; lanes < kLanes; lanes *= 2) out += __shfl_xor_sync(0xffffffffu, out, lanes);
      if (place.lane == 0) shared.out[step][place.channel] = out;
    }
    __syncthreads();
    for (int at = threadIdx.x; o && start >= begin && at < count * kChannels; at += kThreads) {
      const Index d = (Index)blockIdx.x * kChannels + at % kChannels;
      const Index t = p.position(start + at / kChannels);
      if (d < p.channels) store(shared.out[at / kChannels][at % kChannels], o[(b * p.length + t) * p.channels + d]);
    }
  }
}

HFR_DEVICE void forward_segments(const Problem& p, Shared& shared) {
  const Place place;
  const View<T> none = {};
  for (Index item = blockIdx.y; item < p.batch * p.segments; item += gridDim.y) {
    const Work work(item, p.length, p.segments, p.segment_length);
    if (work.segment == p.segments - 1) continue;
    State s[kPer], product[kPer];
    bool cut = false;
    fill(s, State(0)), fill(product, State(1));
    Tile<true, false, false> tile;
    tile.fetch(p, none, work.b, work.begin, work.end);
    for (Index start = work.begin; start < work.end; start += kSteps) {
      State slope[kElements];
      tile.settle(shared, slope);
      tile.fetch(p, none, work.b, start + kSteps, work.end);
#pragma unroll 4
      for (int step = 0; step < kSteps; ++step) {  // past the end all is masked
        const int flag = shared.flags[step];
        const State e = shared.e[step][place.channel], push = shared.push[step][place.channel];
        cut = cut || (flag & kDrop);
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
          const State k = shared.k[step][place.lane * kPer + i];
          if (flag & kDrop) s[i] = State(0);
          if (flag & kMasked) continue;
          s[i] = Cell::forward(s[i], e, push, k);
          product[i] = Cell::forward(product[i], e, State(0), k);
        }
      }
      __syncthreads();
    }
    leave_segment(p, place, work.b, work.segment, product, s, cut);
  }
}

// ---- backward --------------------------------------------------------------------------------------------------------

struct Gradients {
  T *x, *dt;      // (batch, length, channels)
  State *k, *q;   // (batch, blocks of channels, length, m)
};

HFR_DEVICE void store_gradients(const Problem& p, Shared& shared, const Gradients& to, const T (&x)[kElements],
                                const State (&slope)[kElements], Index b, Index start, int count, bool writes) {
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const int at = i * kThreads + threadIdx.x, step = at / kChannels, channel = at % kChannels;
    if (step >= kSteps) continue;  // whole warps
    const Index d = (Index)blockIdx.x * kChannels + channel;
    State kk = 0;
    if (step < count) {
      const State e = shared.e[step][channel], push = shared.out[step][channel];
      const State grad_e = shared.grad_e[step][channel] + push * load(x[i]);
      kk = -grad_e * e * e;
      const Index offset = (b * p.length + p.position(start + step)) * p.channels + d;
      if (writes && d < p.channels) {
        store(push * e, to.x[offset]);
        store(grad_e * slope[i], to.dt[offset]);
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < kChannels; lanes *= 2) kk += __shfl_xor_sync(0xffffffffu, kk, lanes);
    if (channel == 0) shared.grad_kk[step] = kk;
  }
  __syncthreads();
  for (int at = threadIdx.x; writes && at < count * kStates; at += kThreads) {
    const int step = at / kStates, j = at % kStates;
    State k = State(2) * shared.k[step][j] * shared.grad_kk[step], q = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      k += shared.sums[warp][step][j];
      q += shared.sums[warp][step][kPadded + j];
    }
    const Index row = (b * gridDim.x + blockIdx.x) * p.length + p.position(start + step);
    to.k[row * kStates + j] = k;
    to.q[row * kStates + j] = q;
  }
  __syncthreads();
}

// From the last tile that begins before `end` down to `begin`, writing below `writes_below`.
HFR_DEVICE void walk_back(const Problem& p, Shared& shared, const Place& place, const View<T>& grad_o,
                          const State* checkpoints, const Gradients& to, Index b, Index begin, Index writes_below, Index end,
                          State (&carry)[kPer]) {
  const Index tiles = (p.length + kSteps - 1) / kSteps;
  Index start = (end - 1) / kSteps * kSteps;
  Tile<true, true, true> tile;
  tile.fetch(p, grad_o, b, start, end);
  for (; start >= begin; start -= kSteps) {
    const int count = end - start < kSteps ? (int)(end - start) : kSteps;
    State slope[kElements], s[kPer], after[kSteps][kPer];
    T x[kElements];
    tile.settle(shared, slope);
#pragma unroll
    for (int i = 0; i < kElements; ++i) x[i] = tile.x[i];
    if (start > begin) tile.fetch(p, grad_o, b, start - kSteps, end);
    place.read(p, checkpoints, b * tiles + start / kSteps, s);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int flag = shared.flags[step];
      const State e = shared.e[step][place.channel], push = shared.push[step][place.channel];
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        after[step][i] = step > 0 ? after[step > 0 ? step - 1 : 0][i] : s[i];
        if (flag & kDrop) after[step][i] = State(0);
        if (!(flag & kMasked)) {
          after[step][i] = Cell::forward(after[step][i], e, push, shared.k[step][place.lane * kPer + i]);
        }
      }
    }
#pragma unroll
    for (int step = kSteps - 1; step >= 0; --step) {
      if (step >= count) continue;
      const int flag = shared.flags[step];
      const State e = shared.e[step][place.channel], push = shared.push[step][place.channel];
      const State grad = shared.grad[step][place.channel];
      State v[2 * kPer], grad_push = 0, grad_e = 0;
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        const int j = place.lane * kPer + i;
        const State k = shared.k[step][j], g = carry[i] + grad * shared.q[step][j];
        v[i] = 0;
        v[kPer + i] = grad * after[step][i];
        carry[i] = g;
        if (!(flag & kMasked)) {
          State before = step > 0 ? after[step > 0 ? step - 1 : 0][i] : s[i];
          if (flag & kDrop) before = State(0);
          carry[i] = Cell::backward(before, e, push, k, g, grad_push, grad_e, v[i]);
        }
        if (flag & kDrop) carry[i] = State(0);
      }
      int first, n;
      bool write;
      sum_over_lanes<kLanes, kWarp>(v, first, n, write);
#pragma unroll
      for (int i = 0; i < 2 * kPer; ++i) {
        if (i >= n || !write) break;
        const int of = first + i, j = place.lane * kPer + of % kPer;
        shared.sums[threadIdx.x / kWarp][step][of < kPer ? j : kPadded + j] = v[i];
      }
      // Even lanes go on with the gradient of push, odd ones with that of e.
      const bool odd = threadIdx.x & 1;
      State both = (odd ? grad_e : grad_push) + __shfl_xor_sync(0xffffffffu, odd ? grad_push : grad_e, 1);
#pragma unroll
      for (int lanes = 2; lanes < kLanes; lanes *= 2) both += __shfl_xor_sync(0xffffffffu, both, lanes);
      if (place.lane == 0) shared.out[step][place.channel] = both;
      if (place.lane == 1) shared.grad_e[step][place.channel] = both;
    }
    __syncthreads();
    store_gradients(p, shared, to, x, slope, b, start, count, start < writes_below);
  }
}

HFR_DEVICE void backward_segments(const Problem& p, Shared& shared, const View<T>& grad_o) {
  const Place place;
  for (Index item = blockIdx.y; item < p.batch * p.segments; item += gridDim.y) {
    const Work work(item, p.length, p.segments, p.segment_length);
    if (work.segment == 0) continue;
    State carry[kPer], product[kPer];
    bool cut = false;
    fill(carry, State(0)), fill(product, State(1));
    Index start = (work.end - 1) / kSteps * kSteps;
    Tile<false, true, true> tile;
    tile.fetch(p, grad_o, work.b, start, work.end);
    for (; start >= work.begin; start -= kSteps) {
      State slope[kElements];
      tile.settle(shared, slope);
      if (start > work.begin) tile.fetch(p, grad_o, work.b, start - kSteps, work.end);
#pragma unroll 4
      for (int step = kSteps - 1; step >= 0; --step) {
        const int flag = shared.flags[step];
        const State e = shared.e[step][place.channel], grad = shared.grad[step][place.channel];
        cut = cut || (flag & kDrop);
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
          const int j = place.lane * kPer + i;
          const State k = shared.k[step][j];
          carry[i] += grad * shared.q[step][j];
          if (!(flag & kMasked)) {
            // The gradient passes as the state does.
            carry[i] = Cell::forward(carry[i], e, State(0), k);
            product[i] = Cell::forward(product[i], e, State(0), k);
          }
          if (flag & kDrop) carry[i] = State(0);
        }
      }
      __syncthreads();
    }
    leave_segment(p, place, work.b, work.segment, product, carry, cut);
  }
}

// ---- the kernels -----------------------------------------------------------------------------------------------------

#define HFR_PROBLEM                                                                                                       \
  HFR_SCAN, const T *x, Index x_b, Index x_l, Index x_d, const T *dt, Index dt_b, Index dt_l, Index dt_d, const T *k,     \
      Index k_b, Index k_l, Index k_d, const T *q, Index q_b, Index q_l, Index q_d
#define HFR_DESCRIBE                                                                                                       \
  __shared__ Shared shared;                                                                                                \
  const Problem p = {                                                                                                      \
      HFR_SCAN_ARGUMENTS, {x, x_b, x_l, x_d}, {dt, dt_b, dt_l, dt_d}, {k, k_b, k_l, k_d}, {q, q_b, q_l, q_d}};
#define HFR_KERNEL extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)

HFR_KERNEL longhorn_forward_segments(HFR_PROBLEM) {
  HFR_DESCRIBE
  forward_segments(p, shared);
}

// initial, final: (batch, channels, m), either may be null; they may be one where time is in one segment. o: null, or (batch,
// length, channels). checkpoints: null, or (batch, tiles, channels, m), the state before each.
HFR_KERNEL longhorn_forward(HFR_PROBLEM, T* o, State* checkpoints, const State* initial, State* final) {
  HFR_DESCRIBE
  const Place place;
  for (Index item = blockIdx.y; item < p.batch * p.segments; item += gridDim.y) {
    const Work work(item, p.length, p.segments, p.segment_length);
    State s[kPer];
    place.read(p, initial, work.b, s);
    enter_segment(p, place, work.b, 0, work.segment, s);
    Index start = work.begin;
    // As in scan_cuda.cu: what is not finite is not known from the products of segments.
    if (work.segment > 0 && !all_finite(s)) {
      start = 0;
      place.read(p, initial, work.b, s);
    }
    walk(p, shared, place, work.b, start, work.begin, work.end, s, o, checkpoints);
    if (final && work.end == p.length) place.write(p, s, final, work.b);
    __syncthreads();
  }
}

HFR_KERNEL longhorn_backward_segments(HFR_PROBLEM, const T* grad_o, Index g_b, Index g_l, Index g_d) {
  HFR_DESCRIBE
  const View<T> grad = {grad_o, g_b, g_l, g_d};
  backward_segments(p, shared, grad);
}

HFR_KERNEL longhorn_backward(HFR_PROBLEM, const T* grad_o, Index g_b, Index g_l, Index g_d, const State* checkpoints,
                             const State* grad_final, State* grad_initial, T* grad_x, T* grad_dt, State* grad_k,
                             State* grad_q) {
  HFR_DESCRIBE
  const View<T> grad = {grad_o, g_b, g_l, g_d};
  const Gradients to = {grad_x, grad_dt, grad_k, grad_q};
  const Place place;
  for (Index item = blockIdx.y; item < p.batch * p.segments; item += gridDim.y) {
    const Work work(item, p.length, p.segments, p.segment_length);
    State carry[kPer];
    place.read(p, grad_final, work.b, carry);
    enter_segment(p, place, work.b, p.segments - 1, work.segment, carry);
    Index end = work.end;
    if (work.end < p.length && !all_finite(carry)) {
      end = p.length;
      place.read(p, grad_final, work.b, carry);
    }
    walk_back(p, shared, place, grad, checkpoints, to, work.b, work.begin, work.end, end, carry);
    if (work.begin == 0) place.write(p, carry, grad_initial, work.b);
  }
}
