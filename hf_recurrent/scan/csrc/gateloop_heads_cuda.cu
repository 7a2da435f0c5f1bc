// GateLoop's loops for GPUs where a head has d_k x d_v states. A thread has kPer columns of one row of a head's state in
// registers; kColumnLanes such threads side by side have the row, kRowLanes times as many the head, or a slice of its
// columns where it is large. A block has several heads, where they are small, and walks time in tiles of kSteps positions:
// the inputs go through shared memory, while the next tile's loads are in flight. The sums over rows (y and the gradient of
// v) and over columns (the gradients of q, k and a) are formed within warps, then over the warps of a head, then over
// slices, always in the same order. Nothing of the size batch x length x heads x d_k x d_v is ever written: backward starts
// each tile from a checkpoint of the state before it, recomputes the tile's states into registers, and walks it back.
//
// For each head and position with complex states, float32 (bfloat16): forward moves 8 bytes of a and 8 (4) of q and k for
// each row, 8 (4) of v and y for each column. Backward moves the inputs twice, since it makes its checkpoints first, grad_y,
// the gradients, and of each state 16 bytes / kSteps / kTiles for the checkpoints; where there are slices, their sums too.
// Instructions of a thread with four states for a position, as assembled for sm_90, where a tile is whole and has no flags:
// about 80 forward, 145 backward, and 45 in the walk that makes checkpoints, of which 24, 88 and 20 are the cell's own. Other
// tiles are walked with a question at every position and load, in about twice as many.
//   d_k = d_v =  8: forward  192 (128) bytes,  1300 instructions; backward   610 (460) bytes,    3000 instructions
//               16:          384 (256),        4900;                        1470 (1180),        12000
//               64:         1540 (1020),      84000;                       13000 (12000),      245000
// A GPU that runs 8 instructions while its memory moves a byte is bound by memory at 8, by both at 16, by arithmetic at 64:
// there checkpoints lie kTiles tiles apart, which leaves an eighth of them, and are filled in by walking once more.
// Registers of a thread, backward: 2 kSteps kPer = 64 for the tile's states, 8 each for the state before it and the gradient
// that goes back, up to 32 for the next tile's inputs: two blocks of 128 threads to a multiprocessor, at least.
//
// Compiled by NVRTC for what q, k and v hold, HFR_TYPE, the state, HFR_STATE, d_k, HFR_ROWS, and the division of a head's
// states that hf_recurrent.scan.gateloop_heads_cuda has chosen, which is the same for many d_v.
#include "device.h"

using namespace hfr;

typedef HFR_TYPE T;
typedef StateOf<T>::type Real;
typedef HFR_STATE State;  // Real, or Complex<Real>
typedef HeadCell<State, Real> Cell;

constexpr int kRows = HFR_ROWS;
constexpr int kRowLanes = HFR_ROW_LANES, kColumnLanes = HFR_COLUMN_LANES, kPer = HFR_PER;  // powers of two
constexpr int kSteps = HFR_STEPS, kTiles = HFR_TILES;  // of a tile; from one checkpoint to the next
constexpr int kSlice = kColumnLanes * kPer;  // columns of a head in a block
constexpr bool kSliced = HFR_SLICED;         // a head has more
constexpr bool kFull = HFR_FULL;             // every thread has states
constexpr int kHead = kRowLanes * kColumnLanes;  // threads of a head, or of a slice of one
constexpr int kThreads = HFR_THREADS, kHeads = kThreads / kHead;
constexpr int kWarps = kHead > kWarp ? kHead / kWarp : 1;  // of a head
constexpr int kBlockRows = kHeads * kRowLanes, kBlockColumns = kHeads * kSlice;
constexpr int kRowElements = (kSteps * kBlockRows + kThreads - 1) / kThreads;  // of a tile, to a thread
constexpr int kColumnElements = (kSteps * kBlockColumns + kThreads - 1) / kThreads;
constexpr int kWide = !kFull || !HFR_WIDE ? 1 : kPer * (int)sizeof(State) > 16 ? 16 / (int)sizeof(State) : kPer;
constexpr int kForwardBlocks = sizeof(State) > 8 ? 1 : kThreads > 128 ? 2 : 4;  // to a multiprocessor, at least
constexpr int kBackwardBlocks = kThreads > 128 || sizeof(State) > 8 ? 1 : 2;
static_assert(kRowLanes >= kRows && kHeads * kHead == kThreads, "a thread for each row");
static_assert(kThreads % kBlockRows == 0 && kThreads % kBlockColumns == 0, "a thread loads one row and one column");

