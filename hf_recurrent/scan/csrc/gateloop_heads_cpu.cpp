// GateLoop's loops for CPUs where a head has d_k x d_v states. All states of a row r and column c of a head are driven by
// a_r, k_r, q_r and v_c, so a vector holds the same (r, c) of several heads: its lanes need nothing of each other, forward or
// backward. Where the heads are fewer than the lanes, each one's columns are dealt out to several. A tile of positions is
// first turned so that lanes lie side by side (that costs 1 / d_v of the work on the states), then each row and a few
// columns of it walk the tile with their states in registers. Nothing of the size batch x length x heads x d_k x d_v is ever
// written: the backward pass recomputes the states from checkpoints about every sqrt(length) positions.
#include <stdint.h>
#include <string.h>

#include <type_traits>
#include <vector>

#include "cells.h"
#include "lanes.h"

namespace {

using namespace hfr;

constexpr int64_t kTile = 16;   // positions
constexpr int64_t kColumns = 4;  // whose states are in registers at once

// Four neighbouring numbers of each of four lanes, to four vectors of the lanes, `stride` apart.
template <class Real>
struct Four {
  typedef Real type __attribute__((vector_size(4 * sizeof(Real))));
  typedef std::conditional_t<sizeof(Real) == 4, int32_t, int64_t> Index;
  typedef Index Indices __attribute__((vector_size(4 * sizeof(Real))));

  template <int i, int j, int k, int l>
  static type pick(type x, type y) {
#ifdef __clang__
    return __builtin_shufflevector(x, y, i, j, k, l);
#else
    return __builtin_shuffle(x, y, Indices{i, j, k, l});
#endif
  }

  static void turn(const type (&x)[4], Real* to, int64_t stride) {
    const type low = pick<0, 4, 1, 5>(x[0], x[1]), low2 = pick<0, 4, 1, 5>(x[2], x[3]);
    const type high = pick<2, 6, 3, 7>(x[0], x[1]), high2 = pick<2, 6, 3, 7>(x[2], x[3]);
    const type y[4] = {pick<0, 1, 4, 5>(low, low2), pick<2, 3, 6, 7>(low, low2), pick<0, 1, 4, 5>(high, high2),
                       pick<2, 3, 6, 7>(high, high2)};
    for (int i = 0; i < 4; ++i) memcpy(to + i * stride, &y[i], sizeof y[i]);
  }
};

struct Tensor {
  char* data;
  int64_t stride[4];  // in elements: batch, length, heads, rows or columns
};

struct Problem {
  int64_t batch, length, heads, rows, columns;
  int64_t reverse, threads;
  const uint8_t* flags;  // (batch, length) contiguous, or null
  Tensor q, k, v;        // (batch, length, heads, rows or columns)
  Tensor a;              // (batch, length, heads, rows), in the state type
  char* y;               // forward: (batch, length, heads, columns) contiguous
  char* state;           // (batch, heads, rows, columns): in H_{-1}, out the last state; backward: their gradients
  const char* start;     // (heads, rows, columns), what documents start from, or null
  const char* initial;   // backward: H_{-1}, or null
  Tensor grad_y;         // backward: (batch, length, heads, columns)
  char *grad_q, *grad_k, *grad_v, *grad_a;  // backward: contiguous, grad_a in the state type
  char* grad_start;                         // backward: (batch, heads, rows, columns), or null
};

// T: what q, k and v hold. Turned arrays are (..., parts of a number, lanes).
template <class T, bool is_complex>
struct Block {
  using Real = typename StateOf<T>::type;
  using Lanes = typename Vector<Real>::type;
  using State = std::conditional_t<is_complex, Complex<Lanes>, Lanes>;
  using Number = std::conditional_t<is_complex, Complex<Real>, Real>;
  using Cell = HeadCell<State, Lanes>;
  static constexpr int64_t kLanes = kBytes / sizeof(Real), kState = is_complex ? 2 * kLanes : kLanes;

  const Problem& p;
  const int64_t b, first, parts;  // the row of the batch; the first head here; lanes to a head
  const int64_t rows, columns;    // columns: to a lane
  int64_t count = 0;              // positions of the tile
  int64_t heads_[kLanes], columns_[kLanes];  // of each lane: its head, and how many columns it has
  int64_t full_rows, full_columns;           // the first so many lanes, a multiple of four, have all of theirs
  std::vector<Real> memory;
  std::vector<uint8_t> flags;
  Real *a, *k, *q, *v, *start;  // (count, rows), (count, columns); (rows, columns)

