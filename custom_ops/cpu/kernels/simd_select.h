#pragma once
// Comparing sixteen lanes with a bound, and keeping some of them. A mask has bit i set for lane i.
#include "simd.h"

namespace fdsd {
namespace FDSD_ISA {

// Which tokens at a bound count: those that equal it too, or only those above it.
enum class Bound { kInclusive, kExclusive };

#if defined(FDSD_SIMD_AVX512)

template <Bound kBound>
FDSD_INLINE uint32_t MaskFrom(F32x16 a, F32x16 bound) {
  return _mm512_cmp_ps_mask(a.v, bound.v, kBound == Bound::kInclusive ? _CMP_GE_OQ : _CMP_GT_OQ);
}
FDSD_INLINE uint32_t MaskEqual(F32x16 a, F32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }

// Write the lanes of the mask to p, in order; up to 16 floats are overwritten. Returns how many lanes there are.
FDSD_INLINE int StoreLanes(F32x16 a, uint32_t mask, float* p) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), a.v));
  return __builtin_popcount(mask);
}

// The lanes of the mask, and `other` in all others.
FDSD_INLINE F32x16 KeepLanes(F32x16 a, uint32_t mask, float other) {
  return {_mm512_mask_mov_ps(_mm512_set1_ps(other), static_cast<__mmask16>(mask), a.v)};
}

// y * 2^n in the lanes where x reaches the bound, 0 in the others; n is an integer in [-126, 127] where it does.
template <Bound kBound>
FDSD_INLINE F32x16 ScaleFrom(F32x16 x, F32x16 bound, F32x16 y, F32x16 n) {
  return {_mm512_maskz_scalef_ps(static_cast<__mmask16>(MaskFrom<kBound>(x, bound)), y.v, n.v)};
}

FDSD_INLINE float MaxLane(F32x16 a) { return _mm512_reduce_max_ps(a.v); }

// Integral lanes as integers.
FDSD_INLINE void StoreInts(F32x16 a, int32_t* p) { _mm512_storeu_si512(p, _mm512_cvtps_epi32(a.v)); }

#else

#if defined(FDSD_SIMD_AVX2)
template <int kPredicate>
FDSD_INLINE F32x16 Compare(F32x16 a, F32x16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, kPredicate), _mm256_cmp_ps(a.hi, b.hi, kPredicate)};
}
FDSD_INLINE uint32_t MaskOf(F32x16 lanes) {
  return static_cast<uint32_t>(_mm256_movemask_ps(lanes.lo) | _mm256_movemask_ps(lanes.hi) << 8);
}
template <Bound kBound>
FDSD_INLINE F32x16 LanesFrom(F32x16 a, F32x16 bound) {
  constexpr int kPredicate = kBound == Bound::kInclusive ? _CMP_GE_OQ : _CMP_GT_OQ;
  return Compare<kPredicate>(a, bound);
}
template <Bound kBound>
FDSD_INLINE uint32_t MaskFrom(F32x16 a, F32x16 bound) {
  return MaskOf(LanesFrom<kBound>(a, bound));
}
FDSD_INLINE uint32_t MaskEqual(F32x16 a, F32x16 b) { return MaskOf(Compare<_CMP_EQ_OQ>(a, b)); }

FDSD_INLINE F32x16 KeepLanes(F32x16 a, uint32_t mask, float other) {
  const __m256i low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i high = _mm256_slli_epi32(low, 8);
  const __m256i bits = _mm256_set1_epi32(static_cast<int32_t>(mask));
  const __m256 lo = _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(bits, low), low));
  const __m256 hi = _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(bits, high), high));
  return {_mm256_blendv_ps(_mm256_set1_ps(other), a.lo, lo), _mm256_blendv_ps(_mm256_set1_ps(other), a.hi, hi)};
}

template <Bound kBound>
FDSD_INLINE F32x16 ScaleFrom(F32x16 x, F32x16 bound, F32x16 y, F32x16 n) {
  const F32x16 lanes = LanesFrom<kBound>(x, bound);
  const F32x16 scaled = Mul(y, Exp2Int(n));
  return {_mm256_and_ps(lanes.lo, scaled.lo), _mm256_and_ps(lanes.hi, scaled.hi)};
}

FDSD_INLINE float MaxLane(F32x16 a) {
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

FDSD_INLINE void StoreInts(F32x16 a, int32_t* p) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_cvtps_epi32(a.lo));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), _mm256_cvtps_epi32(a.hi));
}
#else
template <Bound kBound>
FDSD_INLINE uint32_t MaskFrom(F32x16 a, F32x16 bound) {
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) {
    const bool counts = kBound == Bound::kInclusive ? a.v[i] >= bound.v[i] : a.v[i] > bound.v[i];
    mask |= static_cast<uint32_t>(counts) << i;
  }
  return mask;
}
FDSD_INLINE uint32_t MaskEqual(F32x16 a, F32x16 b) {
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= static_cast<uint32_t>(a.v[i] == b.v[i]) << i;
  return mask;
}

FDSD_INLINE F32x16 KeepLanes(F32x16 a, uint32_t mask, float other) {
  for (int i = 0; i < kLanes; ++i) a.v[i] = mask >> i & 1u ? a.v[i] : other;
  return a;
}

// 2^n by its bits: n is no integer where x is under the bound, and may be anything there.
template <Bound kBound>
FDSD_INLINE F32x16 ScaleFrom(F32x16 x, F32x16 bound, F32x16 y, F32x16 n) {
  F32x16 scaled;
  for (int i = 0; i < kLanes; ++i) {
    const bool counts = kBound == Bound::kInclusive ? x.v[i] >= bound.v[i] : x.v[i] > bound.v[i];
    const int32_t bits = (static_cast<int32_t>(counts ? n.v[i] : 0.0f) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    scaled.v[i] = counts ? y.v[i] * power : 0.0f;
  }
  return scaled;
}

FDSD_INLINE float MaxLane(F32x16 a) { return ReduceMax(a); }

FDSD_INLINE void StoreInts(F32x16 a, int32_t* p) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int32_t>(a.v[i]);
}
#endif

FDSD_INLINE int StoreLanes(F32x16 a, uint32_t mask, float* p) {
  alignas(64) float lanes[kLanes];
  Store(a, lanes);
  int count = 0;
  for (; mask != 0; mask &= mask - 1) p[count++] = lanes[__builtin_ctz(mask)];
  return count;
}

#endif

}  // namespace FDSD_ISA
}  // namespace fdsd
