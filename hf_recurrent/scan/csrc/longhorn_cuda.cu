// Longhorn's loops for GPUs. Each channel has m states, all driven by the same k and q. A thread has kPer states of kColumns
// neighbouring channels in registers: kLanes threads to the states of a channel, kGroups of them side by side in a warp, so
// that a key that is read from shared memory serves several channels, and a rate several states. A block takes kChannels
// channels of a row of the batch and walks time in tiles: k and q, their norms, and each channel's rate and push are put into
// shared memory once, while the loads of later tiles are in flight. Nothing of the size batch x length x channels x m is ever
// written: backward starts each tile of kSteps positions from a checkpoint of the state before it (m / kSteps numbers for each
// number of x, in memory of its own that lives no longer than the call), recomputes the tile's states into registers, and
// walks it back. What a thread has of a sum over the states (o, and backward the gradients of e and of the push) goes through
// shared memory to the thread that writes that channel's number. The gradients of k and q, sums over all channels, are formed
// in registers, within warps, then over the warps of a block, then over blocks. All sums are formed in the same order at every
// run.
//
// What bounds it is arithmetic: for each channel and position at m = 16 about 175 instructions forward, 120 where only
// checkpoints are written, and 455 backward, of which the formulas are 64, 48 and 208; against 6 and 10 bytes in bfloat16.
// Tiles without a mask or a reset, nearly all, take a path that tests for neither.
//
// Compiled by NVRTC for what the tensors hold, HFR_TYPE, and m, HFR_STATES.
#include "device.h"

using namespace hfr;

typedef HFR_TYPE T;
typedef StateOf<T>::type State;
typedef LonghornCell<State> Cell;

constexpr int kStates = HFR_STATES;
constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kLanes = kStates <= 64 ? 8 : 16;
constexpr int kPerAtLeast = (kStates + kLanes - 1) / kLanes;
constexpr int kPer = kPerAtLeast <= 1 ? 1 : kPerAtLeast <= 2 ? 2 : kPerAtLeast <= 4 ? 4 : 8;
constexpr int kColumns = kPer * sizeof(State) <= 16 ? 2 : 1;
constexpr int kOwn = kColumns * kPer;   // states to a thread: those of its first channel, then those of the next
constexpr int kPadded = kLanes * kPer;  // states past m have keys and queries of zero, and stay zero
constexpr int kGroups = kWarp / kLanes;
constexpr int kAcross = kGroups * kColumns;  // channels to a warp
constexpr int kChannels = kWarps * kAcross;
constexpr int kSteps = kPer <= 4 && sizeof(State) == 4 ? 8 : 4;  // so that a tile's states fit into registers beside all else
constexpr int kLong = 2 * kSteps;          // positions to a tile of the other kernels: more loads in flight
// Blocks to a multiprocessor, at least.
constexpr int kForwardBlocks = kOwn * sizeof(State) <= 16 ? 4 : kOwn * sizeof(State) <= 32 ? 2 : 1;
constexpr int kBackwardBlocks = kOwn * sizeof(State) <= 16 ? 3 : kOwn * sizeof(State) <= 32 ? 2 : 1;
static_assert(kPadded >= kStates, "at most 128 states");
static_assert(kChannels <= kWarp, "the channels of a position belong to one warp");
// Where a thread has several states of a channel, those of the upper half of the groups hold them with the halves swapped: of
// the sums over channels, each thread then sends its second half and keeps its first, without having to choose. Shared memory
// has the keys in both orders, where it has room.
constexpr int kHalf = kPadded * sizeof(State) <= 256 ? kPer / 2 : 0;
constexpr int kOrders = kHalf ? 2 : 1;
constexpr bool kFull = kStates == kPadded;  // every thread has states

// How many numbers are read and written at once where n lie side by side.
__device__ constexpr int wide(int n) { return n * (int)sizeof(State) > 16 ? 16 / (int)sizeof(State) : n; }

template <int n>
HFR_DEVICE void take(const State* from, State (&to)[n]) {
  typedef Vector<State, wide(n)> Pack;
#pragma unroll
  for (int i = 0; i < n; i += wide(n)) {
    const Pack pack = *reinterpret_cast<const Pack*>(from + i);
#pragma unroll
    for (int j = 0; j < wide(n); ++j) to[i + j] = pack.v[j];
  }
}

template <int n, int N>
HFR_DEVICE void put(const State (&from)[N], State* to) {
  typedef Vector<State, wide(n)> Pack;
#pragma unroll
  for (int i = 0; i < n; i += wide(n)) {
    Pack pack;
#pragma unroll
    for (int j = 0; j < wide(n); ++j) pack.v[j] = from[i + j];
    *reinterpret_cast<Pack*>(to + i) = pack;
  }
}

// Tiles of a walk from `begin` to `end`, counted along it; of all but the one that ends it, all positions are there.
template <int steps>
struct Tiles {
  int count, rest;

  HFR_DEVICE Tiles(Index begin, Index end)
      : count((int)((end - begin + steps - 1) / steps)), rest((int)(end - begin - (Index)(count - 1) * steps)) {}

