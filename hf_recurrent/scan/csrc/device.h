// What the kernels for GPUs share: how time is divided, and how what a piece of it makes of a state is put together.
//
// Time is walked in "flow": positions in the order in which the state (forward) or its gradient (backward) passes them.
//
// Where the blocks are too few to fill the GPU, time is also split into segments of whole tiles, by reduce-then-scan: one
// kernel finds what each segment makes of the state that enters it, and the blocks of the next put together what entered
// theirs. The inputs are then read twice: (2 + 3) / 3 of the bytes forward, (2 + 5) / 5 backward. One pass with decoupled
// look-back would read them once, but it adds up in the order in which blocks happen to finish, and its blocks wait for each
// other; so bytes are saved by splitting only where it pays. A block has about 32 KiB in flight, and memory of 4 TB/s that
// answers after 0.8 us needs 3.2 MB in flight, 100 blocks: on 132 multiprocessors. Fewer blocks reach their share of that;
// 5/3 of the bytes at full speed is the better bargain below 60 blocks. So: where there is less than half a block for each
// multiprocessor (hf_recurrent.scan.cuda).
#pragma once
#include "cells.h"

namespace hfr {

typedef long long Index;  // of elements: tensors may have more than 2^31

#define HFR_DEVICE __device__ __forceinline__

// A (batch, length, channels) tensor: strides in elements.
template <class T>
struct View {
  const T* data;
  Index b, l, d;
};

// N elements that are loaded and stored by one instruction; a single one is aligned as PyTorch aligns it.
template <class T, int N>
struct alignas(N * sizeof(T)) Vector {
  T v[N];
};

// state -> product * state + sum. `cut`: the state was dropped on the way, whatever it was. A product that has overflowed
// says nothing of a state of zero.
template <class State>
HFR_DEVICE State passed_on(State state, State product, State sum, bool cut) {
  return cut || is_zero(state) ? sum : product * state + sum;
}

// Where a block stands: one row of the batch and one segment of time.
struct Work {
  Index b, segment, begin, end;

  HFR_DEVICE Work(Index item, Index length, Index segments, Index segment_length)
      : b(item / segments), segment(item % segments), begin(segment * segment_length), end(begin + segment_length) {
    if (end > length) end = length;
  }
};

}  // namespace hfr
