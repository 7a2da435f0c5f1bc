// The short causal depthwise convolution for CPUs, over the real inputs of each document and those before the call, forward
// only: where gradients are wanted, PyTorch computes it.
#include <string.h>

#include <vector>

#include "independent.h"
#include "recurrence.h"
#include "rows.h"

namespace {

using namespace hfr;

struct Problem {
  int64_t batch, length, channels, threads;
  int64_t taps, silu;    // silu: whether it is applied to what is written
  const uint8_t* flags;  // (batch, length) contiguous, or null
  Rows x;
  Rows state;            // (batch, taps - 1, channels), or null for zeros: the last real inputs before x
  const char* weight;    // (channels, taps) contiguous
  const char* bias;      // (channels), or null
  char* out;             // (batch, length, channels) contiguous
  char* new_state;       // (batch, taps - 1, channels) contiguous
};

constexpr int64_t kMinSegment = 64;  // positions that a thread takes at least

// The last taps real inputs of a document, the latest last; null where the document is not that long.
template <class T>
struct Window {
  const Problem& p;
  const int64_t b;
  std::vector<const T*> rows;

  // As it is before position t.
  Window(const Problem& problem, int64_t batch_row, int64_t t) : p(problem), b(batch_row), rows(p.taps, nullptr) {
    int64_t missing = p.taps - 1;
    for (int64_t before = t - 1; missing && before >= 0; --before) {
      if (flags(before) & kMasked) continue;
      rows[missing--] = row<T>(p.x, b, before);
      if (flags(before) & kDrop) return;
    }
    for (int64_t i = p.taps - 2; missing && p.state.data; --i) rows[missing--] = row<T>(p.state, b, i);
  }

  uint8_t flags(int64_t t) const { return p.flags ? p.flags[b * p.length + t] : 0; }

  void push(int64_t t) {
    for (int64_t j = 0; j + 1 < p.taps; ++j) rows[j] = flags(t) & kDrop ? nullptr : rows[j + 1];
    rows[p.taps - 1] = row<T>(p.x, b, t);
  }
};

// weight: (taps, channels) in the state type
template <class T, class State>
void convolve(const Window<T>& window, const State* weight, const State* bias, State* __restrict__ sum, T* __restrict__ out) {
  const int64_t n = window.p.channels;
  for (int64_t i = 0; i < n; ++i) sum[i] = bias[i];
  for (int64_t j = 0; j < window.p.taps; ++j) {
    const T* x = window.rows[j];
    const State* w = weight + j * n;
    if (!x) continue;
    HFR_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) sum[i] += w[i] * load(x[i]);
  }
  if (!window.p.silu) {
    HFR_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) store(sum[i], out[i]);
    return;
  }
  HFR_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    State s, complement;
    logistic(sum[i], s, complement);
    store(sum[i] * s, out[i]);
  }
}

template <class T>
void convolve_rows(const Problem& p) {
  using State = typename StateOf<T>::type;
  const int64_t n = p.channels, k = p.taps;
  std::vector<State> weight(k * n), bias(n, State(0));
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < k; ++j) weight[j * n + i] = load(reinterpret_cast<const T*>(p.weight)[i * k + j]);
    if (p.bias) bias[i] = load(reinterpret_cast<const T*>(p.bias)[i]);
  }
  int64_t segments = p.length / kMinSegment;
  if (segments > p.threads) segments = p.threads;
  if (segments < 1) segments = 1;
#pragma omp parallel for schedule(static) num_threads(p.threads) if (p.threads > 1)
  for (int64_t work = 0; work < p.batch * segments; ++work) {
    const int64_t b = work / segments, segment = work % segments;
    std::vector<State> sum(n);
    T* out = reinterpret_cast<T*>(p.out) + b * p.length * n;
    Window<T> window(p, b, p.length * segment / segments);
    for (int64_t t = p.length * segment / segments; t < p.length * (segment + 1) / segments; ++t) {
      if (window.flags(t) & kMasked) {
        memset(static_cast<void*>(out + t * n), 0, n * sizeof(T));
        continue;
      }
      window.push(t);
      convolve(window, weight.data(), bias.data(), sum.data(), out + t * n);
    }
    if (segment + 1 < segments) continue;
    Window<T> last(p, b, p.length);
    for (int64_t j = 1; j < k; ++j) {
      T* to = reinterpret_cast<T*>(p.new_state) + (b * (k - 1) + j - 1) * n;
      if (last.rows[j]) {
        memcpy(static_cast<void*>(to), last.rows[j], n * sizeof(T));
      } else {
        memset(static_cast<void*>(to), 0, n * sizeof(T));
      }
    }
  }
}

}  // namespace

// HFR_STORAGE as in scan_cpu.cpp.
extern "C" int hfr_short_convolution(const Problem* p) {
  convolve_rows<HFR_STORAGE>(*p);
  return 0;
}

extern "C" int64_t hfr_problem_size() { return sizeof(Problem); }