// Of a gradient of a row only a slice's part is known here, unless there is but one.
template <bool sliced> struct RowGradient { typedef T type; };
template <> struct RowGradient<true> { typedef Real type; };
typedef RowGradient<kSliced>::type Gradient;

typedef Vector<State, 1> Number;
typedef Vector<State, kWide> Pack;  // states as they are read and written at once
typedef Vector<Real, kPer> Columns;

// (batch, length, heads, rows or columns): strides in elements.
template <class U>
struct Heads {
  const U* data;
  Index b, l, h, d;

  HFR_DEVICE const U* at(Index row, Index head, Index i) const { return data + row * b + head * h + i * d; }
};

struct Problem : Scan<State> {  // `channels` are heads
  Index columns;                // of a head
  const State* start;           // (heads, rows, columns), what documents start from, or null
  Heads<T> q, k, v;
  Heads<Number> a;

  HFR_DEVICE int slices() const { return kSliced ? (int)((columns + kSlice - 1) / kSlice) : 1; }
  HFR_DEVICE int slice() const { return kSliced ? blockIdx.x % slices() : 0; }
  HFR_DEVICE Index head(int in_block) const { return (Index)(blockIdx.x / slices()) * kHeads + in_block; }
  HFR_DEVICE bool all_exist() const { return kFull && head(kHeads) <= channels; }  // the rows and columns of this block
  HFR_DEVICE Index along(Index stride) const { return reverse ? -stride : stride; }  // from one step to the next
};

// The numbers of a row, or their gradients.
struct alignas(4 * sizeof(Real)) Row {
  Real a[2], k, q;
};
HFR_DEVICE void join(const Real (&parts)[2], Real& x) { x = parts[0]; }
HFR_DEVICE void join(const Real (&parts)[2], Complex<Real>& x) { x = {parts[0], parts[1]}; }
HFR_DEVICE void part(Real x, Real& re, Real& im) { re = x, im = Real(0); }
HFR_DEVICE void part(Complex<Real> x, Real& re, Real& im) { re = x.re, im = x.im; }

struct Shared {
  Row rows[kSteps][kBlockRows];
  Columns v[kSteps][kBlockColumns / kPer];
  Real sums[kSteps][kHeads][kWarps][kSlice];  // over the rows of a warp: of y, or backward of the gradient of v
  unsigned char flags[kSteps];
};

struct BackwardShared : Shared {
  Columns grad[kSteps][kBlockColumns / kPer];
  Row grads[kSteps][kBlockRows];
};
static_assert(sizeof(BackwardShared) <= 48 * 1024, "what a block may have");

// The i-th element of a tile that this thread loads or stores: its position in the tile, and which of a block's rows or
// columns, always the same, it is.
template <int n>
struct Element {
  static constexpr int apart = kThreads / n;            // positions from one element of a thread to its next
  static constexpr bool all = kSteps % apart == 0;      // every thread has as many
  int index;
  Index head;

  HFR_DEVICE explicit Element(const Problem& p) : index(threadIdx.x % n), head(p.head(index / (n / kHeads))) {}
  HFR_DEVICE static int step(int i) { return i * apart + (int)threadIdx.x / n; }
  HFR_DEVICE static bool in_tile(int i) { return all || step(i) < kSteps; }
  HFR_DEVICE int in_head() const { return index % (n / kHeads); }
};

struct RowElement : Element<kBlockRows> {
  bool exists;

  HFR_DEVICE explicit RowElement(const Problem& p) : Element(p), exists(head < p.channels && in_head() < kRows) {}
};

struct ColumnElement : Element<kBlockColumns> {
  Index column;
  bool exists;

  HFR_DEVICE explicit ColumnElement(const Problem& p)
      : Element(p), column(p.slice() * kSlice + in_head()), exists(head < p.channels && column < p.columns) {}
};

// ---- a tile of the inputs --------------------------------------------------------------------------------------------

