// GateLoop's loops for CPUs where a head has d_k x d_v states. All states of a row r and column c of a head are driven by
// a_r, k_r, q_r and v_c, so a vector holds the same (r, c) of several heads: its lanes need nothing of each other, forward or
// backward. Where the heads are fewer than the lanes, each one's columns are dealt out to several. A tile of positions is
// first turned so that lanes lie side by side (half an instruction for a number, where a state takes six), then a few columns
// of each row walk the tile with their states in registers. Nothing of the size batch x length x heads x d_k x d_v is ever
// written: the backward pass recomputes the states from checkpoints about every sqrt(length / 2) positions.
#include <stdint.h>
#include <string.h>

#include <type_traits>
#include <vector>

#include "cells.h"
#include "convert_cpu.h"
#include "independent.h"
#include "lanes.h"
#include "lines.h"

namespace {

using namespace hfr;

constexpr int64_t kTile = 16;  // positions

struct Tensor {
  char* data;
  int64_t stride[4];  // in elements: batch, length, heads, rows or columns
};

struct Problem {
  int64_t batch, length, heads, rows, columns;
  int64_t a_rows;  // rows, or 1 where all rows of a head have the same transition
  int64_t reverse, threads;
  const uint8_t* flags;  // (batch, length) contiguous, or null
  Tensor q, k, v;        // (batch, length, heads, rows or columns)
  Tensor a;              // (batch, length, heads, a_rows), in the state type
  char* y;               // forward: (batch, length, heads, columns) contiguous
  char* state;           // (batch, heads, rows, columns): in H_{-1}, out the last state; backward: their gradients
  const char* start;     // (heads, rows, columns), what documents start from, or null
  const char* initial;   // backward: H_{-1}, or null
  Tensor grad_y;         // backward: (batch, length, heads, columns)
  char *grad_q, *grad_k, *grad_v, *grad_a;  // backward: contiguous, grad_a in the state type and with a's shape
  char* grad_start;                         // backward: (batch, heads, rows, columns), or null
};

// T: what q, k and v hold. Turned arrays are (rows or columns, positions, parts of a number, lanes).
template <class T, bool is_complex>
struct Block {
  using Real = typename StateOf<T>::type;
  using Lanes = typename Vector<Real>::type;
  using State = std::conditional_t<is_complex, Complex<Lanes>, Lanes>;
  using Number = std::conditional_t<is_complex, Complex<Real>, Real>;
  using Cell = HeadCell<State, Lanes>;
  static constexpr int kSize = is_complex ? 2 : 1;  // numbers of a state
  static constexpr int64_t kLanes = kBytes / sizeof(Real), kState = kSize * kLanes;
  static constexpr int kColumns = 4, kColumnsBack = is_complex ? 2 : 4;  // whose states are in registers at once

  const Problem& p;
  const int64_t b, first, parts;  // the row of the batch; the first head here; lanes to a head
  const int64_t rows, columns;    // columns: to a lane
  const int64_t a_rows;
  int64_t count = 0;              // positions of the tile
  int64_t next = -1;              // the first step of the whole tile that is asked for while this one is turned, or -1
  int64_t heads_[kLanes], columns_[kLanes];  // of each lane: its head, and how many columns it has
  std::vector<Real> memory;
  std::vector<uint8_t> flags;
  int64_t apart;                // what a position's number of one row, or column, is from that of the next
  Real *a, *k, *q, *v, *start;  // (a_rows, apart), (rows, apart), (columns, apart); (rows, columns)
  Real* staged;                 // a position's numbers of each lane, side by side

