// Longhorn's loops for CPUs. Each channel has m states, all driven by the same k and q, so a thread takes a block of
// channels and keeps its m x kWidth states in the L1 cache: nothing of the size batch x length x channels x m is ever
// written to memory. The backward pass recomputes the states from checkpoints about every sqrt(length) positions.
#include <stdint.h>
#include <string.h>

#include <vector>

#include "cells.h"

namespace {

using namespace hfr;

constexpr int kWidth = 64;  // channels of a block: at m = 16 their states take 4 KiB

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

template <class T>
struct Block {
  using State = typename StateOf<T>::type;
  using Cell = LonghornCell<State>;

  const Problem& p;
  const int64_t b, piece, d, n, m;  // the row of the batch, the piece, its first channel here and their number; states
  std::vector<State> k, q;
  State kk;
  State x[kWidth], e[kWidth], push[kWidth], beta[kWidth], beta_slope[kWidth], out[kWidth];

  Block(const Problem& problem, int64_t batch_row, int64_t piece_index, int64_t first, int64_t size)
      : p(problem), b(batch_row), piece(piece_index), d(first), n(size), m(problem.states), k(m), q(m) {}

  uint8_t flags(int64_t t) const { return p.flags ? p.flags[b * p.length + t] : 0; }
  int64_t position(int64_t step) const { return p.reverse ? p.length - 1 - step : step; }

  // States are kept as (m, kWidth), channels innermost; the tensors have (channels, m). Channels past n stay zero.
  void gather(const char* data, State* s) const {
    memset(s, 0, m * kWidth * sizeof(State));
    if (!data) return;
    const State* from = reinterpret_cast<const State*>(data) + (b * p.channels + d) * m;
    for (int64_t j = 0; j < m; ++j)
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) s[j * kWidth + i] = from[i * m + j];
  }