  // Positions of the tile with this number; beyond the last there are none.
  HFR_DEVICE int left(int tile) const { return tile + 1 < count ? steps : tile < count ? rest : 0; }
};

struct Problem : Scan<State> {
  View<T> x, dt, k, q;  // along the flow: their strides over time are negative where it is reversed

  // How far outputs are apart along the flow.
  HFR_DEVICE Index along(Index stride) const { return reverse ? -stride : stride; }
};

constexpr int kSum = 2 * kPadded + (kPadded == 16 ? 16 : 0);  // numbers from one position's sums to the next: other banks
constexpr int kSums = kWarps * kSteps * kSum * sizeof(State) <= 6144 ? 2 : 1;  // of 48 KiB

// parts: 1 where threads leave their parts of o, 2 for those of the gradients of the push and of e, 0 for nothing.
template <int steps, int parts>
struct alignas(16) Shared {
  static constexpr int kRow = kAcross * kLanes * parts + (kAcross * parts) % 32;  // a warp's parts, the next one's elsewhere

  // Keys are written a tile ahead, and those of the tile before are wanted for the gradients' last sums.
  static constexpr int kBuffers = parts == 2 ? 3 : 2;

  State keys[kBuffers][steps][kOrders][kLanes][2][kPer];  // k and q, in each order of a thread's states
  State rates[steps][kChannels][2];              // e and the push
  State grad[steps][kChannels];
  State parts_of[parts ? steps : 1][kWarps][parts ? kRow : 1];
  State sums[parts == 2 ? kSums : 1][kWarps][steps][parts == 2 ? kSum : 1];  // of the gradients of k and q
  State kk[kBuffers][steps], grad_kk[steps];
  unsigned flags[kBuffers][steps / 4];  // a byte for each position

  HFR_DEVICE unsigned char* flag(int buffer, int step) {
    return reinterpret_cast<unsigned char*>(flags[buffer]) + step;
  }

  HFR_DEVICE static int next(int buffer) { return buffer == kBuffers - 1 ? 0 : buffer + 1; }
  HFR_DEVICE static int last(int buffer) { return buffer == 0 ? kBuffers - 1 : buffer - 1; }

  HFR_DEVICE bool flagged(int buffer) const {
    unsigned any = 0;
#pragma unroll
    for (int i = 0; i < steps / 4; ++i) any |= flags[buffer][i];
    return any != 0;
  }

  // Where the part of lane 0 is for a channel of the block; kAcross * parts numbers on is that of the next lane, and
  // kOnward on that of the next position. Threads that have no position are given some place too.
  static constexpr int kOnward = kWarps * kRow;

  HFR_DEVICE const State* part(int step, int channel) const {
    return &parts_of[step % steps][channel / kAcross][channel % kAcross * parts];
  }
};

// ---- a tile of the inputs --------------------------------------------------------------------------------------------

// Of k and q. A thread has kNumber of the numbers of one position.
template <int steps, bool reads>
struct Keys {
  static constexpr int kShare = kThreads / steps;  // threads to a position, of one warp
  static constexpr int kNumber = (kPadded + kShare - 1) / kShare;
  static_assert(kShare <= kWarp, "kk is summed within a warp");

  int step, j;
  const T *k_at, *q_at;
  Index k_on, q_on, flag_at, flag_on;
  T k[kNumber], q[kNumber];
  unsigned char flag;

  // From the tile that begins at `start`, tile by tile, with or against the flow.
  HFR_DEVICE Keys(const Problem& p, Index b, Index start, bool back) : step(threadIdx.x / kShare), j(threadIdx.x % kShare) {
    const Index t = start + step, on = back ? -steps : steps;
    k_at = p.k.data + b * p.k.b + t * p.k.l + j * p.k.d;
    k_on = on * p.k.l;
    if (reads) {
      q_at = p.q.data + b * p.q.b + t * p.q.l + j * p.q.d;
      q_on = on * p.q.l;
    }
    flag_at = b * p.length + p.position(t);
    flag_on = p.along(on);
    fill(k, T()), fill(q, T());
  }

  // The next tile, of which `left` positions are there. What is not there keeps what it had: zero where it never is, and
  // against the flow, where only the first tile may be short; with the flow nothing reads it.
  HFR_DEVICE void fetch(const Problem& p, int left) {
    const bool there = step < left;
#pragma unroll
    for (int i = 0; i < kNumber; ++i) {
      if (!there || j + i * kShare >= kStates) continue;
      k[i] = k_at[i * kShare * p.k.d];
      if (reads) q[i] = q_at[i * kShare * p.q.d];
    }
    flag = there ? 0 : kMasked;
    if (p.flags && there && j == 0) flag = p.flags[flag_at];
    k_at += k_on;
    if (reads) q_at += q_on;
    flag_at += flag_on;
  }

