// Inner loops of integers with a scale per group of 16 to 128 inputs. The integer dot product within a group is exact.
// Then sum += float(dot) * (weight scale * x scale), and with minima sum += minimum * (x scale * sum of x), in order of
// the groups.
#include "linear_grouped.h"

#include "linear_codes.h"
#include "linear_sums.h"
#include "linear_tile.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

constexpr int kMaxGroups = kQuantGroup / 16;

// Scales and minima of one unit as floats, [groups][32].
struct UnitScales {
  alignas(64) float scales[kMaxGroups][kPanelColumns];
  alignas(64) float minima[kMaxGroups][kPanelColumns];
};

// Half [32], then int8 [groups][32]: their products, times `sign`.
FDSD_INLINE const uint8_t* ReadSteps(const uint8_t* from, int num_groups, float sign, float (*out)[kPanelColumns]) {
  const uint8_t* factors = from + kPanelColumns * 2;
  for (int v = 0; v < kPanelVectors; ++v) {
    const F32x16 step = Mul(LoadHalves(from + v * kLanes * 2), Set1(sign));
    for (int g = 0; g < num_groups; ++g) {
      Store(Mul(step, LoadInt8(factors + g * kPanelColumns + v * kLanes)), out[g] + v * kLanes);
    }
  }
  return factors + num_groups * kPanelColumns;
}

FDSD_INLINE const uint8_t* ReadHalves(const uint8_t* from, int num_groups, float (*out)[kPanelColumns]) {
  for (int i = 0; i < num_groups * kPanelColumns; i += kLanes) Store(LoadHalves(from + i * 2), out[0] + i);
  return from + num_groups * kPanelColumns * 2;
}

template <LinearFormat kFormat>
FDSD_INLINE void ReadScales(const uint8_t* from, UnitScales* to) {
  constexpr GroupFormat kGroups = GroupFormatOf(kFormat);
  constexpr int kNum = kGroups.num_groups();
  if constexpr (kGroups.scale == GroupScale::kSteps) {
    from = ReadSteps(from, kNum, 1.0f, to->scales);
  } else if constexpr (kGroups.scale == GroupScale::kHalf) {
    from = ReadHalves(from, kNum, to->scales);
  } else {
    std::memcpy(to->scales, from, kNum * sizeof(to->scales[0]));
    from += kNum * sizeof(to->scales[0]);
  }
  if constexpr (kGroups.minimum == GroupMinimum::kSteps) {
    ReadSteps(from, kNum, -1.0f, to->minima);
  } else if constexpr (kGroups.minimum == GroupMinimum::kHalf) {
    ReadHalves(from, kNum, to->minima);
  } else if constexpr (kGroups.minimum == GroupMinimum::kFloat) {
    std::memcpy(to->minima, from, kNum * sizeof(to->minima[0]));
  } else if constexpr (kGroups.minimum == GroupMinimum::kZeros) {
    for (int i = 0; i < kNum * kPanelColumns; i += kLanes) {
      Store(Mul(Mul(Load(to->scales[0] + i), LoadInt8(from + i)), Set1(-1.0f)), to->minima[0] + i);
    }
  }
}

