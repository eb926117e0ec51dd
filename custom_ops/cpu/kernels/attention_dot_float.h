#pragma once
// Attention over a float32 or bfloat16 cache. bfloat16 scores and values are dot products of pairs, summed in float32.
// Softmax weights are rounded to bfloat16 for that. Their total is taken after the rounding, so that weights still sum
// to one: a constant column of V comes out exactly.
#include "attention_dot.h"

namespace fdsd {
namespace FDSD_ISA {

template <>
struct KvDot<float> {
  using Query = float;
  using Weight = float;
  using Packs = F32x16;
  using Sum = F32x16;
  static constexpr bool kPreparesQuery = false;
  static constexpr bool kSkipsHidden = true;

  FDSD_INLINE static QueryVector<Query> PrepareQuery(const Query* q, int, float factor, Query*) {
    return {q, factor, 0};
  }
  FDSD_INLINE static Packs LoadPacks(const float* p) { return Load(p); }
  FDSD_INLINE static Packs LoadSome(const float* p, int, int) { return Load(p); }
  FDSD_INLINE static Sum Dot(const float* x, const Packs& packs, const Sum& sum) { return Fma(Set1(*x), packs, sum); }
  FDSD_INLINE static Sum StartScore(const QueryVector<Query>&) { return Set1(0.0f); }
  FDSD_INLINE static F32x16 FinishScore(const Sum& sum, const QueryVector<Query>& q, const float*) {
    return Mul(sum, Set1(q.factor));
  }
  FDSD_INLINE static Sum StartValue(const float* y) { return Load(y); }
  FDSD_INLINE static void FinishValue(const Sum& sum, float, float* y) { Store(sum, y); }
  FDSD_INLINE static F32x16 RoundWeights(const F32x16* x, const float* const*, Weight* weights, float*) {
    for (int i = 0; i < kBlockPanels; ++i) Store(x[i], weights + i * kPanelKeys);
    return Add(Add(x[0], x[1]), Add(x[2], x[3]));
  }
};

// Sixteen pairs of bfloat16 and what multiplies them.
#if defined(FDSD_SIMD_AVX512)
using Bf16Pairs = __m512i;
FDSD_INLINE Bf16Pairs MaskedPairs(const bf16* p, uint32_t mask) {
  return _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int>(mask)));
}
FDSD_INLINE F32x16 DotPairs(const bf16* x, const Bf16Pairs& pairs, const F32x16& sum) {
  int32_t pair;
  std::memcpy(&pair, x, sizeof(pair));
  return {_mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)pairs)};
}
// Store 32 weights; `total` and their sum.
FDSD_INLINE F32x16 RoundToPairs(const F32x16& a, const F32x16& b, bf16* weights, const F32x16& total) {
  const __m512bh rounded = _mm512_cvtne2ps_pbh(b.v, a.v);
  _mm512_storeu_si512(weights, (__m512i)rounded);
  return {_mm512_dpbf16_ps(total.v, rounded, (__m512bh)_mm512_set1_epi16(0x3f80))};
}
#else
// Widened to the first and the second elements of the pairs.
struct Bf16Pairs {
  F32x16 first;
  F32x16 second;
};
#if defined(FDSD_SIMD_AVX2)
FDSD_INLINE __m256 FirstOfPairs(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
FDSD_INLINE __m256 SecondOfPairs(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
FDSD_INLINE Bf16Pairs MaskedPairs(const bf16* p, uint32_t mask) {
  const __m256i m = _mm256_set1_epi32(static_cast<int>(mask));
  const __m256i lo = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), m);
  const __m256i hi = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + 1), m);
  return {{FirstOfPairs(lo), FirstOfPairs(hi)}, {SecondOfPairs(lo), SecondOfPairs(hi)}};
}
FDSD_INLINE F32x16 DotPairs(const bf16* x, const Bf16Pairs& pairs, const F32x16& sum) {
  int32_t bits;
  std::memcpy(&bits, x, sizeof(bits));
  const __m256i pair = _mm256_set1_epi32(bits);
  const __m256 first = FirstOfPairs(pair);
  const __m256 second = SecondOfPairs(pair);
  return Fma({second, second}, pairs.second, Fma({first, first}, pairs.first, sum));
}
#else
FDSD_INLINE Bf16Pairs MaskedPairs(const bf16* p, uint32_t mask) {
  Bf16Pairs pairs;
  for (int i = 0; i < kLanes; ++i) {
    pairs.first.v[i] = (mask & 0xffffu) != 0 ? ToFloat(p[2 * i]) : 0.0f;
    pairs.second.v[i] = (mask >> 16) != 0 ? ToFloat(p[2 * i + 1]) : 0.0f;
  }
  return pairs;
}
FDSD_INLINE F32x16 DotPairs(const bf16* x, const Bf16Pairs& pairs, const F32x16& sum) {
  return Fma(Set1(ToFloat(x[1])), pairs.second, Fma(Set1(ToFloat(x[0])), pairs.first, sum));
}
#endif
FDSD_INLINE F32x16 RoundToPairs(const F32x16& a, const F32x16& b, bf16* weights, const F32x16& total) {
  Store(a, weights);
  Store(b, weights + kLanes);
  return Add(total, Add(Load(weights), Load(weights + kLanes)));
}
#endif

template <>
struct KvDot<bf16> {
  using Query = bf16;
  using Weight = bf16;
  using Packs = Bf16Pairs;
  using Sum = F32x16;
  static constexpr bool kPreparesQuery = false;
  static constexpr bool kSkipsHidden = true;

  FDSD_INLINE static QueryVector<Query> PrepareQuery(const Query* q, int, float factor, Query*) {
    return {q, factor, 0};
  }
  FDSD_INLINE static Packs LoadPacks(const bf16* p) { return MaskedPairs(p, ~0u); }  // compilers drop the mask
  FDSD_INLINE static Packs LoadSome(const bf16* p, int begin, int end) {
    return MaskedPairs(p, (begin <= 0 ? 0xffffu : 0u) | (end >= 2 ? 0xffff0000u : 0u));
  }
  FDSD_INLINE static Sum Dot(const bf16* x, const Packs& packs, const Sum& sum) { return DotPairs(x, packs, sum); }
  FDSD_INLINE static Sum StartScore(const QueryVector<Query>&) { return Set1(0.0f); }
  FDSD_INLINE static F32x16 FinishScore(const Sum& sum, const QueryVector<Query>& q, const float*) {
    return Mul(sum, Set1(q.factor));
  }
  FDSD_INLINE static Sum StartValue(const float* y) { return Load(y); }
  FDSD_INLINE static void FinishValue(const Sum& sum, float, float* y) { Store(sum, y); }
  FDSD_INLINE static F32x16 RoundWeights(const F32x16* x, const float* const*, Weight* weights, float*) {
    return RoundToPairs(x[2], x[3], weights + 2 * kPanelKeys, RoundToPairs(x[0], x[1], weights, Set1(0.0f)));
  }
};

}  // namespace FDSD_ISA
}  // namespace fdsd
