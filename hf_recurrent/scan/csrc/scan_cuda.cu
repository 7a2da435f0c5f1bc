// The loops for GPUs. A block takes kChannels channels of a row of the batch and walks a segment of time in tiles. Within a
// tile, a thread has kSteps positions of kWidth channels in registers, loaded while the tile before was computed; it finds
// what its positions make of a state, one thread for each channel passes the states along the kParts threads of that
// channel, and then each runs its positions. So every byte is read once, however few channels there are for a
// multiprocessor, and sums are formed in the same order at every run.
//
// Compiled by NVRTC for one pair of types: HFR_CELL, a cell of cells.h, and HFR_TYPE, what the tensors hold; and for HFR_WIDTH
// channels to a thread, so that an access has 16 bytes (8 for 16-bit types, whose blocks would otherwise be too few), or 1
// where strides or alignment do not allow that; and for HFR_ROW threads side by side (hf_recurrent.scan.cuda says how many).
#include "device.h"

using namespace hfr;

typedef HFR_CELL Cell;
typedef HFR_TYPE T;
typedef Cell::State State;
typedef StateOf<T>::type Value;             // what the numbers of a tensor are computed with
typedef SavedAs<T, State>::type Saved;      // what h is kept as
typedef decltype(real(State())) Real;       // what one part of a state is

constexpr int kWidth = HFR_WIDTH;
constexpr int kThreads = 256;
constexpr int kRow = HFR_ROW;              // threads side by side along the channels
constexpr int kParts = kThreads / kRow;    // threads one after the other in time
constexpr int kChannels = kRow * kWidth;
constexpr int kInputs = Cell::inputs;
constexpr int kNumbers = kInputs + Cell::timed;
constexpr int kMaxInputs = 5;

typedef Vector<T, kWidth> Pack;
typedef Vector<Saved, kWidth> SavedPack;
typedef Vector<State, kWidth> States;

// Writes a pack that starts at element `offset`, by its number: at the address of an element NVRTC writes one number at a time,
// four times the requests to memory.
template <class U>
HFR_DEVICE void put(const Vector<U, kWidth>& pack, U* to, Index offset) {
  reinterpret_cast<Vector<U, kWidth>*>(to)[offset / kWidth] = pack;
}

// Positions that a thread takes at once, of so many bytes in the state type from each tensor: what leaves registers for two
// blocks on a multiprocessor. Backward has twice the tensors.
HFR_DEVICE constexpr int steps_for(int bytes) {
  int steps = bytes / (int)sizeof(State) / kWidth;
  return steps > 1 ? steps : 1;
}

struct Problem : Scan<State> {
  const Real* times;  // of a timed cell: (batch, length), strides in elements
  Index times_b, times_l;
};

struct alignas(16) Shared {
  State products[kParts][kChannels], sums[kParts][kChannels], entering[kParts][kChannels];
  bool cuts[kParts];
};

constexpr bool kSmooth = !Cell::first_may_be_constant;  // exponentials, which take registers of their own
constexpr bool kFewer = kInputs > 2 || kWidth == 1 || sizeof(State) > 4 || (kSmooth && sizeof(T) == 4);
constexpr int kBlocks = kSmooth && sizeof(Value) > 4 ? 1 : 2;  // to a multiprocessor, at least

// What a thread holds of a position: its channels' inputs, and what all channels have in common.
struct Inputs {
  Pack x[kInputs];
  Real time;

  HFR_DEVICE void fetch(const Problem& p, const View<T> (&inputs)[kMaxInputs], Index b, Index t, Index d) {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      x[k] = *reinterpret_cast<const Pack*>(inputs[k].data + b * inputs[k].b + t * inputs[k].l + d * inputs[k].d);
    }
    if (Cell::timed) time = p.times[b * p.times_b + t * p.times_l];
  }
};

// One channel's numbers, as they are computed with.
struct Values {
  Value x[kNumbers];

  HFR_DEVICE Values(const Inputs& inputs, int j) {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) x[k] = load(inputs.x[k].v[j]);
    if constexpr (Cell::timed) x[kInputs] = Value(inputs.time);
  }
};

// ---- one thread's positions of a tile --------------------------------------------------------------------------------

// The two bits of each position's flags stand side by side in `flags`.
struct Forward {
  static constexpr int kSteps = steps_for(kFewer ? 32 : 64);

  struct Raw {
    Inputs x[kSteps];
    unsigned flags;
  };

