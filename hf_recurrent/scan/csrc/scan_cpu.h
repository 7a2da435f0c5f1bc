// The loops for CPUs: threads over batch x blocks of channels, and over segments of time where those are too few; vectors across
// channels.
// Tensors are channel-last (batch, length, channels), so a position's channels are contiguous and every cache line is used
// once; the state of a block stays in the L1 cache. Each source that includes this is compiled at first use for one type of
// elements, HFR_STORAGE, and called through the C functions at its end.
#pragma once
#include <stdint.h>
#include <string.h>

#include <type_traits>
#include <utility>
#include <vector>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "cells.h"
#include "convert_cpu.h"
#include "independent.h"
#include "lines.h"

namespace {

using namespace hfr;

constexpr int kMaxInputs = 5;
constexpr int64_t kBlock = 2048;  // channels a thread takes at once: their float32 state is a quarter of a 32 KiB L1 cache
constexpr int64_t kChunk = 64;    // channels between two requests for rows ahead: a few lines at a time keep memory busy
constexpr int64_t kAhead = 2048;  // bytes of a tensor, at least, between a request and its use
// The same on the way back, which reads more tensors: of complex numbers, whose rows are twice as long, a fifth of the time is
// lost where requests are one row ahead.
template <class T>
constexpr int64_t kAheadBack = sizeof(T) > 4 ? 14336 : kAhead;

// Strides count elements, in the order batch, length, channels.
struct Tensor {
  char* data;
  int64_t stride[3];
};

struct Problem {
  int64_t batch, length, channels;
  int64_t reverse, threads;
  int64_t sum_first;         // backward: the gradient of inputs[0] is summed over time, into (batch, channels) of the state type
  const uint8_t* flags;      // (batch, length) contiguous, or null
  Tensor inputs[kMaxInputs];
  Tensor h;                  // (batch, length, channels), contiguous: written forward, read backward. Of a cell that gives
                             // another number than its state, in what SavedAs says, and null forward if nobody is to read it
  Tensor y;                  // forward: what such a cell gives, contiguous; backward: its gradient, or that of h
  char* initial;             // backward: (batch, channels) contiguous in the state type, or null for zero
  char* state;               // forward: in h_{-1}, out the final state; backward: in its gradient, out that of h_{-1}
  char* grad_inputs[kMaxInputs];  // backward only: contiguous
  const char* times;         // of a timed cell: (batch, length) of the state's real type, and
  int64_t times_stride[2];
  char* grad_times;          // backward only: (batch, length) contiguous
};

template <class T>
const T* at(const Tensor& x, int64_t b, int64_t t, int64_t d) {
  return reinterpret_cast<const T*>(x.data) + b * x.stride[0] + t * x.stride[1] + d * x.stride[2];
}

// One position's channels, contiguous: the tensor's own memory, or a copy where channels are strided or broadcast.
template <class T>
const T* row(const Tensor& x, int64_t b, int64_t t, int64_t d, int64_t n, T* copy) {
  const T* from = at<T>(x, b, t, d);
  if (x.stride[2] == 1) return from;
  for (int64_t i = 0; i < n; ++i) copy[i] = from[i * x.stride[2]];
  return copy;
}

// What the numbers of a tensor of T are computed with.
template <class T>
using Value = typename StateOf<T>::type;

// What one part of a state is.
template <class Cell>
using RealOf = decltype(real(typename Cell::State()));

// What a timed cell takes of the rates of a block's channels, each part apart, and how large they are in a chunk.
template <class Cell, bool timed = Cell::timed>
struct Rates {};
template <class Cell>
struct Rates<Cell, true> {
  using Real = RealOf<Cell>;
  alignas(kLine) Real re[kBlock], im[kBlock], inverse_re[kBlock], inverse_im[kBlock];
  Real largest_re[kBlock / kChunk], largest_im[kBlock / kChunk];

  template <class T>
  void set(const T* from, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const Rate<Real> rate(load(from[i]));
      re[i] = rate.value.re, im[i] = rate.value.im;
      inverse_re[i] = rate.inverse.re, inverse_im[i] = rate.inverse.im;
      Real &most_re = largest_re[i / kChunk], &most_im = largest_im[i / kChunk];
      if (i % kChunk == 0) most_re = most_im = 0;
      if (size(re[i]) > most_re) most_re = size(re[i]);  // a NaN gives NaN, however it is computed
      if (size(im[i]) > most_im) most_im = size(im[i]);
    }
  }

