// One cell's scan on CPUs: HFR_CELL, a cell of cells.h, which may name HFR_STORAGE's Value. For cells of many variants, of
// which a model has one.
#include "scan_cpu.h"

// As hfr_scan of scan_cpu.cpp, for this cell alone.
extern "C" int hfr_cell_scan(int backwards, const Problem* problem) {
  using State = Value<HFR_STORAGE>;
  return run<HFR_CELL, HFR_STORAGE>(*problem, backwards);
}
