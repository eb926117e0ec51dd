#pragma once
// The float sums of a tile of the int formats.
#include "linear_tile.h"

namespace fdsd {
namespace FDSD_ISA {

// The float sums of a slice of a tile: in registers where they fit together with the dot products, else in memory, in
// the level where they will wait.
template <int kRows, int kVectors, bool kInRegisters>
class TileSums {
 public:
  TileSums(float*, int32_t) {
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) sum_[r][v] = Set1(0.0f);
  }
  FDSD_INLINE void Add(int r, int v, F32x16 dots, F32x16 scale) { sum_[r][v] = Fma(dots, scale, sum_[r][v]); }
  FDSD_INLINE void NextGroup() {}
  FDSD_INLINE void End(float* levels, int32_t slice) const { StoreSlice<kRows, kVectors>(sum_, slice, levels); }

 private:
  F32x16 sum_[kRows][kVectors];
};

template <int kRows, int kVectors>
class TileSums<kRows, kVectors, false> {
 public:
  TileSums(float* levels, int32_t slice) : sums_(levels + SumLevel(slice) * kTileSums) {
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) Store(Set1(0.0f), sums_ + r * kPanelColumns + v * kLanes);
  }
  FDSD_INLINE void Add(int r, int v, F32x16 dots, F32x16 scale) {
    float* sum = sums_ + r * kPanelColumns + v * kLanes;
    Store(Fma(dots, scale, Load(sum)), sum);
  }
  // Else gcc keeps a second copy of the sums on the stack.
  FDSD_INLINE void NextGroup() { asm volatile("" ::: "memory"); }
  FDSD_INLINE void End(const float* levels, int32_t slice) const {
    const int level = SumLevel(slice);
    if (level > 0) AddLowerLevels(levels, level);
  }

 private:
  // Out of line: within the loops it would take registers from them.
  __attribute__((noinline)) void AddLowerLevels(const float* levels, int level) const {
    for (int r = 0; r < kRows; ++r) {
      for (int i = r * kPanelColumns; i < r * kPanelColumns + kVectors * kLanes; i += kLanes) {
        const F32x16 sum = Load(sums_ + i);
        Store(level == 1 ? AddLevels<1>(levels + i, sum) : AddLevels<2>(levels + i, sum), sums_ + i);
      }
    }
  }

  float* sums_;
};

}  // namespace FDSD_ISA
}  // namespace fdsd
