// The loops for GPUs. A block takes kChannels channels of a row of the batch and walks a segment of time in tiles. Within a
// tile, a thread has kSteps positions of kWidth channels in registers, loaded while the tile before was computed; it finds
// what its positions make of a state, one thread for each channel passes the states along the kParts threads of that
// channel, and then each runs its positions. So every byte is read once, however few channels there are for a
// multiprocessor, and sums are formed in the same order at every run.
//
// Memory of 4.3 TB/s gives a multiprocessor of an H200 17 bytes in a cycle, in which its 128 lanes run at most one instruction
// each: for a number of float32 (bfloat16) that linear forward reads and writes, of 12 (6) bytes, 90 (45) instructions would be
// all of the time. There are 17 of them (19; minGRU 33 and 23, minLSTM positive 56 and 44, polar GateLoop 105 and 79). What
// is left is latency: of loads, which 32 KiB and more on their way from each multiprocessor hide, and of passing states on.
//
// Compiled by NVRTC for one pair of types: HFR_CELL, a cell of cells.h, and HFR_TYPE, what the tensors hold; and for HFR_WIDTH
// channels to a thread, so that an access has 16 bytes (8 for 16-bit types, whose blocks would otherwise be too few), or 1
// where strides or alignment do not allow that; for HFR_THREADS of a block, HFR_ROW of them side by side, and for so many
// positions of a thread, HFR_STEPS, and blocks of a multiprocessor, HFR_BLOCKS, forward, and HFR_STEPS_BACK and
// HFR_BLOCKS_BACK backward (hf_recurrent.scan.cuda chooses them); and with HFR_ONCE for long rows that are read once.
#include "device.h"

using namespace hfr;

typedef HFR_TYPE T;

// Where a cell's gates begin among its inputs; -1 where it has none.
template <class C>
HFR_DEVICE constexpr auto first_gate_of(int) -> decltype(C::first_gate + 0) { return C::first_gate; }
template <class C>
HFR_DEVICE constexpr int first_gate_of(long) { return -1; }

// How a cell with gates is computed where the tensors hold T: for gates of any size, and for those within kWithin; a timed one
// for times and rates that it calls `within`.
template <class C, class T, bool gated = first_gate_of<C>(0) >= 0, bool timed = C::timed>
struct Computed { typedef C Any, Within; };
template <class C, class T>
struct Computed<C, T, true, false> {
  typedef typename C::template With<Short> Any;
  typedef typename C::template With<ShortWithin> Within;
};
template <class C>
struct Computed<C, float, true, false> {
  typedef C Any;
  typedef typename C::template With<ExactWithin> Within;
};
template <class C>
struct Computed<C, double, true, false> { typedef C Any, Within; };
template <class C>
struct Computed<C, Complex<float>, false, true> {
  typedef C Any;
  typedef typename C::template With<ExactWithin> Within;
};

// What a cell keeps of a position for its backward: timed ones.
template <class C, bool timed = C::timed>
struct KeptBy { typedef bool type; };
template <class C>
struct KeptBy<C, true> { typedef typename C::Kept type; };

typedef Computed<HFR_CELL, T>::Any Cell;
template <bool plain> struct CellWhere { typedef Cell type; };
template <> struct CellWhere<true> { typedef Computed<HFR_CELL, T>::Within type; };
constexpr int kFirstGate = first_gate_of<Cell>(0);

typedef Cell::State State;
typedef StateOf<T>::type Value;             // what the numbers of a tensor are computed with
typedef SavedAs<T, State>::type Saved;      // what h is kept as
typedef decltype(real(State())) Real;       // what one part of a state is

constexpr int kWidth = HFR_WIDTH;
constexpr int kThreads = HFR_THREADS;
constexpr int kRow = HFR_ROW;              // threads side by side along the channels
constexpr int kParts = kThreads / kRow;    // threads one after the other in time
constexpr unsigned kSideBySide = 0xffffffffu >> (kWarp - kRow);
constexpr int kChannels = kRow * kWidth;
constexpr int kInputs = Cell::inputs;
constexpr int kNumbers = kInputs + 2 * Cell::timed, kGradients = kInputs + Cell::timed;
constexpr int kFirstRead = Cell::timed;  // of the inputs: the one before it has no length
constexpr int kMaxInputs = 5;
constexpr bool kOnce = HFR_ONCE;

typedef Packed<T, kWidth> Numbers;
typedef Packed<Saved, kWidth> SavedNumbers;
typedef Vector<State, kWidth> States;

// All that is read or written lies in the order of the flow, from its first position on, with a negative stride where that is
// the last one in memory; but flags and the gradients of times, of which `along`, 1 or -1, says which way the flow goes.
struct Problem : Scan<State> {
  const Real* times;  // of a timed cell: (batch, length), strides in elements
  Index times_b, times_l;
  Index along, next;  // next: from a position to the next one of what is written, in packs

  HFR_DEVICE Index in_memory(Index flow) const { return along < 0 ? length - 1 - flow : flow; }
};

struct alignas(16) Shared {
  State products[kParts][kChannels], sums[kParts][kChannels], entering[kParts][kChannels];
  State initial[kChannels];  // of a backward scan
  State others[kOnce ? kParts : 1][kChannels], prefix[kOnce ? kChannels : 1];
  bool cuts[kParts], others_cuts[kOnce ? kParts : 1];
  int tickets[2];
};

constexpr bool kKeeps = !Cell::first_may_be_constant || Cell::timed;  // coefficients, that are more than the inputs themselves

// What a thread holds of a position: its channels' inputs, and what all channels have in common.
template <int inputs>
struct Inputs {
  Numbers x[inputs];
  Real time;
};

