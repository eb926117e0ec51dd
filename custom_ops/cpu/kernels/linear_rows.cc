// Rewrites rows of x into tiles.
#include <emmintrin.h>

#include "linear_quantize.h"
#include "linear_tile.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// Rows quantised together.
constexpr int kRowsAtOnce = 4;

// Where row `index` of a tile of `num_rows` lies: 4 bytes (8 for a bf16 step of two floats) of every step.
struct TileRow {
  uint8_t* tile;
  int num_rows;
  int index;
  int32_t unit_begin, unit_end;
};

template <typename T>
void PackFloat32(const T* x, const TileRow& row) {
  float* out = reinterpret_cast<float*>(row.tile) + row.index;
  for (int64_t k = row.unit_begin; k < row.unit_end; ++k) out[k * row.num_rows] = ToFloat(x[k]);
}

// The bits of x as bf16, rounded when x is float32.
FDSD_INLINE uint32_t Bf16Bits(bf16 x) { return x.bits; }
FDSD_INLINE uint32_t Bf16Bits(float x) { return RoundToBf16(x).bits; }

FDSD_INLINE void StoreBf16Step(uint32_t first, uint32_t second, uint8_t* out) {
  if constexpr (kBf16StepBytes == kStepBytes) {
    const uint32_t pair = first | second << 16;
    std::memcpy(out, &pair, sizeof(pair));
  } else {
    const uint32_t floats[2] = {first << 16, second << 16};
    std::memcpy(out, floats, sizeof(floats));
  }
}

template <typename T>
void PackBf16(const T* x, int32_t in_features, const TileRow& row) {
  const int64_t stride = static_cast<int64_t>(row.num_rows) * kBf16StepBytes;
  const int32_t full_end = std::min(row.unit_end, in_features / 2);
  uint8_t* out = row.tile + row.index * kBf16StepBytes;
  for (int64_t k = row.unit_begin; k < full_end; ++k) {
    StoreBf16Step(Bf16Bits(x[2 * k]), Bf16Bits(x[2 * k + 1]), out + k * stride);
  }
  if (full_end < row.unit_end) StoreBf16Step(Bf16Bits(x[in_features - 1]), 0, out + full_end * stride);
}

constexpr int32_t kWint8Starts[kPanelVectors] = {kWint8ZeroPoint, kWint8ZeroPoint};
#if defined(FDSD_SIMD_AVX512)
constexpr int32_t kWint4Starts[kPanelVectors] = {17 * kWint4ZeroPoint, 16 * kWint4ZeroPoint};
#else
constexpr int32_t kWint4Starts[kPanelVectors] = {kWint4ZeroPoint, kWint4ZeroPoint};
#endif

// Inputs [128 g, 128 g + 128), zero padded.
template <typename T>
FDSD_INLINE void ReadGroup(const T* x, int32_t in_features, int64_t g, float* values) {
  const T* from = x + g * kQuantGroup;
  const int64_t count = std::min<int64_t>(kQuantGroup, in_features - g * kQuantGroup);
  if (count == kQuantGroup) {
#pragma GCC unroll 8
    for (int i = 0; i < kQuantGroup; i += kLanes) Store(Load(from + i), values + i);
    return;
  }
  for (int i = 0; i < kQuantGroup; i += kLanes) {
    const int n = static_cast<int>(std::clamp<int64_t>(count - i, 0, kLanes));
    Store(n == kLanes ? Load(from + i) : n == 0 ? Set1(0.0f) : LoadPartial(from + i, n), values + i);
  }
}

// QuantizeInt8 of a group whose largest magnitude is known. Returns the scale; `sum` receives the sum of the integers.
FDSD_INLINE float QuantizeGroup(const float* values, float max, int8_t* q, int32_t* sum) {
  *sum = 0;
  float scale;
  if (!HasScale(max, q, &scale)) return scale;
  const F32x16 inverse = Set1(127.0f / max);
#if defined(FDSD_SIMD_AVX512)
  // Converting rounds like RoundNearest: to the nearest, ties to even.
  __m512i sums = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int i = 0; i < kQuantGroup; i += kLanes) {
    const __m512i rounded = _mm512_cvtps_epi32(Mul(Load(values + i), inverse).v);
    sums = _mm512_add_epi32(sums, rounded);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + i), _mm512_cvtepi32_epi8(rounded));
  }
  *sum = _mm512_reduce_add_epi32(sums);
#else
  alignas(64) float rounded[kQuantGroup];
  for (int i = 0; i < kQuantGroup; i += kLanes) Store(RoundNearest(Mul(Load(values + i), inverse)), rounded + i);
  ToInt8(rounded, q);
  for (int i = 0; i < kQuantGroup; ++i) *sum += q[i];
#endif
  return max / 127.0f;
}

// Quantised rows [first, first + count) of a tile: one group of each.
struct GroupRows {
  alignas(64) int8_t q[kRowsAtOnce][kQuantGroup];
  float scale[kRowsAtOnce];
  int32_t sum[kRowsAtOnce];
};