  template <int parts>
  HFR_DEVICE void settle(Shared<steps, parts>& shared, int buffer) const {
    State kk = 0;
#pragma unroll
    for (int i = 0; i < kNumber; ++i) {
      const State number = load(k[i]);
      kk += number * number;
      const int at = j + i * kShare;
      if (kNumber * kShare != kPadded && at >= kPadded) continue;
#pragma unroll
      for (int order = 0; order < kOrders; ++order) {
        State(&to)[2][kPer] = shared.keys[buffer][step][order][at / kPer];
        to[0][at % kPer ^ order * kHalf] = number;
        if (reads) to[1][at % kPer ^ order * kHalf] = load(q[i]);
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < kShare; lanes *= 2) kk += __shfl_xor_sync(0xffffffffu, kk, lanes);
    if (j == 0) {
      shared.kk[buffer][step] = kk;
      *shared.flag(buffer, step) = flag;
    }
  }
};

// Of x, dt and the gradient of o: what a thread reads, and later writes, of a tile's positions x channels.
template <int steps, bool pushes, bool grads>
struct Elements {
  static constexpr int kRows = kThreads / kChannels;  // positions that the block's threads read at once
  static constexpr int kNumber = (steps + kRows - 1) / kRows;
  static constexpr int kOn = kRows < steps ? kRows : steps;  // from one read to the next

  int step, channel;
  bool exists;
  const T *x_at, *dt_at, *grad_at;
  Index x_on, dt_on, grad_on;
  T x[kNumber], dt[kNumber], grad[kNumber];

  HFR_DEVICE Elements(const Problem& p, const View<T>& grad_o, Index b, Index start, bool back)
      : step(threadIdx.x / kChannels), channel(threadIdx.x % kChannels) {
    const Index d = (Index)blockIdx.x * kChannels + channel;
    exists = d < p.channels && (kRows <= steps || step < steps);
    // With the flow a tile's rows are read from its first on, against it from its last.
    const Index t = start + step + (back ? (kNumber - 1) * kRows : 0), on = back ? -kOn : kOn;
    dt_at = p.dt.data + b * p.dt.b + t * p.dt.l + d * p.dt.d;
    dt_on = on * p.dt.l;
    if (pushes) {
      x_at = p.x.data + b * p.x.b + t * p.x.l + d * p.x.d;
      x_on = on * p.x.l;
    }
    if (grads) {
      grad_at = grad_o.data + b * grad_o.b + t * grad_o.l + d * grad_o.d;
      grad_on = on * grad_o.l;
    }
    fill(x, T()), fill(dt, T()), fill(grad, T());
  }

  HFR_DEVICE void fetch(int left, bool back) {
#pragma unroll
    for (int row = 0; row < kNumber; ++row) {
      const int i = back ? kNumber - 1 - row : row;
      if (exists && step + i * kRows < left) {
        dt[i] = *dt_at;
        if (pushes) x[i] = *x_at;
        if (grads) grad[i] = *grad_at;
      }
      dt_at += dt_on;
      if (pushes) x_at += x_on;
      if (grads) grad_at += grad_on;
    }
  }

  // Ready to be walked. slope: of each element, that of its rate over dt.
  template <int parts>
  HFR_DEVICE void settle(Shared<steps, parts>& shared, int buffer, State (&slope)[kNumber]) const {
#pragma unroll
    for (int i = 0; i < kNumber; ++i) {
      const int at = step + i * kRows;
      if (kRows > steps && at >= steps) continue;
      const State e = Cell::rate(load(dt[i]), shared.kk[buffer][at], slope[i]);
      const State rates[2] = {e, pushes ? e * load(x[i]) : State(0)};
      put<2>(rates, shared.rates[at][channel]);
      if (grads) shared.grad[at][channel] = load(grad[i]);
    }
  }
};

// ---- one thread's states ---------------------------------------------------------------------------------------------

struct Place {
  int lane, group, order, warp, channel;  // channel: the first, within the block
  Index d;

  HFR_DEVICE Place()
      : lane(threadIdx.x % kWarp / kGroups), group(threadIdx.x % kGroups),
        order(kHalf ? group / (kGroups / 2) : 0), warp(threadIdx.x / kWarp),
        channel(warp * kAcross + group * kColumns), d((Index)blockIdx.x * kChannels + channel) {}

  // Of (rows, channels, m), from a multiple of 16 bytes on; states past m and of channels past the last are zero and stay out.
  HFR_DEVICE void read(const Problem& p, const State* from, Index row, State (&s)[kOwn]) const {
#pragma unroll
    for (int i = 0; i < kOwn; i += kWide) {
      Pack pack;
      fill(pack.v, State(0));
      if (from && exists(p, i)) pack = reinterpret_cast<const Pack*>(from)[at(p, row, i) / kWide];
#pragma unroll
      for (int j = 0; j < kWide; ++j) s[i + j] = pack.v[j];
    }
    turn(s);
  }