HFR_DEVICE float size_of(float x) { return x < 0 ? -x : x; }

// What a thread holds of its channels at all positions: a timed cell's rates.
template <class C, bool timed = C::timed>
struct RatesOf {
  HFR_DEVICE void set(const View<T>&, Index, Index) {}
  HFR_DEVICE void complete(Value (&)[kNumbers], Real, int) const {}
  template <int steps, class Read>
  HFR_DEVICE bool within(const Read (&)[steps]) const { return true; }
};

template <class C>
struct RatesOf<C, true> {
  typedef Rate<typename C::Real> One;
  One of[kWidth];

  HFR_DEVICE void set(const View<T>& rates, Index d, Index channels) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      of[j] = One(d + j < channels ? load(rates.data[(d + j) * rates.d]) : typename C::State(0));
    }
  }

  // All of a channel's numbers, of which the inputs that have a length are there.
  HFR_DEVICE void complete(Value (&x)[kNumbers], Real time, int j) const {
    x[0] = of[j].value, x[kInputs] = Value(time), x[kInputs + 1] = of[j].inverse;
  }

  template <int steps, class Read>
  HFR_DEVICE bool within(const Read (&read)[steps]) const {
    if (sizeof(Real) > 4) return true;
    bool within = true;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float re = size_of(of[j].value.re), im = size_of(of[j].value.im);
#pragma unroll
      for (int i = 0; i < steps; ++i) within = within && C::within(size_of(read[i].time), re, im);
    }
    return within;
  }
};
typedef RatesOf<Cell> Rates;

// One channel's numbers, as they are computed with.
struct Values {
  Value x[kNumbers];

  template <int inputs>
  HFR_DEVICE Values(const Inputs<inputs>& read, const Rates& rates, int j) {
#pragma unroll
    for (int k = kFirstRead; k < kInputs; ++k) x[k] = k < inputs ? read.x[k < inputs ? k : 0].get(j) : Value(0);
    rates.complete(x, read.time, j);
  }
};

// This thread's, of a block that has the channels of `column`.
HFR_DEVICE unsigned first_channel(unsigned column) { return column * kChannels + threadIdx.x % kRow * kWidth; }

// Whether all gates are within kWithin, or NaN, of which nothing else comes; of a timed cell, its times and rates.
template <int steps, int inputs>
HFR_DEVICE bool all_within(const Inputs<inputs> (&read)[steps], const Rates& rates) {
  if constexpr (kFirstGate >= 0 && sizeof(Real) == 4) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < steps; ++i) {
#pragma unroll
      for (int k = kFirstGate; k < inputs; ++k) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const float size = size_of(read[i].x[k].get(j));
          largest = size > largest ? size : largest;
        }
      }
    }
    return largest <= kWithin;
  } else {
    return rates.within(read);
  }
}

// Where one thread stands in its walk: at the first of its positions of the tile that is fetched next.
template <int inputs>
struct Reader {
  const T* at[inputs];
  const Real* times;

  HFR_DEVICE void start(const Problem& p, const View<T> (&views)[kMaxInputs], Index b, Index flow, Index d) {
#pragma unroll
    for (int k = kFirstRead; k < inputs; ++k) at[k] = views[k].data + b * views[k].b + flow * views[k].l + d * views[k].d;
    if (Cell::timed) times = p.times + b * p.times_b + flow * p.times_l;
  }

  // Reads a position, and goes on to the next.
  HFR_DEVICE void fetch(const Problem& p, const View<T> (&views)[kMaxInputs], Inputs<inputs>& to) {
#pragma unroll
    for (int k = kFirstRead; k < inputs; ++k) to.x[k].read(at[k]);
    if (Cell::timed) to.time = *times;
    skip(p, views, 1);
  }

  HFR_DEVICE void skip(const Problem& p, const View<T> (&views)[kMaxInputs], int steps) {
#pragma unroll
    for (int k = kFirstRead; k < inputs; ++k) at[k] += steps * views[k].l;
    if (Cell::timed) times += steps * p.times_l;
  }
};

// The flags of up to 16 positions: those that are dropped in the lower half, those that are masked in the upper one.
struct Marks {
  unsigned bits;

  HFR_DEVICE bool drop(int i) const { return bits >> i & 1; }
  HFR_DEVICE bool mask(int i) const { return bits >> (16 + i) & 1; }
};

// The threads side by side have the same positions: each holds the flags of every kRow-th of them, until they are used and
// all of a warp say what they have. Whoever looked at his own would wait for as many loads as he has positions.
template <int steps>
struct HeldFlags {
  static_assert(steps <= 16, "so many Marks can hold");
  static constexpr int kHeld = (steps + kRow - 1) / kRow;
  unsigned held[kHeld];  // whole registers: a byte that is put into one is waited for, and the next tile with it

  // `from`: position `flow` of the flags, `step` from the next one.
  HFR_DEVICE void fetch(const unsigned char* from, Index step, Index flow, Index end) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int i = k * kRow + threadIdx.x % kRow;
      held[k] = i < steps && flow + i < end ? from[i * step] : 0;
    }
  }

  HFR_DEVICE Marks marks() const {
    const int first = threadIdx.x % kWarp / kRow * kRow;
    Marks found = {0};
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const unsigned dropped = __ballot_sync(0xffffffffu, held[k] & kDrop) >> first;
      const unsigned masked = __ballot_sync(0xffffffffu, held[k] & kMasked) >> first;
      found.bits |= (dropped & kSideBySide & 0xffff) << k * kRow | (masked & kSideBySide & 0xffff) << (16 + k * kRow);
    }
    return found;
  }
};

