// The loops for GPUs. A block takes kChannels channels of a row of the batch and walks a segment of time in tiles. Within a
// tile, a thread has kSteps positions of kWidth channels in registers, loaded while the tile before was computed; it finds
// what its positions make of a state, one thread for each channel passes the states along the kParts threads of that
// channel, and then each runs its positions. So every byte is read once, however few channels there are for a
// multiprocessor, and sums are formed in the same order at every run.
//
// Compiled by NVRTC for one pair of types: HFR_CELL, a cell of cells.h, and HFR_TYPE, what the tensors hold; and for HFR_WIDTH
// channels to a thread, so that an access has 16 bytes (8 for 16-bit types, whose blocks would otherwise be too few), or 1
// where strides or alignment do not allow that.
#include "device.h"

using namespace hfr;

typedef HFR_CELL Cell;
typedef HFR_TYPE T;
typedef Cell::State State;

constexpr int kWidth = HFR_WIDTH;
constexpr int kThreads = 256;
constexpr int kRow = kWidth > 1 ? 8 : 32;  // threads side by side along the channels
constexpr int kParts = kThreads / kRow;    // threads one after the other in time
constexpr int kChannels = kRow * kWidth;
constexpr int kInputs = Cell::inputs;

typedef Vector<T, kWidth> Pack;
typedef Vector<State, kWidth> States;

// Positions that a thread takes at once, of so many bytes in the state type from each tensor: what leaves registers for two
// blocks on a multiprocessor. Backward has twice the tensors.
HFR_DEVICE constexpr int steps_for(int bytes) {
  int steps = bytes / (int)sizeof(State) / kWidth;
  return steps > 1 ? steps : 1;
}

struct Problem {
  Index batch, length, channels, reverse;
  const unsigned char* flags;  // (batch, length), or null
  Index segments, segment_length;
  State *products, *sums;     // (segments, batch, channels): what each segment but the last makes of a state
  unsigned char* cuts;        // (segments, batch)
};

struct alignas(16) Shared {
  State products[kParts][kChannels], sums[kParts][kChannels], entering[kParts][kChannels];
  bool cuts[kParts];
};

constexpr bool kSmooth = !Cell::first_may_be_constant;  // exponentials, which take registers of their own
constexpr bool kFewer = kInputs > 2 || kWidth == 1 || sizeof(State) > 4 || (kSmooth && sizeof(T) == 4);
constexpr int kBlocks = kSmooth && sizeof(State) > 4 ? 1 : 2;  // to a multiprocessor, at least

// ---- one thread's positions of a tile --------------------------------------------------------------------------------

// The two bits of each position's flags stand side by side in `flags`.
struct Forward {
  static constexpr int kSteps = steps_for(kFewer ? 32 : 64);

  struct Raw {
    Pack x[kSteps][kInputs];
    unsigned flags;
  };

  const Problem& p;
  const View<T> (&inputs)[3];
  T* h;
  Index b, d;
  State a[kSteps][kWidth], c[kSteps][kWidth];

  HFR_DEVICE Index position(Index flow) const { return p.reverse ? p.length - 1 - flow : flow; }

  HFR_DEVICE void end_segment(Shared&, Index, bool) {}

  HFR_DEVICE void fetch(Raw& raw, Index flow, Index end) const {
    raw.flags = 0;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (d >= p.channels || flow + i >= end) {
        raw.flags |= kMasked << 2 * i;
        continue;
      }
      Index t = position(flow + i);
      if (p.flags) raw.flags |= p.flags[b * p.length + t] << 2 * i;
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        raw.x[i][k] = *reinterpret_cast<const Pack*>(inputs[k].data + b * inputs[k].b + t * inputs[k].l + d * inputs[k].d);
      }
    }
  }

  HFR_DEVICE void summarise(const Raw& raw, States& product, States& sum, bool& cut) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (raw.flags >> 2 * i & kDrop) {
        cut = true;
        for (int j = 0; j < kWidth; ++j) sum.v[j] = State(0);
      }
      if (raw.flags >> 2 * i & kMasked) continue;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        State x[kInputs];