// A number as it waits in a register to be used. 16 bits have one of their own, and all of it from the load on: two in one
// would be put together, a half be cut out, and so be waited for, right after they are asked for.
template <class U, int size> struct Waiting {
  typedef U type;
  HFR_DEVICE static U ask(const U* at) { return *at; }
  HFR_DEVICE static U release(U x) { return x; }
};
template <class U> struct Waiting<U, 2> {
  typedef unsigned int type;
  HFR_DEVICE static unsigned int ask(const U* at) {
#ifdef __CUDA_ARCH__
    unsigned int bits;
    asm("ld.global.u16 %0, [%1];" : "=r"(bits) : "l"(at));
    return bits;
#else
    return at->bits;
#endif
  }
  HFR_DEVICE static U release(unsigned int x) { return {(unsigned short)x}; }
};
typedef Waiting<T, sizeof(T)> Waits;
typedef Waits::type Held;
HFR_DEVICE void ask(const Number* at, Number& to) { to = *at; }
HFR_DEVICE void ask(const T* at, Held& to) { to = Waits::ask(at); }
HFR_DEVICE T release(Held x) { return Waits::release(x); }

// What a tile is read for: the state's way (a, k, v), the readout (q), its gradient (a, q, grad_y), or more of them.
template <bool pushes, bool reads, bool grads>
struct Tile {
  Held k[kRowElements], q[kRowElements], v[kColumnElements], grad[kColumnElements];
  Number a[kRowElements];
  unsigned char flag;

  HFR_DEVICE void fetch(const Problem& p, const Heads<T>& grad_y, Index b, Index start, Index end) {
    if (p.all_exist() && start + kSteps <= end) {
      fetch_whole(p, grad_y, b, start);
    } else {
      fetch_part(p, grad_y, b, start, end);
    }
    if (threadIdx.x < kSteps) flag = p.flag(b, start + threadIdx.x, end);
  }

  // Nothing is asked of an element, and one address follows from the one before.
  HFR_DEVICE void fetch_whole(const Problem& p, const Heads<T>& grad_y, Index b, Index start) {
    const RowElement row(p);
    const ColumnElement column(p);
    if (row.in_tile(0)) {
      const Index t = p.position(start + row.step(0));
      whole<RowElement>(p, p.a.at(b, row.head, row.in_head()) + t * p.a.l, p.a.l, a);
      if (pushes) whole<RowElement>(p, p.k.at(b, row.head, row.in_head()) + t * p.k.l, p.k.l, k);
      if (reads || grads) whole<RowElement>(p, p.q.at(b, row.head, row.in_head()) + t * p.q.l, p.q.l, q);
    }
    if (column.in_tile(0)) {
      const Index t = p.position(start + column.step(0));
      if (pushes) whole<ColumnElement>(p, p.v.at(b, column.head, column.column) + t * p.v.l, p.v.l, v);
      if (grads) whole<ColumnElement>(p, grad_y.at(b, column.head, column.column) + t * grad_y.l, grad_y.l, grad);
    }
  }

  template <class E, class U, class To, int n>
  HFR_DEVICE static void whole(const Problem& p, const U* at, Index stride, To (&to)[n]) {
    const Index apart = p.along(stride) * E::apart;
#pragma unroll
    for (int i = 0; i < n; ++i, at += apart) {
      if (i == 0 || E::in_tile(i)) ask(at, to[i]);
    }
  }

  HFR_DEVICE void fetch_part(const Problem& p, const Heads<T>& grad_y, Index b, Index start, Index end) {
    const RowElement row(p);
    const ColumnElement column(p);
    const Number* const a_at = p.a.at(b, row.head, row.in_head());
    const T* const k_at = p.k.at(b, row.head, row.in_head());
    const T* const q_at = p.q.at(b, row.head, row.in_head());
    const T* const v_at = p.v.at(b, column.head, column.column);
    const T* const grad_at = grad_y.at(b, column.head, column.column);
#pragma unroll
    for (int i = 0; i < kRowElements; ++i) {
      k[i] = q[i] = Held();
      a[i].v[0] = State(0);
      const Index step = start + row.step(i);
      if (!row.in_tile(i) || step >= end || !row.exists) continue;
      const Index t = p.position(step);
      ask(a_at + t * p.a.l, a[i]);
      if (pushes) ask(k_at + t * p.k.l, k[i]);
      if (reads || grads) ask(q_at + t * p.q.l, q[i]);
    }
#pragma unroll
    for (int i = 0; i < kColumnElements; ++i) {
      v[i] = grad[i] = Held();
      const Index step = start + column.step(i);
      if (!column.in_tile(i) || step >= end || !column.exists) continue;
      const Index t = p.position(step);
      if (pushes) ask(v_at + t * p.v.l, v[i]);
      if (grads) ask(grad_at + t * grad_y.l, grad[i]);
    }
  }