  static Real size(Real x) { return x < 0 ? -x : x; }

  bool within(Real time, int64_t first) const {
    return Cell::within(size(time), largest_re[first / kChunk], largest_im[first / kChunk]);
  }
};

// The inputs of a position, one pointer each; Indices is 0 ... inputs - 1. `time` is what its channels have in common.
template <class T>
struct Rows {
  const T* x[kMaxInputs];
  Value<T> time = Value<T>(0);
};

// One channel's numbers, as the cell takes them; `i` counts those of a block.
template <class Cell, class T>
struct Numbers {
  Value<T> x[Cell::inputs + 2 * Cell::timed];

  template <class Rates, class... Loaded>
  HFR_INLINE explicit Numbers(const Rates& rates, int64_t i, Value<T> time, Loaded... loaded) : x{loaded...} {
    if constexpr (Cell::timed) {
      x[0] = {rates.re[i], rates.im[i]};
      x[Cell::inputs] = time;
      x[Cell::inputs + 1] = {rates.inverse_re[i], rates.inverse_im[i]};
    }
  }
};

// Whether `Rates` have it, and nobody reads it from its tensor.
template <class Cell, size_t input>
constexpr bool kIsRate = Cell::timed && input == 0;

// Of 16 bits more, since what is done once for a chunk takes as long; but of 128 backward of GateLoop, which walks thirteen
// tensors at once, would take a quarter longer.
template <class T>
constexpr int64_t kChunkOf = sizeof(T) == 2 ? 96 : kChunk;

// A position's numbers of one kind, up to a chunk, as the loops below read and write them: where they lie.
template <class T, bool apart, class = void>
struct Channels {
  T* data;

  HFR_INLINE Channels(T* from, int64_t) : data(from) {}
  HFR_INLINE auto get(int64_t i) const { return load(data[i]); }
  template <class Number>
  HFR_INLINE void set(int64_t i, Number x) { store(x, data[i]); }
  HFR_INLINE void write(int64_t) const {}
};

// Or complex ones with their parts apart. Side by side in a vector, where the linear recurrence is best computed, they would have
// compilers compute twice, once for each part, what is one number for both: an exponential.
template <class T>
struct Channels<T, true> {
  using Number = decltype(load(T()));
  alignas(kLine) decltype(real(Number())) re[kChunk], im[kChunk];
  T* data;

  HFR_INLINE Channels(T* from, int64_t n) : data(from) {
    for (int64_t i = 0; i < n; ++i) re[i] = load(from[i]).re, im[i] = load(from[i]).im;
  }
  HFR_INLINE Number get(int64_t i) const { return {re[i], im[i]}; }
  HFR_INLINE void set(int64_t i, Number x) { re[i] = x.re, im[i] = x.im; }
  HFR_INLINE void write(int64_t n) const {
    for (int64_t i = 0; i < n; ++i) store(Number(re[i], im[i]), data[i]);
  }
};

// Or numbers of 16 bits as floats: whole rows of them are converted by instructions that compilers do not find in the loop,
// where all they do well is to widen bfloat16, by a shift.
template <class T>
struct Channels<T, false, std::enable_if_t<sizeof(T) == 2 && !std::is_same<T, const BFloat16>::value>> {
  alignas(kLine) float wide[kChunkOf<T>];
  T* data;

  HFR_INLINE Channels(T* from, int64_t n) : data(from) {
    if constexpr (std::is_const<T>::value) widen(from, wide, n);
  }
  HFR_INLINE float get(int64_t i) const { return wide[i]; }
  HFR_INLINE void set(int64_t i, float x) { wide[i] = x; }
  HFR_INLINE void write(int64_t n) const { narrow(wide, data, n); }
};

// The states of a chunk that a block keeps from position to position. Of cells whose parts are apart, theirs are too while the
// block walks: first all real parts of the chunk, then all others (`Block::part` and `Block::join`).
template <class State, bool apart>
struct States {
  State* data;

