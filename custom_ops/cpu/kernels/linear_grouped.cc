// Products with integers that have a scale per group of 16 to 128 inputs. A unit of a panel is unpacked once for all
// rows of a block: its codes to a byte each, its scales and minima to floats. The integer dot product within a group is
// exact. Then
//   own += float(dot) * weight scale, and with minima own += float(sum of x) * minimum, in order of the groups
//   sum += own * x scale, in order of the units
#include "linear_codes.h"
#include "linear_panel.h"
#include "scratch.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

constexpr int kMaxGroups = kQuantGroup / 16;

struct Unit {
  const uint8_t* codes;  // [32][32][4]: those of the panel, where these have a byte each
  alignas(64) uint8_t unpacked[kWint8Bytes];
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

template <GroupFormat kGroups>
FDSD_INLINE void ReadScales(const uint8_t* from, Unit* to) {
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

// Weights to ask for, so many lines at a time: all at once would hold up other loads.
struct Asked {
  const uint8_t* next;
  const uint8_t* end;
  int lines;

  FDSD_INLINE void Ask() {
    for (int line = 0; line < lines && next < end; ++line, next += 64) _mm_prefetch(next, _MM_HINT_T1);
  }
};
constexpr int kUnpackParts = 4;  // of a unit: Ask comes once with each

template <GroupFormat kGroups>
void UnpackUnit(const uint8_t* from, Asked* asked, Unit* to) {
  constexpr int kBits = kGroups.bits;
  to->codes = kBits == 8 ? from : to->unpacked;
  if constexpr (kBits == 8) {
    for (int part = 0; part < kUnpackParts; ++part) asked->Ask();
  } else {
    constexpr int kSharing = kHighSteps<kBits - 4>;
    constexpr int kUnrolled = kGroupSteps / kUnpackParts;
    static_assert(kBits == 4 || kUnrolled % kSharing == 0);
    const uint8_t* codes = from;
    const uint8_t* highs = from + kWint4Bytes;
    uint8_t* out = to->unpacked;
    for (int part = 0; part < kUnpackParts; ++part) {
      asked->Ask();
#pragma GCC unroll 8
      for (int step = 0; step < kUnrolled; ++step) {
#pragma GCC unroll 2
        for (int v = 0; v < kPanelVectors; ++v, out += kLanes * 4) {
          StoreCodes(LoadCodes<kBits>(codes, highs, step % kSharing, v), out);
        }
        codes += kPanelColumns * 2;
        if (kBits > 4 && step % kSharing == kSharing - 1) highs += kPanelColumns * 4;
      }
    }
  }
  ReadScales<kGroups>(from + kGroups.code_bytes(), to);
}

// A unit of wint4, whose codes become int8: one group.
void UnpackWint4(const uint8_t* from, Asked* asked, Unit* to) {
  for (int part = 0; part < kUnpackParts; ++part) asked->Ask();
  UnpackInt8Codes(from, to->unpacked);
  to->codes = to->unpacked;
  std::memcpy(to->scales[0], from + kWint4Bytes + kFactorBytes, kScaleBytes);
}

// The rows' exact dot products with a group, each from its start on.
template <int kBits, int kSteps, int kRows, int kVectors>
FDSD_INLINE void MultiplyGroup(const uint8_t* codes, const uint8_t* x, const int32_t* starts, Dots (*dots)[kVectors]) {
  const auto each_step = [&](int begin, int end, auto&& dot) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int step = begin; step < end; ++step) {
      Codes w[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        w[v] = LoadUnpacked<kBits>(codes + (step * kPanelVectors + v) * kLanes * 4);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) dot(r, v, w[v], x + (step * kRows + r) * 4);
      }
    }
  };
