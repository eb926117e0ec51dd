// Products with integers that have a scale per group of 16 to 128 inputs. Many rows share the work of making bytes of a
// unit's codes; few multiply them as they are read. The integer dot product within a group is exact. Then
//   own += float(dot) * weight scale, and with minima own += float(sum of x) * minimum, in order of the groups
//   sum += own * x scale, in order of the units
#include "linear_panel.h"
#include "linear_unit.h"
#include "scratch.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// Rows that multiply codes as they are read: those whose dot products of all columns are made at once.
#if defined(FDSD_SIMD_AVX512)
constexpr int kFewRows = kMaxSums / 4;
#else
constexpr int kFewRows = 2;
#endif

// What products differ by.
struct Kind {
  int bits;  // of a code; what matters of them where it is unpacked
  bool is_packed;
  int group;
  bool has_minima;
};

// Steps of the first vectors' products with each of which Ask comes once.
template <Kind kKind>
constexpr int kAskSteps = kKind.is_packed ? 4 : kKind.group / 4;

// Where a group's codes begin.
struct GroupCodes {
  const uint8_t* codes;
  const uint8_t* highs;

  template <Kind kKind>
  FDSD_INLINE Codes Load(int step, int vector) const {
    if constexpr (kKind.is_packed) {
      constexpr int kSharing = kHighSteps<kKind.bits - 4>;
      return LoadCodes<kKind.bits>(codes + step * kPanelColumns * 2, highs, step % kSharing, vector);
    } else {
      return LoadUnpacked<kKind.bits>(codes + (step * kPanelVectors + vector) * kLanes * 4);
    }
  }
  template <Kind kKind>
  FDSD_INLINE void Next() {
    codes += kKind.group * kPanelColumns / (kKind.is_packed ? 2 : 1);
    if constexpr (kKind.is_packed && kKind.bits > 4) {
      static_assert(kKind.group == 4 * kHighSteps<kKind.bits - 4>);
      highs += kPanelColumns * 4;
    }
  }
};

// The rows' exact dot products with a group, each from its start on, for vectors of columns from `first` on.
template <Kind kKind, int kRows, int kVectors>
FDSD_INLINE void MultiplyGroup(const GroupCodes& group, const uint8_t* x, const int32_t* starts, int first,
                               Asked* asked, Dots (*dots)[kVectors]) {
  constexpr int kSteps = kKind.group / 4;
  const auto each_step = [&](int begin, int end, auto&& dot) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int step = begin; step < end; ++step) {
      if (first == 0 && step % kAskSteps<kKind> == 0) asked->Ask();
      Codes w[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) w[v] = group.Load<kKind>(step, first + v);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) dot(r, v, w[v], x + (step * kRows + r) * 4);
      }
    }
  };
#if defined(FDSD_SIMD_AVX2)
  if constexpr (kKind.bits < 8) {
    constexpr int kAtOnce = std::min(kSteps, kShortSteps<kKind.bits>);
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
    dots[r][v] = Dot<kKind.bits>(dots[r][v], w, step_x);
  });
}

