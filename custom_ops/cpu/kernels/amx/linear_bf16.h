#pragma once
// bf16 on tiles: products of 32 inputs (tiles.h says how one is summed) are added to C in the order of K.
#include "amx/linear_block.h"

namespace fdsd {
namespace FDSD_ISA {
namespace FDSD_TILES {

template <bool kBoth>
FDSD_INLINE void MultiplyBf16Step(const uint8_t* a, const uint8_t* b) {
  LoadTile<4>(a, kStepRowBytes);
  LoadTile<6>(b, kPanelStepBytes);
  DotBf16<0, 4, 6>();
  LoadTile<7>(b + kHalfColumnsBytes, kPanelStepBytes);
  DotBf16<1, 4, 7>();
  if constexpr (kBoth) {
    LoadTile<5>(a + kTileRows * kStepRowBytes, kStepRowBytes);
    DotBf16<2, 5, 6>();
    DotBf16<3, 5, 7>();
  }
}

struct Bf16 {
  static constexpr int kChunkSteps = kChunkBytes / kBf16StepPanelBytes;

  static int64_t NumSteps(const Slice& slice) { return StepsOf(slice.num_units); }

  template <bool kBoth>
  static void Multiply(const PackedRows& x, const Rows& rows, const Slice& slice, int64_t begin, int64_t end,
                       float* sums, Ahead* ahead) {
    const int64_t row_step = int64_t{rows.count} * kStepRowBytes;
    const uint8_t* a = rows.pack + (StepsBefore(x.slices, slice.index) + begin) * row_step;
    const uint8_t* b = slice.weights + begin * kBf16StepPanelBytes;
    if (begin == 0) {
      ZeroSums<kBoth>();
    } else {
      LoadSums<kBoth>(sums);
    }
    const int64_t full_end = std::min<int64_t>(end, slice.num_units / kStepUnits);
    for (int64_t step = begin; step < full_end; ++step, a += row_step, b += kBf16StepPanelBytes) {
      ahead->Step();
      MultiplyBf16Step<kBoth>(a, b);
    }
    if (full_end < end) {  // the slice's last inputs: what follows them in the panel is not theirs
      alignas(64) uint8_t rest[kBf16StepPanelBytes] = {};
      std::memcpy(rest, b, static_cast<size_t>(slice.num_units % kStepUnits) * kPanelStepBytes);
      MultiplyBf16Step<kBoth>(a, rest);
    }
    StoreTiles<kBoth>(sums);
  }
};

}  // namespace FDSD_TILES
}  // namespace FDSD_ISA
}  // namespace fdsd