  HFR_INLINE States(State* from, int64_t) : data(from) {}
  HFR_INLINE State get(int64_t i) const { return data[i]; }
  HFR_INLINE void set(int64_t i, State x) { data[i] = x; }
};

template <class State>
struct States<State, true> {
  using Real = decltype(real(State()));
  Real *re, *im;

  HFR_INLINE States(State* from, int64_t n) : re(reinterpret_cast<Real*>(from)), im(re + n) {}
  HFR_INLINE State get(int64_t i) const { return {re[i], im[i]}; }
  HFR_INLINE void set(int64_t i, State x) { re[i] = x.re, im[i] = x.im; }
  HFR_INLINE void write(State* to, int64_t n) const {
    for (int64_t i = 0; i < n; ++i) to[i] = get(i);
  }
};

// `saved`: whether the states are written too, where they are not what the cell gives. `masked`: they pass.
template <class Cell, bool saved, bool masked, class T, class H, class Rates, size_t... I>
void forward_row(const Rows<T>& rows, const Rates& rates, int64_t first, typename Cell::State* __restrict__ state,
                 T* __restrict__ y, H* __restrict__ h, int64_t n, std::index_sequence<I...>) {
  using State = typename Cell::State;
  const Channels<const T, Cell::apart> x_row[] = {{rows.x[I] + first, kIsRate<Cell, I> ? 0 : n}...};
  States<State, Cell::apart> states(state, n);
  Channels<T, false> given(y, 0);
  Channels<H, false> kept(h, 0);
  const Value<T> time = rows.time;
  HFR_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    const auto [x] = Numbers<Cell, T>(rates, first + i, time, (kIsRate<Cell, I> ? Value<T>() : x_row[I].get(i))...);
    State s = masked ? states.get(i) : Cell::forward(x, states.get(i));
    states.set(i, s);
    if constexpr (!Cell::apart) given.set(i, Cell::read(x, s));
    if constexpr (saved) kept.set(i, s);
  }
  if constexpr (Cell::apart) {
    static_assert(!Cell::reads);
    states.write(y, n);
  }
  given.write(n);
  if constexpr (saved) kept.write(n);
}

// P is the storage type of h_prev: that of a row of h, or the state type for the initial state.
template <class Cell, bool sum_first, bool masked, class T, class P, class Rates, size_t... I>
void backward_row(const Rows<T>& rows, const Rates& rates, int64_t first, const P* __restrict__ h_prev,
                  const T* __restrict__ grad_y, typename Cell::State* __restrict__ carry,
                  typename Cell::State* __restrict__ sum, T* const (&grads)[kMaxInputs],
                  RealOf<Cell>* __restrict__ grad_time, int64_t n, std::index_sequence<I...>) {
  using State = typename Cell::State;
  const Channels<const T, Cell::apart> x_row[] = {{rows.x[I] + first, kIsRate<Cell, I> ? 0 : n}...};
  const Channels<const P, Cell::apart> before(h_prev, n);
  const Channels<const T, Cell::apart> arrived(grad_y, n);
  States<State, Cell::apart> carried(carry, n), total(sum, sum_first ? n : 0);
  Channels<T, Cell::apart> grad[] = {{grads[I], 0}...};
  const Value<T> time = rows.time;
  HFR_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    const auto [x] = Numbers<Cell, T>(rates, first + i, time, (kIsRate<Cell, I> ? Value<T>() : x_row[I].get(i))...);
    Value<T> dx[Cell::inputs + Cell::timed] = {};
    const State previous = before.get(i), h = masked ? previous : Cell::forward(x, previous);
    const State g = carried.get(i) + Cell::read_back(x, h, arrived.get(i), dx);
    carried.set(i, masked ? g : Cell::backward(x, previous, g, dx));
    if constexpr (sum_first) total.set(i, total.get(i) + dx[0]);
    ((sum_first && I == 0 ? void() : grad[I].set(i, dx[I])), ...);
    if constexpr (Cell::timed) grad_time[i] = real(dx[Cell::inputs]);
  }
  ((sum_first && I == 0 ? void() : grad[I].write(n)), ...);
}

