// The short causal depthwise convolution of convolution.h for CPUs.
#include "convolution.h"

#include <string.h>

#include <utility>
#include <vector>

#include "independent.h"
#include "rows.h"

namespace {

using namespace hfr;

constexpr int kMostTaps = 32;
constexpr int kGroup = 4;        // taps that a loop over channels takes; where there are fewer, zeros stand for the others
constexpr int64_t kBlock = 512;  // channels that are taken together: their rows of a few positions stay in the first cache

struct Problem {
  int64_t batch, length, channels, threads;
  int64_t segments;      // of a row, that threads take
  int64_t taps, silu;    // silu: whether the sums go through one
  const uint8_t* flags;  // (batch, length) contiguous, or null
  Rows x;
  Rows state;            // (batch, taps - 1, channels), or null for zeros: the last real inputs before x
  const char* weight;    // (channels, taps) contiguous
  const char* bias;      // (channels), or null
  char* out;             // (batch, length, channels) contiguous, as all below
  char* new_state;       // (batch, taps - 1, channels)
  // Backward.
  Rows grad_out;
  const char* grad_new_state;
  char *grad_x, *grad_state;  // grad_state: null without a state
  char* grad_weight;          // (batch, segments, taps + 1, channels) in the state type, of the bias last
};

template <class T>
struct Weights {
  std::vector<typename StateOf<T>::type> weight, bias;  // (whole groups of taps, channels) and (channels)

  explicit Weights(const Problem& p) : weight((p.taps + kGroup - 1) / kGroup * kGroup * p.channels), bias(p.channels) {
    const T *w = reinterpret_cast<const T*>(p.weight), *b = reinterpret_cast<const T*>(p.bias);
    for (int64_t i = 0; i < p.channels; ++i) {
      for (int64_t j = 0; j < p.taps; ++j) weight[j * p.channels + i] = load(w[i * p.taps + j]);
      bias[i] = b ? load(b[i]) : 0;
    }
  }
};

// One row of the batch, one segment of its positions, one block of channels.
template <class T>
struct Walk {
  using State = typename StateOf<T>::type;
  const Problem& p;
  const Weights<T>& weights;
  const int64_t b, segment, begin, end, first, n;  // channels from `first` on, n of them
  const int k;
  Taps<int64_t, kMostTaps> taps;
  std::vector<State> sum;

  Walk(const Problem& problem, const Weights<T>& its_weights, int64_t item)
      : p(problem),
        weights(its_weights),
        b(item / blocks(problem) / problem.segments),
        segment(item / blocks(problem) % problem.segments),
        begin(problem.length * segment / problem.segments),
        end(problem.length * (segment + 1) / problem.segments),
        first(item % blocks(problem) * kBlock),
        n(problem.channels - first < kBlock ? problem.channels - first : kBlock),
        k(int(problem.taps)),
        sum(n) {
    taps.look_back([this](int64_t position) { return flags(position); }, begin, p.state.data, k);
  }

  static int64_t blocks(const Problem& p) { return (p.channels + kBlock - 1) / kBlock; }

  uint8_t flags(int64_t t) const { return p.flags ? p.flags[b * p.length + t] : 0; }

  const State* weight(int j) const { return weights.weight.data() + j * p.channels + first; }

  T* place(char* tensor, int64_t length, int64_t t) const {
    return reinterpret_cast<T*>(tensor) + (b * length + t) * p.channels + first;
  }

  // Zeros where there is none.
  const T* input(int j) const {
    static const T kZeros[kBlock] = {};
    const int64_t at = j < k ? taps.at[j] : taps.kNowhere;
    if (at >= 0) return row<T>(p.x, b, at) + first;
    return at == taps.kNowhere ? kZeros : row<T>(p.state, b, k - 1 + at) + first;
  }

  void zero(T* to) const { memset(static_cast<void*>(to), 0, n * sizeof(T)); }

  // use(i, the sum for channel i)
  template <class Use>
  void add_up(const Use& use) {
    const State* from = weights.bias.data() + first;
    for (int j = 0; j < k; j += kGroup) {
      const T *x0 = input(j), *x1 = input(j + 1), *x2 = input(j + 2), *x3 = input(j + 3);
      const State *w0 = weight(j), *w1 = weight(j + 1), *w2 = weight(j + 2), *w3 = weight(j + 3);
      const auto total = [=](int64_t i) {
        return from[i] + w0[i] * load(x0[i]) + w1[i] * load(x1[i]) + w2[i] * load(x2[i]) + w3[i] * load(x3[i]);
      };
      if (j + kGroup >= k) {
        HFR_INDEPENDENT
        for (int64_t i = 0; i < n; ++i) use(i, total(i));
      } else {
        State* s = sum.data();
        HFR_INDEPENDENT
        for (int64_t i = 0; i < n; ++i) s[i] = total(i);
        from = s;
      }
    }
  }

  void forward() {
    for (int64_t t = begin; t < end; ++t) {
      T* __restrict__ out = place(p.out, p.length, t);
      if (flags(t) & kMasked) {
        zero(out);
        continue;
      }
      if (flags(t) & kDrop) drop();
      taps.push(t, k);
      if (p.silu) {
        add_up([=](int64_t i, State s) { store(silu(s), out[i]); });
      } else {
        add_up([=](int64_t i, State s) { store(s, out[i]); });
      }
    }
    for (int j = 1; end == p.length && j < k; ++j) {
      memcpy(static_cast<void*>(place(p.new_state, k - 1, j - 1)), input(j), n * sizeof(T));
    }
  }