// ---- one thread's positions of a tile --------------------------------------------------------------------------------

// Where all of a thread's positions lie within the sequence and have no flags, and its gates are no larger than kWithin, there
// is nothing to choose: nearly all are `plain`, and the choices would take several times the instructions of the recurrence.
struct Forward {
  static constexpr int kSteps = HFR_STEPS;

  struct Raw {
    Inputs<kInputs> x[kSteps];
    HeldFlags<kSteps> flags;
    bool whole;
  };

  const Problem& p;
  const View<T> (&inputs)[kMaxInputs];
  Saved* h;  // may be null where y is given
  T* y;      // null where h is what is given
  unsigned b = 0, d = 0, column = 0;  // there are fewer than 2^31 of each, as of segments, and registers are few
  Rates rates;
  Reader<kInputs> reader;
  Index out;  // this tile's first position in what is written, in packs
  State a[kKeeps ? kSteps : 1][kWidth], c[kKeeps ? kSteps : 1][kWidth];

  HFR_DEVICE Forward(const Problem& p, const View<T> (&inputs)[kMaxInputs], Saved* h, T* y)
      : p(p), inputs(inputs), h(h), y(y) {}

  HFR_DEVICE void place(unsigned row, unsigned channels) {
    b = row, column = channels, d = first_channel(channels);
    rates.set(inputs[0], d, p.channels);
  }

  HFR_DEVICE void start_reading(Index flow) { reader.start(p, inputs, b, flow, d); }

  HFR_DEVICE void start_writing(Index flow) { out = (b * p.length * p.channels + d) / kWidth + flow * p.next; }

  HFR_DEVICE void end_segment(Shared&, Index, bool) {}

  // The next tile's, of which this thread's positions begin at `flow`.
  HFR_DEVICE void fetch(Raw& raw, Index flow, Index end, int tile) {
    raw.whole = d < p.channels && flow + kSteps <= end;
    if (raw.whole) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) reader.fetch(p, inputs, raw.x[i]);
    } else {
      raw = {};
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (d < p.channels && flow + i < end) {
          reader.fetch(p, inputs, raw.x[i]);
        } else {
          reader.skip(p, inputs, 1);
        }
      }
    }
    if (p.flags) raw.flags.fetch(p.flags + b * p.length + p.in_memory(flow), p.along, flow, end);
    reader.skip(p, inputs, tile - kSteps);
  }

  // Finds those of the i-th position; returns where they are.
  template <bool plain>
  HFR_DEVICE int coefficients(const Raw& raw, int i) {
    const int at = kKeeps ? i : 0;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) CellWhere<plain>::type::coefficients(Values(raw.x[i], rates, j).x, a[at][j], c[at][j]);
    return at;
  }

  template <bool plain>
  HFR_DEVICE void summarise(const Raw& raw, const Marks& marks, States& product, States& sum, bool& cut) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (!plain && marks.drop(i)) {
        cut = true;
        for (int j = 0; j < kWidth; ++j) sum.v[j] = State(0);
      }
      const int at = coefficients<plain>(raw, i);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if (!plain && marks.mask(i)) continue;
        product.v[j] = a[at][j] * product.v[j];
        sum.v[j] = a[at][j] * sum.v[j] + c[at][j];
      }
    }
  }

  template <bool plain>
  HFR_DEVICE void run(const Raw& raw, const Marks& marks, States state, Index flow, Index begin, Index end) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (!plain && (d >= p.channels || flow + i >= end)) continue;
      Value given[kWidth];
      const int at = kKeeps ? i : coefficients<plain>(raw, i);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if (!plain && marks.drop(i)) state.v[j] = State(0);
        if (plain || !marks.mask(i)) state.v[j] = a[at][j] * state.v[j] + c[at][j];
        if constexpr (Cell::reads) given[j] = Cell::read(Values(raw.x[i], rates, j).x, state.v[j]);
      }
      if (!plain && flow + i < begin) continue;
      const Index to = out + i * p.next;
      if constexpr (Cell::reads) Numbers(given).write(y, to);
      if (!Cell::reads || h) SavedNumbers(state.v).write(h, to);
    }
  }

  HFR_DEVICE void skip(int steps) { out += steps * p.next; }
};

// The flow is against time: g = carry + what comes from grad_y, and the cell's backward makes the next carry, conj(a) g.
// grad_y is the gradient of what the cell gives, be that h.
struct Backward {
  static constexpr int kSteps = HFR_STEPS_BACK;
  static constexpr int kRead = Cell::backward_inputs;

  struct Raw {
    Inputs<kRead> x[kSteps];
    Numbers grad[kSteps];
    SavedNumbers before[kSteps];  // h of the position before
    HeldFlags<kSteps> flags;
    bool whole;
  };

  const Problem& p;
  const View<T> (&inputs)[kMaxInputs];
  const View<T>& grad_y;
  const Saved* h;
  const State* initial;
  State (&initial_here)[kChannels];  // shared: from memory, it would be waited for with the next tile
  T* const (&grads)[kMaxInputs];
  State* totals;
  Real* grad_times;  // (blocks of channels, batch, length): the sums over each block's channels
  unsigned b = 0, d = 0, column = 0;
  Rates rates;
  Reader<kRead> reader;
  const T* grad_at;
  Index out;  // this tile's first position in what is written, in packs
  Index before;  // of the position before the next tile's first in h, likewise
  States total;         // of the gradient of inputs[0], where it is constant over time
  typename KeptBy<Cell>::type kept[Cell::timed ? kSteps : 1][kWidth];  // of these positions, by the summary

