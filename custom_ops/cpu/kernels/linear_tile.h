#pragma once
// Seam between the linear op and its inner loops: a tile is up to kMaxTileRows rows times one panel of 32 columns.
// Every output element is one accumulator summed strictly over k, whatever the number of rows. So a row's bits depend
// on that row alone. Speed comes from the columns and rows of a tile running side by side.
#include <xmmintrin.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "fdsd/linear.h"
#include "linear_grouped.h"
#include "linear_tuning.h"
#include "simd.h"

namespace fdsd {
namespace FDSD_ISA {

// Sums of 16 columns that fit the level's vector registers together with weights and x, and the most rows of a tile. A
// tile whose two vectors of columns do not fit side by side is multiplied one vector after the other.
// kPrefetchFromRows: where nothing was measured, tiles of so many rows ask for weights ahead of their loads
// (PrefetchStep). On AMD, fewer rows are bound by memory and read fastest when left to the processor's own prefetcher,
// which requests throw out of step. Other processors want requests for any number of rows. More rows multiply more
// slowly than that prefetcher wants to be called. Where a tile goes over a panel once per vector of columns, that
// prefetcher would find every other line only. Codes of few bits have half the lines per product, so fewer rows are
// slow enough.
#if defined(FDSD_SIMD_AVX512)
constexpr int kMaxSums = 24;
constexpr int kMaxTileRows = 12;
constexpr int kPrefetchFromRows = 6;
constexpr int kCodesPrefetchFromRows = 1;
#else
constexpr int kMaxSums = 2;
constexpr int kMaxTileRows = 5;
constexpr int kPrefetchFromRows = 2;
constexpr int kCodesPrefetchFromRows = 2;
#endif
constexpr int kPanelVectors = kPanelColumns / kLanes;
template <int kRows>
constexpr int kVectorsAtOnce = kRows * kPanelVectors <= kMaxSums ? kPanelVectors : 1;

// A bf16 step of x: the pair itself where the processor multiplies bf16 pairs, else two floats.
#if defined(FDSD_SIMD_AVX512)
constexpr int kBf16StepBytes = 4;
#else
constexpr int kBf16StepBytes = 8;
#endif

// Bytes of one row of x for one group of an int format: 128 int8, their scale and the accumulators' start value.
constexpr int kRowGroupBytes = kQuantGroup + 4 + 4;

// Bytes of one row of x per unit (see Slices::units).
FDSD_INLINE constexpr int RowUnitBytes(LinearFormat format) {
  if (IsGrouped(format)) {
    const GroupFormat groups = GroupFormatOf(format);
    return kQuantGroup + 4 + (groups.minimum == GroupMinimum::kNone ? 4 : 8) * groups.num_groups();
  }
  if (format == LinearFormat::kE4m3) return kQuantGroup / 2 * kBf16StepBytes;
  return IsQuantized(format) ? kRowGroupBytes : format == LinearFormat::kBFloat16 ? kBf16StepBytes : kStepBytes;
}

FDSD_INLINE constexpr int64_t ElementBytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Rows of x as an op got them.
struct XRows {
  LinearFormat format;
  DType dtype;
  int32_t in_features;     // of these rows or, if `x` points into them, of a slice
  int64_t stride;          // from row to row
  const void* x;           // [., in_features]
  const int32_t* indices;  // of the rows in x, or nullptr: rows 0, 1, ..

