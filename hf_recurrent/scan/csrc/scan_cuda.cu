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
constexpr int kMasked = 1, kDrop = 2;  // as in scan_cpu.cpp

// Arguments are pointers and 64-bit integers only. Strides count elements: batch, length, channels.
extern "C" __global__ void scan_forward(
    Index batch, Index length, Index channels, Index reverse, const unsigned char* flags,
    const T* x0, Index x0_b, Index x0_l, Index x0_d, const T* x1, Index x1_b, Index x1_l, Index x1_d,
    T* h, State* state) {
  Index d = (Index)blockIdx.x * blockDim.x + threadIdx.x;
  if (d >= channels) return;
  for (Index b = blockIdx.y; b < batch; b += gridDim.y) {
    State s = state[b * channels + d];
    for (Index start = 0; start < length; start += kTile) {
      T in[kTile][2];
#pragma unroll
      for (int i = 0; i < kTile; ++i) {
        if (start + i >= length) break;
        Index t = reverse ? length - 1 - start - i : start + i;
        in[i][0] = x0[b * x0_b + t * x0_l + d * x0_d];
        in[i][1] = x1[b * x1_b + t * x1_l + d * x1_d];
      }
#pragma unroll
      for (int i = 0; i < kTile; ++i) {
        if (start + i >= length) break;
        Index t = reverse ? length - 1 - start - i : start + i;
        int flag = flags ? flags[b * length + t] : 0;
        if (flag & kDrop) s = State(0);
        if (!(flag & kMasked)) {
          State x[2] = {load(in[i][0]), load(in[i][1])};
          s = Cell::forward(x, s);
        }
        store(s, h[(b * length + t) * channels + d]);
      }
    }
    state[b * channels + d] = s;
  }
}

// `sum` is null, or takes the gradient of x0 summed over time, (batch, channels) in the state type, instead of grad0.
extern "C" __global__ void scan_backward(
    Index batch, Index length, Index channels, Index reverse, const unsigned char* flags,
    const T* x0, Index x0_b, Index x0_l, Index x0_d, const T* x1, Index x1_b, Index x1_l, Index x1_d,
    const T* h, const T* grad_h, Index g_b, Index g_l, Index g_d, const State* initial, State* state,
    T* grad0, T* grad1, State* sum) {
  Index d = (Index)blockIdx.x * blockDim.x + threadIdx.x;
  if (d >= channels) return;
  for (Index b = blockIdx.y; b < batch; b += gridDim.y) {
    State carry = state[b * channels + d];
    State total = State(0);
    State first = initial ? initial[b * channels + d] : State(0);
    for (Index start = 0; start < length; start += kTile) {
      T in[kTile][4];
#pragma unroll
      for (int i = 0; i < kTile; ++i) {
        if (start + i >= length) break;
        Index step = length - 1 - start - i;
        Index t = reverse ? length - 1 - step : step;
        in[i][0] = x0[b * x0_b + t * x0_l + d * x0_d];
        in[i][1] = x1[b * x1_b + t * x1_l + d * x1_d];
        in[i][2] = grad_h[b * g_b + t * g_l + d * g_d];
        if (step > 0) in[i][3] = h[(b * length + (reverse ? t + 1 : t - 1)) * channels + d];
      }
#pragma unroll
      for (int i = 0; i < kTile; ++i) {
        if (start + i >= length) break;
        Index step = length - 1 - start - i;
        Index t = reverse ? length - 1 - step : step;
        int flag = flags ? flags[b * length + t] : 0;
        State g = carry + load(in[i][2]);
        State dx[2] = {State(0), State(0)};
        if (flag & kMasked) {
          carry = g;
        } else {
          State x[2] = {load(in[i][0]), load(in[i][1])};
          State previous = first;
          if (step > 0) previous = load(in[i][3]);
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
      }
    }
    state[b * channels + d] = carry;
    if (sum) sum[b * channels + d] = total;
  }
}