// One position more for what a segment makes of a state: `product` and `sum` of `Block::summarise`.
template <class Cell, bool backwards, bool masked, class T, class Rates, size_t... I>
void summary_row(const Rows<T>& rows, const Rates& rates, const T* grad_y, typename Cell::State* __restrict__ product,
                 typename Cell::State* __restrict__ sum, int64_t n, std::index_sequence<I...>) {
  using State = typename Cell::State;
  const Value<T> time = rows.time;
  HFR_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    const auto [x] = Numbers<Cell, T>(rates, i, time, (kIsRate<Cell, I> ? Value<T>() : load(rows.x[I][i]))...);
    Value<T> dx[Cell::inputs + Cell::timed];
    State next = masked ? product[i] : Cell::backward(x, State(0), product[i], dx);  // times conj(a)
    if constexpr (backwards) {
      sum[i] = sum[i] + next * Cell::read_back(x, State(0), load(grad_y[i]), dx);
    } else {
      sum[i] = sum[i] + conj(product[i]) * Cell::forward(x, State(0));
    }
    product[i] = next;
  }
}

// How a cell with exponentials is computed where the tensors hold T: for gates of any size, and for those within kWithin; of a
// timed one, for times and rates that it calls `within`.
template <class Cell, class T, class = void>
struct Computed { using Any = Cell; using Within = Cell; };
template <class Cell, class T>
struct Computed<Cell, T, std::enable_if_t<sizeof(T) == 2 && Cell::first_gate >= 0>> {
  using Any = typename Cell::template With<Short>;
  using Within = typename Cell::template With<ShortWithin>;
};
template <class Cell>
struct Computed<Cell, float, std::enable_if_t<Cell::first_gate >= 0>> {
  using Any = Cell;
  using Within = typename Cell::template With<ExactWithin>;
};

template <class Cell>
struct Computed<Cell, Complex<float>, std::enable_if_t<Cell::timed>> {
  using Any = Cell;
  using Within = typename Cell::template With<ExactWithin>;
};

HFR_INLINE unsigned int bits_of(float x) { return bits_from_float(x); }
template <class T>
HFR_INLINE unsigned short bits_of(T x) { return x.bits; }

// Whether what a cell computes exponentials of is at most kWithin, in n channels from the first on.
template <class Cell, class T, size_t... I>
bool within(const Rows<T>& rows, int64_t first, int64_t n, std::index_sequence<I...>) {
  using Bits = decltype(bits_of(T()));
  constexpr Bits kSign = Bits(1) << (8 * sizeof(T) - 1);
  T limit;
  store(kWithin, limit);
  const T* const gates[] = {rows.x[Cell::first_gate + I] + first...};
  // Magnitudes are in the order of their bits, NaN above all numbers: what is beyond has a difference whose sign bit is set.
  Bits differences = 0;
#pragma omp simd reduction(| : differences)
  for (int64_t i = 0; i < n; ++i) {
    differences |= (Bits(bits_of(limit) - Bits(bits_of(gates[I][i]) & Bits(~kSign))) | ...);
  }
  return !(differences & kSign);
}

// Less than this is left of a state: nothing that could be seen next to what has been added since, even if that is smaller by
// twelve orders of magnitude. Errors are measured by a channel's largest state: where nothing is added, or coefficients above
// one have raised a state by more than that, a remainder is lost here that the loop would keep.
constexpr double kFaded = 5e-20;

double magnitude(double x) { return x < 0 ? -x : x; }
template <class T>
double magnitude(Complex<T> x) { return magnitude(x.re) + magnitude(x.im); }

// An infinity or a NaN sends the scan back to one segment: what a segment makes of the state that enters it says neither what
// an infinity that has seemingly faded leaves behind (NaN to the end) nor that a reset stops it.
template <class State>
bool finite(const State* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (!(magnitude(x[i]) < __builtin_inf())) return false;
  }
  return true;
}

template <class State>
bool faded(const State* product, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (!(magnitude(product[i]) < kFaded)) return false;
  }
  return true;
}

template <class Real>
Real sum_of(const Real* x, int64_t n) {
  Real sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  return sum;
}