  HFR_DEVICE Backward(const Problem& p, const View<T> (&inputs)[kMaxInputs], const View<T>& grad_y, const Saved* h,
                      const State* initial, Shared& shared, T* const (&grads)[kMaxInputs], State* totals, Real* grad_times)
      : p(p), inputs(inputs), grad_y(grad_y), h(h), initial(initial), initial_here(shared.initial), grads(grads),
        totals(totals), grad_times(grad_times) {
    fill(total.v, State(0));
  }

  HFR_DEVICE void place(unsigned row, unsigned channels) {
    b = row, column = channels, d = first_channel(channels);
    rates.set(inputs[0], d, p.channels);
    const unsigned channel = column * kChannels + threadIdx.x;
    __syncthreads();  // others may still look at those of another place
    if (threadIdx.x < kChannels) {
      initial_here[threadIdx.x] = initial && channel < p.channels ? initial[b * p.channels + channel] : State(0);
    }
  }

  HFR_DEVICE Index pack(Index flow) const { return (b * p.length * p.channels + d) / kWidth + flow * p.next; }

  HFR_DEVICE void start_reading(Index flow) {
    reader.start(p, inputs, b, flow, d);
    grad_at = grad_y.data + b * grad_y.b + flow * grad_y.l + d * grad_y.d;
    before = pack(flow + 1);
  }

  HFR_DEVICE void start_writing(Index flow) { out = pack(flow); }

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

  HFR_DEVICE void fetch(Raw& raw, Index flow, Index end, int tile) {
    raw.whole = d < p.channels && flow + kSteps <= end && flow + kSteps < p.length;
    if (raw.whole) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        reader.fetch(p, inputs, raw.x[i]);
        raw.grad[i].read(grad_at);
        if (h) raw.before[i].read(h, before);  // a summary needs no h
        grad_at += grad_y.l, before += p.next;
      }
    } else {
      raw = {};
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (d < p.channels && flow + i < end) {
          reader.fetch(p, inputs, raw.x[i]);
          raw.grad[i].read(grad_at);
          if (h && flow + i + 1 < p.length) raw.before[i].read(h, before);
        } else {
          reader.skip(p, inputs, 1);
        }
        grad_at += grad_y.l, before += p.next;
      }
    }
    if (p.flags) raw.flags.fetch(p.flags + b * p.length + p.in_memory(flow), p.along, flow, end);
    reader.skip(p, inputs, tile - kSteps);
    grad_at += (tile - kSteps) * grad_y.l;
    before += (tile - kSteps) * p.next;
  }

  template <bool plain>
  HFR_DEVICE void summarise(const Raw& raw, const Marks& marks, States& product, States& sum, bool& cut) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      // Past the end of the sequence there is neither a gradient nor a flag but kMasked.
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const Values values(raw.x[i], rates, j);
        Value dx[kGradients];
        sum.v[j] = sum.v[j] + Cell::read_back(values.x, State(0), raw.grad[i].get(j), dx);
        if (!plain && marks.mask(i)) continue;
        State a, c;
        if constexpr (Cell::timed) {
          a = CellWhere<plain>::type::decay(values.x, kept[i][j]);
        } else {
          CellWhere<plain>::type::coefficients(values.x, a, c);
        }
        product.v[j] = conj(a) * product.v[j];
        sum.v[j] = conj(a) * sum.v[j];
      }
      if (!plain && marks.drop(i)) {
        cut = true;
        for (int j = 0; j < kWidth; ++j) sum.v[j] = State(0);
      }
    }
  }

  template <bool plain>
  HFR_DEVICE void run(const Raw& raw, const Marks& marks, States carry, Index flow, Index begin, Index end) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      Real of_time(0);
      if (plain || (d < p.channels && flow + i < end)) of_time = run_position<plain>(raw, marks, i, carry, flow + i, begin);
      if constexpr (Cell::timed) sum_of_time(of_time, flow + i, begin, end);
    }
  }

  // The threads side by side have the same position; all of a warp take part, so that any may ask any.
  HFR_DEVICE void sum_of_time(Real of_time, Index at, Index begin, Index end) const {
#pragma unroll
    for (int lanes = 1; lanes < kRow; lanes *= 2) of_time += __shfl_xor_sync(0xffffffffu, of_time, lanes);
    if (threadIdx.x % kRow == 0 && at >= begin && at < end) {
      grad_times[(column * p.batch + b) * p.length + p.in_memory(at)] = of_time;
    }
  }

  // The i-th of a tile, `at` in the flow. Returns these channels' part of the gradient of a timed cell's time.
  template <bool plain>
  HFR_DEVICE Real run_position(const Raw& raw, const Marks& marks, int i, States& carry, Index at, Index begin) {
    const bool drop = !plain && marks.drop(i), masked = !plain && marks.mask(i);
    typedef typename CellWhere<plain>::type Here;
    Value grad[kInputs][kWidth];
    Real of_time(0);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const Values values(raw.x[i], rates, j);
      Value dx[kGradients];
#pragma unroll
      for (int k = 0; k < kGradients; ++k) dx[k] = Value(0);
      State previous = State(0);
      if (plain || (!drop && at + 1 < p.length)) previous = raw.before[i].get(j);
      if (!plain && !drop && at + 1 == p.length) previous = initial_here[threadIdx.x % kRow * kWidth + j];
      const State here = masked || !Cell::reads ? previous : Here::forward(values.x, previous);
      const State g = carry.v[j] + Cell::read_back(values.x, here, raw.grad[i].get(j), dx);
      if constexpr (Cell::timed) {
        carry.v[j] = masked ? g : Here::backward(values.x, previous, g, dx, kept[i][j]);
      } else {
        carry.v[j] = masked ? g : Here::backward(values.x, previous, g, dx);
      }
      if (drop) carry.v[j] = State(0);
      if (Cell::first_may_be_constant && (plain || at >= begin)) total.v[j] = total.v[j] + State(dx[0]);
      if constexpr (Cell::timed) of_time += real(dx[kInputs]);
#pragma unroll
      for (int k = 0; k < kInputs; ++k) grad[k][j] = dx[k];
    }
    if (!plain && at < begin) return of_time;
    const Index to = out + i * p.next;
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      if (k > 0 || !totals) Numbers(grad[k]).write(grads[k], to);
    }
    return of_time;
  }

  HFR_DEVICE void skip(int steps) { out += steps * p.next; }
};

