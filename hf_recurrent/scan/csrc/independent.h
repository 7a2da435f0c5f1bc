// For the loops of the CPU kernels: the channels of a position are independent, whatever the compiler can tell of their
// pointers. Not "omp simd", under which GCC gives arrays of complex numbers a copy for each lane and then leaves the loop as
// it is.
#pragma once

#ifdef __clang__
#define HFR_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define HFR_INDEPENDENT _Pragma("GCC ivdep")
#endif