// The work of one thread at a time.
template <class Cell, class T>
struct Block {
  using State = typename Cell::State;
  using Saved = typename SavedAs<T, State>::type;
  using Any = typename Computed<Cell, T>::Any;
  using Within = typename Computed<Cell, T>::Within;
  static constexpr int64_t kChunk = kChunkOf<T>;
  static_assert(!Cell::timed || kChunk == ::kChunk, "the chunks that Rates knows the largest of");
  static constexpr auto kIndices = std::make_index_sequence<Cell::inputs>();

  const Problem& p;
  const int64_t b, d, n;      // the row of the batch, the first channel and their number
  const int64_t begin, end;   // steps: positions in the order of the recurrence
  const int64_t row_bytes;
  const bool streams;
  RealOf<Cell>* const grad_times;  // of this row and these channels, (length): backward of a timed cell only
  Rates<Cell> rates;
  T copies[kMaxInputs + 1][kBlock];
  alignas(kLine) T out[kMaxInputs][kChunk];  // what is to be streamed
  alignas(kLine) Saved out_h[kChunk];

  Block(const Problem& problem, int64_t batch_row, int64_t first, int64_t size, int64_t from, int64_t to, bool past_caches,
        RealOf<Cell>* time_sums)
      : p(problem), b(batch_row), d(first), n(size), begin(from), end(to), row_bytes(n * (int64_t)sizeof(T)),
        streams(past_caches), grad_times(time_sums) {
    if constexpr (Cell::timed) rates.set(row(p.inputs[0], b, 0, d, n, copies[0]), n);
  }

  ~Block() {
    if (streams) finish_streams();
  }

  uint8_t flags(int64_t t) const { return p.flags ? p.flags[b * p.length + t] : 0; }

  int64_t position(int64_t step) const { return p.reverse ? p.length - 1 - step : step; }

  // The first channel of the chunk to take after i channels. A walk to lower positions takes the chunks of a row from the last
  // one on, so that addresses only fall: processors foresee that, and not the leaps between one row's end and another's.
  int64_t chunk(int64_t i, bool falling) const { return falling ? (n - 1) / kChunk * kChunk - i : i; }

  Rows<T> inputs(int64_t t) {
    Rows<T> rows;
    for (int i = 0; i < Cell::inputs; ++i) rows.x[i] = row(p.inputs[i], b, t, d, n, copies[i]);
    if constexpr (Cell::timed) {
      rows.time = reinterpret_cast<const RealOf<Cell>*>(p.times)[b * p.times_stride[0] + t * p.times_stride[1]];
    }
    return rows;
  }

  bool is_within(const Rows<T>& rows, int64_t first, int64_t size) const {
    if constexpr (std::is_same<Any, Within>::value) {
      return true;
    } else if constexpr (Cell::timed) {
      return rates.within(real(rows.time), first);
    } else {
      return within<Cell>(rows, first, size, std::make_index_sequence<Cell::inputs - Cell::first_gate>());
    }
  }

  // What these steps make of the state that enters them, which is conj(product) * state + sum, or of its gradient, which is
  // product * gradient + sum. From where it leaves to where it enters, as far as anything of it is left.
  template <bool backwards>
  void summarise(State* product, State* sum) {
    for (int64_t i = 0; i < n; ++i) product[i] = State(1), sum[i] = State(0);
    for (int64_t count = 1; count <= end - begin; ++count) {
      int64_t t = position(backwards ? begin + count - 1 : end - count);
      bool drop = flags(t) & kDrop, masked = flags(t) & kMasked;
      if (!(backwards && drop)) {
        const T* grad_y = backwards ? row(p.y, b, t, d, n, copies[kMaxInputs]) : nullptr;
        if (!masked) {
          summary_row<Any, backwards, false>(inputs(t), rates, grad_y, product, sum, n, kIndices);
        } else if (backwards) {
          summary_row<Any, backwards, true>(inputs(t), rates, grad_y, product, sum, n, kIndices);
        }
      }
      if (drop || (count % 16 == 0 && faded(product, n))) {
        for (int64_t i = 0; i < n; ++i) product[i] = State(0);
        return;
      }
    }
  }

  // The states of each chunk as its loops take them; and side by side again.
  void part(State* state) const {
    if constexpr (Cell::apart) {
      for (int64_t c = 0; c < n; c += kChunk) {
        const int64_t m = n - c < kChunk ? n - c : kChunk;
        const Channels<const State, true> beside(state + c, m);
        States<State, true> parts(state + c, m);
        for (int64_t i = 0; i < m; ++i) parts.set(i, beside.get(i));
      }
    }
  }