template <LinearFormat kFormat, int kRows>
void MultiplyTile(const uint8_t* panel, const uint8_t* tile, const Slices& slices, int64_t ahead, float* levels) {
  constexpr GroupFormat kGroups = GroupFormatOf(kFormat);
  constexpr int kBits = kGroups.bits;
  constexpr int kSteps = kGroups.group / 4;
  constexpr int kStepCodes = kPanelColumns * (kBits == 8 ? 4 : 2);
  constexpr int kSharing = kHighSteps<(kBits == 8 ? 0 : kBits - 4)>;
  constexpr int kVectors = kVectorsAtOnce<kRows>;
  constexpr bool kHasMinima = kGroups.minimum != GroupMinimum::kNone;
  constexpr int64_t kUnitBytes = kGroups.unit_bytes();
  static_assert(kBits == 8 || kBits == 4 || kSharing % kSteps == 0 || kSteps % kSharing == 0);
  for (int32_t s = 0; s < slices.count; ++s) {
    const int32_t num_units = slices.units[s + 1] - slices.units[s];
    for (int first = 0; first < kPanelVectors; first += kVectors) {
      const uint8_t* unit = panel;
      const uint8_t* x = tile;
      TileSums<kRows, kVectors, (2 * kRows * kVectors <= kMaxSums)> tile_sums(levels + first * kLanes, s);
      for (int32_t u = 0; u < num_units; ++u) {
        UnitScales scales;
        ReadScales<kFormat>(unit + kGroups.code_bytes(), &scales);
        const float* x_scales = reinterpret_cast<const float*>(x + kRows * kQuantGroup);
        const int32_t* x_sums = reinterpret_cast<const int32_t*>(x_scales + kRows);
        if (ahead != 0) {
          for (int64_t line = 0; line < kUnitBytes; line += 64) _mm_prefetch(unit + ahead + line, _MM_HINT_T1);
        }
        const uint8_t* codes = unit;
        const uint8_t* highs = unit + kWint4Bytes;
        for (int g = 0; g < kGroups.num_groups(); ++g) {
          Dots dots[kRows][kVectors];
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) dots[r][v] = Start(kHasZero<kBits> ? -kGroups.zero * x_sums[r] : 0);
#pragma GCC unroll 8
          for (int step = 0; step < kSteps; ++step) {
            Codes w[kVectors];
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) w[v] = LoadCodes<kBits>(codes, highs, step, first + v);
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
              for (int v = 0; v < kVectors; ++v) dots[r][v] = Dot<kBits>(dots[r][v], w[v], x + (step * kRows + r) * 4);
            }
            codes += kStepCodes;
          }
          if constexpr (kBits == 5 || kBits == 6) highs += kPanelColumns * 4;
          x += kSteps * kRows * 4;
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) {
            const F32x16 scale = Load(scales.scales[g] + (first + v) * kLanes);
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
              tile_sums.Add(r, v, ToFloats(dots[r][v]), Mul(scale, Set1(x_scales[r])));
            }
            if constexpr (kHasMinima) {
              const F32x16 minimum = Load(scales.minima[g] + (first + v) * kLanes);
#pragma GCC unroll 16
              for (int r = 0; r < kRows; ++r) {
                tile_sums.Add(r, v, minimum, Set1(x_scales[r] * static_cast<float>(x_sums[r])));
              }
            }
          }
          x_sums += kRows;
          tile_sums.NextGroup();
        }
        unit += kUnitBytes;
        x += kRows * 4 * (1 + kGroups.num_groups());
      }
      tile_sums.End(levels + first * kLanes, s);
    }
    panel += int64_t{num_units} * kUnitBytes;
    tile += int64_t{num_units} * kRows * RowUnitBytes(kFormat);
  }
}

template <LinearFormat kFormat>
struct Of {
  template <int kRows>
  struct Tile {
    static constexpr TileFunction Run = MultiplyTile<kFormat, kRows>;
  };
  static constexpr TileFunctions kTiles = MakeTileFunctions<Tile>();
};

// Those of the format, which is one from kFirst on.
template <int32_t kFirst = static_cast<int32_t>(LinearFormat::kQ4Of0)>
const TileFunctions& TilesOf(LinearFormat format) {
  constexpr auto kFormat = static_cast<LinearFormat>(kFirst);
  if constexpr (kFirst + 1 < kNumLinearFormats) {
    if (format != kFormat) return TilesOf<kFirst + 1>(format);
  }
  return Of<kFormat>::kTiles;
}

}  // namespace

const TileFunctions& GroupedTiles(LinearFormat format) { return TilesOf(format); }

}  // namespace FDSD_ISA
}  // namespace fdsd
