// Longhorn's loops for CPUs. Each channel has m states, all driven by the same k and q. A thread takes a block of channels
// and walks time in tiles: what drives the states is computed for all positions of a tile, then a few states of as many
// channels as a register holds walk the tile without leaving the registers. Nothing of the size batch x length x channels x m
// is ever written to memory: the backward pass recomputes the states of a tile from a checkpoint.
#include <stdint.h>
#include <string.h>

#include <vector>

#include "cells.h"
#include "lanes.h"
#include "lines.h"

namespace {

using namespace hfr;

constexpr int64_t kWidth = 128;  // channels of a block at most: at m = 16 their states take 8 KiB
constexpr int64_t kTile = 16;    // positions
constexpr int64_t kLeast = 4;    // m is padded to its multiple, with keys and queries of zero: their states stay zero
// States that are in registers at once: backward also needs as many for their gradients' sums.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int64_t kGroup = 8;
#else
constexpr int64_t kGroup = 4;
#endif
constexpr int64_t kMostTiles = 64;  // of one checkpoint each

struct Tensor {
  char* data;
  int64_t stride[3];  // in elements: batch, length, channels
};

struct Problem {
  int64_t batch, length, channels, states;
  int64_t reverse, threads, pieces;  // pieces: parts of the channels that are scanned independently
  const uint8_t* flags;              // (batch, length) contiguous, or null
  Tensor x, dt;                      // (batch, length, channels)
  Tensor k, q;                       // (batch, length, states)
  char* o;                           // forward: (batch, length, channels) contiguous
  char* state;                       // (batch, channels, states): in S_{-1}, out the last state; backward: their gradients
  const char* initial;               // backward: S_{-1}, (batch, channels, states)
  Tensor grad_o;                     // backward: (batch, length, channels)
  char *grad_x, *grad_dt;            // backward: (batch, length, channels) contiguous
  char *grad_k, *grad_q;             // backward: (batch, pieces, length, states) contiguous, zero, in the state type
  const char* skip;                  // forward: D, (channels), or null; with it o becomes (o + D x) silu(gate)
  Tensor gate;                       // forward: (batch, length, channels)
};

template <class T>
T* at(const Tensor& x, int64_t b, int64_t t, int64_t d) {
  return reinterpret_cast<T*>(x.data) + b * x.stride[0] + t * x.stride[1] + d * x.stride[2];
}

int64_t up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

template <class T>
struct Block {
  using State = typename StateOf<T>::type;
  using Lanes = Vector<State>;
  using V = typename Lanes::type;
  using Rows = State[kTile][kWidth + kLine / sizeof(State)];  // rows of one position are not 4096 bytes apart
  static_assert(2 * kGroup % Lanes::kLanes == 0 && kWidth % Lanes::kLanes == 0, "whole vectors");

  const Problem& p;
  const int64_t b, piece, d, n, m;  // the row of the batch, the piece, its first channel here and their number; states
  const int64_t wide, padded, size;  // n and m with what fills up vectors and groups, and the states of a block
  int64_t count;                    // positions of the tile
  uint8_t flags[kTile];
  std::vector<State> k, q;  // (kTile, padded)
  Rows x, e, push, out;
  Rows slope, grad, grad_push, grad_e;  // backward; slope: of e over dt
  V sums[kTile][2 * kGroup];            // backward: of the gradients of q, then of k, over the channels of each lane

  Block(const Problem& problem, int64_t batch_row, int64_t piece_index, int64_t first, int64_t channels)
      : p(problem),
        b(batch_row),
        piece(piece_index),
        d(first),
        n(channels),
        m(problem.states),
        wide(up(n, Lanes::kLanes)),
        padded(m ? up(m, kLeast) : kLeast),
        size(padded * wide),
        k(kTile * padded),
        q(kTile * padded) {}

  int64_t position(int64_t step) const { return p.reverse ? p.length - 1 - step : step; }

  // ---- memory --------------------------------------------------------------------------------------------------------

  // States are kept as (padded, wide), channels innermost; the tensors have (channels, m). Channels past n stay zero.
  void gather(const char* data, State* s) const {
    memset(s, 0, size * sizeof(State));
    if (!data) return;
    const State* from = reinterpret_cast<const State*>(data) + (b * p.channels + d) * m;
    for (int64_t j = 0; j < m; ++j)
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) s[j * wide + i] = from[i * m + j];
  }

