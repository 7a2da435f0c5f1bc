// Tensors as the CPU kernels get them that read the channels of a position side by side.
#pragma once
#include <stdint.h>

namespace hfr {

// Strides count elements, in the order batch, length, channels; the last is 1.
struct Rows {
  const char* data;
  int64_t stride[3];
};

template <class T>
const T* row(const Rows& x, int64_t b, int64_t t) {
  return reinterpret_cast<const T*>(x.data) + b * x.stride[0] + t * x.stride[1];
}

}  // namespace hfr
