// The scans on CPUs of the linear recurrence, minGRU and minLSTM.
#include "scan_cpu.h"

namespace {

enum CellId { kLinear, kMinGRUVanilla, kMinGRUPositive, kMinLSTMVanilla, kMinLSTMPositive };

template <class T>
struct Cells {
  using State = typename StateOf<T>::type;

  static int run(int cell, const Problem& p, int backwards) {
    switch (cell) {
      case kLinear: return ::run<LinearCell<State>, T>(p, backwards);
      case kMinGRUVanilla: return ::run<MinGRUCell<State, false>, T>(p, backwards);
      case kMinGRUPositive: return ::run<MinGRUCell<State, true>, T>(p, backwards);
      case kMinLSTMVanilla: return ::run<MinLSTMCell<State, false>, T>(p, backwards);
      case kMinLSTMPositive: return ::run<MinLSTMCell<State, true>, T>(p, backwards);
    }
    return 1;
  }
};

template <class T>
struct Cells<Complex<T>> {
  static int run(int cell, const Problem& p, int backwards) {
    return cell == kLinear ? ::run<LinearCell<Complex<T>>, Complex<T>>(p, backwards) : 1;
  }
};

}  // namespace

// HFR_STORAGE is the type of the tensors' elements, given to the compiler. Returns 0, or 1 for a cell without a kernel for it.
extern "C" int hfr_scan(int cell, int backwards, const Problem* problem) {
  return Cells<HFR_STORAGE>::run(cell, *problem, backwards);
}