  // Into shared memory, ready to be walked. Whether the tile is plain: whole, and without flags.
  template <class S>
  HFR_DEVICE bool settle(const Problem& p, S& shared) const {
    const RowElement row(p);
    const ColumnElement column(p);
#pragma unroll
    for (int i = 0; i < kRowElements; ++i) {
      if (!row.in_tile(i)) continue;
      Row to;
      part(a[i].v[0], to.a[0], to.a[1]);
      to.k = load(release(k[i])), to.q = load(release(q[i]));
      shared.rows[row.step(i)][row.index] = to;
    }
#pragma unroll
    for (int i = 0; i < kColumnElements; ++i) {
      if (!column.in_tile(i)) continue;
      const int at = column.index / kPer, j = column.index % kPer;
      if (pushes) shared.v[column.step(i)][at].v[j] = load(release(v[i]));
      if constexpr (grads) shared.grad[column.step(i)][at].v[j] = load(release(grad[i]));
    }
    if (threadIdx.x < kSteps) shared.flags[threadIdx.x] = flag;
    return __syncthreads_and(threadIdx.x >= kSteps || flag == 0);
  }
};

// ---- one thread's states ---------------------------------------------------------------------------------------------

struct Place {
  int in_block, row, lane;  // which of the block's heads, and of its rows; the first of its columns in the slice
  Index head, column;       // and in the head
  bool exists;

  HFR_DEVICE explicit Place(const Problem& p)
      : in_block(threadIdx.x / kHead),
        row(threadIdx.x % kHead / kColumnLanes),
        lane(threadIdx.x % kColumnLanes * kPer),
        head(p.head(in_block)),
        column(p.slice() * kSlice + lane),
        exists(head < p.channels) {}

  HFR_DEVICE int block_row() const { return in_block * kRowLanes + row; }
  HFR_DEVICE int block_columns() const { return (in_block * kSlice + lane) / kPer; }

  // Rows past d_k and columns past d_v are zero, and must stay out of all sums: what is not finite would not.
  HFR_DEVICE bool lives(const Problem& p, int i) const { return kFull || (row < kRows && column + i < p.columns); }

  HFR_DEVICE Index offset(const Problem& p, Index batch_row, int i) const {
    return ((batch_row * p.channels + head) * kRows + row) * p.columns + column + i;
  }

  // Of (rows of the batch, heads, rows, columns); zero where that is null.
  HFR_DEVICE void read(const Problem& p, const State* from, Index batch_row, State (&s)[kPer]) const {
#pragma unroll
    for (int i = 0; i < kPer; i += kWide) {
      Pack pack;
      fill(pack.v, State(0));
      if (from && exists && lives(p, i)) pack = *reinterpret_cast<const Pack*>(from + offset(p, batch_row, i));
#pragma unroll
      for (int j = 0; j < kWide; ++j) s[i + j] = pack.v[j];
    }
  }

  HFR_DEVICE void write(const Problem& p, const State (&s)[kPer], State* to, Index batch_row) const {
#pragma unroll
    for (int i = 0; i < kPer; i += kWide) {
      if (exists && lives(p, i)) put(s, i, *reinterpret_cast<Pack*>(to + offset(p, batch_row, i)));
    }
  }

  HFR_DEVICE static void put(const State (&s)[kPer], int i, Pack& to) {
    Pack pack;
#pragma unroll
    for (int j = 0; j < kWide; ++j) pack.v[j] = s[i + j];
    to = pack;
  }

  // The position's step for these states.
  HFR_DEVICE void advance(const Problem& p, const Shared& shared, int step, State (&s)[kPer]) const {
    const int flag = shared.flags[step];
    if (flag & kDrop) read(p, p.start, 0, s);
    if (!(flag & kMasked)) push(p, shared.rows[step][block_row()], shared.v[step][block_columns()], s);
  }

  HFR_DEVICE void push(const Problem& p, const Row& now, const Columns& v, State (&s)[kPer]) const {
    State a;
    join(now.a, a);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (lives(p, i)) s[i] = Cell::forward(s[i], a, now.k, v.v[i]);
    }
  }

  // Sums over the rows of this warp, into shared memory.
  HFR_DEVICE void sum_rows(Shared& shared, int step, Real (&x)[kPer]) const {
    int first, n;
    bool write;
    sum_over_lanes<kColumnLanes, (kHead < kWarp ? kHead : kWarp)>(x, first, n, write);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (i >= n || !write) break;
      shared.sums[step][in_block][threadIdx.x % kHead / kWarp][lane + first + i] = x[i];
    }
  }
};