  const Problem& p;
  const View<T> (&inputs)[kMaxInputs];
  Saved* h;  // may be null where y is given
  T* y;      // null where h is what is given
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
      raw.x[i].fetch(p, inputs, b, t, d);
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
        Cell::coefficients(Values(raw.x[i], j).x, a[i][j], c[i][j]);
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
      SavedPack saved;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if (raw.flags >> 2 * i & kDrop) state.v[j] = State(0);
        if (!(raw.flags >> 2 * i & kMasked)) state.v[j] = a[i][j] * state.v[j] + c[i][j];
        store(state.v[j], saved.v[j]);
        if (Cell::reads) store(Cell::read(Values(raw.x[i], j).x, state.v[j]), out.v[j]);
      }
      if (flow + i < begin) continue;
      const Index offset = (b * p.length + position(flow + i)) * p.channels + d;
      if (Cell::reads) put(out, y, offset);
      if (!Cell::reads || h) put(saved, h, offset);
    }
  }
};

// The flow is against time: g = carry + what comes from grad_y, and the cell's backward makes the next carry, conj(a) g.
// grad_y is the gradient of what the cell gives, be that h.
struct Backward {
  static constexpr int kSteps = steps_for(kInputs > 2 || kWidth == 1 ? 16 : 32);

  struct Raw {
    Inputs x[kSteps];
    Pack grad[kSteps];
    SavedPack before[kSteps];  // h of the position before
    unsigned flags;
  };

  const Problem& p;
  const View<T> (&inputs)[kMaxInputs];
  const View<T>& grad_y;
  const Saved* h;
  const State* initial;
  T* const (&grads)[kMaxInputs];
  State* totals;
  Real* grad_times;  // (gridDim.x, batch, length): the sums over each block's channels
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
      raw.x[i].fetch(p, inputs, b, t, d);
      raw.grad[i] = *reinterpret_cast<const Pack*>(grad_y.data + b * grad_y.b + t * grad_y.l + d * grad_y.d);
      if (h && flow + i + 1 < p.length) {  // a summary needs no h
        raw.before[i] = *reinterpret_cast<const SavedPack*>(h + (b * p.length + position(flow + i + 1)) * p.channels + d);
      }
    }
  }

  HFR_DEVICE void summarise(const Raw& raw, States& product, States& sum, bool& cut) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      // Past the end of the sequence there is neither a gradient nor a flag but kMasked.
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const Values values(raw.x[i], j);
        Value dx[kNumbers];
        sum.v[j] = sum.v[j] + Cell::read_back(values.x, State(0), load(raw.grad[i].v[j]), dx);
        if (raw.flags >> 2 * i & kMasked) continue;
        State a, c;
        Cell::coefficients(values.x, a, c);
        product.v[j] = conj(a) * product.v[j];
        sum.v[j] = conj(a) * sum.v[j];
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
      Real of_time(0);
      if (d < p.channels && flow + i < end) of_time = run_position(raw, i, carry, flow + i, begin);
      if (!Cell::timed) continue;
      // The threads side by side have the same position; all of a warp take part, so that any may ask any.
#pragma unroll
      for (int lanes = 1; lanes < kRow; lanes *= 2) of_time += __shfl_xor_sync(0xffffffffu, of_time, lanes);
      if (threadIdx.x % kRow == 0 && flow + i >= begin && flow + i < end) {
        grad_times[((Index)blockIdx.x * p.batch + b) * p.length + position(flow + i)] = of_time;
      }
    }
  }

  // The i-th of a tile, `at` in the flow. Returns these channels' part of the gradient of a timed cell's time.
  HFR_DEVICE Real run_position(const Raw& raw, int i, States& carry, Index at, Index begin) {
    const bool drop = raw.flags >> 2 * i & kDrop, masked = raw.flags >> 2 * i & kMasked;
    Pack out[kInputs];
    Real of_time(0);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const Values values(raw.x[i], j);
      Value dx[kNumbers];
#pragma unroll
      for (int k = 0; k < kNumbers; ++k) dx[k] = Value(0);
      State previous = State(0);
      if (!drop && at + 1 < p.length) previous = load(raw.before[i].v[j]);
      if (!drop && at + 1 == p.length && initial) previous = initial[b * p.channels + d + j];
      const State here = masked || !Cell::reads ? previous : Cell::forward(values.x, previous);
      const State g = carry.v[j] + Cell::read_back(values.x, here, load(raw.grad[i].v[j]), dx);
      carry.v[j] = masked ? g : Cell::backward(values.x, previous, g, dx);
      if (drop) carry.v[j] = State(0);
      if (Cell::first_may_be_constant && at >= begin) total.v[j] = total.v[j] + State(dx[0]);
      if constexpr (Cell::timed) of_time += real(dx[kInputs]);
#pragma unroll
      for (int k = 0; k < kInputs; ++k) store(dx[k], out[k].v[j]);
    }
    if (at < begin) return of_time;
    const Index offset = (b * p.length + position(at)) * p.channels + d;
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      if (k > 0 || !totals) put(out[k], grads[k], offset);
    }
    return of_time;
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

