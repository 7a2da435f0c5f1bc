// Memory that the CPU kernels ask for before they need it.
#pragma once
#include <stdint.h>

namespace hfr {

constexpr int64_t kLine = 64;  // bytes of a cache line

// Asks for the lines of n elements, to be read or (write) overwritten soon.
template <bool write, class T>
void request(const T* from, int64_t n) {
  const char* line = reinterpret_cast<const char*>(from);
  for (int64_t i = 0; i < n * (int64_t)sizeof(T); i += kLine) __builtin_prefetch(line + i, write);
}

}  // namespace hfr