// Four rows change places with four steps, in registers: half the time of copying step by step.
FDSD_INLINE void InterleaveFour(const GroupRows& rows, int num_rows, uint8_t* out) {
  const int64_t stride = static_cast<int64_t>(num_rows) * kStepBytes;
#pragma GCC unroll 8
  for (int s = 0; s < kGroupSteps; s += 4) {
    __m128i row[4];
    for (int r = 0; r < 4; ++r) row[r] = _mm_load_si128(reinterpret_cast<const __m128i*>(rows.q[r] + s * kStepBytes));
    const __m128i low01 = _mm_unpacklo_epi32(row[0], row[1]);
    const __m128i low23 = _mm_unpacklo_epi32(row[2], row[3]);
    const __m128i high01 = _mm_unpackhi_epi32(row[0], row[1]);
    const __m128i high23 = _mm_unpackhi_epi32(row[2], row[3]);
    uint8_t* step = out + s * stride;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(step), _mm_unpacklo_epi64(low01, low23));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(step + stride), _mm_unpackhi_epi64(low01, low23));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(step + 2 * stride), _mm_unpacklo_epi64(high01, high23));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(step + 3 * stride), _mm_unpackhi_epi64(high01, high23));
  }
}

// `group` is the tile's group, of `num_rows` rows.
FDSD_INLINE void WriteGroup(const GroupRows& rows, int first, int count, int num_rows, const int32_t* zero_points,
                            uint8_t* group) {
  uint8_t* steps = group + first * kStepBytes;
  if (num_rows == 1) {
    std::memcpy(steps, rows.q[0], kQuantGroup);
  } else if (count == kRowsAtOnce) {
    InterleaveFour(rows, num_rows, steps);
  } else {
    for (int r = 0; r < count; ++r)
      for (int s = 0; s < kGroupSteps; ++s)
        std::memcpy(steps + (s * num_rows + r) * kStepBytes, rows.q[r] + s * kStepBytes, kStepBytes);
  }
  float* scales = reinterpret_cast<float*>(group + num_rows * kQuantGroup) + first;
  int32_t* starts = reinterpret_cast<int32_t*>(scales + num_rows);
  for (int r = 0; r < count; ++r) {
    scales[r] = rows.scale[r];
    for (int v = 0; v < kPanelVectors; ++v) starts[v * num_rows + r] = -zero_points[v] * rows.sum[r];
  }
}

template <typename T>
void PackGroups(const XRows& rows, int num_rows, int32_t unit_begin, int32_t unit_end, const int32_t* zero_points,
                uint8_t* tile) {
  for (int first = 0; first < num_rows; first += kRowsAtOnce) {
    const int count = std::min(kRowsAtOnce, num_rows - first);
    for (int64_t g = unit_begin; g < unit_end; ++g) {
      // First all magnitudes, then the integers: a row alone would wait for its own maximum.
      alignas(64) float values[kRowsAtOnce][kQuantGroup];
      float max[kRowsAtOnce];
      for (int r = 0; r < count; ++r) {
        ReadGroup(rows.Row<T>(first + r), rows.in_features, g, values[r]);
        max[r] = MaxMagnitude(values[r]);
      }
      GroupRows group;
      for (int r = 0; r < count; ++r) group.scale[r] = QuantizeGroup(values[r], max[r], group.q[r], group.sum + r);
      WriteGroup(group, first, count, num_rows, zero_points, tile + g * num_rows * kRowGroupBytes);
    }
  }
}

// One row of a float format.
template <typename T>
void PackRow(const XRows& rows, const TileRow& row) {
  const T* x = rows.Row<T>(row.index);
  if (rows.format == LinearFormat::kFloat32) return PackFloat32(x, row);
  PackBf16(x, rows.in_features, row);
}

template <typename T>
void PackRows(const XRows& rows, int num_rows, int32_t unit_begin, int32_t unit_end, uint8_t* tile) {
  if (rows.format == LinearFormat::kWint8) {
    return PackGroups<T>(rows, num_rows, unit_begin, unit_end, kWint8Starts, tile);
  }
  if (rows.format == LinearFormat::kWint4) {
    return PackGroups<T>(rows, num_rows, unit_begin, unit_end, kWint4Starts, tile);
  }
  for (int r = 0; r < num_rows; ++r) PackRow<T>(rows, {tile, num_rows, r, unit_begin, unit_end});
}

}  // namespace

void PackTile(const XRows& rows, int num_rows, int32_t unit_begin, int32_t unit_end, uint8_t* tile) {
  if (rows.dtype == DType::kFloat32) {
    PackRows<float>(rows, num_rows, unit_begin, unit_end, tile);
  } else {
    PackRows<bf16>(rows, num_rows, unit_begin, unit_end, tile);
  }
}

}  // namespace FDSD_ISA
}  // namespace fdsd