  HFR_DEVICE void write(const Problem& p, const State (&states)[kOwn], State* to, Index row) const {
    State s[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) s[i] = states[i];
    turn(s);
#pragma unroll
    for (int i = 0; i < kOwn; i += kWide) {
      Pack pack;
#pragma unroll
      for (int j = 0; j < kWide; ++j) pack.v[j] = s[i + j];
      if (exists(p, i)) reinterpret_cast<Pack*>(to)[at(p, row, i) / kWide] = pack;
    }
  }

  // Where this thread's states before a tile are among the checkpoints, (batch, tiles, blocks, threads, kOwn).
  HFR_DEVICE static Index checkpoint(const Problem& p, Index b, Index start) {
    const Index tiles = (p.length + kSteps - 1) / kSteps;
    return (((b * tiles + start / kSteps) * gridDim.x + blockIdx.x) * kThreads + threadIdx.x) * kOwn;
  }

 private:
  static constexpr int kWide = kFull ? wide(kPer) : 1;
  typedef Vector<State, kWide> Pack;

  // Between the order in memory and this thread's.
  HFR_DEVICE void turn(State (&s)[kOwn]) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (i % kPer >= kHalf) continue;
      const State first = s[i], second = s[i + kHalf];
      s[i] = order ? second : first;
      s[i + kHalf] = order ? first : second;
    }
  }

  HFR_DEVICE bool exists(const Problem& p, int i) const {
    return d + i / kPer < p.channels && (kFull || lane * kPer + i % kPer < kStates);
  }

  HFR_DEVICE Index at(const Problem& p, Index row, int i) const {
    return (row * p.channels + d + i / kPer) * kStates + lane * kPer + i % kPer;
  }
};

HFR_DEVICE State forward(State s, int flag, State e, State push, State k) {
  if (flag & kDrop) s = State(0);
  return flag & kMasked ? s : Cell::forward(s, e, push, k);
}

// ---- forward ---------------------------------------------------------------------------------------------------------

template <bool flagged, bool reads, class Memory>
HFR_DEVICE void walk_tile(Memory& shared, const Place& place, int buffer, int first, State (&s)[kOwn]) {
#pragma unroll (flagged ? 1 : kSteps)
  for (int step = first; step < first + kSteps; ++step) {
    const int flag = flagged ? *shared.flag(buffer, step) : 0;
    State keys[(reads ? 2 : 1) * kPer], rates[2 * kColumns], out[kColumns];
    take(shared.keys[buffer][step][place.order][place.lane][0], keys);
    take(shared.rates[step][place.channel], rates);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int column = i / kPer, j = i % kPer;
      s[i] = forward(s[i], flag, rates[2 * column], rates[2 * column + 1], keys[j]);
      if (reads) out[column] = j ? out[column] + s[i] * keys[j + (reads ? kPer : 0)] : s[i] * keys[j + (reads ? kPer : 0)];
    }
    if (reads) put<kColumns>(out, &shared.parts_of[step][place.warp][(threadIdx.x % kWarp) * kColumns]);
  }
}

// From step `from` on, writing from `begin` on: o where it `reads`, else checkpoints.
template <bool reads, class Memory>
HFR_DEVICE void walk(const Problem& p, Memory& shared, const Place& place, Index b, Index from, Index begin, Index end,
                     State (&s)[kOwn], T* o, State* checkpoints) {
  const View<T> none = {};
  typedef Elements<kLong, true, false> Wide;
  Wide elements(p, none, b, from, false);
  Keys<kLong, reads> keys(p, b, from, false);
  const Tiles<kLong> tiles(from, end);
  keys.fetch(p, tiles.left(0));
  keys.settle(shared, 0);
  keys.fetch(p, tiles.left(1));
  elements.fetch(tiles.left(0), false);
  const Index on = Wide::kOn * p.along(p.channels);
  if (reads) {
    o += (b * p.length + p.position(from + elements.step)) * p.channels + (Index)blockIdx.x * kChannels + elements.channel;
  }
  const State* const parts = reads ? shared.part(elements.step, elements.channel) : nullptr;
  Index checkpoint = Place::checkpoint(p, b, from);
  const Index checkpoint_on = (Index)gridDim.x * kThreads * kOwn;
  __syncthreads();
  int buffer = 0;
  const int silent = (int)((begin - from) / kLong);
  for (int tile = 0; tile < tiles.count; ++tile) {
    State slope[Wide::kNumber];
    elements.settle(shared, buffer, slope);
    keys.settle(shared, shared.next(buffer));
    elements.fetch(tiles.left(tile + 1), false);
    keys.fetch(p, tiles.left(tile + 2));
    const int count = tile < silent ? 0 : tiles.left(tile);  // of positions that are written
    __syncthreads();
#pragma unroll 1
    for (int first = 0; first < kLong; first += kSteps) {
      if (!reads) {
        if (first < count) put<kOwn>(s, checkpoints + checkpoint);
        checkpoint += checkpoint_on;
      }
      if (shared.flagged(buffer)) {
        walk_tile<true, reads>(shared, place, buffer, first, s);
      } else {
        walk_tile<false, reads>(shared, place, buffer, first, s);
      }
    }
    __syncthreads();
    if (reads) {
#pragma unroll
      for (int i = 0; i < Wide::kNumber; ++i) {
        const int step = elements.step + i * Wide::kRows;
        if (step < count && elements.exists) {
          const State* const part = parts + i * Wide::kRows * Memory::kOnward;
          State out = part[0];
#pragma unroll
          for (int lane = 1; lane < kLanes; ++lane) out += part[lane * kAcross];
          store(out, *o);
        }
        o += on;
      }
    }
    buffer = shared.next(buffer);
  }
}