// ---- the walk of a block over its segment ----------------------------------------------------------------------------

// What all threads know of a tile, or each of its positions there.
struct Tile {
  Marks marks;
  bool plain, cuts;
};

// Puts into `shared` what each thread's positions make of a state. `flow`: this thread's first one.
template <class Pass>
HFR_DEVICE Tile summarise_tile(Pass& pass, Shared& shared, const typename Pass::Raw& now, Index flow, Index begin, Index end) {
  constexpr int kSteps = Pass::kSteps;
  const int column = threadIdx.x % kRow, part = threadIdx.x / kRow;
  Tile tile;
  tile.marks.bits = 0;
  if (pass.p.flags) tile.marks = now.flags.marks();
  if (flow + kSteps > end) tile.marks.bits |= ~0u << (16 + (flow < end ? end - flow : 0));  // past the end all is padding
  tile.plain = now.whole && !tile.marks.bits && flow >= begin && all_within(now.x, pass.rates);
  if constexpr (Cell::timed) tile.plain = __all_sync(0xffffffffu, tile.plain);  // all form sums over a warp's threads
  States products, sums;
  bool cut = false;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) products.v[j] = State(1), sums.v[j] = State(0);
  if (tile.plain) {
    pass.template summarise<true>(now, tile.marks, products, sums, cut);
  } else {
    pass.template summarise<false>(now, tile.marks, products, sums, cut);
  }
  *reinterpret_cast<States*>(&shared.products[part][column * kWidth]) = products;
  *reinterpret_cast<States*>(&shared.sums[part][column * kWidth]) = sums;
  if (column == 0) shared.cuts[part] = cut;
  tile.cuts = __syncthreads_or(cut);
  return tile;
}

// In one thread for each channel: passes a state through a tile, and says which one enters each part, or else multiplies the
// parts' products.
template <bool enters>
HFR_DEVICE void pass_through(Shared& shared, bool cuts, State& state, State& product) {
#pragma unroll 4
  for (int i = 0; i < kParts; ++i) {
    const bool cut = cuts && shared.cuts[i];
    if (enters) shared.entering[i][threadIdx.x] = state;
    state = passed_on(state, shared.products[i][threadIdx.x], shared.sums[i][threadIdx.x], cut);
    if (!enters) product = shared.products[i][threadIdx.x] * product;
  }
}

template <class Pass>
HFR_DEVICE void run_tile(Pass& pass, const Shared& shared, const typename Pass::Raw& now, const Tile& tile, Index flow,
                         Index begin, Index end) {
  const int column = threadIdx.x % kRow, part = threadIdx.x / kRow;
  const States entering = *reinterpret_cast<const States*>(&shared.entering[part][column * kWidth]);
  if (tile.plain) {
    pass.template run<true>(now, tile.marks, entering, flow, begin, end);
  } else {
    pass.template run<false>(now, tile.marks, entering, flow, begin, end);
  }
}

// `from`: where the walk starts, at or before `begin`, from where on it writes. `enter` gives the state that it starts from,
// once loads are in flight. With `writes` false it only finds, in the threads of the first kChannels, what the walk makes of a
// state: product, state (from 0) and cut.
template <bool writes, class Pass, class Enter>
HFR_DEVICE void walk(Pass& pass, Shared& shared, Index from, Index begin, Index end, const Enter& enter, State& product,
                     State& state, bool& cut) {
  constexpr int kTile = kParts * Pass::kSteps;
  const int ahead = threadIdx.x / kRow * Pass::kSteps;
  Index flow = from + ahead;
  pass.start_reading(flow);
  pass.start_writing(flow);
  typename Pass::Raw next;
  pass.fetch(next, flow, end, kTile);
  state = enter();
  for (; flow - ahead < end; flow += kTile) {
    const typename Pass::Raw now = next;
    pass.fetch(next, flow + kTile, end, kTile);
    const Tile tile = summarise_tile(pass, shared, now, flow, begin, end);
    if (threadIdx.x < kChannels) {
      pass_through<writes>(shared, tile.cuts, state, product);
      cut = cut || tile.cuts;
    }
    __syncthreads();
    if (!writes) continue;
    run_tile(pass, shared, now, tile, flow, begin, end);
    pass.skip(kTile);
  }
}

// What another multiprocessor has written.
template <class U>
HFR_DEVICE U fresh(const U* at) { return *static_cast<const volatile U*>(at); }
template <class U>
HFR_DEVICE Complex<U> fresh(const Complex<U>* at) { return {fresh(&at->re), fresh(&at->im)}; }