  Block(const Problem& problem, int64_t batch_row, int64_t block, int64_t parts_of_a_head)
      : p(problem),
        b(batch_row),
        first(block * (kLanes / parts_of_a_head)),
        parts(parts_of_a_head),
        rows(problem.rows),
        columns((problem.columns + parts_of_a_head - 1) / parts_of_a_head),
        a_rows(problem.a_rows) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      heads_[lane] = first + lane / parts;
      const int64_t left = p.columns - first_column(lane);
      columns_[lane] = head(lane) >= p.heads || left < 0 ? 0 : left < columns ? left : columns;
    }
  }

  // ---- memory --------------------------------------------------------------------------------------------------------

  int64_t state_size() const { return rows * columns * kState; }

  // Odd, so that what lies side by side in a tensor is not all in one set of a cache.
  static int64_t apart_of(int64_t positions) { return positions | 1; }

  // Room for tiles of `positions` and `more` numbers, whose address is returned.
  Real* reserve(int64_t positions, int64_t more) {
    apart = apart_of(positions);
    const int64_t of_rows = rows * apart * kLanes, of_columns = columns * apart * kLanes, of_a = a_rows * apart * kState;
    flags.resize(positions);
    memory.resize(of_a + 2 * of_rows + of_columns + state_size() + more + kLanes +
                  kLanes * padded(2 * (rows > columns ? rows : columns)));
    const uintptr_t misaligned = reinterpret_cast<uintptr_t>(memory.data()) % kBytes;
    a = memory.data() + (misaligned ? kBytes - misaligned : 0) / sizeof(Real);
    k = a + of_a;
    q = k + of_rows;
    v = q + of_rows;
    start = v + of_columns;
    staged = start + state_size() + more;
    gather(p.start, 0, start);
    return start + state_size();
  }

  static Lanes lanes(const Real* from) { return Vector<Real>::load(from); }
  static void get(const Real* from, Lanes& x) { x = lanes(from); }
  static void get(const Real* from, Complex<Lanes>& x) { x.re = lanes(from), x.im = lanes(from + kLanes); }
  static void put(Lanes x, Real* to) { Vector<Real>::store(x, to); }
  static void put(Complex<Lanes> x, Real* to) { put(x.re, to), put(x.im, to + kLanes); }

  // ---- between tensors and lanes -------------------------------------------------------------------------------------

  int64_t position(int64_t step) const { return p.reverse ? p.length - 1 - step : step; }
  int64_t head(int64_t lane) const { return heads_[lane]; }
  int64_t first_column(int64_t lane) const { return (lane & (parts - 1)) * columns; }  // parts: a power of two
  int64_t columns_of(int64_t lane) const { return columns_[lane]; }

  // Of the `all` that a lane has of each row, or column, at a position.
  int64_t numbers_of(int64_t lane, bool is_columns, int64_t all) const {
    return is_columns ? columns_of(lane) : head(lane) < p.heads ? all : 0;
  }

  // The numbers of the lanes, n of each, where they lie side by side, or `padded` of each in `staged`: as many as are turned at
  // once (below), or a multiple of the lanes.
  static int64_t padded(int64_t n) {
    int64_t width = 1;
    while (width < n && width < kLanes) width *= 2;
    return (n + width - 1) & -width;
  }

  // Where the lanes' numbers lie in `staged`.
  static void place_staged(int64_t n, int64_t (&places)[kLanes]) {
    const int64_t step = padded(n);
    for (int64_t lane = 0; lane < kLanes; ++lane) places[lane] = lane * step;
  }

  // Whether all lanes have as many as there are of each row, or column.
  bool full(bool is_columns, int64_t all) const { return numbers_of(kLanes - 1, is_columns, all) == all; }

  // Whether n numbers of all lanes can be turned where they are: as many as there are lanes, or lanes that lie side by side.
  static bool in_place(int64_t n, bool beside) { return n == padded(n) && (n % kLanes == 0 || beside); }

  static void widen_lanes(const Real* from, Lanes& x) { x = lanes(from); }
  static void widen_lanes(const BFloat16* from, Lanes& x) {
    typename Vector<Real>::Halves halves;
    memcpy(&halves, from, sizeof halves);
    const auto words = __builtin_convertvector(halves, typename Vector<Real>::Words) << 16;
    memcpy(&x, &words, sizeof x);
  }
  static void widen_lanes(const Float16* from, Lanes& x) {
    Real wide[kLanes];
    widen(from, wide, kLanes);
    x = lanes(wide);
  }

  // The place of number i, `size` of which make one of the tensor's, which are `apart` from each other.
  template <int size>
  static int64_t place(int64_t i, int64_t apart) { return (i / size * size * apart + i % size) * kLanes; }

  // From n numbers of each lane, the first of which is at its place, to n vectors of the lanes, `width` at a time; and back,
  // past the caches if it `streams`.
  template <int width, int size, class S>
  static void turn(const S* from, const int64_t* places, int64_t n, Real* to, int64_t apart) {
    for (int64_t i = 0; i < n; i += width) {
      Lanes x[width];
      for (int j = 0; j < width; ++j) widen_lanes(from + (width == kLanes ? places[j] + i : j * kLanes), x[j]);
      Vector<Real>::template turn<width>(x);
      for (int j = 0; j < width && i + j < n; ++j) put(x[j], to + place<size>(i + j, apart));
    }
  }

  template <int width, int size, class S>
  static void turn_back(const Real* from, int64_t apart, int64_t n, S* to, const int64_t* places,
                        bool streams = false) {
    for (int64_t i = 0; i < n; i += width) {
      Lanes x[width];
      for (int j = 0; j < width; ++j) x[j] = i + j < n ? lanes(from + place<size>(i + j, apart)) : Lanes{};
      Vector<Real>::template turn_back<width>(x);
      Real wide[width * kLanes];
      for (int j = 0; j < width; ++j) {
        if constexpr (std::is_same<S, Real>::value) {
          Real* place = to + (width == kLanes ? places[j] + i : j * kLanes);
          if (streams) {
            stream(&x[j], place, sizeof x[j]);
          } else {
            put(x[j], place);
          }
        } else {
          put(x[j], wide + j * kLanes);
          if (width == kLanes) narrow(wide + j * kLanes, to + places[j] + i, kLanes);
        }
      }
      if constexpr (!std::is_same<S, Real>::value && width < kLanes) narrow(wide, to, width * kLanes);
    }
  }

  // visit(the width as a type) for n numbers of each lane.
  template <int width = kLanes, class Visit>
  static void with_width(int64_t n, Visit visit) {
    if constexpr (width > 1) {
      if (padded(n) < width) return with_width<width / 2>(n, visit);
    }
    visit(std::integral_constant<int, width>());
  }

  // The numbers of a position to `staged`, zeros where a lane has fewer; and from there, of rows their sums over the lanes of
  // each head, in their order. Each is compiled once, for all widths.
  template <int size, class S>
  HFR_SHARED void stage(const S* from, const int64_t* places, int64_t stride, bool is_columns, int64_t n) const {
    const int64_t step = padded(n * size);
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t have = numbers_of(lane, is_columns, n) * size;
      const S* from_lane = from + places[lane];
      Real* to = staged + lane * step;
      if (stride == size) {
        HFR_INDEPENDENT
        for (int64_t i = 0; i < have; ++i) to[i] = load(from_lane[i]);
      } else {
        for (int64_t i = 0; i < have; ++i) to[i] = load(from_lane[i / size * stride + i % size]);
      }
      for (int64_t i = have; i < n * size; ++i) to[i] = 0;
    }
  }

  template <int size, class S>
  HFR_SHARED void unstage(S* to, const int64_t* places, bool is_columns, int64_t n) const {
    const int64_t step = padded(n * size);
    for (int64_t lane = 0; lane < kLanes; lane += is_columns ? 1 : parts) {
      const int64_t have = numbers_of(lane, is_columns, n) * size;
      S* to_lane = to + places[lane];
      Real* sum = staged + lane * step;
      for (int64_t part = 1; !is_columns && part < parts; ++part) {
        const Real* more = sum + part * step;
        HFR_INDEPENDENT
        for (int64_t i = 0; i < have; ++i) sum[i] += more[i];
      }
      HFR_INDEPENDENT
      for (int64_t i = 0; i < have; ++i) store(sum[i], to_lane[i]);
    }
  }

  // States, between (batch, heads, rows, columns) and (rows, columns) with lanes. Lanes without a column stay zero.
  void gather(const char* data, int64_t batch_row, Real* to) const {
    if (!data) {
      memset(to, 0, state_size() * sizeof(Real));
      return;
    }
    visit_rows(batch_row, [&](auto width, int64_t r, bool here, const int64_t* places, const int64_t* staged_places) {
      const Real* from = reinterpret_cast<const Real*>(data);
      if (!here) stage<kSize>(from, places, kSize, true, columns);
      turn<width, kSize>(here ? from : staged, here ? places : staged_places, columns * kSize, to + r * columns * kState, 1);
    });
  }

  void scatter(const Real* from, char* data) const {
    visit_rows(b, [&](auto width, int64_t r, bool here, const int64_t* places, const int64_t* staged_places) {
      Real* to = here ? reinterpret_cast<Real*>(data) : staged;
      turn_back<width, kSize>(from + r * columns * kState, 1, columns * kSize, to, here ? places : staged_places);
      if (!here) unstage<kSize>(reinterpret_cast<Real*>(data), places, true, columns);
    });
  }

  // visit(the width, the row, whether its states can be turned where they are, their places there and in `staged`)
  template <class Visit>
  void visit_rows(int64_t batch_row, Visit visit) const {
    const int64_t n = columns * kSize;
    const bool here = full(true, columns) && in_place(n, false);
    int64_t places[kLanes], staged_places[kLanes];
    place_staged(n, staged_places);
    with_width(n, [&](auto width) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t lane = 0; lane < kLanes; ++lane) {
          places[lane] = (((batch_row * p.heads + head(lane)) * rows + r) * p.columns + first_column(lane)) * kSize;
        }
        visit(width, r, here, places, staged_places);
      }
    });
  }

  // Asks for a tensor's numbers at a step, where those of the block lie side by side.
  template <class U>
  void ask(const Tensor& x, bool is_columns, int64_t of_each, int64_t step) const {
    const int64_t of_a_head = is_columns ? p.columns : of_each, heads = kLanes / parts, left = p.heads - first;
    if ((x.stride[3] != 1 && of_a_head != 1) || (x.stride[2] != of_a_head && heads > 1)) return;
    const U* from = reinterpret_cast<const U*>(x.data) + b * x.stride[0] + position(step) * x.stride[1] + first * x.stride[2];
    request<false>(from, (left < heads ? left : heads) * of_a_head);
  }

  // With each of a tile's `walks` a share of what the tile from `begin` on reads: all at once has to wait for memory.
  void ask_share(int64_t begin, int64_t walk, int64_t walks, bool reads) const {
    const int64_t left = p.length - begin, here = left < count ? left : count;
    for (int64_t step = begin + here * walk / walks; step < begin + here * (walk + 1) / walks; ++step) {
      ask<Number>(p.a, false, a_rows, step);
      ask<T>(p.k, false, rows, step);
      ask<T>(p.v, true, columns, step);
      if (reads) ask<T>(p.q, false, rows, step);
    }
  }

  // (count, n) of a tensor from step `begin` on, n rows or n columns.
  template <class U>
  void fetch(const Tensor& x, bool is_columns, int64_t of_each, int64_t begin, Real* to) const {
    using Wide = decltype(load(U()));
    using S = std::conditional_t<std::is_same<U, Wide>::value, Real, U>;  // a complex number is two that lie side by side
    constexpr int64_t size = sizeof(Wide) / sizeof(Real);
    const int64_t n = of_each * size, head_apart = x.stride[2] * size;
    const bool beside = parts == 1 ? head_apart == n : is_columns && head_apart == parts * n;
    const bool here = full(is_columns, of_each) && (x.stride[3] == 1 || of_each == 1) && in_place(n, beside);
    int64_t from_places[kLanes], staged_places[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      from_places[lane] = (head(lane) * x.stride[2] + is_columns * first_column(lane) * x.stride[3]) * size;
    }
    place_staged(n, staged_places);
    with_width(n, [&](auto width) {
      for (int64_t t = 0; t < count; ++t) {
        const S* from = reinterpret_cast<const S*>(x.data) + (b * x.stride[0] + position(begin + t) * x.stride[1]) * size;
        if (here) {
          turn<width, size>(from + (width < kLanes ? from_places[0] : 0), from_places, n, to + t * size * kLanes, apart);
          if (next >= 0) ask<U>(x, is_columns, of_each, next + t);
          continue;
        }
        stage<size>(from, from_places, x.stride[3] * size, is_columns, of_each);
        turn<width, size>(staged, staged_places, n, to + t * size * kLanes, apart);
      }
    });
  }

  // (count, n) to a contiguous tensor: of columns each lane's, of rows the sum over the lanes of each head, in their order.
  template <class U>
  void deliver(const Real* from, bool is_columns, int64_t of_each, int64_t begin, char* data) const {
    using Wide = decltype(load(U()));
    using S = std::conditional_t<std::is_same<U, Wide>::value, Real, U>;
    constexpr int64_t size = sizeof(Wide) / sizeof(Real);
    const int64_t of_a_head = (is_columns ? p.columns : of_each) * size, n = of_each * size;
    const bool here = full(is_columns, of_each) && (is_columns || parts == 1) && in_place(n, true);
    int64_t to_places[kLanes], staged_places[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      to_places[lane] = head(lane) * of_a_head + is_columns * first_column(lane) * size;
    }
    place_staged(n, staged_places);
    const int64_t row_bytes = p.heads * of_a_head * (int64_t)sizeof(S);
    const bool streams = kBytes % kLine == 0 && is_streamed(data, row_bytes, p.batch * p.length * row_bytes);
    with_width(n, [&](auto width) {
      for (int64_t t = 0; t < count; ++t) {
        S* to = reinterpret_cast<S*>(data) + (b * p.length + position(begin + t)) * p.heads * of_a_head;
        if (here) {
          turn_back<width, size>(from + t * size * kLanes, apart, n, to + (width < kLanes ? to_places[0] : 0), to_places,
                                 streams);
          continue;
        }
        turn_back<width, size>(from + t * size * kLanes, apart, n, staged, staged_places);
        unstage<size>(to, to_places, is_columns, of_each);
      }
    });
  }

  void fetch_tile(int64_t begin, int64_t end) {
    count = end - begin;
    fetch<Number>(p.a, false, a_rows, begin, a);
    fetch<T>(p.k, false, rows, begin, k);
    fetch<T>(p.v, true, columns, begin, v);
    for (int64_t t = 0; t < count; ++t) flags[t] = p.flags ? p.flags[b * p.length + position(begin + t)] : 0;
  }

  // ---- forward -------------------------------------------------------------------------------------------------------

  // n states of a row, from column c on, through the tile; `out` (columns, apart) is added to, and the states before the first
  // and after each position are kept in `history`, (count + 1, n).
  template <int n, bool reads, bool keeps>
  void walk(int64_t r, int64_t c, Real* states, Real* out, Real* history) const {
    const int64_t column = apart * kLanes, first_state = (r * columns + c) * kState;
    const Real *a_r = a + (a_rows > 1 ? r : 0) * apart * kState, *k_r = k + r * column, *q_r = q + r * column;
    const Real* v_c = v + c * column;
    Real* out_c = reads ? out + c * column : nullptr;
    const uint8_t* flag = flags.data();
    State s[n];
    for (int j = 0; j < n; ++j) {
      get(states + first_state + j * kState, s[j]);
      if (keeps) put(s[j], history + j * kState);
    }
    for (int64_t t = 0, end = count; t < end; ++t) {
      if (flag[t] & kDrop)
        for (int j = 0; j < n; ++j) get(start + first_state + j * kState, s[j]);
      if (!(flag[t] & kMasked)) {
        State at;
        get(a_r + t * kState, at);
        const Lanes kt = lanes(k_r + t * kLanes);
        for (int j = 0; j < n; ++j) s[j] = Cell::forward(s[j], at, kt, lanes(v_c + j * column + t * kLanes));
      }
      if (reads) {
        const Lanes qt = lanes(q_r + t * kLanes);
        for (int j = 0; j < n; ++j) {
          Real* to = out_c + j * column + t * kLanes;
          put(lanes(to) + Cell::read(s[j], qt), to);
        }
      }
      if (keeps)
        for (int j = 0; j < n; ++j) put(s[j], history + ((t + 1) * n + j) * kState);
    }
    if (!keeps)
      for (int j = 0; j < n; ++j) put(s[j], states + first_state + j * kState);
  }

  // visit(how many columns as a type, the row, the first column): of each row kColumns at once, and what is left one by one.
  template <class Visit>
  void visit_walks(Visit visit) const {
    int64_t c = 0;
    const auto of_rows = [&](auto n) {
      for (int64_t r = 0; r < rows; ++r) visit(n, r, c);
      c += n;
    };
    while (c + kColumns <= columns) of_rows(std::integral_constant<int, kColumns>());
    while (c < columns) of_rows(std::integral_constant<int, 1>());
  }

  // Asks for the tile from `begin` on meanwhile.
  template <bool reads>
  void walk_all(Real* states, Real* out, int64_t begin) const {
    const int64_t walks = rows * (columns / kColumns + columns % kColumns);
    int64_t walked = 0;
    visit_walks([&](auto n, int64_t r, int64_t c) {
      ask_share(begin, walked++, walks, reads);
      walk<n, reads, false>(r, c, states, out, nullptr);
    });
  }

  void forward() {
    const int64_t tile = p.length < kTile ? p.length : kTile;
    Real* states = reserve(tile, state_size() + apart_of(tile) * columns * kLanes);
    Real* out = states + state_size();
    gather(p.state, b, states);
    for (int64_t begin = 0; begin < p.length; begin += kTile) {
      fetch_tile(begin, begin + kTile < p.length ? begin + kTile : p.length);
      fetch<T>(p.q, false, rows, begin, q);
      memset(out, 0, columns * apart * kLanes * sizeof(Real));
      walk_all<true>(states, out, begin + kTile);
      deliver<T>(out, true, columns, begin, p.y);
    }
    scatter(states, p.state);
  }

  // ---- backward ------------------------------------------------------------------------------------------------------

  struct Gradients {
    Real *a, *k, *q, *v;  // (a_rows, apart), (rows, apart), (columns, apart)
    Real *carry, *start;  // (rows, columns)
  };

  // n states of a row back through the tile, from those that were kept, of which each position has `across`. It is compiled by
  // itself: within its callers it is slower, by how much hangs on what is around it.
  template <int n>
  HFR_SHARED void walk_back(int64_t r, int64_t c, const Real* history, int64_t across, const Real* dy,
                            const Gradients& to) const {
    const int64_t column = apart * kLanes, first_state = (r * columns + c) * kState;
    const Real *a_r = a + (a_rows > 1 ? r : 0) * apart * kState, *k_r = k + r * column, *q_r = q + r * column;
    const Real *v_c = v + c * column, *dy_c = dy + c * column;
    Real *da_r = to.a + (a_rows > 1 ? r : 0) * apart * kState, *dk_r = to.k + r * column, *dq_r = to.q + r * column;
    Real *dv_c = to.v + c * column, *carry = to.carry + first_state, *dstart = to.start + first_state;
    const uint8_t* flag = flags.data();
    State g[n], after[n];
    for (int j = 0; j < n; ++j) get(carry + j * kState, g[j]), get(history + (count * across + j) * kState, after[j]);
    for (int64_t t = count - 1; t >= 0; --t) {
      const Lanes qt = lanes(q_r + t * kLanes);
      Lanes dq = lanes(dq_r + t * kLanes);
      for (int j = 0; j < n; ++j) {
        g[j] = Cell::read_back(after[j], qt, lanes(dy_c + j * column + t * kLanes), g[j], dq);
        get(history + (t * across + j) * kState, after[j]);  // of the position before
      }
      put(dq, dq_r + t * kLanes);
      if (!(flag[t] & kMasked)) {
        const Lanes kt = lanes(k_r + t * kLanes);
        Lanes dk = lanes(dk_r + t * kLanes);
        State at, da;
        get(a_r + t * kState, at), get(da_r + t * kState, da);
        for (int j = 0; j < n; ++j) {
          const int64_t place = j * column + t * kLanes;
          Lanes dv = lanes(dv_c + place);
          State h = after[j];
          if (flag[t] & kDrop) get(start + first_state + j * kState, h);
          g[j] = Cell::backward(h, at, kt, lanes(v_c + place), g[j], dk, dv, da);
          put(dv, dv_c + place);
        }
        put(dk, dk_r + t * kLanes), put(da, da_r + t * kState);
      }
      if (flag[t] & kDrop)
        for (int j = 0; j < n; ++j) {
          State sum;
          get(dstart + j * kState, sum);
          put(sum + g[j], dstart + j * kState);
          g[j] = State();
        }
    }
    for (int j = 0; j < n; ++j) put(g[j], carry + j * kState);
  }

  template <int n>
  void through(int64_t r, int64_t c, Real* before, Real* history, const Real* dy, const Gradients& to) const {
    if (r + 1 < rows) request<false>(before + ((r + 1) * columns + c) * kState, n * kState);
    constexpr int back = n < kColumnsBack ? n : kColumnsBack;
    walk<n, false, true>(r, c, before, nullptr, history);
    for (int j = 0; j < n; j += back) walk_back<back>(r, c + j, history + j * kState, n, dy, to);
  }

  void backward() {
    int64_t segment = kTile;
    while (2 * segment * segment < p.length) ++segment;
    const int64_t segments = (p.length + segment - 1) / segment, size = state_size();
    const int64_t of_rows = rows * apart_of(segment) * kLanes, of_columns = columns * apart_of(segment) * kLanes;
    const int64_t of_a = a_rows * apart_of(segment) * kState, gradients = of_a + 2 * of_rows + of_columns;
    const int64_t of_history = (segment + 1) * kColumns * kState;
    Real* checkpoints = reserve(segment, (segments + 2) * size + of_history + of_columns + gradients);
    Gradients to;
    to.carry = checkpoints + segments * size;
    to.start = to.carry + size;
    Real* history = to.start + size;
    Real* dy = history + of_history;
    to.a = dy + of_columns;
    to.k = to.a + of_a;
    to.q = to.k + of_rows;
    to.v = to.q + of_rows;
    gather(p.initial, b, checkpoints);
    for (int64_t i = 1; i < segments; ++i) {
      fetch_tile((i - 1) * segment, i * segment);
      memcpy(checkpoints + i * size, checkpoints + (i - 1) * size, size * sizeof(Real));
      walk_all<false>(checkpoints + i * size, nullptr, i * segment);
    }
    gather(p.state, b, to.carry);
    memset(to.start, 0, size * sizeof(Real));
    for (int64_t i = segments - 1; i >= 0; --i) {
      const int64_t begin = i * segment;
      next = begin - segment;
      fetch_tile(begin, begin + segment < p.length ? begin + segment : p.length);
      fetch<T>(p.q, false, rows, begin, q);
      fetch<T>(p.grad_y, true, columns, begin, dy);
      memset(to.a, 0, gradients * sizeof(Real));
      visit_walks([&](auto n, int64_t r, int64_t c) { through<n>(r, c, checkpoints + i * size, history, dy, to); });
      deliver<Number>(to.a, false, a_rows, begin, p.grad_a);
      deliver<T>(to.k, false, rows, begin, p.grad_k);
      deliver<T>(to.q, false, rows, begin, p.grad_q);
      deliver<T>(to.v, true, columns, begin, p.grad_v);
    }
    scatter(to.carry, p.state);
    if (p.grad_start) scatter(to.start, p.grad_start);
  }
};