// The first `count` of a tile's sums over rows, to (batch, length, heads, columns).
HFR_DEVICE void store_sums(const Problem& p, const Shared& shared, Index b, Index start, int count, T* to) {
  const ColumnElement column(p);
  if (!column.exists) return;
  const Index row = p.channels * p.columns, apart = p.along(row) * column.apart;
  T* at = to + (b * p.length + p.position(start + column.step(0))) * row + column.head * p.columns + column.column;
#pragma unroll
  for (int i = 0; i < kColumnElements; ++i, at += apart) {
    const int step = column.step(i);
    if (step >= count) break;
    Real sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      sum += shared.sums[step][column.index / kSlice][warp][column.in_head()];
    }
    store(sum, *at);
  }
}

// States before tiles, (slots, heads, slices, kPer / kWide, threads of a head, kWide), so that neighbouring threads' lie side
// by side: before one tile in `every`, from slot `first` on.
struct Checkpoints {
  State* data;
  Index first;
  int every;

  HFR_DEVICE Pack* at(const Problem& p, const Place& place, Index tile) const {
    const Index slot = ((first + tile / every) * p.channels + place.head) * p.slices() + p.slice();
    return reinterpret_cast<Pack*>(data) + slot * (kPer / kWide) * kHead + threadIdx.x % kHead;
  }

  HFR_DEVICE void put(const Problem& p, const Place& place, Index tile, const State (&s)[kPer]) const {
    if (!place.exists || tile % every) return;
#pragma unroll
    for (int i = 0; i < kPer; i += kWide) place.put(s, i, at(p, place, tile)[i / kWide * kHead]);
  }

  HFR_DEVICE void get(const Problem& p, const Place& place, Index tile, State (&s)[kPer]) const {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      s[i] = place.exists ? at(p, place, tile)[i / kWide * kHead].v[i % kWide] : State(0);
    }
  }
};

// What forward leaves for backward, of one row of the batch.
HFR_DEVICE Checkpoints of_row(const Problem& p, State* checkpoints, Index b) {
  constexpr int every = kSteps * kTiles;
  return {checkpoints, b * ((p.length + every - 1) / every), kTiles};
}

// ---- forward ---------------------------------------------------------------------------------------------------------

HFR_DEVICE void read_out(const Problem& p, Shared& shared, const Place& place, int step, Real q, const State (&s)[kPer]) {
  Real out[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) out[i] = place.lives(p, i) ? Cell::read(s[i], q) : Real(0);
  place.sum_rows(shared, step, out);
}

// From step `from` on, writing from `begin` on: y, or checkpoints.
template <bool reads>
HFR_DEVICE void walk(const Problem& p, Shared& shared, const Place& place, Index b, Index from, Index begin, Index end,
                     State (&s)[kPer], T* y, const Checkpoints& checkpoints) {
  const Heads<T> none = {};
  Tile<true, reads, false> tile;
  tile.fetch(p, none, b, from, end);
  for (Index start = from; start < end; start += kSteps) {
    const bool plain = tile.settle(p, shared);
    tile.fetch(p, none, b, start + kSteps, end);
    if (!reads && start >= begin) checkpoints.put(p, place, start / kSteps, s);
    const int count = end - start < kSteps ? (int)(end - start) : kSteps;
    if (plain) {
      Row next = shared.rows[0][place.block_row()];
      Columns next_v = shared.v[0][place.block_columns()];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const Row now = next;
        const Columns v = next_v;
        // Asked for before this position's sums are written: the compiler does not know that these are others.
        if (step + 1 < kSteps) {
          next = shared.rows[step + 1][place.block_row()];
          next_v = shared.v[step + 1][place.block_columns()];
        }
        place.push(p, now, v, s);
        if (reads) read_out(p, shared, place, step, now.q, s);
      }
    } else {
#pragma unroll 1
      for (int step = 0; step < count; ++step) {
        place.advance(p, shared, step, s);
        if (reads) read_out(p, shared, place, step, shared.rows[step][place.block_row()].q, s);
      }
    }
    __syncthreads();
    if (reads && start >= begin) store_sums(p, shared, b, start, count, y);
  }
}