#pragma unroll
        for (int k = 0; k < kInputs; ++k) x[k] = load(raw.x[i][k].v[j]);
        Cell::coefficients(x, a[i][j], c[i][j]);
        product.v[j] = a[i][j] * product.v[j];
        sum.v[j] = a[i][j] * sum.v[j] + c[i][j];
      }
    }
  }

  HFR_DEVICE void run(const Raw& raw, States state, Index flow, Index begin, Index end) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (d >= p.channels || flow + i >= end) continue;
      Pack out;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if (raw.flags >> 2 * i & kDrop) state.v[j] = State(0);
        if (!(raw.flags >> 2 * i & kMasked)) state.v[j] = a[i][j] * state.v[j] + c[i][j];
        store(state.v[j], out.v[j]);
      }
      if (flow + i >= begin) *reinterpret_cast<Pack*>(h + (b * p.length + position(flow + i)) * p.channels + d) = out;
    }
  }
};

// The flow is against time: g = carry + grad_h, and the cell's backward makes the next carry, conj(a) g.
struct Backward {
  static constexpr int kSteps = steps_for(kInputs > 2 || kWidth == 1 ? 16 : 32);

  struct Raw {
    Pack x[kSteps][kInputs], grad[kSteps], before[kSteps];  // before: h of the position before
    unsigned flags;
  };

  const Problem& p;
  const View<T> (&inputs)[3];
  const View<T>& grad_h;
  const T* h;
  const State* initial;
  T* const (&grads)[3];
  State* totals;
  Index b, d;
  States total;  // of the gradient of inputs[0], where it is constant over time

  HFR_DEVICE Index position(Index flow) const { return p.reverse ? flow : p.length - 1 - flow; }

  HFR_DEVICE void end_segment(Shared& shared, Index at, bool owner) {
    if (!totals) return;
    *reinterpret_cast<States*>(&shared.sums[threadIdx.x / kRow][threadIdx.x % kRow * kWidth]) = total;
    for (int j = 0; j < kWidth; ++j) total.v[j] = State(0);
    __syncthreads();
    State sum(0);
    for (int i = 0; owner && i < kParts; ++i) sum = sum + shared.sums[i][threadIdx.x];
    if (owner) totals[at] = sum;
    __syncthreads();
  }

  HFR_DEVICE void fetch(Raw& raw, Index flow, Index end) const {
    raw.flags = 0;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (d >= p.channels || flow + i >= end) {
        raw.flags |= kMasked << 2 * i;
        continue;
      }
      Index t = position(flow + i);
      if (p.flags) raw.flags |= p.flags[b * p.length + t] << 2 * i;
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        raw.x[i][k] = *reinterpret_cast<const Pack*>(inputs[k].data + b * inputs[k].b + t * inputs[k].l + d * inputs[k].d);
      }
      raw.grad[i] = *reinterpret_cast<const Pack*>(grad_h.data + b * grad_h.b + t * grad_h.l + d * grad_h.d);
      if (h && flow + i + 1 < p.length) {  // a summary needs no h
        raw.before[i] = *reinterpret_cast<const Pack*>(h + (b * p.length + position(flow + i + 1)) * p.channels + d);
      }
    }
  }

  HFR_DEVICE void summarise(const Raw& raw, States& product, States& sum, bool& cut) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      // Past the end of the sequence there is neither a gradient nor a flag but kMasked.
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if (raw.flags >> 2 * i & kMasked) {
          sum.v[j] = sum.v[j] + load(raw.grad[i].v[j]);
          continue;
        }
        State x[kInputs], a, c;
#pragma unroll
        for (int k = 0; k < kInputs; ++k) x[k] = load(raw.x[i][k].v[j]);
        Cell::coefficients(x, a, c);
        product.v[j] = conj(a) * product.v[j];
        sum.v[j] = conj(a) * (sum.v[j] + load(raw.grad[i].v[j]));
      }
      if (raw.flags >> 2 * i & kDrop) {
        cut = true;
        for (int j = 0; j < kWidth; ++j) sum.v[j] = State(0);
      }
    }
  }

  HFR_DEVICE void run(const Raw& raw, States carry, Index flow, Index begin, Index end) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (d >= p.channels || flow + i >= end) continue;
      const bool drop = raw.flags >> 2 * i & kDrop, masked = raw.flags >> 2 * i & kMasked;
      Pack out[kInputs];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        State g = carry.v[j] + load(raw.grad[i].v[j]), dx[kInputs];
#pragma unroll
        for (int k = 0; k < kInputs; ++k) dx[k] = State(0);
        if (masked) {
          carry.v[j] = g;
        } else {
          State x[kInputs], previous = State(0);
#pragma unroll
          for (int k = 0; k < kInputs; ++k) x[k] = load(raw.x[i][k].v[j]);
          if (!drop && flow + i + 1 < p.length) previous = load(raw.before[i].v[j]);
          if (!drop && flow + i + 1 == p.length && initial) previous = initial[b * p.channels + d + j];
          carry.v[j] = Cell::backward(x, previous, g, dx);
        }
        if (drop) carry.v[j] = State(0);
        if (flow + i >= begin) total.v[j] = total.v[j] + dx[0];