  Block(const Problem& problem, int64_t batch_row, int64_t block, int64_t parts_of_a_head)
      : p(problem),
        b(batch_row),
        first(block * (kLanes / parts_of_a_head)),
        parts(parts_of_a_head),
        rows(problem.rows),
        columns((problem.columns + parts_of_a_head - 1) / parts_of_a_head) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      heads_[lane] = first + lane / parts;
      const int64_t left = p.columns - first_column(lane);
      columns_[lane] = head(lane) >= p.heads || left < 0 ? 0 : left < columns ? left : columns;
    }
    full_rows = full_lanes(false), full_columns = full_lanes(true);
  }

  // ---- memory --------------------------------------------------------------------------------------------------------

  int64_t state_size() const { return rows * columns * kState; }

  // Room for tiles of `positions` and `more` numbers, whose address is returned.
  Real* reserve(int64_t positions, int64_t more) {
    const int64_t of_rows = positions * rows * kLanes, of_columns = positions * columns * kLanes;
    flags.resize(positions);
    memory.resize(of_rows / kLanes * kState + 2 * of_rows + of_columns + state_size() + more + kLanes);
    const uintptr_t misaligned = reinterpret_cast<uintptr_t>(memory.data()) % kBytes;
    a = memory.data() + (misaligned ? kBytes - misaligned : 0) / sizeof(Real);
    k = a + of_rows / kLanes * kState;
    q = k + of_rows;
    v = q + of_rows;
    start = v + of_columns;
    gather(p.start, 0, start);
    return start + state_size();
  }

  static Lanes lanes(const Real* from) { return Vector<Real>::load(from); }
  static void get(const Real* from, Lanes& x) { x = lanes(from); }
  static void get(const Real* from, Complex<Lanes>& x) { x.re = lanes(from), x.im = lanes(from + kLanes); }
  static void put(Lanes x, Real* to) { Vector<Real>::store(x, to); }
  static void put(Complex<Lanes> x, Real* to) { put(x.re, to), put(x.im, to + kLanes); }
  static void put_lane(Real x, Real* to) { *to = x; }
  static void put_lane(Complex<Real> x, Real* to) { to[0] = x.re, to[kLanes] = x.im; }
  static void get_lane(const Real* from, Real& x) { x = *from; }
  static void get_lane(const Real* from, Complex<Real>& x) { x.re = from[0], x.im = from[kLanes]; }

  // ---- between tensors and lanes -------------------------------------------------------------------------------------

  int64_t position(int64_t step) const { return p.reverse ? p.length - 1 - step : step; }
  int64_t head(int64_t lane) const { return heads_[lane]; }
  int64_t first_column(int64_t lane) const { return (lane & (parts - 1)) * columns; }  // parts: a power of two
  int64_t columns_of(int64_t lane) const { return columns_[lane]; }

  // States, between (batch, heads, rows, columns) and (rows, columns) with lanes. Lanes without a column stay zero.
  void gather(const char* data, int64_t batch_row, Real* to) const {
    memset(to, 0, state_size() * sizeof(Real));
    if (!data) return;
    for (int64_t lane = 0; lane < kLanes; ++lane)
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t n = columns_of(lane);
        const Number* from = reinterpret_cast<const Number*>(data) +
                             ((batch_row * p.heads + head(lane)) * rows + r) * p.columns + first_column(lane);
        for (int64_t c = 0; c < n; ++c) put_lane(from[c], to + (r * columns + c) * kState + lane);
      }
  }

  void scatter(const Real* from, char* data) const {
    for (int64_t lane = 0; lane < kLanes; ++lane)
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t n = columns_of(lane);
        Number* to = reinterpret_cast<Number*>(data) + ((b * p.heads + head(lane)) * rows + r) * p.columns + first_column(lane);
        for (int64_t c = 0; c < n; ++c) get_lane(from + (r * columns + c) * kState + lane, to[c]);
      }
  }

  // (count, n) of a tensor from step `begin` on, n rows or n columns.
  template <class U>
  void fetch(const Tensor& x, bool is_columns, int64_t begin, Real* to) const {
    const int64_t n = is_columns ? columns : rows, size = sizeof(load(U())) / sizeof(Real) * kLanes;
    for (int64_t t = 0; t < count; ++t) {
      const U* at_t = reinterpret_cast<const U*>(x.data) + b * x.stride[0] + position(begin + t) * x.stride[1];
      Real* to_t = to + t * n * size;
      const U* from[kLanes];
      for (int64_t lane = 0; lane < kLanes; ++lane)
        from[lane] = at_t + head(lane) * x.stride[2] + (is_columns ? first_column(lane) * x.stride[3] : 0);
      const int64_t full = x.stride[3] == 1 ? is_columns ? full_columns : full_rows : 0;
      for (int64_t lane = 0; lane < full; lane += 4) fetch_four(from + lane, n, to_t + lane);
      for (int64_t lane = full; lane < kLanes; ++lane) {
        const int64_t have = numbers_of(lane, is_columns);
        for (int64_t i = 0; i < have; ++i) put_lane(load(from[lane][i * x.stride[3]]), to_t + i * size + lane);
        for (int64_t i = have; i < n; ++i) put_lane(decltype(load(U()))(0), to_t + i * size + lane);
      }
    }
  }

  int64_t numbers_of(int64_t lane, bool is_columns) const {
    return is_columns ? columns_of(lane) : head(lane) < p.heads ? rows : 0;
  }

  int64_t full_lanes(bool is_columns) const {
    int64_t lane = 0;
    while (lane < kLanes && numbers_of(lane, is_columns) == (is_columns ? columns : rows)) ++lane;
    return lane - lane % 4;
  }

  // n numbers side by side of each of four lanes.
  template <class U>
  static void fetch_four(const U* const* from, int64_t n, Real* to) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
      typename Four<Real>::type x[4];
      for (int lane = 0; lane < 4; ++lane)
        for (int j = 0; j < 4; ++j) x[lane][j] = load(from[lane][i + j]);
      Four<Real>::turn(x, to + i * kLanes, kLanes);
    }
    for (; i < n; ++i)
      for (int lane = 0; lane < 4; ++lane) to[i * kLanes + lane] = load(from[lane][i]);
  }

  // A complex number is two that lie side by side, there and here.
  static void fetch_four(const Complex<Real>* const* from, int64_t n, Real* to) {
    const Real* parts_of[4];
    for (int lane = 0; lane < 4; ++lane) parts_of[lane] = reinterpret_cast<const Real*>(from[lane]);
    fetch_four(parts_of, 2 * n, to);
  }

  void fetch_tile(int64_t begin, int64_t end) {
    count = end - begin;
    fetch<Number>(p.a, false, begin, a);
    fetch<T>(p.k, false, begin, k);
    fetch<T>(p.v, true, begin, v);
    for (int64_t t = 0; t < count; ++t) flags[t] = p.flags ? p.flags[b * p.length + position(begin + t)] : 0;
  }

  void put_columns(const Real* from, int64_t begin, char* data) const {
    for (int64_t t = 0; t < count; ++t) {
      T* at_t = reinterpret_cast<T*>(data) + (b * p.length + position(begin + t)) * p.heads * p.columns;
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const int64_t have = columns_of(lane);
        T* to = at_t + head(lane) * p.columns + first_column(lane);
        for (int64_t c = 0; c < have; ++c) store(from[(t * columns + c) * kLanes + lane], to[c]);
      }
    }
  }

  // Sums over the lanes of each head, in their order.
  template <class U, class Value>
  void put_rows(const Real* from, int64_t begin, char* data) const {
    const int64_t size = sizeof(Value) / sizeof(Real) * kLanes;
    for (int64_t t = 0; t < count; ++t) {
      U* at_t = reinterpret_cast<U*>(data) + (b * p.length + position(begin + t)) * p.heads * rows;
      for (int64_t lane = 0; lane < kLanes && head(lane) < p.heads; lane += parts)
        for (int64_t r = 0; r < rows; ++r) {
          Value sum(0);
          for (int64_t part = 0; part < parts; ++part) {
            Value x;
            get_lane(from + (t * rows + r) * size + lane + part, x);
            sum = sum + x;
          }
          store(sum, at_t[head(lane) * rows + r]);
        }
    }
  }

  // ---- forward -------------------------------------------------------------------------------------------------------

  // n states of a row, from column c on, through the tile; `out` (count, columns) is added to, and each state after a
  // position kept in `history`, (count, n).
  template <int n, bool reads, bool keeps>
  void walk(int64_t r, int64_t c, Real* states, Real* out, Real* history) const {
    State s[n], from_start[n];
    for (int j = 0; j < n; ++j) {
      get(states + (r * columns + c + j) * kState, s[j]);
      get(start + (r * columns + c + j) * kState, from_start[j]);
    }
    for (int64_t t = 0; t < count; ++t) {
      const uint8_t flag = flags[t];
      if (flag & kDrop)
        for (int j = 0; j < n; ++j) s[j] = from_start[j];
      if (!(flag & kMasked)) {
        State at;
        get(a + (t * rows + r) * kState, at);
        const Lanes kt = lanes(k + (t * rows + r) * kLanes);
        for (int j = 0; j < n; ++j) s[j] = Cell::forward(s[j], at, kt, lanes(v + (t * columns + c + j) * kLanes));
      }
      if (reads) {
        const Lanes qt = lanes(q + (t * rows + r) * kLanes);
        for (int j = 0; j < n; ++j) {
          Real* to = out + (t * columns + c + j) * kLanes;
          put(lanes(to) + Cell::read(s[j], qt), to);
        }
      }
      if (keeps)
        for (int j = 0; j < n; ++j) put(s[j], history + (t * n + j) * kState);
    }
    if (!keeps)
      for (int j = 0; j < n; ++j) put(s[j], states + (r * columns + c + j) * kState);
  }

  template <bool reads>
  void walk_all(Real* states, Real* out) const {
    for (int64_t r = 0; r < rows; ++r) {
      int64_t c = 0;
      for (; c + kColumns <= columns; c += kColumns) walk<kColumns, reads, false>(r, c, states, out, nullptr);
      for (; c < columns; ++c) walk<1, reads, false>(r, c, states, out, nullptr);
    }
  }

  void forward() {
    Real* states = reserve(kTile, state_size() + kTile * columns * kLanes);
    Real* out = states + state_size();
    gather(p.state, b, states);
    for (int64_t begin = 0; begin < p.length; begin += kTile) {
      fetch_tile(begin, begin + kTile < p.length ? begin + kTile : p.length);
      fetch<T>(p.q, false, begin, q);
      memset(out, 0, count * columns * kLanes * sizeof(Real));
      walk_all<true>(states, out);
      put_columns(out, begin, p.y);
    }
    scatter(states, p.state);
  }

  // ---- backward ------------------------------------------------------------------------------------------------------

  struct Gradients {
    Real *a, *k, *q, *v;  // (count, rows), (count, columns)
    Real *carry, *start;  // (rows, columns)
  };

  // n states of a row back through the tile, from those that were kept.
  template <int n>
  void walk_back(int64_t r, int64_t c, const Real* before, const Real* history, const Real* dy, const Gradients& to) const {
    State g[n], from_start[n], dstart[n];
    for (int j = 0; j < n; ++j) {
      const int64_t at = (r * columns + c + j) * kState;
      get(to.carry + at, g[j]), get(start + at, from_start[j]), get(to.start + at, dstart[j]);
    }
    for (int64_t t = count - 1; t >= 0; --t) {
      const uint8_t flag = flags[t];
      const int64_t row = t * rows + r;
      const Lanes qt = lanes(q + row * kLanes);
      Lanes dq = lanes(to.q + row * kLanes);
      for (int j = 0; j < n; ++j) {
        State after;
        get(history + (t * n + j) * kState, after);
        g[j] = Cell::read_back(after, qt, lanes(dy + (t * columns + c + j) * kLanes), g[j], dq);
      }
      put(dq, to.q + row * kLanes);
      if (!(flag & kMasked)) {
        const Lanes kt = lanes(k + row * kLanes);
        Lanes dk = lanes(to.k + row * kLanes);
        State at, da;
        get(a + row * kState, at), get(to.a + row * kState, da);
        for (int j = 0; j < n; ++j) {
          const int64_t column = (t * columns + c + j) * kLanes;
          Lanes dv = lanes(to.v + column);
          State h = from_start[j];
          if (!(flag & kDrop)) get(t ? history + ((t - 1) * n + j) * kState : before + (r * columns + c + j) * kState, h);
          g[j] = Cell::backward(h, at, kt, lanes(v + column), g[j], dk, dv, da);
          put(dv, to.v + column);
        }
        put(dk, to.k + row * kLanes), put(da, to.a + row * kState);
      }
      if (flag & kDrop)
        for (int j = 0; j < n; ++j) dstart[j] = dstart[j] + g[j], g[j] = State();
    }
    for (int j = 0; j < n; ++j) {
      const int64_t at = (r * columns + c + j) * kState;
      put(g[j], to.carry + at), put(dstart[j], to.start + at);
    }
  }

  template <int n>
  void through(int64_t r, int64_t c, Real* before, Real* history, const Real* dy, const Gradients& to) const {
    walk<n, false, true>(r, c, before, nullptr, history);
    walk_back<n>(r, c, before, history, dy, to);
  }

  void backward() {
    int64_t segment = kTile;
    while (segment * segment < p.length) ++segment;
    const int64_t segments = (p.length + segment - 1) / segment, size = state_size();
    const int64_t of_rows = segment * rows * kLanes, of_columns = segment * columns * kLanes;
    const int64_t gradients = of_rows / kLanes * kState + 2 * of_rows + of_columns;
    Real* checkpoints = reserve(segment, (segments + 2) * size + segment * kColumns * kState + of_columns + gradients);
    Gradients to;
    to.carry = checkpoints + segments * size;
    to.start = to.carry + size;
    Real* history = to.start + size;
    Real* dy = history + segment * kColumns * kState;
    to.a = dy + of_columns;
    to.k = to.a + of_rows / kLanes * kState;
    to.q = to.k + of_rows;
    to.v = to.q + of_rows;
    gather(p.initial, b, checkpoints);
    for (int64_t i = 1; i < segments; ++i) {
      fetch_tile((i - 1) * segment, i * segment);
      memcpy(checkpoints + i * size, checkpoints + (i - 1) * size, size * sizeof(Real));
      walk_all<false>(checkpoints + i * size, nullptr);
    }
    gather(p.state, b, to.carry);
    memset(to.start, 0, size * sizeof(Real));
    for (int64_t i = segments - 1; i >= 0; --i) {
      const int64_t begin = i * segment;
      fetch_tile(begin, begin + segment < p.length ? begin + segment : p.length);
      fetch<T>(p.q, false, begin, q);
      fetch<T>(p.grad_y, true, begin, dy);
      memset(to.a, 0, gradients * sizeof(Real));
      for (int64_t r = 0; r < rows; ++r) {
        int64_t c = 0;
        for (; c + kColumns <= columns; c += kColumns) through<kColumns>(r, c, checkpoints + i * size, history, dy, to);
        for (; c < columns; ++c) through<1>(r, c, checkpoints + i * size, history, dy, to);
      }
      put_rows<Number, Number>(to.a, begin, p.grad_a);
      put_rows<T, Real>(to.k, begin, p.grad_k);
      put_rows<T, Real>(to.q, begin, p.grad_q);
      put_columns(to.v, begin, p.grad_v);
    }
    scatter(to.carry, p.state);
    if (p.grad_start) scatter(to.start, p.grad_start);
  }
};

template <class T, bool is_complex>
int run(const Problem& p, int backwards) {
  constexpr int64_t lanes = Block<T, is_complex>::kLanes;
  const auto blocks = [&](int64_t parts) { return (p.heads * parts + lanes - 1) / lanes; };
  // A head's columns are dealt out until the lanes are full and the threads have work; a head is always in one block.
  int64_t parts = 1;
  while (parts < lanes && parts < p.columns && (p.heads * parts < lanes || p.batch * blocks(parts) < p.threads)) parts *= 2;
  const int64_t of_a_row = blocks(parts);
#pragma omp parallel for schedule(static) num_threads(p.threads) if (p.threads > 1)
  for (int64_t item = 0; item < p.batch * of_a_row; ++item) {
    Block<T, is_complex> block(p, item / of_a_row, item % of_a_row, parts);
    if (backwards) {
      block.backward();
    } else {
      block.forward();
    }
  }
  return 0;
}

}  // namespace

extern "C" int hfr_gateloop_heads(int backwards, const Problem* problem) {
  constexpr bool complex_transitions = true, real_transitions = false;
  return run<HFR_STORAGE, HFR_CELL>(*problem, backwards);
}

extern "C" int64_t hfr_problem_size() { return sizeof(Problem); }