HFR_DEVICE void forward_segments(const Problem& p, Shared& shared) {
  const Place place(p);
  const Heads<T> none = {};
  for (Index item = blockIdx.y; item < p.batch * p.segments; item += gridDim.y) {
    const Work work(item, p.length, p.segments, p.segment_length);
    if (work.segment == p.segments - 1) continue;
    State s[kPer], product[kPer];
    bool cut = false;
    fill(s, State(0)), fill(product, State(1));
    Tile<true, false, false> tile;
    tile.fetch(p, none, work.b, work.begin, work.end);
    for (Index start = work.begin; start < work.end; start += kSteps) {
      const bool plain = tile.settle(p, shared);
      tile.fetch(p, none, work.b, start + kSteps, work.end);
      const auto advance = [&](int step, int flag) {
        const Row now = shared.rows[step][place.block_row()];
        State a;
        join(now.a, a);
        cut = cut || (flag & kDrop);
        if (flag & kDrop) place.read(p, p.start, 0, s);
        if (flag & kMasked) return;
        place.push(p, now, shared.v[step][place.block_columns()], s);
        fill(product, a * product[0]);
      };
      if (plain) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) advance(step, 0);
      } else {
#pragma unroll 1
        for (int step = 0; step < kSteps; ++step) advance(step, shared.flags[step]);  // past the end all is masked
      }
      __syncthreads();
    }
    leave_segment(p, place, work.b, work.segment, product, s, cut);
  }
}

// ---- backward --------------------------------------------------------------------------------------------------------

struct Gradients {
  Gradient *q, *k;  // (slices, batch, length, heads, rows)
  Number* a;
  T* v;             // (batch, length, heads, columns)
  State* start;     // (batch, segments, heads, rows, columns), or null
};

// The gradients of a tile's rows.
HFR_DEVICE void store_rows(const Problem& p, const BackwardShared& shared, const Gradients& to, Index b, Index start,
                           int count) {
  const RowElement row(p);
  if (!row.exists) return;
  const Index rows = p.channels * kRows, apart = p.along(rows) * row.apart;
  const Index position = (p.slice() * p.batch + b) * p.length + p.position(start + row.step(0));
  Index offset = position * rows + row.head * kRows + row.in_head();
#pragma unroll
  for (int i = 0; i < kRowElements; ++i, offset += apart) {
    const int step = row.step(i);
    if (step >= count) break;
    const Row sum = shared.grads[step][row.index];
    store(sum.q, to.q[offset]);
    store(sum.k, to.k[offset]);
    Number a;
    join(sum.a, a.v[0]);
    to.a[offset] = a;
  }
}

// What a position's gradients are made of.
struct Position {
  Row row;
  Columns v, grad;

  HFR_DEVICE Position(const BackwardShared& shared, const Place& place, int step)
      : row(shared.rows[step][place.block_row()]),
        v(shared.v[step][place.block_columns()]),
        grad(shared.grad[step][place.block_columns()]) {}
};

// One position back: `s` is the state before it, `after` that after it; `carry`, the gradient of the state after it that
// comes from later positions, becomes that of the state before it.
HFR_DEVICE void step_back(const Problem& p, BackwardShared& shared, const Place& place, int step, const Position& at, int flag,
                          const State (&s)[kPer], const State (&after)[kPer], State (&carry)[kPer]) {
  State before[kPer], a, grad_a(0);
  Real grad_k = 0, grad_q = 0, grad_v[kPer];
  join(at.row.a, a);
#pragma unroll
  for (int i = 0; i < kPer; ++i) before[i] = s[i];
  if (flag & kDrop) place.read(p, p.start, 0, before);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    grad_v[i] = 0;
    if (!place.lives(p, i)) continue;
    carry[i] = Cell::read_back(after[i], at.row.q, at.grad.v[i], carry[i], grad_q);
    if (flag & kMasked) continue;
    carry[i] = Cell::backward(before[i], a, at.row.k, at.v.v[i], carry[i], grad_k, grad_v[i], grad_a);
  }
  place.sum_rows(shared, step, grad_v);
  Real of_row[4];  // as a Row has them
  part(grad_a, of_row[0], of_row[1]);
  of_row[2] = grad_k, of_row[3] = grad_q;
  int first, n;
  bool write;
  sum_over_lanes<1, kColumnLanes>(of_row, first, n, write);
  Real* const to = reinterpret_cast<Real*>(&shared.grads[step][place.block_row()]);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= n || !write) break;
    to[first + i] = of_row[i];
  }
}

// The state that documents start from has this gradient too.
HFR_DEVICE void drop(const Problem& p, const Place& place, State* grad_start, Index row, State (&carry)[kPer]) {
  if (grad_start) {
    State sum[kPer];
    place.read(p, grad_start, row, sum);
#pragma unroll
    for (int i = 0; i < kPer; ++i) sum[i] = sum[i] + carry[i];
    place.write(p, sum, grad_start, row);
  }
  fill(carry, State(0));
}