  void join(State* state) const {
    if constexpr (Cell::apart) {
      for (int64_t c = 0; c < n; c += kChunk) {
        const int64_t m = n - c < kChunk ? n - c : kChunk;
        State beside[kChunk];
        States<State, true>(state + c, m).write(beside, m);
        memcpy(static_cast<void*>(state + c), beside, m * sizeof(State));
      }
    }
  }

  void forward(State* state) {
    part(state);
    if (Cell::reads && p.h.data) {
      forward<Cell::reads>(state);
    } else {
      forward<false>(state);
    }
    join(state);
  }

  template <bool saved>
  void forward(State* state) {
    const Tensor& given = Cell::reads ? p.y : p.h;
    const int64_t ahead = 1 + kAhead / row_bytes;  // positions between a request and its use
    for (int64_t step = begin; step < end; ++step) {
      int64_t t = position(step), later = position(step + ahead < end ? step + ahead : end - 1);
      if (flags(t) & kDrop) memset(static_cast<void*>(state), 0, n * sizeof(State));
      Rows<T> rows = inputs(t);
      for (int64_t i = 0; i < n; i += kChunk) {
        int64_t c = chunk(i, p.reverse), m = n - c < kChunk ? n - c : kChunk;
        T* y = const_cast<T*>(at<T>(given, b, t, d + c));
        Saved* h = saved ? const_cast<Saved*>(at<Saved>(p.h, b, t, d + c)) : nullptr;
        for (int i = 0; i < Cell::inputs; ++i) request<false>(at<T>(p.inputs[i], b, later, d + c), m);
        if (!streams) {
          request<true>(at<T>(given, b, later, d + c), m);
          if (saved) request<true>(at<Saved>(p.h, b, later, d + c), m);
        }
        T* to = streams ? out[0] : y;
        Saved* to_h = streams ? out_h : h;
        if (flags(t) & kMasked) {
          forward_row<Any, saved, true>(rows, rates, c, state + c, to, to_h, m, kIndices);
        } else if (is_within(rows, c, m)) {
          forward_row<Within, saved, false>(rows, rates, c, state + c, to, to_h, m, kIndices);
        } else {
          forward_row<Any, saved, false>(rows, rates, c, state + c, to, to_h, m, kIndices);
        }
        if (!streams) continue;
        stream(to, y, m * sizeof(T));
        if (saved) stream(to_h, h, m * sizeof(Saved));
      }
    }
  }