// sums [kRows][32] += the rows' products with a unit; `x` is theirs (PackTile).
template <Kind kKind, int kRows>
void MultiplyUnit(const Unit& unit, const uint8_t* x, Asked* asked, float* sums) {
  constexpr int kNum = kQuantGroup / kKind.group;
  constexpr bool kIsWhole = kNum == 1 && !kKind.has_minima;  // as one tile of wint4 is multiplied
  constexpr int kSumsPerVector = kIsWhole ? kRows : 2 * kRows;
  constexpr int kVectors = kVectorsAtOnce<kSumsPerVector>;
  const float* const x_scales = reinterpret_cast<const float*>(x + kRows * kQuantGroup);
  for (int first = 0; first < kPanelVectors; first += kVectors) {
    GroupCodes codes{unit.codes, unit.highs};
    const int32_t* starts = reinterpret_cast<const int32_t*>(x_scales + kRows);
    const float* x_sums = x_scales + kRows * (1 + kNum);
    F32x16 own[kRows][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) own[r][v] = Set1(0.0f);
    for (int g = 0; g < kNum; ++g, starts += kRows, x_sums += kRows, codes.Next<kKind>()) {
      Dots dots[kRows][kVectors];
      MultiplyGroup<kKind, kRows, kVectors>(codes, x + g * kKind.group * kRows, starts, first, asked, dots);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const F32x16 scale = Load(unit.scales[g] + (first + v) * kLanes);
        const F32x16 minimum = Load(unit.minima[g] + (first + v) * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          own[r][v] = kIsWhole ? ToFloats(dots[r][v]) : Fma(ToFloats(dots[r][v]), scale, own[r][v]);
          if constexpr (kKind.has_minima) own[r][v] = Fma(Set1(x_sums[r]), minimum, own[r][v]);
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
// Of 1, 2, .. rows. Formats of a kind share it.
template <Kind kKind, int... kIndex>
const UnitFunction* MultiplyFunctions(std::integer_sequence<int, kIndex...>) {
  static constexpr UnitFunction kFunctions[] = {MultiplyUnit<kKind, kIndex + 1>...};
  return kFunctions;
}

struct Functions {
  void (*read)(const uint8_t* from, Asked* asked, Unit* to);
  const UnitFunction* multiply;
  int32_t read_asks;  // how often they ask
  int32_t multiply_asks;

  template <Kind kKind>
  static Functions Of(void (*read)(const uint8_t* from, Asked* asked, Unit* to)) {
    return {read,
            MultiplyFunctions<kKind>(std::make_integer_sequence<int, kKind.is_packed ? kFewRows : kMaxTileRows>()),
            kKind.is_packed ? 0 : kReadAsks, kGroupSteps / kAskSteps<kKind>};
  }
};

// Those of wint4, or of the format, which is one from kFirst on.
template <int32_t kFirst = static_cast<int32_t>(LinearFormat::kQ4Of0)>
Functions FunctionsOf(LinearFormat format, bool has_few_rows) {
  constexpr auto kFormat = static_cast<LinearFormat>(kFirst);
  constexpr GroupFormat kGroups = GroupFormatOf(kFormat);
  if (format == LinearFormat::kWint4) return Functions::Of<Kind{8, false, kQuantGroup, false}>(UnpackWint4);
  if constexpr (kFirst + 1 < kNumLinearFormats) {
    if (format != kFormat) return FunctionsOf<kFirst + 1>(format, has_few_rows);
  }
  constexpr bool kHasMinima = kGroups.minimum != GroupMinimum::kNone;
  if constexpr (kGroups.bits < 8) {
    if (has_few_rows) {
      return Functions::Of<Kind{kGroups.bits, true, kGroups.group, kHasMinima}>(ReadUnit<kGroups, true>);
    }
  }
  constexpr Kind kKind{kUnpackedBits<kGroups.bits>, false, kGroups.group, kHasMinima};
  return Functions::Of<kKind>(ReadUnit<kGroups, false>);
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
  const int32_t num_rows = x.Begin(tile_end) - x.Begin(tile_begin);
  const Functions functions = FunctionsOf(x.format, num_rows <= kFewRows);
  const int64_t unit_bytes = PanelUnitBytes(x.format);
  const int64_t ahead = PrefetchAhead(x.format, std::min(num_rows, kMaxPrefetchRows));
  const int64_t asking = functions.read_asks + (tile_end - tile_begin) * functions.multiply_asks;
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
      functions.read(from, &asked, &unit);
      for (int64_t t = tile_begin; t < tile_end; ++t) {
        const int32_t size = x.Size(t);
        functions.multiply[size - 1](unit, x.Tile(t) + u * size * RowUnitBytes(x.format), &asked,
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
