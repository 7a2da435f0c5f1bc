// Stands in for a GPU: scan_cuda.cu compiled as C++, its blocks and threads run one after the other on the host.
#pragma once
#include <utility>

struct Dim { long long x = 1, y = 1, z = 1; };
static Dim blockIdx, blockDim, threadIdx, gridDim;
#define __global__

template <class... Parameters, std::size_t... I>
void call(void (*kernel)(Parameters...), const long long* values, std::index_sequence<I...>) {
  kernel((Parameters)values[I]...);
}

template <class... Parameters>
void launch(void (*kernel)(Parameters...), const long long* values) {
  for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
      for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x)
        call(kernel, values, std::index_sequence_for<Parameters...>());
}