#if HFR_ONCE
// What a tile makes of a channel's state, as it passes between multiprocessors: each packet of 16 bytes says itself that it is
// there, so that nobody waits for a fence, which would also wait for the loads of the next tile.
struct alignas(16) Packet { unsigned long long numbers, is; };
constexpr int kKnown = 1, kCut = 2;  // what it is
struct Summary { State product, sum; };
constexpr int kPackets = sizeof(Summary) / 8;  // a single one of float32
constexpr int kPatience = 8;                   // looks, of 0.4 us each

HFR_DEVICE void publish(Packet* to, Packet packet) {
#ifdef __CUDA_ARCH__
  asm volatile("{ .reg .b128 packet; mov.b128 packet, {%1, %2}; st.relaxed.gpu.global.b128 [%0], packet; }" ::"l"(to),
               "l"(packet.numbers), "l"(packet.is));
#else
  *to = packet;
  __threadfence();  // where others run in between
#endif
}

HFR_DEVICE Packet look(const Packet* at) {
#ifdef __CUDA_ARCH__
  Packet packet;
  asm volatile("{ .reg .b128 packet; ld.relaxed.gpu.global.b128 packet, [%2]; mov.b128 {%0, %1}, packet; }"
               : "=l"(packet.numbers), "=l"(packet.is)
               : "l"(at));
  return packet;
#else
  __threadfence();
  return *at;
#endif
}

// Several blocks share a row of the batch. Each takes a tile, the next one that nobody has, keeps it in registers, makes known
// what it makes of a state, and folds what the tiles before it make of the one that enters the row. So every byte is read
// once, and blocks of a row wait for each other once in a tile, while their next tiles are on their way. Nothing waits for a
// tile before it has made its own known, and then only for tiles that were taken before: none waits for ever. What enters a
// tile is folded in the order of the tiles, whoever does it, from the same numbers: no result depends on who takes which tile.
//
// from, to: (batch, channels), the state (or its gradient) before and after the whole sequence, never the same memory; `from`
// may be null, for zero. tickets: for each row of `columns` blocks of channels how many of its tiles are taken, then for each
// of its tiles whether what leaves it is there. p.segments: tiles, of which p.products are the summaries as packets, both all
// zero at first, and p.sums what leaves them, where the fold does not say that: where products have overflowed, or of
// infinities, the state is passed from one tile to the next.
template <class Pass>
HFR_DEVICE void scan_rows(const Problem& p, Shared& shared, Pass& pass, const State* from, State* to, int* tickets,
                          Index columns) {
  constexpr int kTile = kParts * Pass::kSteps;
  const Index column = blockIdx.x, channel = column * kChannels + threadIdx.x, end = p.length;
  const Index part_flow = threadIdx.x / kRow * Pass::kSteps, next_tile = p.batch * p.channels;
  const bool owner = threadIdx.x < kChannels && channel < p.channels;
  for (Index b = blockIdx.y % p.batch; b < p.batch; b += gridDim.y) {
    const Index row = b * columns + column, first = b * p.channels + column * kChannels, at = first + threadIdx.x;
    int* const taken = tickets + row;
    int* const left = tickets + p.batch * columns + row * p.segments;
    Packet* const summaries = reinterpret_cast<Packet*>(p.products);
    if (threadIdx.x == 0) shared.tickets[0] = atomicAdd(taken, 1);
    // What enters the tile `folded`, to be seen by this thread only: in a register it would be waited for with the next tile.
    if (threadIdx.x < kChannels) shared.prefix[threadIdx.x] = owner && from ? from[at] : State(0);
    __syncthreads();
    Index tile = shared.tickets[0], folded = 0;
    pass.place(b, column);
    typename Pass::Raw next;
    pass.start_reading(tile * kTile + part_flow);
    pass.fetch(next, tile * kTile + part_flow, end, kTile);
    if (threadIdx.x == 0) {  // each block's first tile before any second one, which is known later
      for (int i = 0; i < kPatience && fresh(taken) * p.batch < gridDim.y; ++i) {}
      shared.tickets[1] = atomicAdd(taken, 1);
    }
    __syncthreads();
    Index following = shared.tickets[1];
    while (tile < p.segments) {
      const typename Pass::Raw now = next;
      pass.start_reading(following * kTile + part_flow);
      pass.fetch(next, following * kTile + part_flow, end, kTile);
      const Index flow = tile * kTile + part_flow;
      const Tile here = summarise_tile(pass, shared, now, flow, 0, end);
      if (threadIdx.x == kThreads - 1) shared.tickets[0] = atomicAdd(taken, 1);
      Summary own = {State(1), State(0)};
      if (threadIdx.x < kChannels) pass_through<false>(shared, here.cuts, own.sum, own.product);
      if (owner) {
        unsigned long long numbers[kPackets];
        memcpy(numbers, &own, sizeof own);
#pragma unroll
        for (int k = 0; k < kPackets; ++k) {
          publish(summaries + (tile * next_tile + at) * kPackets + k, {numbers[k], here.cuts ? kKnown | kCut : kKnown});
        }
      }

      State prefix = threadIdx.x < kChannels ? shared.prefix[threadIdx.x] : State(0);
      // Those of the tiles since this block's last one, so many at a time: each thread takes those of kWidth channels.
      for (; folded < tile; folded = folded + kParts < tile ? folded + kParts : tile) {
        Packet packets[kWidth][kPackets];
        bool all;
        do {
          all = true;
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            const int i = (threadIdx.x + j * kThreads) / kChannels, c = (threadIdx.x + j * kThreads) % kChannels;
            const bool needed = folded + i < tile && column * kChannels + c < p.channels;
#pragma unroll
            for (int k = 0; k < kPackets; ++k) {
              packets[j][k] = {0, kKnown};
              if (needed) packets[j][k] = look(summaries + ((folded + i) * next_tile + first + c) * kPackets + k);
            }
          }
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
#pragma unroll
            for (int k = 0; k < kPackets; ++k) all = all && packets[j][k].is;
          }
          if (!all) __nanosleep(64);
        } while (!all);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const int i = (threadIdx.x + j * kThreads) / kChannels, c = (threadIdx.x + j * kThreads) % kChannels;
          unsigned long long numbers[kPackets];
#pragma unroll
          for (int k = 0; k < kPackets; ++k) numbers[k] = packets[j][k].numbers;
          Summary other;
          memcpy(&other, numbers, sizeof other);
          shared.entering[i][c] = other.product;  // which nothing else needs yet
          shared.others[i][c] = other.sum;
          if (c == 0) shared.others_cuts[i] = packets[j][0].is & kCut;
        }
        __syncthreads();
        if (threadIdx.x < kChannels) {
#pragma unroll 4
          for (int i = 0; i < kParts; ++i) {
            if (folded + i >= tile) break;
            prefix = passed_on(prefix, shared.entering[i][threadIdx.x], shared.others[i][threadIdx.x], shared.others_cuts[i]);
          }
        }
        if (folded + kParts < tile) __syncthreads();
      }

      State state = prefix;
      if (threadIdx.x < kChannels) {
        pass_through<true>(shared, here.cuts, state, own.product);
        shared.prefix[threadIdx.x] = prefix;
      }
      // Twice what leaves: whoever folds it elsewhere may round it otherwise, but finds it infinite only where it is told here.
      const State after = passed_on(prefix, own.product, own.sum, here.cuts);
      const bool sound = __syncthreads_and(!owner || (is_finite(prefix) && is_finite(after + after)));
      if (!sound) {
        state = prefix;
        if (tile > 0 && owner && !is_finite(prefix)) {
          while (!fresh(left + tile - 1)) __nanosleep(64);
          __threadfence();
          state = fresh(p.sums + (tile - 1) * next_tile + at);
        }
        if (threadIdx.x < kChannels) pass_through<true>(shared, here.cuts, state, own.product);
        __syncthreads();
      }
      pass.start_writing(flow);
      run_tile(pass, shared, now, here, flow, 0, end);
      if (owner && tile == p.segments - 1) to[at] = state;
      if (!sound) {
        if (owner) p.sums[tile * next_tile + at] = state;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) *static_cast<volatile int*>(left + tile) = 1;
      }
      pass.end_segment(shared, (b * p.segments + tile) * p.channels + channel, owner);
      tile = following, following = shared.tickets[0];
    }
    __syncthreads();
  }
}

