// Stands in for a GPU: a .cu file compiled as C++, the threads of a block as coroutines on the host that meet at the barriers.
// A barrier that some threads of a block (or of a warp) never reach aborts, and so do blocks that all wait for each other.
// Shared memory is filled with NaNs before each block. `reversed` lets the threads between two barriers run in the opposite
// order: what then comes out differently is a race. Blocks run one after the other or, with a `seed`, `resident` of them side
// by side, started in any order and changed at any barrier, fence or look at what another block has written.
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("gpu_shared")))
extern char __start_gpu_shared[] __attribute__((visibility("hidden")));
extern char __stop_gpu_shared[] __attribute__((visibility("hidden")));
__shared__ __attribute__((used)) char some_shared;  // there is such a section where kernels have none

namespace shim {

struct Dim { unsigned x = 1, y = 1; };
constexpr int kMost = 1024, kWarp = 32;
constexpr size_t kStack = 1 << 18;

enum State { kRunnable, kAtBlock, kAtWarp, kAsleep, kDone };
struct Thread {
  ucontext_t context;
  State state;
  int parity;
};
struct Block {
  Dim index;
  Thread threads[kMost];
  char* stacks;
  std::vector<char> shared;  // while another one runs
  double slots[2][kMost];
  bool votes[kMost];
};

static Block* block;  // that runs
static ucontext_t scheduler;
static int count, current;
static unsigned seed;
static std::mt19937 chance;
static void (*body)();

static void wait(State state) {
  block->threads[current].state = state;
  swapcontext(&block->threads[current].context, &scheduler);
}

static void entry() {
  body();
  block->threads[current].state = kDone;
}

static void fail(const char* what) {
  fprintf(stderr, "host shim: %s\n", what);
  abort();
}

}  // namespace shim

static shim::Dim blockIdx, blockDim, threadIdx, gridDim;

static void __syncthreads() { shim::wait(shim::kAtBlock); }

static bool __syncthreads_and(bool mine) {
  shim::block->votes[shim::current] = mine;
  __syncthreads();
  bool all = true;
  for (int i = 0; i < shim::count; ++i) all = all && shim::block->votes[i];
  __syncthreads();
  return all;
}

// Where others run in between, if any do.
static void __threadfence() {
  if (shim::seed) shim::wait(shim::kAsleep);
}

static void __nanosleep(unsigned) { shim::wait(shim::kAsleep); }

// Nothing else runs meanwhile.
static int atomicAdd(int* at, int n) { return (*at += n) - n; }

static bool __syncthreads_or(bool mine) { return !__syncthreads_and(!mine); }

template <class T>
static T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  if (mask != 0xffffffffu) shim::fail("a shuffle among less than a warp");
  const int me = shim::current, parity = shim::block->threads[me].parity ^= 1;
  memcpy(&shim::block->slots[parity][me], &value, sizeof value);
  shim::wait(shim::kAtWarp);
  memcpy(&value, &shim::block->slots[parity][me ^ lanes], sizeof value);
  return value;
}

static unsigned __ballot_sync(unsigned mask, int mine) {
  double bits = mine ? 1u << shim::current % shim::kWarp : 0;
  for (int lanes = 1; lanes < shim::kWarp; lanes *= 2) bits += __shfl_xor_sync(mask, bits, lanes);
  return (unsigned)bits;
}

static bool __all_sync(unsigned mask, bool mine) { return __ballot_sync(mask, mine) == 0xffffffffu; }

