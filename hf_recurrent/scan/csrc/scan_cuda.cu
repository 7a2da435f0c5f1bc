// The loops for GPUs: one thread per channel of a row of the batch, time in sequence, neighbouring threads on neighbouring
// channels, so that every access of a warp is one contiguous piece of memory. The inputs of the next few positions are
// loaded before the first of them is used: the recurrence waits for arithmetic, not for memory.
//
// Compiled by NVRTC for one pair of types: HFR_CELL, a cell of cells.h, and HFR_TYPE, what the tensors hold.
#include "cells.h"

using namespace hfr;

typedef HFR_CELL Cell;
typedef HFR_TYPE T;
typedef Cell::State State;
typedef long long Index;

constexpr int kTile = 8;  // positions whose loads are in flight together

constexpr int kInputs = Cell::inputs;

// The inputs, each with its strides in elements (batch, length, channels); what a cell does not have is null.
#define HFR_INPUTS                                                                                              \
  const T *x0, Index x0_b, Index x0_l, Index x0_d, const T *x1, Index x1_b, Index x1_l, Index x1_d, const T *x2, \
      Index x2_b, Index x2_l, Index x2_d
#define HFR_LOAD_INPUTS(in, b, t, d)                             \
  in[0] = x0[(b) * x0_b + (t) * x0_l + (d) * x0_d];              \
  in[1] = x1[(b) * x1_b + (t) * x1_l + (d) * x1_d];              \
  if constexpr (kInputs > 2) in[2] = x2[(b) * x2_b + (t) * x2_l + (d) * x2_d];

HFR_INLINE void convert(const T (&in)[kInputs], State (&x)[kInputs]) {
#pragma unroll
  for (int i = 0; i < kInputs; ++i) x[i] = load(in[i]);
}

// Arguments are pointers and 64-bit integers only.
extern "C" __global__ void scan_forward(Index batch, Index length, Index channels, Index reverse,
                                        const unsigned char* flags, HFR_INPUTS, T* h, State* state) {
  Index d = (Index)blockIdx.x * blockDim.x + threadIdx.x;
  if (d >= channels) return;
  for (Index b = blockIdx.y; b < batch; b += gridDim.y) {
    State s = state[b * channels + d];
    for (Index start = 0; start < length; start += kTile) {
      T in[kTile][kInputs];
#pragma unroll
      for (int i = 0; i < kTile; ++i) {
        if (start + i >= length) break;
        Index t = reverse ? length - 1 - start - i : start + i;
        HFR_LOAD_INPUTS(in[i], b, t, d)
      }
#pragma unroll
      for (int i = 0; i < kTile; ++i) {
        if (start + i >= length) break;
        Index t = reverse ? length - 1 - start - i : start + i;
        int flag = flags ? flags[b * length + t] : 0;
        if (flag & kDrop) s = State(0);
        if (!(flag & kMasked)) {
          State x[kInputs];
          convert(in[i], x);
          s = Cell::forward(x, s);
        }
        store(s, h[(b * length + t) * channels + d]);
      }
    }
    state[b * channels + d] = s;
  }
}

// `sum` is null, or takes the gradient of x0 summed over time, (batch, channels) in the state type, instead of grad0.
extern "C" __global__ void scan_backward(Index batch, Index length, Index channels, Index reverse,
                                         const unsigned char* flags, HFR_INPUTS, const T* h, const T* grad_h, Index g_b,
                                         Index g_l, Index g_d, const State* initial, State* state, State* sum, T* grad0,
                                         T* grad1, T* grad2) {
  Index d = (Index)blockIdx.x * blockDim.x + threadIdx.x;
  if (d >= channels) return;
  for (Index b = blockIdx.y; b < batch; b += gridDim.y) {
    State carry = state[b * channels + d];
    State total = State(0);
    State first = initial ? initial[b * channels + d] : State(0);
    for (Index start = 0; start < length; start += kTile) {
      T in[kTile][kInputs], grad_in[kTile], h_in[kTile];
#pragma unroll
      for (int i = 0; i < kTile; ++i) {
        if (start + i >= length) break;
        Index step = length - 1 - start - i;
        Index t = reverse ? length - 1 - step : step;
        HFR_LOAD_INPUTS(in[i], b, t, d)
        grad_in[i] = grad_h[b * g_b + t * g_l + d * g_d];
        if (step > 0) h_in[i] = h[(b * length + (reverse ? t + 1 : t - 1)) * channels + d];
      }
#pragma unroll
      for (int i = 0; i < kTile; ++i) {
        if (start + i >= length) break;
        Index step = length - 1 - start - i;
        Index t = reverse ? length - 1 - step : step;
        int flag = flags ? flags[b * length + t] : 0;
        State g = carry + load(grad_in[i]);
        State dx[kInputs];
        for (int k = 0; k < kInputs; ++k) dx[k] = State(0);
        if (flag & kMasked) {
          carry = g;
        } else {
          State x[kInputs];
          convert(in[i], x);
          State previous = first;
          if (step > 0) previous = load(h_in[i]);
          if (flag & kDrop) previous = State(0);
          carry = Cell::backward(x, previous, g, dx);
        }
        if (flag & kDrop) carry = State(0);
        Index offset = (b * length + t) * channels + d;
        if (sum) {
          total = total + dx[0];
        } else {
          store(dx[0], grad0[offset]);
        }
        store(dx[1], grad1[offset]);
        if constexpr (kInputs > 2) store(dx[2], grad2[offset]);
      }
    }
    state[b * channels + d] = carry;
    if (sum) sum[b * channels + d] = total;
  }
}