#pragma unroll
        for (int k = 0; k < kInputs; ++k) store(dx[k], out[k].v[j]);
      }
      if (flow + i < begin) continue;
      Index offset = (b * p.length + position(flow + i)) * p.channels + d;
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        if (k > 0 || !totals) *reinterpret_cast<Pack*>(grads[k] + offset) = out[k];
      }
    }
  }
};

// ---- the walk of a block over its segment ----------------------------------------------------------------------------

// `from`: where the walk starts, at or before `begin`, from where on it writes. With `writes` false it only finds, in the
// threads of the first kChannels, what the walk makes of a state: product, state (from 0) and cut.
template <bool writes, class Pass>
HFR_DEVICE void walk(Pass& pass, Shared& shared, Index from, Index begin, Index end, State& product, State& state,
                     bool& cut) {
  constexpr int kSteps = Pass::kSteps, kTile = kParts * kSteps;
  const int column = threadIdx.x % kRow, part = threadIdx.x / kRow;
  typename Pass::Raw next = {};
  pass.fetch(next, from + part * kSteps, end);
  for (Index tile = from; tile < end; tile += kTile) {
    const Index flow = tile + part * kSteps;
    const typename Pass::Raw now = next;
    next = {};
    pass.fetch(next, flow + kTile, end);
    States products, sums;
    bool cut_here = false;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) products.v[j] = State(1), sums.v[j] = State(0);
    pass.summarise(now, products, sums, cut_here);
    *reinterpret_cast<States*>(&shared.products[part][column * kWidth]) = products;
    *reinterpret_cast<States*>(&shared.sums[part][column * kWidth]) = sums;
    if (column == 0) shared.cuts[part] = cut_here;
    __syncthreads();
    if (threadIdx.x < kChannels) {
#pragma unroll 8
      for (int i = 0; i < kParts; ++i) {
        const bool cut_there = shared.cuts[i];
        if (writes) shared.entering[i][threadIdx.x] = state;
        state = passed_on(state, shared.products[i][threadIdx.x], shared.sums[i][threadIdx.x], cut_there);
        product = shared.products[i][threadIdx.x] * product;
        cut = cut || cut_there;
      }
    }
    __syncthreads();
    if (writes) pass.run(now, *reinterpret_cast<const States*>(&shared.entering[part][column * kWidth]), flow, begin, end);
  }
}

template <class Pass>
HFR_DEVICE void summarise_segments(const Problem& p, Shared& shared, Pass& pass) {
  const Index channel = (Index)blockIdx.x * kChannels + threadIdx.x;
  for (Index item = blockIdx.y; item < p.batch * p.segments; item += gridDim.y) {
    const Work work(item, p.length, p.segments, p.segment_length);
    if (work.segment == p.segments - 1) continue;
    pass.b = work.b;
    State product(1), state(0);
    bool cut = false;
    walk<false>(pass, shared, work.begin, work.begin, work.end, product, state, cut);
    if (threadIdx.x < kChannels && channel < p.channels) {
      const Index at = (work.segment * p.batch + work.b) * p.channels + channel;
      p.products[at] = product;
      p.sums[at] = state;
      if (channel == 0) p.cuts[work.segment * p.batch + work.b] = cut;
    }
  }
}

// from, to: (batch, channels), the state (or its gradient) before and after the whole sequence. `from` may be null, for zero,
// and may be `to` where time is in one segment.
template <class Pass>
HFR_DEVICE void scan_segments(const Problem& p, Shared& shared, Pass& pass, const State* from, State* to) {
  const Index channel = (Index)blockIdx.x * kChannels + threadIdx.x;
  const bool owner = threadIdx.x < kChannels && channel < p.channels;
  for (Index item = blockIdx.y; item < p.batch * p.segments; item += gridDim.y) {
    const Work work(item, p.length, p.segments, p.segment_length);
    pass.b = work.b;
    const State given = owner && from ? from[work.b * p.channels + channel] : State(0);
    State state = given;
    for (Index s = 0; owner && s < work.segment; ++s) {
      const Index at = (s * p.batch + work.b) * p.channels + channel;
      state = passed_on(state, p.products[at], p.sums[at], p.cuts[s * p.batch + work.b]);
    }
    Index start = work.begin;
    if (work.segment > 0) {
      // A segment's product says neither what an infinity that has seemingly faded leaves behind nor, once it has
      // overflowed, what becomes of a small state: such blocks walk all that comes before them, and write none of it.
      if (!__syncthreads_and(is_finite(state))) start = 0, state = given;
    }
    State product(1);
    bool cut = false;
    walk<true>(pass, shared, start, work.begin, work.end, product, state, cut);
    if (owner && work.end == p.length) to[work.b * p.channels + channel] = state;
    pass.end_segment(shared, (work.b * p.segments + work.segment) * p.channels + channel, owner);
  }
}

