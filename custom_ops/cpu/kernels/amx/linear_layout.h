#pragma once
// Rows of x packed for tiles, up to 32 at a time: two tiles of A. A *step* is what a row of A holds, 64 bytes.
//   bf16   [steps][rows][64]: a slice begins a step anew, the rest of its last step is zero
//   int    [groups][2][rows][64], float scale [groups][rows], int32 start [groups][rows]
//   groups [units][rows][128], float scale [units][rows], and for formats with minima float sum [units][groups][rows]
// start = -zero point of the weights * sum of the group's int8 values; sum = that of such values.
// Tiles of A are loaded with as many rows as the largest pack has. So a smaller pack is read some bytes past a step's
// end; the rows of C from these bytes are not used.
#include "linear_panel.h"

namespace fdsd {
namespace FDSD_ISA {
namespace FDSD_TILES {

constexpr int kPackRows = 32;
constexpr int kStepRowBytes = 64;
constexpr int kStepUnits = kStepRowBytes / kStepBytes;  // units of bf16 in a step
constexpr int kGroupRowSteps = kQuantGroup / kStepRowBytes;

FDSD_INLINE int64_t StepsOf(int32_t bf16_units) { return DivideUp(bf16_units, kStepUnits); }

// Steps of bf16 before a slice; slice = count: all.
FDSD_INLINE int64_t StepsBefore(const Slices& slices, int32_t slice) {
  int64_t steps = 0;
  for (int32_t s = 0; s < slice; ++s) steps += StepsOf(slices.units[s + 1] - slices.units[s]);
  return steps;
}

// The parts of an int pack of `num_rows` rows.
struct IntPack {
  uint8_t* integers;
  float* scales;
  int32_t* starts;

  FDSD_INLINE IntPack(uint8_t* pack, const Slices& slices, int num_rows)
      : integers(pack),
        scales(reinterpret_cast<float*>(pack + int64_t{slices.num_units()} * num_rows * kQuantGroup)),
        starts(reinterpret_cast<int32_t*>(scales) + int64_t{slices.num_units()} * num_rows) {}
};

// The parts of a pack for a format with groups.
struct GroupPack {
  uint8_t* integers;
  float* scales;
  float* sums;

  FDSD_INLINE GroupPack(uint8_t* pack, const Slices& slices, int num_rows)
      : integers(pack),
        scales(reinterpret_cast<float*>(pack + int64_t{slices.num_units()} * num_rows * kQuantGroup)),
        sums(scales + int64_t{slices.num_units()} * num_rows) {}
};

int64_t RowBytes(const Slices& slices, LinearFormat format);
void PackRows(const XRows& rows, const Slices& slices, int num_rows, int32_t unit_begin, int32_t unit_end,
              uint8_t* pack);

}  // namespace FDSD_TILES
}  // namespace FDSD_ISA
}  // namespace fdsd