template <class T, bool is_complex>
int run(const Problem& p, int backwards) {
  constexpr int64_t lanes = Block<T, is_complex>::kLanes;
  const auto blocks = [&](int64_t parts) { return (p.heads * parts + lanes - 1) / lanes; };
  // A head's columns are dealt out so that lanes are full and threads have work; what is done for a row takes about as long as
  // a column. A head is always in one block.
  const auto cost = [&](int64_t parts) {
    return (p.batch * blocks(parts) + p.threads - 1) / p.threads * ((p.columns + parts - 1) / parts + 1);
  };
  int64_t parts = 1;
  for (int64_t more = 2; more <= lanes && more < 2 * p.columns; more *= 2)
    if (cost(more) < cost(parts)) parts = more;
  const int64_t of_a_row = blocks(parts);
#pragma omp parallel for schedule(static) num_threads(p.threads) if (p.threads > 1)
  for (int64_t item = 0; item < p.batch * of_a_row; ++item) {
    Block<T, is_complex> block(p, item / of_a_row, item % of_a_row, parts);
    if (backwards) {
      block.backward();
    } else {
      block.forward();
    }
    finish_streams();
  }
  return 0;
}

}  // namespace

extern "C" int hfr_gateloop_heads(int backwards, const Problem* problem) {
  constexpr bool complex_transitions = true, real_transitions = false;
  return run<HFR_STORAGE, HFR_CELL>(*problem, backwards);
}

extern "C" int64_t hfr_problem_size() { return sizeof(Problem); }
