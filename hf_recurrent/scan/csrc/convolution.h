// The short causal depthwise convolution over the real inputs x_n of a document, for host and device compilers alike:
//
//   s_n = bias + sum_j w_j x_{n - k + 1 + j},   y_n = s_n, or with a SiLU s_n sigmoid(s_n)
//
// Backward, with g_n = dy_n or with a SiLU dy_n (d silu / d s)(s_n), where s_n is computed again:
//
//   dw_j = sum_n g_n x_{n - k + 1 + j},   dbias = sum_n g_n,   dx_n = sum_j w_j g_{n + k - 1 - j}
//
// in which the last sum ends with the document; the inputs that are left at the end of a row are its new state, which adds its
// gradient to theirs.
#pragma once
#include "recurrence.h"

namespace hfr {

// Where the taps of a position lie, the latest last: in the row; at -1, -2, ... in the state that came before it, from its
// latest input back; or nowhere.
template <class Int, int most>
struct Taps {
  static constexpr Int kNowhere = -(Int(1) << 30);
  Int at[most];

  // Taps 1 to count - 1 as they are before position t. `flags(p)` is that of a position, see `Flags`.
  template <class FlagsOf>
  HFR_INLINE void look_back(const FlagsOf& flags, Int t, bool has_state, int count) {
    Int before = t - 1, in_state = -1;
    bool ended = false;
#ifdef __CUDACC_RTC__
#pragma unroll
#endif
    for (int j = count - 1; j > 0; --j) {
      while (!ended && before >= 0 && flags(before) & kMasked) --before;
      if (ended || (before < 0 && !has_state)) {
        at[j] = kNowhere;
      } else if (before < 0) {
        at[j] = in_state--;
      } else {
        at[j] = before;
        ended = flags(before--) & kDrop;
      }
    }
  }

  // The input at t becomes the last tap; what was tap 1 becomes tap 0.
  HFR_INLINE void push(Int t, int count) {
#ifdef __CUDACC_RTC__
#pragma unroll
#endif
    for (int j = 0; j + 1 < count; ++j) at[j] = at[j + 1];
    at[count - 1] = t;
  }
};

}  // namespace hfr