  // `sum`: where sum_first, what the gradient of a coefficient that is constant over time is added to.
  template <bool sum_first>
  void backward(State* carry, State* sum) {
    State zero[kBlock];
    memset(static_cast<void*>(zero), 0, n * sizeof(State));
    const int64_t ahead = 1 + kAheadBack<T> / row_bytes;
    part(carry);
    if (sum_first) part(sum);
    const State* initial = p.initial ? reinterpret_cast<const State*>(p.initial) + b * p.channels + d : zero;
    for (int64_t step = end - 1; step >= begin; --step) {
      int64_t t = position(step), before = position(step - 1);
      int64_t later = position(step - ahead > begin ? step - ahead : begin);
      const T* grad_y = row(p.y, b, t, d, n, copies[kMaxInputs]);
      Rows<T> rows = inputs(t);
      RealOf<Cell> time_sum = 0;
      for (int64_t i = 0; i < n; i += kChunk) {
        int64_t c = chunk(i, !p.reverse), m = n - c < kChunk ? n - c : kChunk;
        T *grads[kMaxInputs], *to[kMaxInputs];
        for (int i = 0; i < Cell::inputs; ++i) {
          if (i < Cell::backward_inputs) request<false>(at<T>(p.inputs[i], b, later, d + c), m);
          if (sum_first && i == 0) {
            grads[i] = to[i] = nullptr;
            continue;
          }
          T* grad = reinterpret_cast<T*>(p.grad_inputs[i]) + b * p.length * p.channels + d + c;
          if (!streams) request<true>(grad + later * p.channels, m);
          grads[i] = grad + t * p.channels;
          to[i] = streams ? out[i] : grads[i];
        }
        request<false>(at<T>(p.y, b, later, d + c), m);
        request<false>(at<Saved>(p.h, b, later, d + c), m);
        RealOf<Cell> of_time[kChunk];
        auto run = [&](auto* h_prev) {
          if (flags(t) & kMasked) {
            backward_row<Any, sum_first, true>(rows, rates, c, h_prev, grad_y + c, carry + c, sum + c, to, of_time, m,
                                               kIndices);
          } else if (is_within(rows, c, m)) {
            backward_row<Within, sum_first, false>(rows, rates, c, h_prev, grad_y + c, carry + c, sum + c, to, of_time, m,
                                                   kIndices);
          } else {
            backward_row<Any, sum_first, false>(rows, rates, c, h_prev, grad_y + c, carry + c, sum + c, to, of_time, m,
                                                kIndices);
          }
        };
        if (flags(t) & kDrop) {
          run(zero);
        } else if (step == 0) {
          run(initial + c);
        } else {
          run(at<Saved>(p.h, b, before, d + c));
        }
        for (int i = sum_first; streams && i < Cell::inputs; ++i) stream(to[i], grads[i], m * sizeof(T));
        if constexpr (Cell::timed) time_sum += sum_of(of_time, m);
      }
      if constexpr (Cell::timed) grad_times[t] = time_sum;
      if (flags(t) & kDrop) memset(static_cast<void*>(carry), 0, n * sizeof(State));
    }
    join(carry);
    if (sum_first) join(sum);
  }
};

// How the work is divided: blocks of whole rows of channels where the batch alone keeps the threads busy. Otherwise the
// channels are split, but not into pieces under a page: two cores that walk the same pages side by side fetch each other's
// lines and end up slower than one core alone. Where that is too little still, time is split.
constexpr int64_t kPage = 4096;
constexpr int64_t kSegment = 512;  // steps, at least

struct Division {
  int64_t size, pieces, segments;

  Division(const Problem& p, int64_t bytes) {
    pieces = (p.channels + kBlock - 1) / kBlock;
    while (p.batch * pieces % p.threads && p.batch * pieces < 4 * p.threads && p.channels * bytes / (pieces + 1) >= kPage) {
      ++pieces;
    }
    size = (p.channels + pieces - 1) / pieces;
    size = (size + 31) / 32 * 32;  // whole cache lines of every type
    if (size > kBlock) size = kBlock;
    pieces = (p.channels + size - 1) / size;
    segments = p.threads / (p.batch * pieces);
    if (segments > p.length / kSegment) segments = p.length / kSegment;
    if (segments < 1) segments = 1;
  }
};

// A large new tensor costs more in page faults than in arithmetic: ask for huge pages before the first touch.
void prefer_huge_pages(const void* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t huge = 1 << 21;
  uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + huge - 1) & ~(huge - 1);
  uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(huge - 1);
  if (end > begin + 4 * huge) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

