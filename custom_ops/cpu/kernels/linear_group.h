#pragma once
// Groups of 128 inputs of rows of x: read and quantised.
#include "linear_quantize.h"
#include "linear_tile.h"

namespace fdsd {
namespace FDSD_ISA {

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

// Rows quantised together: one alone would wait for its own maximum.
constexpr int kRowsAtOnce = 4;

FDSD_INLINE int32_t SumOf(const int8_t* q, int count) {
  int32_t sum = 0;
  for (int i = 0; i < count; ++i) sum += q[i];
  return sum;
}

// One group of some rows, quantised.
struct GroupRows {
  alignas(64) int8_t q[kRowsAtOnce][kQuantGroup];
  float scale[kRowsAtOnce];
  int32_t sum[kRowsAtOnce];  // of the integers
};

// write(first, count, g, group): groups g of [begin, end) of `num_rows` rows, `count` rows at a time from `first` on.
template <typename T, typename Write>
FDSD_INLINE void QuantizeGroups(const XRows& rows, int num_rows, int64_t begin, int64_t end, Write&& write) {
  for (int first = 0; first < num_rows; first += kRowsAtOnce) {
    const int count = std::min(kRowsAtOnce, num_rows - first);
    for (int64_t g = begin; g < end; ++g) {
      alignas(64) float values[kRowsAtOnce][kQuantGroup];
      float max[kRowsAtOnce];
      for (int r = 0; r < count; ++r) {
        ReadGroup(rows.Row<T>(first + r), rows.in_features, g, values[r]);
        max[r] = MaxMagnitude(values[r]);
      }
      GroupRows group;
      for (int r = 0; r < count; ++r) group.scale[r] = QuantizeGroup(values[r], max[r], group.q[r], group.sum + r);
      write(first, count, g, group);
    }
  }
}

// body(rows, s, begin, end): units [unit_begin, unit_end) of rows of x slice by slice. Slice s has units [begin, end)
// of its own, and the rows are those of its inputs.
template <typename Body>
FDSD_INLINE void ForEachSlice(const XRows& rows, const Slices& slices, int32_t unit_begin, int32_t unit_end,
                              Body&& body) {
  for (int32_t s = 0; s < slices.count; ++s) {
    const int32_t first = slices.units[s];
    const int32_t begin = std::max(unit_begin, first);
    const int32_t end = std::min(unit_end, slices.units[s + 1]);
    if (begin >= end) continue;
    XRows slice = rows;
    slice.in_features = slices.inputs[s + 1] - slices.inputs[s];
    slice.x = static_cast<const char*>(rows.x) + int64_t{slices.inputs[s]} * ElementBytes(rows.dtype);
    body(slice, s, begin - first, end - first);
  }
}

}  // namespace FDSD_ISA
}  // namespace fdsd