#else
template <class Pass>
HFR_DEVICE void summarise_segments(const Problem& p, Shared& shared, Pass& pass) {
  const unsigned channel = blockIdx.x * kChannels + threadIdx.x;
  for (unsigned item = blockIdx.y; item < p.batch * p.segments; item += gridDim.y) {
    const unsigned b = item / (unsigned)p.segments, segment = item % (unsigned)p.segments;
    if (segment == p.segments - 1) continue;
    const Index begin = segment * p.segment_length;
    pass.place(b, blockIdx.x);
    State product(1), state;
    bool cut = false;
    walk<false>(pass, shared, begin, begin, begin + p.segment_length, [] { return State(0); }, product, state, cut);
    if (threadIdx.x < kChannels && channel < p.channels) {
      const Index row = segment * p.batch + b, at = row * p.channels + channel;
      p.products[at] = product;
      p.sums[at] = state;
      if (channel == 0) p.cuts[row] = cut;
    }
  }
}

// from, to: (batch, channels), the state (or its gradient) before and after the whole sequence. `from` may be null, for zero,
// and may be `to` where the products of segments are not used.
//
// chain: null, or a ticket and, for each row of `columns` blocks of channels, how many of its segments are done, all zero at
// first. There the rows are more than the blocks that run at once, and time is in segments only so that all of them have as
// much to do: a block takes one segment after the other, the first ones of all rows before all second ones, and the state
// goes from one to the next in `to`. So every byte is read once, and states are those of one walk, whoever takes which segment.
// A block waits only for what was given out before its own, so that none waits for ever.
template <class Pass>
HFR_DEVICE void scan_rows(const Problem& p, Shared& shared, Pass& pass, const State* from, State* to, int* chain,
                          Index columns) {
  for (unsigned item = blockIdx.y;; item += gridDim.y) {
    unsigned b, column = blockIdx.x, segment;
    if (chain) {
      if (threadIdx.x == 0) shared.tickets[0] = atomicAdd(chain, 1);
      __syncthreads();
      const unsigned rows = p.batch * columns, row = shared.tickets[0] % rows;
      b = row / (unsigned)columns, column = row % (unsigned)columns, segment = shared.tickets[0] / rows;
      if (segment >= p.segments) return;
    } else {
      if (item >= p.batch * p.segments) return;
      b = item / (unsigned)p.segments, segment = item % (unsigned)p.segments;
    }
    const Index begin = segment * p.segment_length;
    const Index end = begin + p.segment_length < p.length ? begin + p.segment_length : p.length;
    const Index channel = column * kChannels + threadIdx.x, at = b * p.channels + channel;
    const bool owner = threadIdx.x < kChannels && channel < p.channels;
    int* const done = chain + 1 + (b * (unsigned)columns + column);
    pass.place(b, column);
    Index start = begin;
    const State given = owner && from ? from[at] : State(0);
    State entering = given;
    if (!chain && segment > 0) {
      for (Index s = 0; owner && s < segment; ++s) {
        const Index summary = (s * p.batch + b) * p.channels + channel;
        entering = passed_on(entering, p.products[summary], p.sums[summary], p.cuts[s * p.batch + b]);
      }
      // A segment's product says neither what an infinity that has seemingly faded leaves behind nor, once it has
      // overflowed, what becomes of a small state: such blocks walk all that comes before them, and write none of it.
      if (!__syncthreads_and(is_finite(entering))) start = 0, entering = given;
    }
    const auto enter = [&]() -> State {
      if (!chain || segment == 0) return entering;
      if (threadIdx.x == 0) {
        while (fresh(done) < (int)segment) __nanosleep(20);
        __threadfence();
      }
      __syncthreads();
      return owner ? fresh(to + at) : State(0);
    };
    State product(1), state;
    bool cut = false;
    walk<true>(pass, shared, start, begin, end, enter, product, state, cut);
    if (owner && (chain || end == p.length)) to[at] = state;
    if (chain) {
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) *static_cast<volatile int*>(done) = (int)segment + 1;
    }
    pass.end_segment(shared, (b * p.segments + segment) * p.channels + channel, owner);
  }
}
#endif

