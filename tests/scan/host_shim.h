// Stands in for a GPU: a .cu file compiled as C++, its blocks run one after the other on the host, the threads of a block as
// coroutines that meet at the barriers. A barrier that some threads of a block (or of a warp) never reach aborts. Shared memory
// is filled with NaNs before each block. `reversed` lets the threads between two barriers run in the opposite order: what
// then comes out differently is a race.
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("gpu_shared")))
extern char __start_gpu_shared[] __attribute__((visibility("hidden")));
extern char __stop_gpu_shared[] __attribute__((visibility("hidden")));

namespace shim {

struct Dim { unsigned x = 1, y = 1; };
constexpr int kMost = 1024, kWarp = 32;
constexpr size_t kStack = 1 << 18;

enum State { kRunnable, kAtBlock, kAtWarp, kDone };
struct Thread {
  ucontext_t context;
  State state;
  int parity;
};

static Thread threads[kMost];
static ucontext_t scheduler;
static int count, current;
static double slots[2][kMost];
static bool votes[kMost];
static void (*body)();

static void wait(State state) {
  threads[current].state = state;
  swapcontext(&threads[current].context, &scheduler);
}

static void entry() {
  body();
  threads[current].state = kDone;
}

static void fail(const char* what) {
  fprintf(stderr, "host shim: %s\n", what);
  abort();
}

}  // namespace shim

static shim::Dim blockIdx, blockDim, threadIdx, gridDim;

static void __syncthreads() { shim::wait(shim::kAtBlock); }

static bool __syncthreads_and(bool mine) {
  shim::votes[shim::current] = mine;
  __syncthreads();
  bool all = true;
  for (int i = 0; i < shim::count; ++i) all = all && shim::votes[i];
  __syncthreads();
  return all;
}

static void __threadfence() {}

// Blocks run one after the other.
static int atomicAdd(int* at, int n) { return (*at += n) - n; }

static bool __syncthreads_or(bool mine) { return !__syncthreads_and(!mine); }

template <class T>
static T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  if (mask != 0xffffffffu) shim::fail("a shuffle among less than a warp");
  const int me = shim::current, parity = shim::threads[me].parity ^= 1;
  memcpy(&shim::slots[parity][me], &value, sizeof value);
  shim::wait(shim::kAtWarp);
  memcpy(&value, &shim::slots[parity][me ^ lanes], sizeof value);
  return value;
}

static unsigned __ballot_sync(unsigned mask, int mine) {
  double bits = mine ? 1u << shim::current % shim::kWarp : 0;
  for (int lanes = 1; lanes < shim::kWarp; lanes *= 2) bits += __shfl_xor_sync(mask, bits, lanes);
  return (unsigned)bits;
}

static bool __all_sync(unsigned mask, bool mine) { return __ballot_sync(mask, mine) == 0xffffffffu; }

namespace shim {

static void run_block(bool reversed) {
  static char* stacks = static_cast<char*>(
      mmap(nullptr, kMost * kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  memset(__start_gpu_shared, 0xff, __stop_gpu_shared - __start_gpu_shared);
  for (int i = 0; i < count; ++i) {
    Thread& thread = threads[i];
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stacks + i * kStack;
    thread.context.uc_stack.ss_size = kStack;
    thread.context.uc_link = &scheduler;
    thread.state = kRunnable;
    thread.parity = 0;
    makecontext(&thread.context, entry, 0);
  }
  for (;;) {
    for (int i = 0; i < count; ++i) {
      current = reversed ? count - 1 - i : i;
      threadIdx.x = current;
      if (threads[current].state == kRunnable) swapcontext(&scheduler, &threads[current].context);
    }
    int done = 0, at_block = 0;
    bool released = false;
    for (int warp = 0; warp < count; warp += kWarp) {
      int at_warp = 0;
      for (int i = warp; i < warp + kWarp; ++i) {
        done += threads[i].state == kDone;
        at_block += threads[i].state == kAtBlock;
        at_warp += threads[i].state == kAtWarp;
      }
      if (at_warp != 0 && at_warp != kWarp) fail("a shuffle that a part of a warp did not reach");
      for (int i = warp; at_warp && i < warp + kWarp; ++i) threads[i].state = kRunnable;
      released = released || at_warp;
    }
    if (done == count) return;
    if (released) continue;
    if (done + at_block != count) fail("threads that neither run nor wait");
    if (done) fail("a barrier that a part of the block did not reach");
    for (int i = 0; i < count; ++i) threads[i].state = kRunnable;
  }
}

template <class... Parameters, size_t... I>
void call(void (*kernel)(Parameters...), const long long* values, std::index_sequence<I...>) {
  static void (*the_kernel)(Parameters...);
  static const long long* the_values;
  the_kernel = kernel;
  the_values = values;
  body = [] { the_kernel((Parameters)the_values[I]...); };
}

template <class... Parameters>
void launch(void (*kernel)(Parameters...), long long x, long long y, long long size, bool reversed, const long long* values) {
  gridDim.x = x, gridDim.y = y, blockDim.x = count = size;
  call(kernel, values, std::index_sequence_for<Parameters...>());
  for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) run_block(reversed);
}

}  // namespace shim