template <bool flagged, class Memory>
HFR_DEVICE void sum_tile(Memory& shared, const Place& place, int buffer, State (&product)[kOwn], State (&s)[kOwn], bool& cut) {
#pragma unroll (flagged ? 1 : kSteps)
  for (int step = 0; step < kLong; ++step) {
    const int flag = flagged ? *shared.flag(buffer, step) : 0;
    State keys[kPer], rates[2 * kColumns];
    take(shared.keys[buffer][step][place.order][place.lane][0], keys);
    take(shared.rates[step][place.channel], rates);
    cut = cut || (flag & kDrop);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const State e = rates[i / kPer * 2], push = rates[i / kPer * 2 + 1];
      s[i] = forward(s[i], flag, e, push, keys[i % kPer]);
      product[i] = forward(product[i], flag & kMasked, e, State(0), keys[i % kPer]);
    }
  }
}

template <class Memory>
HFR_DEVICE void forward_segments(const Problem& p, Memory& shared) {
  const Place place;
  const View<T> none = {};
  for (Index item = blockIdx.y; item < p.batch * p.segments; item += gridDim.y) {
    const Work work(item, p.length, p.segments, p.segment_length);
    if (work.segment == p.segments - 1) continue;
    State s[kOwn], product[kOwn];
    bool cut = false;
    fill(s, State(0)), fill(product, State(1));
    typedef Elements<kLong, true, false> Wide;
    Wide elements(p, none, work.b, work.begin, false);
    Keys<kLong, false> keys(p, work.b, work.begin, false);
    const Tiles<kLong> tiles(work.begin, work.end);
    keys.fetch(p, tiles.left(0));
    keys.settle(shared, 0);
    keys.fetch(p, tiles.left(1));
    elements.fetch(tiles.left(0), false);
    __syncthreads();
    int buffer = 0;
    for (int tile = 0; tile < tiles.count; ++tile) {  // past the end all is masked
      State slope[Wide::kNumber];
      elements.settle(shared, buffer, slope);
      keys.settle(shared, shared.next(buffer));
      elements.fetch(tiles.left(tile + 1), false);
      keys.fetch(p, tiles.left(tile + 2));
      __syncthreads();
      if (shared.flagged(buffer)) {
        sum_tile<true>(shared, place, buffer, product, s, cut);
      } else {
        sum_tile<false>(shared, place, buffer, product, s, cut);
      }
      __syncthreads();
      buffer = shared.next(buffer);
    }
    leave_segment(p, place, work.b, work.segment, product, s, cut);
  }
}

// ---- backward --------------------------------------------------------------------------------------------------------

struct Gradients {
  T *x, *dt;     // (batch, length, channels)
  State *k, *q;  // (batch, blocks of channels, length, m)
};

typedef Shared<kSteps, 2> BackwardMemory;
typedef Elements<kSteps, true, true> BackwardElements;
typedef Keys<kSteps, true> BackwardKeys;

template <bool flagged>
HFR_DEVICE void walk_tile_back(BackwardMemory& shared, const Place& place, int buffer, int sums, const State (&s)[kOwn],
                               State (&carry)[kOwn]) {
  State after[kSteps][kOwn];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int flag = flagged ? *shared.flag(buffer, step) : 0;
    State k[kPer], rates[2 * kColumns];
    take(shared.keys[buffer][step][place.order][place.lane][0], k);
    take(shared.rates[step][place.channel], rates);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const State before = step > 0 ? after[step > 0 ? step - 1 : 0][i] : s[i];
      after[step][i] = forward(before, flag, rates[i / kPer * 2], rates[i / kPer * 2 + 1], k[i % kPer]);
    }
  }
#pragma unroll
  for (int step = kSteps - 1; step >= 0; --step) {
    const int flag = flagged ? *shared.flag(buffer, step) : 0;
    State keys[2 * kPer], rates[2 * kColumns], grad[kColumns], of_rates[2 * kColumns], v[2 * kPer];
    take(shared.keys[buffer][step][place.order][place.lane][0], keys);
    take(shared.rates[step][place.channel], rates);
    take(&shared.grad[step][place.channel], grad);
    fill(of_rates, State(0)), fill(v, State(0));
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int column = i / kPer, j = i % kPer;
      const State g = carry[i] + grad[column] * keys[kPer + j];
      v[kPer + j] += grad[column] * after[step][i];
      carry[i] = g;
      if (!(flag & kMasked)) {
        State before = step > 0 ? after[step > 0 ? step - 1 : 0][i] : s[i], of_key;
        if (flag & kDrop) before = State(0);
        const State e = rates[2 * column], push = rates[2 * column + 1];
        carry[i] = Cell::backward(before, e, push, keys[j], g, of_rates[2 * column], of_rates[2 * column + 1], of_key);
        v[j] += of_key;
      }
      if (flag & kDrop) carry[i] = State(0);
    }
    put<2 * kColumns>(of_rates, &shared.parts_of[step][place.warp][(threadIdx.x % kWarp) * 2 * kColumns]);
    constexpr int kKept = kHalf ? kHalf : kPer, kRest = kHalf ? kGroups / 2 : kGroups;
    State kept[2 * kKept];  // of k, then of q