#if defined(FDSD_SIMD_AVX2)
  if constexpr (kBits < 8) {
    constexpr int kAtOnce = std::min(kSteps, kShortSteps<kBits>);
#pragma GCC unroll 4
    for (int begin = 0; begin < kSteps; begin += kAtOnce) {
      Dots shorts[kRows][kVectors];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) shorts[r][v] = Start(0);
      each_step(begin, begin + kAtOnce,
                [&](int r, int v, const Codes& w, const uint8_t* step_x)
                    __attribute__((always_inline)) { shorts[r][v] = DotShorts(shorts[r][v], w, step_x); });
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v)
          dots[r][v] = AddShorts(begin == 0 ? Start(starts[r]) : dots[r][v], shorts[r][v]);
    }
    return;
  }
#endif
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) dots[r][v] = Start(starts[r]);
  each_step(0, kSteps, [&](int r, int v, const Codes& w, const uint8_t* step_x) __attribute__((always_inline)) {
    dots[r][v] = Dot<kBits>(dots[r][v], w, step_x);
  });
}

// sums [kRows][32] += the rows' products with a unit; `x` is theirs (PackTile).
template <int kBits, int kGroup, bool kHasMinima, int kRows>
void MultiplyUnit(const Unit& unit, const uint8_t* x, Asked* asked, float* sums) {
  constexpr int kNum = kQuantGroup / kGroup;
  constexpr bool kIsWhole = kGroup == kQuantGroup && !kHasMinima;  // as one tile of wint4 is multiplied
  constexpr int kSumsPerVector = kIsWhole ? kRows : 2 * kRows;
  constexpr int kVectors = kVectorsAtOnce<kSumsPerVector>;
  const float* const x_scales = reinterpret_cast<const float*>(x + kRows * kQuantGroup);
  for (int first = 0; first < kPanelVectors; first += kVectors) {
    const uint8_t* codes = unit.codes + first * kLanes * 4;
    const int32_t* starts = reinterpret_cast<const int32_t*>(x_scales + kRows);
    const float* x_sums = x_scales + kRows * (1 + kNum);
    F32x16 own[kRows][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) own[r][v] = Set1(0.0f);
    for (int g = 0; g < kNum; ++g, starts += kRows, x_sums += kRows, codes += kGroup * kPanelColumns) {
      if (first == 0) asked->Ask();
      Dots dots[kRows][kVectors];
      MultiplyGroup<kBits, kGroup / 4, kRows, kVectors>(codes, x + g * kGroup * kRows, starts, dots);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const F32x16 scale = Load(unit.scales[g] + (first + v) * kLanes);
        const F32x16 minimum = Load(unit.minima[g] + (first + v) * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          own[r][v] = kIsWhole ? ToFloats(dots[r][v]) : Fma(ToFloats(dots[r][v]), scale, own[r][v]);
          if constexpr (kHasMinima) own[r][v] = Fma(Set1(x_sums[r]), minimum, own[r][v]);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        float* sum = sums + r * kPanelColumns + (first + v) * kLanes;
        F32x16 scale = Set1(x_scales[r]);
        if constexpr (kIsWhole) scale = Mul(Load(unit.scales[0] + (first + v) * kLanes), scale);
        Store(Fma(own[r][v], scale, Load(sum)), sum);
      }
    }
  }
}

using UnitFunction = void (*)(const Unit& unit, const uint8_t* x, Asked* asked, float* sums);
// Of 1, 2, .. rows. Formats that differ in their packed bytes only share it.
template <int kBits, int kGroup, bool kHasMinima, int... kIndex>
const UnitFunction* MultiplyFunctions(std::integer_sequence<int, kIndex...>) {
  static constexpr UnitFunction kFunctions[] = {MultiplyUnit<kBits, kGroup, kHasMinima, kIndex + 1>...};
  return kFunctions;
}

struct Functions {
  void (*unpack)(const uint8_t* from, Asked* asked, Unit* to);
  const UnitFunction* multiply;
  int32_t num_groups;
};

template <int kBits, int kGroup, bool kHasMinima>
Functions FunctionsWith(void (*unpack)(const uint8_t* from, Asked* asked, Unit* to)) {
  constexpr auto kRows = std::make_integer_sequence<int, kMaxTileRows>();
  return {unpack, MultiplyFunctions<kBits, kGroup, kHasMinima>(kRows), kQuantGroup / kGroup};
}