// ---- the kernels -----------------------------------------------------------------------------------------------------

// Arguments are pointers and 64-bit integers only. Inputs with their strides; what a cell does not have is null.
#define HFR_PROBLEM                                                                                                       \
  Index batch, Index length, Index channels, Index reverse, const unsigned char *flags, Index segments,                  \
      Index segment_length, State *products, State *sums, unsigned char *cuts, const T *x0, Index x0_b, Index x0_l,      \
      Index x0_d, const T *x1, Index x1_b, Index x1_l, Index x1_d, const T *x2, Index x2_b, Index x2_l, Index x2_d
#define HFR_DESCRIBE                                                                                                       \
  __shared__ Shared shared;                                                                                                \
  const Problem p = {batch, length, channels, reverse, flags, segments, segment_length, products, sums, cuts};             \
  const View<T> inputs[3] = {{x0, x0_b, x0_l, x0_d}, {x1, x1_b, x1_l, x1_d}, {x2, x2_b, x2_l, x2_d}};                      \
  const Index d = (Index)blockIdx.x * kChannels + threadIdx.x % kRow * kWidth;
#define HFR_KERNEL extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)

HFR_KERNEL scan_forward_segments(HFR_PROBLEM) {
  HFR_DESCRIBE
  Forward pass = {p, inputs, nullptr, 0, d};
  summarise_segments(p, shared, pass);
}

// initial: (batch, channels), or null for zero; final: the same shape, and the same memory if time is in one segment.
HFR_KERNEL scan_forward(HFR_PROBLEM, T* h, const State* initial, State* final) {
  HFR_DESCRIBE
  Forward pass = {p, inputs, h, 0, d};
  scan_segments(p, shared, pass, initial, final);
}

HFR_KERNEL scan_backward_segments(HFR_PROBLEM, const T* grad_h, Index g_b, Index g_l, Index g_d) {
  HFR_DESCRIBE
  const View<T> grad = {grad_h, g_b, g_l, g_d};
  T* const grads[3] = {};
  Backward pass = {p, inputs, grad, nullptr, nullptr, grads, nullptr, 0, d};
  summarise_segments(p, shared, pass);
}

// totals: null, or takes the gradient of x0 summed over time, (batch, segments, channels), instead of grad0.
HFR_KERNEL scan_backward(HFR_PROBLEM, const T* grad_h, Index g_b, Index g_l, Index g_d, const T* h, const State* initial,
                         const State* grad_final, State* grad_initial, State* totals, T* grad0, T* grad1, T* grad2) {
  HFR_DESCRIBE
  const View<T> grad = {grad_h, g_b, g_l, g_d};
  T* const grads[3] = {grad0, grad1, grad2};
  Backward pass = {p, inputs, grad, h, initial, grads, totals, 0, d};
  scan_segments(p, shared, pass, grad_final, grad_initial);
}

// One position for a batch, each thread a channel. The state may be updated in place: initial and final are one.
HFR_KERNEL scan_step(HFR_PROBLEM, T* h, const State* initial, State* final) {
  const View<T> inputs[3] = {{x0, x0_b, x0_l, x0_d}, {x1, x1_b, x1_l, x1_d}, {x2, x2_b, x2_l, x2_d}};
  const Index i = (Index)blockIdx.x * kThreads + threadIdx.x;
  if (i >= batch * channels) return;
  const Index b = i / channels, channel = i % channels;
  const int flag = flags ? flags[b] : 0;
  State state = initial && !(flag & kDrop) ? initial[i] : State(0);
  if (!(flag & kMasked)) {
    State x[kInputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) x[k] = load(inputs[k].data[b * inputs[k].b + channel * inputs[k].d]);
    state = Cell::forward(x, state);
  }
  store(state, h[i]);
  final[i] = state;
}