// The states before the tiles from the last checkpoint up to the one at `start`, into `tiles`.
HFR_DEVICE void fill_in(const Problem& p, Shared& shared, const Place& place, Index b, const Checkpoints& checkpoints,
                        const Checkpoints& tiles, Index start) {
  const Index from = start / (kSteps * kTiles) * (kSteps * kTiles);
  State s[kPer];
  checkpoints.get(p, place, from / kSteps, s);
  walk<false>(p, shared, place, b, from, from, start, s, nullptr, tiles);
  tiles.put(p, place, start / kSteps, s);
}

HFR_DEVICE void copy(const State (&from)[kPer], State (&to)[kPer]) {
#pragma unroll
  for (int i = 0; i < kPer; ++i) to[i] = from[i];
}

// From the last tile that begins before `end` down to the segment's first, writing below the segment's end.
HFR_DEVICE void walk_back(const Problem& p, BackwardShared& shared, const Place& place, const Heads<T>& grad_y,
                          const Checkpoints& checkpoints, State* scratch, const Gradients& to, const Work& work, Index end,
                          State (&carry)[kPer]) {
  Index start = (end - 1) / kSteps * kSteps;
  Tile<true, true, true> tile;
  State before[kPer];  // the next tile, asked for with its inputs: later, it would be waited for with those of the one after it
  tile.fetch(p, grad_y, work.b, start, end);
  for (bool first = true; start >= work.begin; start -= kSteps, first = false) {
    const bool writes = start < work.end;
    const Index number = start / kSteps;
    Checkpoints tiles = checkpoints;
    if constexpr (kTiles > 1) tiles = {scratch, (blockIdx.y - number / kTiles) * kTiles, 1};
    if (first || (kTiles > 1 && number % kTiles == kTiles - 1)) {
      if constexpr (kTiles > 1) fill_in(p, shared, place, work.b, checkpoints, tiles, start);
      tiles.get(p, place, number, before);
    }
    State states[kSteps + 1][kPer];  // after as many positions
    copy(before, states[0]);
    const bool plain = tile.settle(p, shared);
    if (start > work.begin) {
      tile.fetch(p, grad_y, work.b, start - kSteps, end);
      if (kTiles == 1 || number % kTiles > 0) tiles.get(p, place, number - 1, before);
    }
    if (plain) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        copy(states[step], states[step + 1]);
        place.push(p, shared.rows[step][place.block_row()], shared.v[step][place.block_columns()], states[step + 1]);
      }
      Position next(shared, place, kSteps - 1);
#pragma unroll
      for (int step = kSteps - 1; step >= 0; --step) {
        const Position at = next;
        if (step > 0) next = Position(shared, place, step - 1);  // as in `walk`
        step_back(p, shared, place, step, at, 0, states[step], states[step + 1], carry);
      }
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        copy(states[step], states[step + 1]);
        place.advance(p, shared, step, states[step + 1]);
      }
#pragma unroll
      for (int step = kSteps - 1; step >= 0; --step) {
        const int flag = shared.flags[step];
        step_back(p, shared, place, step, Position(shared, place, step), flag, states[step], states[step + 1], carry);
        if (flag & kDrop) drop(p, place, writes ? to.start : nullptr, work.b * p.segments + work.segment, carry);
      }
    }
    __syncthreads();
    if (!writes) continue;
    const int count = end - start < kSteps ? (int)(end - start) : kSteps;
    store_rows(p, shared, to, work.b, start, count);
    store_sums(p, shared, work.b, start, count, to.v);
  }
}

HFR_DEVICE void backward_segments(const Problem& p, BackwardShared& shared, const Heads<T>& grad_y) {
  const Place place(p);
  for (Index item = blockIdx.y; item < p.batch * p.segments; item += gridDim.y) {
    const Work work(item, p.length, p.segments, p.segment_length);
    if (work.segment == 0) continue;
    State carry[kPer], product[kPer];
    bool cut = false;
    fill(carry, State(0)), fill(product, State(1));
    Index start = (work.end - 1) / kSteps * kSteps;
    Tile<false, true, true> tile;
    tile.fetch(p, grad_y, work.b, start, work.end);
    for (; start >= work.begin; start -= kSteps) {
      const bool plain = tile.settle(p, shared);
      if (start > work.begin) tile.fetch(p, grad_y, work.b, start - kSteps, work.end);
      const auto back = [&](int step, int flag) {
        const Row now = shared.rows[step][place.block_row()];
        const Columns grad = shared.grad[step][place.block_columns()];
        State a;
        join(now.a, a);
        cut = cut || (flag & kDrop);
        if (!(flag & kMasked)) fill(product, conj(a) * product[0]);
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
          if (!place.lives(p, i)) continue;
          carry[i] = plus_real(carry[i], now.q * grad.v[i]);
          if (!(flag & kMasked)) carry[i] = conj(a) * carry[i];
          if (flag & kDrop) carry[i] = State(0);
        }
      };
      if (plain) {
#pragma unroll
        for (int step = kSteps - 1; step >= 0; --step) back(step, 0);
      } else {
#pragma unroll 1
        for (int step = kSteps - 1; step >= 0; --step) back(step, shared.flags[step]);
      }
      __syncthreads();
    }
    leave_segment(p, place, work.b, work.segment, product, carry, cut);
  }
}