// Over segments of time in two passes: what each makes of the state that enters it, which a gate that forgets lets end after
// few steps, and then, with the states known that enter all of them, the scan itself.
template <class Cell, class T, bool backwards>
void run_divided(const Problem& p, bool streams, bool splits_time = true) {
  using State = typename Cell::State;
  const Division division(p, sizeof(T));
  const int64_t segments = splits_time ? division.segments : 1, rows = p.batch * p.channels;

  // Of the times' gradients each piece of the channels has its own sums, (pieces, batch, length), which are then added in order.
  using Real = RealOf<Cell>;
  const int64_t positions = p.batch * p.length;
  Real* time_sums = reinterpret_cast<Real*>(p.grad_times);
  std::vector<Real> own_time_sums;
  if (Cell::timed && backwards && division.pieces > 1) {
    own_time_sums.resize(division.pieces * positions);
    time_sums = own_time_sums.data();
  }

  // visit(block, flow, offset), flow being the place of the segment in the order in which states (or gradients) pass them.
  auto each = [&](int64_t count, auto visit) {
    const int64_t items = p.batch * division.pieces;
#pragma omp parallel for schedule(static) num_threads(p.threads) if (p.threads > 1)
    for (int64_t work = 0; work < items * count; ++work) {
      int64_t flow = work / items, b = work % items / division.pieces, d = work % division.pieces * division.size;
      int64_t n = p.channels - d < division.size ? p.channels - d : division.size;
      int64_t place = backwards ? segments - 1 - flow : flow;
      Real* sums_here = time_sums ? time_sums + d / division.size * positions + b * p.length : nullptr;
      Block<Cell, T> block(p, b, d, n, p.length * place / segments, p.length * (place + 1) / segments, streams, sums_here);
      visit(block, flow, b * p.channels + d);
    }
  };

  // Row `flow` of each, (batch, channels): the state that enters a segment, and the sums over it. The first and only segment
  // works on the caller's own.
  State* entering = reinterpret_cast<State*>(p.state);
  State* sums = reinterpret_cast<State*>(p.grad_inputs[0]);
  std::vector<State> own_entering, own_sums;
  if (segments > 1) {
    own_entering.resize(segments * rows);
    own_sums.resize(p.sum_first ? segments * rows : 0, State(0));
    std::vector<State> products(segments * rows);
    each(segments - 1, [&](auto& block, int64_t flow, int64_t at) {
      int64_t next = (flow + 1) * rows + at;
      block.template summarise<backwards>(&products[next], &own_entering[next]);
    });
    for (int64_t i = 0; i < rows; ++i) own_entering[i] = entering[i];
    for (int64_t i = rows; i < segments * rows; ++i) {
      State product = backwards ? products[i] : conj(products[i]);
      own_entering[i] = own_entering[i] + product * own_entering[i - rows];
    }
    if (!finite(own_entering.data(), segments * rows)) return run_divided<Cell, T, backwards>(p, streams, false);
    entering = own_entering.data();
    sums = own_sums.data();
  }
  each(segments, [&](auto& block, int64_t flow, int64_t at) {
    int64_t i = flow * rows + at;
    if constexpr (!backwards) {
      block.forward(entering + i);
    } else if (!p.sum_first) {
      block.template backward<false>(entering + i, nullptr);
    } else if constexpr (Cell::first_may_be_constant) {
      block.template backward<true>(entering + i, sums + i);
    }
  });
  if (segments > 1) {
    if (!finite(entering, (segments - 1) * rows)) return run_divided<Cell, T, backwards>(p, streams, false);
    memcpy(p.state, entering + (segments - 1) * rows, rows * sizeof(State));
    State* total = reinterpret_cast<State*>(p.grad_inputs[0]);
    for (size_t i = 0; i < own_sums.size(); ++i) total[i % rows] = total[i % rows] + own_sums[i];
  }
  if (!own_time_sums.empty()) {
    Real* total = reinterpret_cast<Real*>(p.grad_times);
    for (int64_t i = 0; i < positions; ++i) {
      total[i] = 0;
      for (int64_t piece = 0; piece < division.pieces; ++piece) total[i] += own_time_sums[piece * positions + i];
    }
  }
}

template <class Cell, class T>
int run(const Problem& p, int backwards) {
  const int64_t row_bytes = p.channels * sizeof(T), bytes = p.batch * p.length * row_bytes;
  bool streams = true;  // pieces of a row too, which start on a line where rows do
  int outputs = backwards ? Cell::inputs - (int)p.sum_first : 1;
  if (!backwards && Cell::reads && p.h.data) {
    prefer_huge_pages(p.h.data, bytes / sizeof(T) * sizeof(typename SavedAs<T, typename Cell::State>::type));
    streams = is_streamed(p.h.data, row_bytes, bytes);
  }
  for (int i = 0; i < outputs; ++i) {
    const char* output = backwards ? p.grad_inputs[i + p.sum_first] : Cell::reads ? p.y.data : p.h.data;
    prefer_huge_pages(output, bytes);
    streams = streams && is_streamed(output, row_bytes, bytes);
  }
  if (backwards) {
    run_divided<Cell, T, true>(p, streams);
  } else {
    run_divided<Cell, T, false>(p, streams);
  }
  return 0;
}

}  // namespace

// The size of Problem as this compiler laid it out: the caller checks its own against it.
extern "C" int64_t hfr_problem_size() { return sizeof(Problem); }