  void scatter(const State* s, char* data) const {
    State* to = reinterpret_cast<State*>(data) + (b * p.channels + d) * m;
    for (int64_t j = 0; j < m; ++j)
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) to[i * m + j] = s[j * wide + i];
  }

  void load_row(const Tensor& tensor, int64_t t, State* to) const {
    const T* from = at<const T>(tensor, b, t, d);
    int64_t stride = tensor.stride[2];
    if (stride == 1) {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) to[i] = load(from[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = load(from[i * stride]);
    }
    for (int64_t i = n; i < wide; ++i) to[i] = State(0);
  }

  void store_row(const State* from, char* data, int64_t t) const {
    T* to = reinterpret_cast<T*>(data) + (b * p.length + t) * p.channels + d;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) store(from[i], to[i]);
  }

  // ---- a tile ----------------------------------------------------------------------------------------------------------

  // The tile that is walked next is asked for meanwhile: its rows lie too far apart for the processor to guess.
  template <bool backwards>
  void load_tile(int64_t tile) {
    const int64_t left = p.length - tile * kTile;
    count = left < kTile ? left : kTile;
    for (int64_t step = 0; step < count; ++step) {
      const int64_t t = position(tile * kTile + step), next = (tile + (backwards ? -1 : 1)) * kTile + step;
      if (next >= 0 && next < p.length) {
        request<false>(at<const T>(p.x, b, position(next), d), n);
        request<false>(at<const T>(p.dt, b, position(next), d), n);
        if (backwards) request<false>(at<const T>(p.grad_o, b, position(next), d), n);
      }
      flags[step] = p.flags ? p.flags[b * p.length + t] : 0;
      const T *from_k = at<const T>(p.k, b, t, 0), *from_q = at<const T>(p.q, b, t, 0);
      State *to_k = &k[step * padded], *to_q = &q[step * padded], sum = 0;
      for (int64_t j = 0; j < m; ++j) {
        to_k[j] = load(from_k[j * p.k.stride[2]]);
        to_q[j] = load(from_q[j * p.q.stride[2]]);
        sum += to_k[j] * to_k[j];
      }
      State dt[kWidth];
      load_row(p.x, t, x[step]);
      load_row(p.dt, t, dt);
      if (backwards) load_row(p.grad_o, t, grad[step]);
      if (backwards && (flags[step] & kMasked)) {  // whatever is there, its gradients are zero
        memset(x[step], 0, sizeof x[step]);
        memset(dt, 0, sizeof dt);
        memset(to_k, 0, m * sizeof(State));
        sum = 0;
      }
#pragma omp simd
      for (int64_t i = 0; i < wide; ++i) {
        State of_dt;
        e[step][i] = LonghornCell<State>::rate(dt[i], sum, of_dt);
        push[step][i] = e[step][i] * x[step][i];
        if (backwards) slope[step][i] = of_dt;
      }
    }
  }

  // Takes the states s past the tile; `readout` also leaves S q in out.
  template <bool readout>
  void advance(State* s) {
    for (int64_t i = 0; i < n; i += Lanes::kLanes) {
      int64_t j = 0;
      for (; j + kGroup <= padded; j += kGroup) walk<kGroup, readout>(s, i, j);
      for (; j < padded; j += kLeast) walk<kLeast, readout>(s, i, j);
    }
  }

  template <int64_t group, bool readout>
  void walk(State* from, int64_t i, int64_t j) {
    V s[group];
    for (int64_t g = 0; g < group; ++g) s[g] = Lanes::load(from + (j + g) * wide + i);
    for (int64_t step = 0; step < count; ++step) {
      move<group>(step, i, j, s);
      if (!readout) continue;
      V sum = j ? Lanes::load(out[step] + i) : V{};
      for (int64_t g = 0; g < group; ++g) sum += s[g] * Lanes::all(q[step * padded + j + g]);
      Lanes::store(sum, out[step] + i);
    }
    for (int64_t g = 0; g < group; ++g) Lanes::store(s[g], from + (j + g) * wide + i);
  }

  template <int64_t group>
  void move(int64_t step, int64_t i, int64_t j, V (&s)[group]) const {
    if (flags[step] & kDrop)
      for (V& one : s) one = V{};
    if (flags[step] & kMasked) return;
    const V rate = Lanes::load(e[step] + i), pushed = Lanes::load(push[step] + i);
    for (int64_t g = 0; g < group; ++g) {
      s[g] = LonghornCell<V>::forward(s[g], rate, pushed, Lanes::all(k[step * padded + j + g]));
    }
  }

  // ---- forward -------------------------------------------------------------------------------------------------------

  void forward(std::vector<State>& scratch) {
    scratch.resize(size);
    gather(p.state, scratch.data());
    for (int64_t tile = 0; tile * kTile < p.length; ++tile) {
      load_tile<false>(tile);
      advance<true>(scratch.data());
      for (int64_t step = 0; step < count; ++step) {
        const int64_t t = position(tile * kTile + step);
        if (p.skip) read_gated(t, x[step], out[step]);
        store_row(out[step], p.o, t);
      }
    }
    scatter(scratch.data(), p.state);
  }

  void read_gated(int64_t t, const State* x, State* out) const {
    const T* skip = reinterpret_cast<const T*>(p.skip) + d;
    State gate[kWidth];
    load_row(p.gate, t, gate);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      State sigma, complement;
      logistic(gate[i], sigma, complement);
      out[i] = (out[i] + load(skip[i]) * x[i]) * (gate[i] * sigma);
    }
  }

  // ---- backward ------------------------------------------------------------------------------------------------------

  // The states before each tile, if those are many before each of the parts of the length, whose tiles follow one by one.
  void backward(std::vector<State>& scratch) {
    const int64_t tiles = (p.length + kTile - 1) / kTile;
    int64_t part = 1;
    while (tiles > kMostTiles && part * part < tiles) ++part;
    const int64_t parts = (tiles + part - 1) / part;
    scratch.resize(size * (1 + parts + part));
    State *carry = scratch.data(), *before_parts = carry + size, *before_tiles = before_parts + parts * size;
    gather(p.initial, before_parts);
    for (int64_t tile = 0; tile < (parts - 1) * part; ++tile) {
      State* s = before_parts + (tile / part + 1) * size;
      if (tile % part == 0) memcpy(s, s - size, size * sizeof(State));
      load_tile<false>(tile);
      advance<false>(s);
    }
    gather(p.state, carry);
    for (int64_t c = parts - 1; c >= 0; --c) {
      const int64_t first = c * part, here = tiles - first < part ? tiles - first : part;
      memcpy(before_tiles, before_parts + c * size, size * sizeof(State));
      for (int64_t tile = 1; tile < here; ++tile) {
        State* s = before_tiles + tile * size;
        memcpy(s, s - size, size * sizeof(State));
        load_tile<false>(first + tile - 1);
        advance<false>(s);
      }
      for (int64_t tile = here - 1; tile >= 0; --tile) {
        load_tile<true>(first + tile);
        tile_back(first + tile, before_tiles + tile * size, carry);
      }
    }
    scatter(carry, p.state);
  }

  void tile_back(int64_t tile, const State* before, State* carry) {
    memset(grad_push, 0, count * sizeof *grad_push);
    memset(grad_e, 0, count * sizeof *grad_e);
    int64_t j = 0;
    for (; j + kGroup <= padded; j += kGroup) group_back<kGroup>(tile, before, carry, j);
    for (; j < padded; j += kLeast) group_back<kLeast>(tile, before, carry, j);
    for (int64_t step = 0; step < count; ++step) store_gradients(position(tile * kTile + step), step);
  }

  State* row_of(char* grads, int64_t t) const {
    return reinterpret_cast<State*>(grads) + ((b * p.pieces + piece) * p.length + t) * m;
  }

  template <int64_t group>
  void group_back(int64_t tile, const State* before, State* carry, int64_t j) {
    memset(sums, 0, count * sizeof *sums);
    for (int64_t i = 0; i < n; i += Lanes::kLanes) walk_back<group>(before, carry, i, j);
    for (int64_t step = 0; step < count; ++step) {
      const int64_t t = position(tile * kTile + step);
      State *grad_q = row_of(p.grad_q, t) + j, *grad_k = row_of(p.grad_k, t) + j, total[2 * kGroup];
      for (int64_t g = 0; g < 2 * kGroup; g += Lanes::kLanes) Lanes::store(Lanes::sums(sums[step] + g), total + g);
      for (int64_t g = 0; g < group && j + g < m; ++g) {
        grad_q[g] += total[g];
        grad_k[g] += total[kGroup + g];
      }
    }
  }

  template <int64_t group>
  void walk_back(const State* before, State* carry, int64_t i, int64_t j) {
    V s[kTile + 1][group], c[group];  // s: before each position of the tile, and after the last
    for (int64_t g = 0; g < group; ++g) {
      s[0][g] = Lanes::load(before + (j + g) * wide + i);
      c[g] = Lanes::load(carry + (j + g) * wide + i);
    }
    for (int64_t step = 0; step < count; ++step) {
      V next[group];
      for (int64_t g = 0; g < group; ++g) next[g] = s[step][g];
      move<group>(step, i, j, next);
      for (int64_t g = 0; g < group; ++g) s[step + 1][g] = next[g];
    }
    for (int64_t step = count - 1; step >= 0; --step) {
      const V given = Lanes::load(grad[step] + i);
      for (int64_t g = 0; g < group; ++g) {
        sums[step][g] += given * s[step + 1][g];
        c[g] += given * Lanes::all(q[step * padded + j + g]);
      }
      // By choice, not by a factor of zero: 0 * NaN would take a NaN past a reset.
      const bool drop = flags[step] & kDrop;
      V from[group];
      for (int64_t g = 0; g < group; ++g) from[g] = drop ? V{} : s[step][g];
      if (!(flags[step] & kMasked)) move_back<group>(step, i, j, from, c);
      if (drop)
        for (V& one : c) one = V{};
    }
    for (int64_t g = 0; g < group; ++g) Lanes::store(c[g], carry + (j + g) * wide + i);
  }

  template <int64_t group>
  void move_back(int64_t step, int64_t i, int64_t j, const V (&s)[group], V (&c)[group]) {
    const V rate = Lanes::load(e[step] + i), pushed = Lanes::load(push[step] + i);
    V dp = Lanes::load(grad_push[step] + i), de = Lanes::load(grad_e[step] + i);
    for (int64_t g = 0; g < group; ++g) {
      V dk;
      c[g] = LonghornCell<V>::backward(s[g], rate, pushed, Lanes::all(k[step * padded + j + g]), c[g], dp, de, dk);
      sums[step][kGroup + g] += dk;
    }
    Lanes::store(dp, grad_push[step] + i);
    Lanes::store(de, grad_e[step] + i);
  }

  void store_gradients(int64_t t, int64_t step) {
    State grad_kk = 0, grad_x[kWidth], grad_dt[kWidth];
#pragma omp simd reduction(+ : grad_kk)
    for (int64_t i = 0; i < wide; ++i) {
      const State rate = e[step][i], grad_rate = grad_e[step][i] + grad_push[step][i] * x[step][i];
      grad_x[i] = grad_push[step][i] * rate;
      grad_dt[i] = grad_rate * slope[step][i];
      grad_kk -= grad_rate * rate * rate;
    }
    // kk is every k's: its gradient is known only now.
    State* grad_k = row_of(p.grad_k, t);
    for (int64_t j = 0; j < m; ++j) grad_k[j] += State(2) * k[step * padded + j] * grad_kk;
    store_row(grad_x, p.grad_x, t);
    store_row(grad_dt, p.grad_dt, t);
  }
};

template <class T>
int run(const Problem& p, int backwards) {
  const int64_t share = up((p.channels + p.pieces - 1) / p.pieces, Vector<typename StateOf<T>::type>::kLanes);
  const int64_t width = share < kWidth ? share : kWidth, blocks = (p.channels + width - 1) / width;
#pragma omp parallel for schedule(static) num_threads(p.threads) if (p.threads > 1)
  for (int64_t item = 0; item < p.batch * p.pieces; ++item) {
    std::vector<typename StateOf<T>::type> scratch;
    const int64_t b = item / p.pieces, piece = item % p.pieces;
    for (int64_t block = blocks * piece / p.pieces; block < blocks * (piece + 1) / p.pieces; ++block) {
      const int64_t d = block * width, n = p.channels - d < width ? p.channels - d : width;
      Block<T> work(p, b, piece, d, n);
      if (backwards) {
        work.backward(scratch);
      } else {
        work.forward(scratch);
      }
    }
  }
  return 0;
}

}  // namespace

extern "C" int hfr_longhorn(int backwards, const Problem* problem) { return run<HFR_STORAGE>(*problem, backwards); }

extern "C" int64_t hfr_problem_size() { return sizeof(Problem); }