// ---- the kernels -----------------------------------------------------------------------------------------------------

#define HFR_HEADS(U, x) const U *x, Index x##_b, Index x##_l, Index x##_h, Index x##_d
#define HFR_VIEW(x) {x, x##_b, x##_l, x##_h, x##_d}
#define HFR_PROBLEM \
  HFR_SCAN, Index columns, const State *start, HFR_HEADS(T, q), HFR_HEADS(T, k), HFR_HEADS(T, v), HFR_HEADS(Number, a)
#define HFR_DESCRIBE(S) \
  __shared__ S shared;  \
  const Problem p = {HFR_SCAN_ARGUMENTS, columns, start, HFR_VIEW(q), HFR_VIEW(k), HFR_VIEW(v), HFR_VIEW(a)};
#define HFR_KERNEL(blocks) extern "C" __global__ void __launch_bounds__(kThreads, blocks)

HFR_KERNEL(kForwardBlocks) gateloop_heads_forward_segments(HFR_PROBLEM) {
  HFR_DESCRIBE(Shared)
  forward_segments(p, shared);
}

// y: (batch, length, heads, columns), or null, and then checkpoints, (batch, runs of kTiles tiles, one row's state, whole
// blocks of threads). initial, final: (batch, heads, rows, columns), either may be null; they may be one where time is in one
// segment.
HFR_KERNEL(kForwardBlocks) gateloop_heads_forward(HFR_PROBLEM, T* y, State* checkpoints, const State* initial, State* final) {
  HFR_DESCRIBE(Shared)
  const Place place(p);
  for (Index item = blockIdx.y; item < p.batch * p.segments; item += gridDim.y) {
    const Work work(item, p.length, p.segments, p.segment_length);
    State s[kPer];
    place.read(p, initial, work.b, s);
    enter_segment(p, place, work.b, 0, work.segment, s);
    Index from = work.begin;
    // As in scan_cuda.cu: what is not finite is not known from the products of segments.
    if (work.segment > 0 && !all_finite(s)) {
      from = 0;
      place.read(p, initial, work.b, s);
    }
    const Checkpoints kept = of_row(p, checkpoints, work.b);
    if (y) {
      walk<true>(p, shared, place, work.b, from, work.begin, work.end, s, y, kept);
    } else {
      walk<false>(p, shared, place, work.b, from, work.begin, work.end, s, y, kept);
    }
    if (final && work.end == p.length) place.write(p, s, final, work.b);
  }
}

HFR_KERNEL(kForwardBlocks) gateloop_heads_backward_segments(HFR_PROBLEM, HFR_HEADS(T, grad_y)) {
  HFR_DESCRIBE(BackwardShared)
  const Heads<T> grad = HFR_VIEW(grad_y);
  backward_segments(p, shared, grad);
}

// scratch: where kTiles > 1, (gridDim.y, kTiles, one row's state), of which each block uses its own.
HFR_KERNEL(kBackwardBlocks)
gateloop_heads_backward(HFR_PROBLEM, HFR_HEADS(T, grad_y), State* checkpoints, State* scratch, const State* grad_final,
                        State* grad_initial, Gradient* grad_q, Gradient* grad_k, T* grad_v, Number* grad_a,
                        State* grad_start) {
  HFR_DESCRIBE(BackwardShared)
  const Heads<T> grad = HFR_VIEW(grad_y);
  const Gradients to = {grad_q, grad_k, grad_a, grad_v, grad_start};
  const Place place(p);
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
    walk_back(p, shared, place, grad, of_row(p, checkpoints, work.b), scratch, to, work, end, carry);
    if (work.begin == 0) place.write(p, carry, grad_initial, work.b);
  }
}