  void drop() {
    for (int j = 1; j < k; ++j) taps.at[j] = taps.kNowhere;
  }
};

// Walks on past its segment until no input of it is under a tap.
template <class T>
struct Backward : Walk<T> {
  using Walk<T>::p;
  using Walk<T>::b;
  using Walk<T>::begin;
  using Walk<T>::end;
  using Walk<T>::n;
  using Walk<T>::k;
  using Walk<T>::taps;
  using State = typename StateOf<T>::type;

  const int groups;
  std::vector<State> g, memory, grad_weight;  // (n), (whole groups of taps, n), and the same and one more for the bias
  std::vector<State*> grad;                   // of the input under each tap, in `memory`

  Backward(const Problem& problem, const Weights<T>& its_weights, int64_t item)
      : Walk<T>(problem, its_weights, item),
        groups((k + kGroup - 1) / kGroup),
        g(n),
        memory(groups * kGroup * n, State(0)),
        grad_weight((groups * kGroup + 1) * n, State(0)),
        grad(groups * kGroup) {
    for (size_t j = 0; j < grad.size(); ++j) grad[j] = memory.data() + j * n;
  }

  bool is_mine(int64_t at) const { return at < 0 ? begin == 0 && at != taps.kNowhere : at >= begin && at < end; }

  bool any_is_mine() const {
    for (int j = 1; j < k; ++j) {
      if (is_mine(taps.at[j])) return true;
    }
    return false;
  }

  // The input under tap j gets no more.
  void retire(int j) {
    const int64_t at = taps.at[j];
    if (!is_mine(at)) return;
    T* __restrict__ to = at >= 0 ? this->place(p.grad_x, p.length, at) : this->place(p.grad_state, k - 1, k - 1 + at);
    const State* from = grad[j];
    HFR_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) store(from[i], to[i]);
  }

  void retire_all() {
    for (int j = 1; j < k; ++j) retire(j);
    this->drop();
  }

  void visit(int64_t t) {
    if (this->flags(t) & kDrop) retire_all();
    taps.push(t, k);
    for (int j = 0; j + 1 < k; ++j) std::swap(grad[j], grad[j + 1]);
    memset(grad[k - 1], 0, n * sizeof(State));
    const T* grad_out = row<T>(p.grad_out, b, t) + this->first;
    State* slopes = g.data();
    if (p.silu) {
      this->add_up([=](int64_t i, State s) { slopes[i] = load(grad_out[i]) * silu_slope(s); });
    } else {
      HFR_INDEPENDENT
      for (int64_t i = 0; i < n; ++i) slopes[i] = load(grad_out[i]);
    }
    for (int j = 0; j < k; j += kGroup) {
      const State *w0 = this->weight(j), *w1 = this->weight(j + 1), *w2 = this->weight(j + 2), *w3 = this->weight(j + 3);
      State *to0 = grad[j], *to1 = grad[j + 1], *to2 = grad[j + 2], *to3 = grad[j + 3];
      HFR_INDEPENDENT
      for (int64_t i = 0; i < n; ++i) {
        to0[i] += w0[i] * slopes[i], to1[i] += w1[i] * slopes[i];
        to2[i] += w2[i] * slopes[i], to3[i] += w3[i] * slopes[i];
      }
    }
    if (t < end) add_to_weights(slopes);
    retire(0);
  }

  void add_to_weights(const State* slopes) {
    for (int j = 0; j < k; j += kGroup) {
      const T *x0 = this->input(j), *x1 = this->input(j + 1), *x2 = this->input(j + 2), *x3 = this->input(j + 3);
      State *dw0 = grad_weight.data() + j * n, *dw1 = dw0 + n, *dw2 = dw1 + n, *dw3 = dw2 + n;
      HFR_INDEPENDENT
      for (int64_t i = 0; i < n; ++i) {
        dw0[i] += slopes[i] * load(x0[i]), dw1[i] += slopes[i] * load(x1[i]);
        dw2[i] += slopes[i] * load(x2[i]), dw3[i] += slopes[i] * load(x3[i]);
      }
    }
    State* db = grad_weight.data() + groups * kGroup * n;
    HFR_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) db[i] += slopes[i];
  }

  void run() {
    int64_t t = begin;
    for (; t < end || (t < p.length && any_is_mine()); ++t) {
      if (!(this->flags(t) & kMasked)) {
        visit(t);
      } else if (t < end) {
        this->zero(this->place(p.grad_x, p.length, t));
      }
    }
    for (int j = 1; t == p.length && j < k; ++j) {
      if (!is_mine(taps.at[j])) continue;
      const T* from = this->place(const_cast<char*>(p.grad_new_state), k - 1, j - 1);
      for (int64_t i = 0; i < n; ++i) grad[j][i] += load(from[i]);
    }
    retire_all();
    for (int j = 0; j <= k; ++j) {
      State* to = reinterpret_cast<State*>(p.grad_weight) + ((b * p.segments + this->segment) * (k + 1) + j) * p.channels;
      memcpy(to + this->first, grad_weight.data() + (j < k ? j : groups * kGroup) * n, n * sizeof(State));
    }
  }
};

}  // namespace

// HFR_STORAGE as in scan_cpu.cpp. Returns 1 where there are more taps than this file is made for.
extern "C" int hfr_short_convolution(int backward, const Problem* p) {
  if (p->taps > kMostTaps) return 1;
  const Weights<HFR_STORAGE> weights(*p);
  const int64_t items = p->batch * p->segments * Walk<HFR_STORAGE>::blocks(*p);
#pragma omp parallel for schedule(static) num_threads(p->threads) if (p->threads > 1)
  for (int64_t item = 0; item < items; ++item) {
    if (backward) {
      Backward<HFR_STORAGE>(*p, weights, item).run();
    } else {
      Walk<HFR_STORAGE>(*p, weights, item).forward();
    }
  }
  return 0;
}

extern "C" int64_t hfr_problem_size() { return sizeof(Problem); }