// ---- the kernels -----------------------------------------------------------------------------------------------------

// Inputs with their strides; what a cell does not have is null.
#define HFR_INPUT(x) const T *x, Index x##_b, Index x##_l, Index x##_d
#define HFR_PROBLEM                                                                                                       \
  HFR_SCAN, HFR_INPUT(x0), HFR_INPUT(x1), HFR_INPUT(x2), HFR_INPUT(x3), HFR_INPUT(x4), const Real *times, Index times_b,  \
      Index times_l, Index along, Index next
#define HFR_VIEW(x) {x, x##_b, x##_l, x##_d}
#define HFR_INPUTS                                                                                                         \
  const View<T> inputs[kMaxInputs] = {HFR_VIEW(x0), HFR_VIEW(x1), HFR_VIEW(x2), HFR_VIEW(x3), HFR_VIEW(x4)};
#define HFR_DESCRIBE                                                                                                       \
  __shared__ Shared shared;                                                                                                \
  const Problem p = {HFR_SCAN_ARGUMENTS, times, times_b, times_l, along, next};                                            \
  HFR_INPUTS
#define HFR_KERNEL(blocks) extern "C" __global__ void __launch_bounds__(kThreads, blocks)

#if !HFR_ONCE
HFR_KERNEL(HFR_BLOCKS) scan_forward_segments(HFR_PROBLEM) {
  HFR_DESCRIBE
  Forward pass(p, inputs, nullptr, nullptr);
  summarise_segments(p, shared, pass);
}

HFR_KERNEL(HFR_BLOCKS_BACK) scan_backward_segments(HFR_PROBLEM, HFR_INPUT(grad_y)) {
  HFR_DESCRIBE
  const View<T> grad = HFR_VIEW(grad_y);
  T* const grads[kMaxInputs] = {};
  Backward pass(p, inputs, grad, nullptr, nullptr, shared, grads, nullptr, nullptr);
  summarise_segments(p, shared, pass);
}

// One position for a batch, each thread a channel. The state may be updated in place: initial and final are one.
HFR_KERNEL(1) scan_step(HFR_PROBLEM, Saved* h, T* y, const State* initial, State* final) {
  HFR_INPUTS
  const Index i = (Index)blockIdx.x * kThreads + threadIdx.x;
  if (i >= batch * channels) return;
  const Index b = i / channels, channel = i % channels;
  const int flag = flags ? flags[b] : 0;
  State state = initial && !(flag & kDrop) ? initial[i] : State(0);
  Value x[kNumbers];
#pragma unroll
  for (int k = kFirstRead; k < kInputs; ++k) x[k] = load(inputs[k].data[b * inputs[k].b + channel * inputs[k].d]);
  Rates rates;
  rates.set(inputs[0], channel, channel + 1);
  rates.complete(x, Cell::timed ? times[b * times_b] : Real(0), 0);
  if (!(flag & kMasked)) state = Cell::forward(x, state);
  if (Cell::reads) store(Cell::read(x, state), y[i]);
  if (!Cell::reads || h) store(state, h[i]);
  final[i] = state;
}
#endif

// initial, final, chain and columns are those of scan_rows. Of a cell that gives its state, y is null; of another, h may be,
// where there is to be no backward.
HFR_KERNEL(HFR_BLOCKS)
scan_forward(HFR_PROBLEM, int* chain, Index columns, Saved* h, T* y, const State* initial, State* final) {
  HFR_DESCRIBE
  Forward pass(p, inputs, h, y);
  scan_rows(p, shared, pass, initial, final, chain, columns);
}

// totals: null, or takes the gradient of x0 summed over time, (batch, segments, channels), instead of grad0. grad_times: of a
// timed cell, (blocks of channels, batch, length).
HFR_KERNEL(HFR_BLOCKS_BACK)
scan_backward(HFR_PROBLEM, int* chain, Index columns, HFR_INPUT(grad_y), const Saved* h, const State* initial,
              const State* grad_final, State* grad_initial, State* totals, T* grad0, T* grad1, T* grad2, T* grad3, T* grad4,
              Real* grad_times) {
  HFR_DESCRIBE
  const View<T> grad = HFR_VIEW(grad_y);
  T* const grads[kMaxInputs] = {grad0, grad1, grad2, grad3, grad4};
  Backward pass(p, inputs, grad, h, initial, shared, grads, totals, grad_times);
  scan_rows(p, shared, pass, grad_final, grad_initial, chain, columns);
}
