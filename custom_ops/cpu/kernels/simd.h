#pragma once
// Sixteen float lanes on every instruction-set level. Kernel files are compiled once per level with FDSD_ISA set to
// scalar, avx2 or avx512 and put their code into that namespace; the same source then uses 1x512, 2x256 or plain
// floats. Lane counts and reduction trees are the same everywhere, and contraction is off: a*b+c is fused only where
// Fma says so.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "fdsd/status.h"

#if defined(__AVX512F__)
#define FDSD_SIMD_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__)
#define FDSD_SIMD_AVX2 1
#include <immintrin.h>
#endif

#define FDSD_INLINE inline __attribute__((always_inline))

namespace fdsd {
namespace FDSD_ISA {

FDSD_INLINE float ToFloat(float x) { return x; }
FDSD_INLINE float ToFloat(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Round to nearest, ties to even; NaN stays NaN.
FDSD_INLINE bf16 RoundToBf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return bf16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
FDSD_INLINE void FromFloat(float f, float* out) { *out = f; }
FDSD_INLINE void FromFloat(float f, bf16* out) { *out = RoundToBf16(f); }

constexpr int kLanes = 16;

#if defined(FDSD_SIMD_AVX512)

struct F32x16 {
  __m512 v;
};
FDSD_INLINE F32x16 Set1(float x) { return {_mm512_set1_ps(x)}; }
FDSD_INLINE F32x16 Load(const float* p) { return {_mm512_loadu_ps(p)}; }
FDSD_INLINE F32x16 Load(const bf16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
FDSD_INLINE F32x16 LoadPartial(const float* p, int n) {
  return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p)};
}
FDSD_INLINE F32x16 LoadPartial(const bf16* p, int n) {
  const __m256i half = _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
FDSD_INLINE void Store(F32x16 a, float* p) { _mm512_storeu_ps(p, a.v); }
FDSD_INLINE __m256i ToBf16Bits(F32x16 a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
}
FDSD_INLINE void Store(F32x16 a, bf16* p) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), ToBf16Bits(a)); }
FDSD_INLINE void StorePartial(F32x16 a, float* p, int n) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), a.v);
}
FDSD_INLINE void StorePartial(F32x16 a, bf16* p, int n) {
  _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << n) - 1), ToBf16Bits(a));
}
FDSD_INLINE F32x16 Add(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
FDSD_INLINE F32x16 Sub(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
FDSD_INLINE F32x16 Mul(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
FDSD_INLINE F32x16 Div(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
FDSD_INLINE F32x16 Max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
FDSD_INLINE F32x16 Min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
FDSD_INLINE F32x16 Fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
FDSD_INLINE F32x16 RoundNearest(F32x16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// 2^n for integral n in [-126, 127].
FDSD_INLINE F32x16 Exp2Int(F32x16 n) {
  const __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}

#elif defined(FDSD_SIMD_AVX2)

struct F32x16 {
  __m256 lo, hi;
};
FDSD_INLINE F32x16 Set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
FDSD_INLINE F32x16 Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
FDSD_INLINE __m256 WidenBf16(__m128i half) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
FDSD_INLINE F32x16 Load(const bf16* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {WidenBf16(_mm_loadu_si128(q)), WidenBf16(_mm_loadu_si128(q + 1))};
}
FDSD_INLINE F32x16 LoadPartial(const float* p, int n) {
  alignas(32) float buffer[kLanes] = {};
  std::memcpy(buffer, p, static_cast<size_t>(n) * sizeof(float));
  return Load(buffer);
}
FDSD_INLINE F32x16 LoadPartial(const bf16* p, int n) {
  alignas(32) bf16 buffer[kLanes] = {};
  std::memcpy(buffer, p, static_cast<size_t>(n) * sizeof(bf16));
  return Load(buffer);
}
FDSD_INLINE void Store(F32x16 a, float* p) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
FDSD_INLINE __m256i Bf16Lanes(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
FDSD_INLINE void Store(F32x16 a, bf16* p) {
  const __m256i packed = _mm256_packus_epi32(Bf16Lanes(a.lo), Bf16Lanes(a.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
template <typename T>
FDSD_INLINE void StorePartial(F32x16 a, T* p, int n) {
  alignas(32) T buffer[kLanes];
  Store(a, buffer);
  std::memcpy(p, buffer, static_cast<size_t>(n) * sizeof(T));
}
#define FDSD_LANEWISE(Name, op) \
  FDSD_INLINE F32x16 Name(F32x16 a, F32x16 b) { return {op(a.lo, b.lo), op(a.hi, b.hi)}; }
FDSD_LANEWISE(Add, _mm256_add_ps)
FDSD_LANEWISE(Sub, _mm256_sub_ps)
FDSD_LANEWISE(Mul, _mm256_mul_ps)
FDSD_LANEWISE(Div, _mm256_div_ps)
FDSD_LANEWISE(Max, _mm256_max_ps)
FDSD_LANEWISE(Min, _mm256_min_ps)
#undef FDSD_LANEWISE
FDSD_INLINE F32x16 Fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
FDSD_INLINE F32x16 RoundNearest(F32x16 a) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, kMode), _mm256_round_ps(a.hi, kMode)};
}
FDSD_INLINE __m256 Exp2IntHalf(__m256 n) {
  const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
FDSD_INLINE F32x16 Exp2Int(F32x16 n) { return {Exp2IntHalf(n.lo), Exp2IntHalf(n.hi)}; }

#else

struct F32x16 {
  float v[kLanes];
};
#define FDSD_EACH(expr)                             \
  F32x16 r;                                         \
  for (int i = 0; i < kLanes; ++i) r.v[i] = (expr); \
  return r
FDSD_INLINE F32x16 Set1(float x) { FDSD_EACH(x); }
template <typename T>
FDSD_INLINE F32x16 Load(const T* p) {
  FDSD_EACH(ToFloat(p[i]));
}
template <typename T>
FDSD_INLINE F32x16 LoadPartial(const T* p, int n) {
  FDSD_EACH(i < n ? ToFloat(p[i]) : 0.0f);
}
template <typename T>
FDSD_INLINE void StorePartial(F32x16 a, T* p, int n) {
  for (int i = 0; i < n; ++i) FromFloat(a.v[i], p + i);
}
template <typename T>
FDSD_INLINE void Store(F32x16 a, T* p) {
  StorePartial(a, p, kLanes);
}
FDSD_INLINE F32x16 Add(F32x16 a, F32x16 b) { FDSD_EACH(a.v[i] + b.v[i]); }
FDSD_INLINE F32x16 Sub(F32x16 a, F32x16 b) { FDSD_EACH(a.v[i] - b.v[i]); }
FDSD_INLINE F32x16 Mul(F32x16 a, F32x16 b) { FDSD_EACH(a.v[i] * b.v[i]); }
FDSD_INLINE F32x16 Div(F32x16 a, F32x16 b) { FDSD_EACH(a.v[i] / b.v[i]); }
// Like the vector instructions: the second operand where either is NaN.
FDSD_INLINE F32x16 Max(F32x16 a, F32x16 b) { FDSD_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
FDSD_INLINE F32x16 Min(F32x16 a, F32x16 b) { FDSD_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
FDSD_INLINE F32x16 Fma(F32x16 a, F32x16 b, F32x16 c) { FDSD_EACH(a.v[i] * b.v[i] + c.v[i]); }
FDSD_INLINE F32x16 RoundNearest(F32x16 a) { FDSD_EACH(std::nearbyintf(a.v[i])); }
FDSD_INLINE F32x16 Exp2Int(F32x16 n) {
  FDSD_EACH(std::isnan(n.v[i]) ? n.v[i] : std::ldexp(1.0f, static_cast<int>(n.v[i])));
}
#undef FDSD_EACH

#endif

// Fixed tree: lanes 8 apart, then 4, 2, 1.
#if defined(FDSD_SIMD_AVX512) || defined(FDSD_SIMD_AVX2)
FDSD_INLINE float ReduceAdd(F32x16 a) {
#if defined(FDSD_SIMD_AVX512)
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
#else
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#else
FDSD_INLINE float ReduceAdd(F32x16 a) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
  return a.v[0];
}
#endif
FDSD_INLINE float ReduceMax(F32x16 a) {
  alignas(64) float v[kLanes];
  Store(a, v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) v[i] = std::max(v[i], v[i + half]);
  return v[0];
}

// e^x, relative error below 2e-7 for x in [-87, 88]; smaller x (also -inf) gives 0, larger is clamped to 88, NaN stays.
// Range reduction to |r| <= ln2/2, then the Taylor polynomial of degree 7.
FDSD_INLINE F32x16 Exp(F32x16 x) {
  // Max and Min return the second operand where one is NaN.
  const F32x16 clamped = Min(Set1(88.0f), Max(Set1(-87.0f), x));
  const F32x16 n = RoundNearest(Mul(clamped, Set1(1.44269504f)));
  F32x16 r = Fma(n, Set1(-0.693359375f), clamped);
  r = Fma(n, Set1(2.12194440e-4f), r);
  F32x16 y = Set1(1.0f / 5040);
  y = Fma(y, r, Set1(1.0f / 720));
  y = Fma(y, r, Set1(1.0f / 120));
  y = Fma(y, r, Set1(1.0f / 24));
  y = Fma(y, r, Set1(1.0f / 6));
  y = Fma(y, r, Set1(0.5f));
  y = Fma(y, r, Set1(1.0f));
  y = Fma(y, r, Set1(1.0f));
  y = Mul(y, Exp2Int(n));
#if defined(FDSD_SIMD_AVX512)
  const __mmask16 keep = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
  return {_mm512_maskz_mov_ps(keep, y.v)};
#elif defined(FDSD_SIMD_AVX2)
  const __m256 low = _mm256_set1_ps(-87.0f);
  return {_mm256_and_ps(_mm256_cmp_ps(x.lo, low, _CMP_NLT_UQ), y.lo),
          _mm256_and_ps(_mm256_cmp_ps(x.hi, low, _CMP_NLT_UQ), y.hi)};
#else
  for (int i = 0; i < kLanes; ++i)
    if (x.v[i] < -87.0f) y.v[i] = 0.0f;
  return y;
#endif
}

}  // namespace FDSD_ISA
}  // namespace fdsd