namespace shim {

static void start(Block& b, Dim index) {
  b.index = index;
  b.shared.assign(__stop_gpu_shared - __start_gpu_shared, (char)0xff);
  if (!b.stacks) {
    b.stacks = static_cast<char*>(
        mmap(nullptr, kMost * kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  }
  for (int i = 0; i < count; ++i) {
    Thread& thread = b.threads[i];
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = b.stacks + i * kStack;
    thread.context.uc_stack.ss_size = kStack;
    thread.context.uc_link = &scheduler;
    thread.state = kRunnable;
    thread.parity = 0;
    makecontext(&thread.context, entry, 0);
  }
}

// Lets each thread of `block` run until it waits. Returns kDone, kAsleep where all that do not wait for those sleep, or
// kRunnable.
static State run_threads(bool reversed) {
  Thread* const threads = block->threads;
  bool awake = false;
  const int first = seed ? chance() % (count / kWarp) * kWarp : 0;
  for (int i = 0; i < count; ++i) {
    current = (first + (reversed ? count - 1 - i : i)) % count;
    threadIdx.x = current;
    if (threads[current].state == kAsleep) threads[current].state = kRunnable;
    if (threads[current].state != kRunnable) continue;
    swapcontext(&scheduler, &threads[current].context);
    awake = awake || threads[current].state != kAsleep;
  }
  int done = 0, at_block = 0, to_run = 0;
  for (int warp = 0; warp < count; warp += kWarp) {
    int at_warp = 0, to_run_here = 0;
    for (int i = warp; i < warp + kWarp; ++i) {
      done += threads[i].state == kDone;
      at_block += threads[i].state == kAtBlock;
      at_warp += threads[i].state == kAtWarp;
      to_run_here += threads[i].state == kRunnable || threads[i].state == kAsleep;
    }
    if (at_warp != 0 && at_warp + to_run_here != kWarp) fail("a shuffle that a part of a warp did not reach");
    for (int i = warp; at_warp == kWarp && i < warp + kWarp; ++i) threads[i].state = kRunnable, ++to_run;
    to_run += to_run_here;
  }
  if (done == count) return kDone;
  if (to_run == 0) {
    if (done + at_block != count) fail("threads that neither run nor wait");
    if (done) fail("a barrier that a part of the block did not reach");
    for (int i = 0; i < count; ++i) threads[i].state = kRunnable;
  }
  return awake ? kRunnable : kAsleep;
}

// Runs these blocks side by side, each of them for a while.
static void run_blocks(std::vector<Dim> indices, size_t resident, bool reversed) {
  static std::vector<Block*> places;
  while (places.size() < resident) places.push_back(new Block());
  if (seed) std::shuffle(indices.begin(), indices.end(), chance);
  std::vector<Block*> live, free(places.begin(), places.begin() + resident);
  size_t started = 0, asleep = 0;
  while (started < indices.size() || !live.empty()) {
    for (; started < indices.size() && !free.empty(); free.pop_back()) {
      start(*free.back(), indices[started++]);
      live.push_back(free.back());
    }
    const size_t turn = chance() % live.size();
    block = live[turn];
    blockIdx.x = block->index.x, blockIdx.y = block->index.y;
    memcpy(__start_gpu_shared, block->shared.data(), block->shared.size());
    State state;
    int rounds = resident > 1 ? chance() % 8 : 1 << 30;
    bool awake = false;
    do {
      state = run_threads(reversed);
      awake = awake || state != kAsleep;
    } while (state == kRunnable && rounds-- > 0);
    memcpy(block->shared.data(), __start_gpu_shared, block->shared.size());
    asleep = awake ? 0 : asleep + 1;
    if (asleep > 1000 * resident) fail("blocks that wait for each other, or for one that never ran");
    if (state == kDone) {
      free.push_back(block);
      live.erase(live.begin() + turn);
    }
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
void launch(void (*kernel)(Parameters...), long long x, long long y, long long size, bool reversed, long long resident,
            long long random, const long long* values) {
  gridDim.x = x, gridDim.y = y, blockDim.x = count = size;
  seed = random, chance.seed(seed);
  call(kernel, values, std::index_sequence_for<Parameters...>());
  std::vector<Dim> indices;
  for (unsigned j = 0; j < y; ++j)
    for (unsigned i = 0; i < x; ++i) indices.push_back({i, j});
  run_blocks(indices, resident, reversed);
}

}  // namespace shim