// Inputs with their strides; what a cell does not have is null.
#define HFR_INPUT(x) const T *x, Index x##_b, Index x##_l, Index x##_d
#define HFR_PROBLEM                                                                                                       \
  HFR_SCAN, HFR_INPUT(x0), HFR_INPUT(x1), HFR_INPUT(x2), HFR_INPUT(x3), HFR_INPUT(x4), const Real *times, Index times_b,  \
      Index times_l
#define HFR_VIEW(x) {x, x##_b, x##_l, x##_d}
#define HFR_INPUTS                                                                                                         \
  const View<T> inputs[kMaxInputs] = {HFR_VIEW(x0), HFR_VIEW(x1), HFR_VIEW(x2), HFR_VIEW(x3), HFR_VIEW(x4)};
#define HFR_DESCRIBE                                                                                                       \
  __shared__ Shared shared;                                                                                                \
  const Problem p = {HFR_SCAN_ARGUMENTS, times, times_b, times_l};                                                         \
  HFR_INPUTS                                                                                                               \
  const Index d = (Index)blockIdx.x * kChannels + threadIdx.x % kRow * kWidth;
#define HFR_KERNEL extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)

HFR_KERNEL scan_forward_segments(HFR_PROBLEM) {
  HFR_DESCRIBE
  Forward pass = {p, inputs, nullptr, nullptr, 0, d};
  summarise_segments(p, shared, pass);
}

// initial: (batch, channels), or null for zero; final: the same shape, and the same memory if time is in one segment. Of a
// cell that gives its state, y is null; of another, h may be, where there is to be no backward.
HFR_KERNEL scan_forward(HFR_PROBLEM, Saved* h, T* y, const State* initial, State* final) {
  HFR_DESCRIBE
  Forward pass = {p, inputs, h, y, 0, d};
  scan_segments(p, shared, pass, initial, final);
}

HFR_KERNEL scan_backward_segments(HFR_PROBLEM, HFR_INPUT(grad_y)) {
  HFR_DESCRIBE
  const View<T> grad = HFR_VIEW(grad_y);
  T* const grads[kMaxInputs] = {};
  Backward pass = {p, inputs, grad, nullptr, nullptr, grads, nullptr, nullptr, 0, d};
  summarise_segments(p, shared, pass);
}

// totals: null, or takes the gradient of x0 summed over time, (batch, segments, channels), instead of grad0. grad_times: of a
// timed cell, (blocks of channels, batch, length).
HFR_KERNEL scan_backward(HFR_PROBLEM, HFR_INPUT(grad_y), const Saved* h, const State* initial, const State* grad_final,
                         State* grad_initial, State* totals, T* grad0, T* grad1, T* grad2, T* grad3, T* grad4,
                         Real* grad_times) {
  HFR_DESCRIBE
  const View<T> grad = HFR_VIEW(grad_y);
  T* const grads[kMaxInputs] = {grad0, grad1, grad2, grad3, grad4};
  Backward pass = {p, inputs, grad, h, initial, grads, totals, grad_times, 0, d};
  scan_segments(p, shared, pass, grad_final, grad_initial);
}

// One position for a batch, each thread a channel. The state may be updated in place: initial and final are one.
HFR_KERNEL scan_step(HFR_PROBLEM, Saved* h, T* y, const State* initial, State* final) {
  HFR_INPUTS
  const Index i = (Index)blockIdx.x * kThreads + threadIdx.x;
  if (i >= batch * channels) return;
  const Index b = i / channels, channel = i % channels;
  const int flag = flags ? flags[b] : 0;
  State state = initial && !(flag & kDrop) ? initial[i] : State(0);
  Value x[kNumbers];
#pragma unroll
  for (int k = 0; k < kInputs; ++k) x[k] = load(inputs[k].data[b * inputs[k].b + channel * inputs[k].d]);
  if constexpr (Cell::timed) x[kInputs] = Value(times[b * times_b]);
  if (!(flag & kMasked)) state = Cell::forward(x, state);
  if (Cell::reads) store(Cell::read(x, state), y[i]);
  if (!Cell::reads || h) store(state, h[i]);
  final[i] = state;
}