#pragma unroll
    for (int i = 0; i < 2 * kKept; ++i) {
      const int at = i / kKept * kPer + i % kKept;
      kept[i] = v[at];
      if (kHalf) kept[i] += __shfl_xor_sync(0xffffffffu, v[at + kHalf], kGroups / 2);
    }
    int first, n;
    bool write;
    sum_over_lanes<1, kRest>(kept, first, n, write);
    constexpr int kLeft = 2 * kKept > kRest ? 2 * kKept / kRest : 1;
    const int at = first / kKept * kPadded + place.lane * kPer + place.order * kHalf + first % kKept;
    if (write) put<(kLeft > kKept ? kKept : kLeft)>(kept, &shared.sums[sums][place.warp][step][at]);
    static_assert(kLeft <= kKept, "one piece to a thread");
  }
}

// What the walk left of the gradients of x and dt, and of kk.
HFR_DEVICE void store_elements(const Problem& p, BackwardMemory& shared, const Gradients& to, const BackwardElements& at,
                               const T (&x)[BackwardElements::kNumber], const State (&slope)[BackwardElements::kNumber],
                               const State* parts, int buffer, Index offset, Index on, int count) {
  constexpr int kNumber = BackwardElements::kNumber, kRows = BackwardElements::kRows;
  State kk[kNumber];
#pragma unroll
  for (int i = 0; i < kNumber; ++i) {
    const int step = at.step + i * kRows;
    kk[i] = 0;
    if (kRows > kSteps && step >= kSteps) continue;
    State sum[2];
    const State* const part = parts + i * kRows * BackwardMemory::kOnward;
    take(part, sum);
#pragma unroll
    for (int lane = 1; lane < kLanes; ++lane) {
      State more[2];
      take(part + lane * kAcross * 2, more);
      sum[0] += more[0], sum[1] += more[1];
    }
    const State e = shared.rates[step][at.channel][0];  // this thread's own, until it settles the next tile
    const bool masked = *shared.flag(buffer, step) & kMasked;  // whatever is there, its gradients are zero
    const State grad_e = masked ? State(0) : sum[1] + sum[0] * load(x[i]);
    kk[i] = masked ? State(0) : -grad_e * e * e;
    if (at.exists && step < count) {
      store(masked ? State(0) : sum[0] * e, to.x[offset + i * on]);
      store(masked ? State(0) : grad_e * slope[i], to.dt[offset + i * on]);
    }
  }
  int first, n;
  bool write;
  sum_over_lanes<1, kChannels>(kk, first, n, write);
  if (write && (kRows <= kSteps || at.step < kSteps)) shared.grad_kk[at.step + first * kRows] = kk[0];
  static_assert(kNumber <= kChannels, "one sum to a thread");
}

HFR_DEVICE void store_keys(BackwardMemory& shared, const Gradients& to, const BackwardKeys& at, int buffer, int sums,
                           Index offset, int count) {
  if (at.step >= count) return;
#pragma unroll
  for (int i = 0; i < BackwardKeys::kNumber; ++i) {
    const int j = at.j + i * BackwardKeys::kShare;
    if (j >= kStates) continue;
    State k = State(2) * shared.keys[buffer][at.step][0][j / kPer][0][j % kPer] * shared.grad_kk[at.step], q = 0;
    if (*shared.flag(buffer, at.step) & kMasked) k = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      k += shared.sums[sums][warp][at.step][j];
      q += shared.sums[sums][warp][at.step][kPadded + j];
    }
    to.k[offset + i * BackwardKeys::kShare] = k;
    to.q[offset + i * BackwardKeys::kShare] = q;
  }
}

