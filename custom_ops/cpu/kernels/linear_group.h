#pragma once
// Groups of 128 inputs of rows of x: read and quantised.
#include "linear_quantize.h"

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

}  // namespace FDSD_ISA
}  // namespace fdsd