// Those of wint4, or of the format, which is one from kFirst on.
template <int32_t kFirst = static_cast<int32_t>(LinearFormat::kQ4Of0)>
Functions FunctionsOf(LinearFormat format) {
  constexpr auto kFormat = static_cast<LinearFormat>(kFirst);
  constexpr GroupFormat kGroups = GroupFormatOf(kFormat);
  if (format == LinearFormat::kWint4) return FunctionsWith<8, kQuantGroup, false>(UnpackWint4);
  if constexpr (kFirst + 1 < kNumLinearFormats) {
    if (format != kFormat) return FunctionsOf<kFirst + 1>(format);
  }
  constexpr bool kHasMinima = kGroups.minimum != GroupMinimum::kNone;
  return FunctionsWith<kUnpackedBits<kGroups.bits>, kGroups.group, kHasMinima>(UnpackUnit<kGroups>);
}

// Ends slice `index` of a tile: adds the sums that wait in the levels below to the slice's own.
void EndSlice(int32_t index, int32_t num_rows, float* levels) {
  const int level = SumLevel(index);
  float* const sums = levels + level * kTileSums;
  for (int i = 0; i < num_rows * kPanelColumns && level > 0; i += kLanes) {
    const F32x16 sum = Load(sums + i);
    Store(level == 1 ? AddLevels<1>(levels + i, sum) : AddLevels<2>(levels + i, sum), sums + i);
  }
}

void MultiplyPanel(const PackedRows& x, int64_t tile_begin, int64_t tile_end, const uint8_t* panel, int64_t index,
                   const LinearOutput& out) {
  constexpr int64_t kTileFloats = kSumLevels * kTileSums;
  const Functions functions = FunctionsOf(x.format);
  const int64_t unit_bytes = PanelUnitBytes(x.format);
  const int64_t ahead = PrefetchAhead(x.format, std::min(x.Begin(tile_end) - x.Begin(tile_begin), kMaxPrefetchRows));
  const int64_t asking = kUnpackParts + (tile_end - tile_begin) * functions.num_groups;
  const int lines = ahead == 0 ? 0 : static_cast<int>(DivideUp(unit_bytes, 64 * asking));
  float* const sums = ScratchArray<float>(Scratch::kInnerTask, (tile_end - tile_begin) * kTileFloats);
  Unit unit;
  for (int32_t s = 0; s < x.slices.count; ++s) {
    float* const slice_sums = sums + SumLevel(s) * kTileSums;
    for (int64_t t = tile_begin; t < tile_end; ++t) {
      std::memset(slice_sums + (t - tile_begin) * kTileFloats, 0, kTileSums * sizeof(float));
    }
    for (int64_t u = x.slices.units[s]; u < x.slices.units[s + 1]; ++u) {
      const uint8_t* const from = panel + u * unit_bytes;
      Asked asked{from + ahead, from + ahead + unit_bytes, lines};
      functions.unpack(from, &asked, &unit);
      for (int64_t t = tile_begin; t < tile_end; ++t) {
        const int32_t num_rows = x.Size(t);
        functions.multiply[num_rows - 1](unit, x.Tile(t) + u * num_rows * RowUnitBytes(x.format), &asked,
                                         slice_sums + (t - tile_begin) * kTileFloats);
      }
    }
    for (int64_t t = tile_begin; t < tile_end; ++t) EndSlice(s, x.Size(t), sums + (t - tile_begin) * kTileFloats);
  }
  for (int64_t t = tile_begin; t < tile_end; ++t) {
    StoreSums(sums + (t - tile_begin) * kTileFloats + SumLevel(x.slices.count - 1) * kTileSums, x.Size(t), x.Begin(t),
              index, out);
  }
}

}  // namespace

const RowKernels kGroupedRowKernels = {kMaxTileRows, kBlockBytes, RowBytes, PackTile, MultiplyPanel, Leave};

}  // namespace FDSD_ISA
}  // namespace fdsd