// From the last tile that begins before `end` down to `begin`, writing below `writes_below`.
HFR_DEVICE void walk_back(const Problem& p, BackwardMemory& shared, const Place& place, const View<T>& grad_o,
                          const State* checkpoints, const Gradients& to, Index b, Index begin, Index writes_below, Index end,
                          State (&carry)[kOwn]) {
  constexpr int kNumber = BackwardElements::kNumber;
  constexpr bool kAhead = kOwn * sizeof(State) < 64;  // whether registers are left for the next checkpoint
  const Index start = (end - 1) / kSteps * kSteps;
  BackwardElements elements(p, grad_o, b, start, true);
  BackwardKeys keys(p, b, start, true);
  const int left = (int)(end - start);  // in the first tile; the others are whole
  int tiles = (int)((start - begin) / kSteps) + 1;  // that are left, and how many of them are written
  const int written = start < writes_below ? tiles : (int)((writes_below - begin) / kSteps);
  keys.fetch(p, left);
  keys.settle(shared, 0);
  keys.fetch(p, tiles > 1 ? kSteps : 0);
  elements.fetch(left, true);
  State before[kOwn], s[kOwn];
  fill(before, State(0));
  Index checkpoint = Place::checkpoint(p, b, start);
  const Index checkpoint_on = (Index)gridDim.x * kThreads * kOwn;
  if (kAhead) take(checkpoints + checkpoint, before);
  const Index on = BackwardElements::kRows * p.along(p.channels), tile_on = kSteps * p.along(p.channels);
  Index at =
      (b * p.length + p.position(start + elements.step)) * p.channels + (Index)blockIdx.x * kChannels + elements.channel;
  const State* const parts = shared.part(elements.step, elements.channel);
  // Those of k and q are written a tile later.
  const Index keys_on = kSteps * p.along(kStates);
  Index keys_at =
      ((b * gridDim.x + blockIdx.x) * p.length + p.position(start + kSteps + keys.step)) * kStates + keys.j;
  __syncthreads();
  int buffer = 0, sums = 0, count = tiles > written ? 0 : left, last_count = 0;
  for (; tiles > 0; --tiles) {
    State slope[kNumber];
    T x[kNumber];
    elements.settle(shared, buffer, slope);
    keys.settle(shared, shared.next(buffer));
#pragma unroll
    for (int i = 0; i < kNumber; ++i) x[i] = elements.x[i];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) s[i] = before[i];
    if (!kAhead) take(checkpoints + checkpoint, s);
    elements.fetch(tiles > 1 ? kSteps : 0, true);
    keys.fetch(p, tiles > 2 ? kSteps : 0);
    checkpoint -= checkpoint_on;
    if (kAhead && tiles > 1) take(checkpoints + checkpoint, before);
    __syncthreads();
    // Of the tile before, whose parts of the gradient of kk are together by now.
    store_keys(shared, to, keys, shared.last(buffer), kSums == 2 ? 1 - sums : 0, keys_at, last_count);
    if (kSums == 1) __syncthreads();
    if (shared.flagged(buffer)) {
      walk_tile_back<true>(shared, place, buffer, sums, s, carry);
    } else {
      walk_tile_back<false>(shared, place, buffer, sums, s, carry);
    }
    __syncthreads();
    store_elements(p, shared, to, elements, x, slope, parts, buffer, at, on, count);
    at -= tile_on;
    keys_at -= keys_on;
    last_count = count;
    count = tiles - 1 > written ? 0 : kSteps;
    buffer = shared.next(buffer);
    if (kSums == 2) sums = 1 - sums;
  }
  __syncthreads();
  store_keys(shared, to, keys, shared.last(buffer), kSums == 2 ? 1 - sums : 0, keys_at, last_count);
}

template <bool flagged, class Memory>
HFR_DEVICE void sum_tile_back(Memory& shared, const Place& place, int buffer, State (&product)[kOwn], State (&carry)[kOwn],
                              bool& cut) {
#pragma unroll (flagged ? 1 : kSteps)
  for (int step = kLong - 1; step >= 0; --step) {
    const int flag = flagged ? *shared.flag(buffer, step) : 0;
    State keys[2 * kPer], rates[2 * kColumns], grad[kColumns];
    take(shared.keys[buffer][step][place.order][place.lane][0], keys);
    take(shared.rates[step][place.channel], rates);
    take(&shared.grad[step][place.channel], grad);
    cut = cut || (flag & kDrop);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      // The gradient passes as the state does.
      const int column = i / kPer, j = i % kPer;
      carry[i] += grad[column] * keys[kPer + j];
      carry[i] = forward(carry[i], flag & kMasked, rates[2 * column], State(0), keys[j]);
      product[i] = forward(product[i], flag & kMasked, rates[2 * column], State(0), keys[j]);
      if (flag & kDrop) carry[i] = State(0);
    }
  }
}