  template <typename T>
  FDSD_INLINE const T* Row(int64_t r) const {
    return static_cast<const T*>(x) + (indices == nullptr ? r : indices[r]) * stride;
  }
};

// Rewrite units [unit_begin, unit_end) of `num_rows` rows of x as `tile` (the start of the whole tile), rows
// interleaved, slice after slice:
//   float32 float [K][rows], bf16 [K / 2][rows] steps,
//   fp8     [K / 128]{ steps of bf16 [64][rows] },
//   int     [K / 128]{ int8 [32][rows][4], float scale [rows], int32 start [rows] }
// start = -zero point of the weights * sum of the int8 values, for the accumulators.
//   groups  [K / 128]{ int8 [32][rows][4], float scale [rows], int32 start [groups][rows], and for formats with minima
//   float sum [groups][rows] }, of the int8 values of a group
void PackTile(const XRows& rows, const Slices& slices, int num_rows, int32_t unit_begin, int32_t unit_end,
              uint8_t* tile);

constexpr int kTileSums = kMaxTileRows * kPanelColumns;

// The sums of slices are added like the ones of a binary counter: slice s completes subtrees of up to 2^level slices,
// whose left halves wait in the levels below and whose sum waits in its own. So each border of slices costs a few
// instructions, which matters: meanwhile no weights are asked for. The last slice leaves the whole sum in its level.
constexpr int kSumLevels = 3;
static_assert(kMaxSlices == 1 << (kSumLevels - 1));
FDSD_INLINE constexpr int SumLevel(int32_t slice) { return __builtin_ctz(~static_cast<uint32_t>(slice)); }

// The sum that waits in level `kLevel` of `levels` once the last slice of it has `sum`.
template <int kLevel>
FDSD_INLINE F32x16 AddLevels(const float* levels, F32x16 sum) {
  for (int l = 0; l < kLevel; ++l) sum = Add(Load(levels + l * kTileSums), sum);
  return sum;
}

template <int kLevel, int kRows, int kVectors>
FDSD_INLINE void StoreLevel(const F32x16 (*sum)[kVectors], float* levels) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      float* at = levels + r * kPanelColumns + v * kLanes;
      Store(AddLevels<kLevel>(at, sum[r][v]), at + kLevel * kTileSums);
    }
  }
}

// Ends a slice. `levels` [kSumLevels][kTileSums] begins at the vectors' columns.
template <int kRows, int kVectors>
FDSD_INLINE void StoreSlice(const F32x16 (*sum)[kVectors], int32_t slice, float* levels) {
  switch (SumLevel(slice)) {
    case 0:
      return StoreLevel<0, kRows, kVectors>(sum, levels);
    case 1:
      return StoreLevel<1, kRows, kVectors>(sum, levels);
    default:
      return StoreLevel<2, kRows, kVectors>(sum, levels);
  }
}

// Row r, column j of level SumLevel(count - 1) of `levels` = dot product of row r of the tile and column j of the
// panel, both cut into `slices`; `of[r - 1]` multiplies r rows. It asks for weights `ahead` bytes before it loads them,
// 0 = not at all.
using TileFunction = void (*)(const uint8_t* panel, const uint8_t* tile, const Slices& slices, int64_t ahead,
                              float* levels);
struct TileFunctions {
  TileFunction of[kMaxTileRows];
};
extern const TileFunctions kFloat32Tiles;
extern const TileFunctions kBf16Tiles;
extern const TileFunctions kFloat8Tiles;
extern const TileFunctions kWint8Tiles;
extern const TileFunctions kWint4Tiles;

// Ask for the weights of a later step: into the second-level cache, since requests for the first level wait for each
// other. The requests must cover every line: the prefetcher does not find a line that is left out.
constexpr int kPrefetchBytes = 8192;
template <int kBytes>
FDSD_INLINE void PrefetchStep(const uint8_t* weights, int64_t ahead) {
  for (int line = 0; line < kBytes; line += 64) _mm_prefetch(weights + ahead + line, _MM_HINT_T1);
}

// Runs loop(std::bool_constant: whether it asks). A loop of its own for each: asking within one whether to ask took 7 %
// of three rows' time.
template <typename Loop>
FDSD_INLINE void AskingOrNot(int64_t ahead, Loop&& loop) {
  if (ahead == 0) {
    loop(std::false_type());
  } else {
    loop(std::true_type());
  }
}

// What a tile function gets as `ahead` for a tile of so many rows.
inline int64_t PrefetchAhead(LinearFormat format, int num_rows) {
  const int32_t measured = PrefetchBytes(format, num_rows);
  if (measured != kNotMeasured) return measured;
  const bool has_codes = format == LinearFormat::kWint4 || IsGrouped(format);
  const int from = has_codes ? kCodesPrefetchFromRows : kPrefetchFromRows;
  return num_rows >= from ? kPrefetchBytes : 0;
}

template <template <int> class Tile, int... kIndex>
constexpr TileFunctions MakeTileFunctions(std::integer_sequence<int, kIndex...>) {
  return {{Tile<kIndex + 1>::Run...}};
}
template <template <int> class Tile>
constexpr TileFunctions MakeTileFunctions() {
  return MakeTileFunctions<Tile>(std::make_integer_sequence<int, kMaxTileRows>());
}

}  // namespace FDSD_ISA
}  // namespace fdsd