  void scatter(const State* s, char* data) const {
    State* to = reinterpret_cast<State*>(data) + (b * p.channels + d) * m;
    for (int64_t j = 0; j < m; ++j)
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) to[i * m + j] = s[j * kWidth + i];
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
    for (int64_t i = n; i < kWidth; ++i) to[i] = State(0);
  }

  void load_position(int64_t t) {
    const T *from_k = at<const T>(p.k, b, t, 0), *from_q = at<const T>(p.q, b, t, 0);
    kk = State(0);
    for (int64_t j = 0; j < m; ++j) {
      k[j] = load(from_k[j * p.k.stride[2]]);
      q[j] = load(from_q[j * p.q.stride[2]]);
      kk += k[j] * k[j];
    }
    State dt[kWidth];
    load_row(p.x, t, x);
    load_row(p.dt, t, dt);
#pragma omp simd
    for (int i = 0; i < kWidth; ++i) {
      e[i] = Cell::rate(dt[i], kk, beta[i], beta_slope[i]);
      push[i] = e[i] * x[i];
    }
  }

  // from -> to, which may be the same; `readout` also leaves S q in out.
  template <bool readout>
  void advance(uint8_t flag, const State* from, State* to) {
    if (flag & kDrop) {
      memset(to, 0, m * kWidth * sizeof(State));
      from = to;
    }
    if (readout) memset(out, 0, sizeof out);
    for (int64_t j = 0; j < m; ++j) {
      const State kj = k[j], qj = q[j];
      const State* s = from + j * kWidth;
      State* next = to + j * kWidth;
      if (flag & kMasked) {
        if (from != to) memcpy(next, s, kWidth * sizeof(State));
      } else {
#pragma omp simd
        for (int i = 0; i < kWidth; ++i) next[i] = Cell::forward(s[i], e[i], push[i], kj);
      }
      if (readout) {
#pragma omp simd
        for (int i = 0; i < kWidth; ++i) out[i] += next[i] * qj;
      }
    }
  }

  void forward(std::vector<State>& scratch) {
    scratch.resize(m * kWidth);
    State* s = scratch.data();
    gather(p.state, s);
    for (int64_t step = 0; step < p.length; ++step) {
      int64_t t = position(step);
      load_position(t);
      advance<true>(flags(t), s, s);
      if (p.skip) read_gated(t);
      T* o = reinterpret_cast<T*>(p.o) + (b * p.length + t) * p.channels + d;
      for (int64_t i = 0; i < n; ++i) store(out[i], o[i]);
    }
    scatter(s, p.state);
  }

  void read_gated(int64_t t) {
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

  void backward(std::vector<State>& scratch) {
    const int64_t size = m * kWidth;
    int64_t segment = 1;
    while (segment * segment < p.length) ++segment;
    const int64_t segments = (p.length + segment - 1) / segment;
    // The gradient of the state, the checkpoints before each segment, and all states of one segment and before it.
    scratch.resize(size * (1 + segments + segment + 1));
    State *carry = scratch.data(), *checkpoints = carry + size, *s = checkpoints + segments * size;
    gather(p.initial, checkpoints);
    for (int64_t c = 1; c < segments; ++c) {
      State* at_end = checkpoints + c * size;
      memcpy(at_end, at_end - size, size * sizeof(State));
      for (int64_t step = (c - 1) * segment; step < c * segment; ++step) {
        load_position(position(step));
        advance<false>(flags(position(step)), at_end, at_end);
      }
    }
    gather(p.state, carry);
    for (int64_t c = segments - 1; c >= 0; --c) {
      const int64_t begin = c * segment, end = begin + segment < p.length ? begin + segment : p.length;
      memcpy(s, checkpoints + c * size, size * sizeof(State));
      for (int64_t step = begin; step < end; ++step) {
        load_position(position(step));
        State* from = s + (step - begin) * size;
        advance<false>(flags(position(step)), from, from + size);
      }
      for (int64_t step = end - 1; step >= begin; --step) {
        const State* before = s + (step - begin) * size;
        backward_position(position(step), before, before + size, carry);
      }
    }
    scatter(carry, p.state);
  }

  void backward_position(int64_t t, const State* before, const State* after, State* carry) {
    State grad[kWidth], grad_push[kWidth] = {}, grad_e[kWidth] = {};
    const uint8_t flag = flags(t);
    const bool drop = flag & kDrop;  // by choice, not by a factor of zero: 0 * NaN would take a NaN past a reset
    load_position(t);
    load_row(p.grad_o, t, grad);
    const int64_t row = ((b * p.pieces + piece) * p.length + t) * m;
    State* grad_k = reinterpret_cast<State*>(p.grad_k) + row;
    State* grad_q = reinterpret_cast<State*>(p.grad_q) + row;
    for (int64_t j = 0; j < m; ++j) {
      const State kj = k[j], qj = q[j];
      const State *s = before + j * kWidth, *next = after + j * kWidth;
      State* c = carry + j * kWidth;
      State sum_k = 0, sum_q = 0;
      if (flag & kMasked) {
#pragma omp simd reduction(+ : sum_q)
        for (int i = 0; i < kWidth; ++i) {
          sum_q += grad[i] * next[i];
          c[i] = drop ? State(0) : c[i] + grad[i] * qj;
        }
      } else {
#pragma omp simd reduction(+ : sum_k, sum_q)
        for (int i = 0; i < kWidth; ++i) {
          sum_q += grad[i] * next[i];
          State dk;
          State g = Cell::backward(drop ? State(0) : s[i], e[i], push[i], kj, c[i] + grad[i] * qj, grad_push[i], grad_e[i], dk);
          c[i] = drop ? State(0) : g;
          sum_k += dk;
        }
      }
      grad_k[j] += sum_k;
      grad_q[j] += sum_q;
    }
    // kk is every k's: its gradient is known only now.
    State grad_kk = 0, grad_x[kWidth], grad_dt[kWidth];
#pragma omp simd reduction(+ : grad_kk)
    for (int i = 0; i < kWidth; ++i) {
      State grad_eps = grad_e[i] + grad_push[i] * x[i];
      State damping = State(1) / (State(1) + beta[i] * kk);  // eps / beta
      grad_x[i] = grad_push[i] * e[i];
      grad_dt[i] = grad_eps * damping * damping * beta_slope[i];
      grad_kk -= grad_eps * e[i] * e[i];
    }
    for (int64_t j = 0; j < m; ++j) grad_k[j] += State(2) * k[j] * grad_kk;
    const int64_t offset = (b * p.length + t) * p.channels + d;
    T* to_x = reinterpret_cast<T*>(p.grad_x) + offset;
    T* to_dt = reinterpret_cast<T*>(p.grad_dt) + offset;
    for (int64_t i = 0; i < n; ++i) {
      store(grad_x[i], to_x[i]);
      store(grad_dt[i], to_dt[i]);
    }
  }
};

template <class T>
int run(const Problem& p, int backwards) {
  const int64_t blocks = (p.channels + kWidth - 1) / kWidth;
#pragma omp parallel for schedule(static) num_threads(p.threads) if (p.threads > 1)
  for (int64_t item = 0; item < p.batch * p.pieces; ++item) {
    std::vector<typename StateOf<T>::type> scratch;
    const int64_t b = item / p.pieces, piece = item % p.pieces;
    for (int64_t block = blocks * piece / p.pieces; block < blocks * (piece + 1) / p.pieces; ++block) {
      const int64_t d = block * kWidth, n = p.channels - d < kWidth ? p.channels - d : kWidth;
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