template <class Memory>
HFR_DEVICE void backward_segments(const Problem& p, Memory& shared, const View<T>& grad_o) {
  const Place place;
  for (Index item = blockIdx.y; item < p.batch * p.segments; item += gridDim.y) {
    const Work work(item, p.length, p.segments, p.segment_length);
    if (work.segment == 0) continue;
    State carry[kOwn], product[kOwn];
    bool cut = false;
    fill(carry, State(0)), fill(product, State(1));
    const Index start = (work.end - 1) / kLong * kLong;
    typedef Elements<kLong, false, true> Wide;
    Wide elements(p, grad_o, work.b, start, true);
    Keys<kLong, true> keys(p, work.b, start, true);
    const int tiles = (int)((start - work.begin) / kLong) + 1;
    keys.fetch(p, (int)(work.end - start));
    keys.settle(shared, 0);
    keys.fetch(p, tiles > 1 ? kLong : 0);
    elements.fetch((int)(work.end - start), true);
    __syncthreads();
    int buffer = 0;
    for (int tile = 0; tile < tiles; ++tile) {
      State slope[Wide::kNumber];
      elements.settle(shared, buffer, slope);
      keys.settle(shared, shared.next(buffer));
      elements.fetch(tile + 1 < tiles ? kLong : 0, true);
      keys.fetch(p, tile + 2 < tiles ? kLong : 0);
      __syncthreads();
      if (shared.flagged(buffer)) {
        sum_tile_back<true>(shared, place, buffer, product, carry, cut);
      } else {
        sum_tile_back<false>(shared, place, buffer, product, carry, cut);
      }
      __syncthreads();
      buffer = shared.next(buffer);
    }
    leave_segment(p, place, work.b, work.segment, product, carry, cut);
  }
}

// ---- the kernels -----------------------------------------------------------------------------------------------------

#define HFR_PROBLEM                                                                                                       \
  HFR_SCAN, const T *x, Index x_b, Index x_l, Index x_d, const T *dt, Index dt_b, Index dt_l, Index dt_d, const T *k,     \
      Index k_b, Index k_l, Index k_d, const T *q, Index q_b, Index q_l, Index q_d
#define HFR_DESCRIBE                                                                                                       \
  const Problem p = {                                                                                                      \
      HFR_SCAN_ARGUMENTS, {x, x_b, x_l, x_d}, {dt, dt_b, dt_l, dt_d}, {k, k_b, k_l, k_d}, {q, q_b, q_l, q_d}};
#define HFR_KERNEL(blocks) extern "C" __global__ void __launch_bounds__(kThreads, blocks)

typedef Shared<kLong, 0> SegmentMemory;
typedef Shared<kLong, 1> ForwardMemory;

HFR_KERNEL(kForwardBlocks) longhorn_forward_segments(HFR_PROBLEM) {
  HFR_DESCRIBE
  __shared__ SegmentMemory shared;
  forward_segments(p, shared);
}

// initial, final: (batch, channels, m), either may be null; they may be one where time is in one segment. o: null, or (batch,
// length, channels). checkpoints: where o is null, the state before each tile of kSteps positions, as Place has it.
HFR_KERNEL(kForwardBlocks) longhorn_forward(HFR_PROBLEM, T* o, State* checkpoints, const State* initial, State* final) {
  HFR_DESCRIBE
  __shared__ ForwardMemory shared;
  const Place place;
  for (Index item = blockIdx.y; item < p.batch * p.segments; item += gridDim.y) {
    const Work work(item, p.length, p.segments, p.segment_length);
    State s[kOwn];
    place.read(p, initial, work.b, s);
    enter_segment(p, place, work.b, 0, work.segment, s);
    Index start = work.begin;
    // As in scan_cuda.cu: what is not finite is not known from the products of segments.
    if (work.segment > 0 && !all_finite(s)) {
      start = 0;
      place.read(p, initial, work.b, s);
    }
    if (o) {
      walk<true>(p, shared, place, work.b, start, work.begin, work.end, s, o, checkpoints);
    } else {
      walk<false>(p, shared, place, work.b, start, work.begin, work.end, s, o, checkpoints);
    }
    if (final && work.end == p.length) place.write(p, s, final, work.b);
    __syncthreads();
  }
}

HFR_KERNEL(kForwardBlocks) longhorn_backward_segments(HFR_PROBLEM, const T* grad_o, Index g_b, Index g_l, Index g_d) {
  HFR_DESCRIBE
  __shared__ SegmentMemory shared;
  const View<T> grad = {grad_o, g_b, g_l, g_d};
  backward_segments(p, shared, grad);
}

HFR_KERNEL(kBackwardBlocks) longhorn_backward(HFR_PROBLEM, const T* grad_o, Index g_b, Index g_l, Index g_d,
                                              const State* checkpoints, const State* grad_final, State* grad_initial,
                                              T* grad_x, T* grad_dt, State* grad_k, State* grad_q) {
  HFR_DESCRIBE
  __shared__ BackwardMemory shared;
  const View<T> grad = {grad_o, g_b, g_l, g_d};
  const Gradients to = {grad_x, grad_dt, grad_k, grad_q};
  const Place place;
  for (Index item = blockIdx.y; item < p.batch * p.segments; item += gridDim.y) {
    const Work work(item, p.length, p.segments, p.segment_length);
    State carry[kOwn];
    place.read(p, grad_final, work.b, carry);
    enter_segment(p, place, work.b, p.segments - 1, work.segment, carry);
    Index end = work.end;
    if (work.end < p.length && !all_finite(carry)) {
      end = p.length;
      place.read(p, grad_final, work.b, carry);
    }
    walk_back(p, shared, place, grad, checkpoints, to, work.b, work.begin, work.end, end, carry);
    if (work.begin == 0) place.write(p, carry, grad_initial, work.b);
    __syncthreads();
  }
}
