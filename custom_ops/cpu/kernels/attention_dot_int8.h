#pragma once
// Attention over an int8 cache. Scores and values are integer dot products of four bytes: query vectors are quantised
// like keys, and the softmax weights of 64 keys, times the scales of their values, to 0..254 with one factor. Sums of
// integers are exact, so that neither their order nor the instruction set shows in them.
#include "attention_dot.h"
#include "attention_quantize.h"
#include "attention_softmax.h"

namespace fdsd {
namespace FDSD_ISA {

// One below what a byte holds: a weight takes up to half a unit from its neighbours, see RoundWeights.
constexpr float kMaxWeight = 254.0f;
// Products that are all below this are taken for zero: 254 over them would leave float's range. A row's largest weight
// is 1, and no scale but 0 is below 1e-32, so that this says nothing about the keys that matter.
constexpr float kTinyWeight = 1e-36f;

#if defined(FDSD_SIMD_AVX512)

using Int8Query = int8_t;
using Int8Weight = uint8_t;
using Int8Packs = __m512i;
struct I32x16 {
  __v16si v;  // not __m512i, of which compilers spill arrays
};
// The dot product wants one factor unsigned: keys are moved up by 128, and every score by as much times its query's
// sum.
constexpr int32_t kKeyShift = 128;
constexpr int kPackOrder[] = {0, 1, 2, 3};

FDSD_INLINE I32x16 Set1Int(int32_t x) { return {(__v16si)_mm512_set1_epi32(x)}; }
FDSD_INLINE F32x16 ToFloat(const I32x16& a) { return {_mm512_cvtepi32_ps((__m512i)a.v)}; }
FDSD_INLINE Int8Packs LoadInt8Packs(const int8_t* p) { return _mm512_loadu_si512(p); }
template <typename Byte>
FDSD_INLINE __m512i BroadcastPack(const Byte* x) {
  int32_t pack;
  std::memcpy(&pack, x, sizeof(pack));
  return _mm512_set1_epi32(pack);
}
FDSD_INLINE I32x16 DotPacks(const Int8Query* q, const Int8Packs& keys, const I32x16& sum) {
  const __m512i shifted = _mm512_xor_si512(keys, _mm512_set1_epi8(static_cast<char>(kKeyShift)));
  return {(__v16si)_mm512_dpbusd_epi32((__m512i)sum.v, shifted, BroadcastPack(q))};
}
FDSD_INLINE I32x16 DotPacks(const Int8Weight* weights, const Int8Packs& values, const I32x16& sum) {
  return {(__v16si)_mm512_dpbusd_epi32((__m512i)sum.v, BroadcastPack(weights), values)};
}
// Sixteen integral numbers in 0..255.
FDSD_INLINE void StoreWeights(const F32x16& integral, Int8Weight* y) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(y), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(integral.v)));
}
// weights * scales, 0 where a weight is 0, whatever the scale is there.
FDSD_INLINE F32x16 ScaleWeights(const F32x16& weights, const float* scales) {
  const __mmask16 is_seen = _mm512_cmp_ps_mask(weights.v, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  return {_mm512_maskz_mul_ps(is_seen, weights.v, _mm512_loadu_ps(scales))};
}

#elif defined(FDSD_SIMD_AVX2)

// Two products of bytes can leave the 16 bits in which vpmaddubsw adds them, so that bytes are widened here. The
// elements 0 and 2 of a pack come first, then 1 and 3, which is how shifts widen the packs of the cache.
using Int8Query = int16_t;
using Int8Weight = int16_t;
struct Int8Packs {
  __m256i even_lo, even_hi, odd_lo, odd_hi;
};
struct I32x16 {
  __m256i lo, hi;
};
constexpr int32_t kKeyShift = 0;
constexpr int kPackOrder[] = {0, 2, 1, 3};

FDSD_INLINE I32x16 Set1Int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
FDSD_INLINE F32x16 ToFloat(const I32x16& a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
FDSD_INLINE __m256i EvenBytes(__m256i x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }
FDSD_INLINE __m256i OddBytes(__m256i x) { return _mm256_srai_epi16(x, 8); }
FDSD_INLINE Int8Packs LoadInt8Packs(const int8_t* p) {
  const __m256i lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i hi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + 1);
  return {EvenBytes(lo), EvenBytes(hi), OddBytes(lo), OddBytes(hi)};
}
FDSD_INLINE __m256i BroadcastPair(const int16_t* x) {
  int32_t pair;
  std::memcpy(&pair, x, sizeof(pair));
  return _mm256_set1_epi32(pair);
}
FDSD_INLINE I32x16 DotPacks(const int16_t* x, const Int8Packs& packs, const I32x16& sum) {
  const __m256i even = BroadcastPair(x);
  const __m256i odd = BroadcastPair(x + 2);
  const __m256i lo = _mm256_add_epi32(sum.lo, _mm256_madd_epi16(even, packs.even_lo));
  const __m256i hi = _mm256_add_epi32(sum.hi, _mm256_madd_epi16(even, packs.even_hi));
  return {_mm256_add_epi32(lo, _mm256_madd_epi16(odd, packs.odd_lo)),
          _mm256_add_epi32(hi, _mm256_madd_epi16(odd, packs.odd_hi))};
}
FDSD_INLINE void StoreWeights(const F32x16& integral, Int8Weight* y) {
  const __m256i crossed = _mm256_packs_epi32(_mm256_cvtps_epi32(integral.lo), _mm256_cvtps_epi32(integral.hi));
  const __m256i in_order = _mm256_permute4x64_epi64(crossed, _MM_SHUFFLE(3, 1, 2, 0));
  constexpr int kEvenFirst = _MM_SHUFFLE(3, 1, 2, 0);
  const __m256i packs = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(in_order, kEvenFirst), kEvenFirst);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), packs);
}
FDSD_INLINE __m256 ScaleWeightsHalf(__m256 weights, const float* scales) {
  const __m256 is_seen = _mm256_cmp_ps(weights, _mm256_setzero_ps(), _CMP_NEQ_UQ);
  return _mm256_and_ps(is_seen, _mm256_mul_ps(weights, _mm256_loadu_ps(scales)));
}
FDSD_INLINE F32x16 ScaleWeights(const F32x16& weights, const float* scales) {
  return {ScaleWeightsHalf(weights.lo, scales), ScaleWeightsHalf(weights.hi, scales + kLanes / 2)};
}

#else

using Int8Query = int16_t;
using Int8Weight = int16_t;
struct Int8Packs {
  const int8_t* bytes;
};
struct I32x16 {
  int32_t v[kLanes];
};
constexpr int32_t kKeyShift = 0;
constexpr int kPackOrder[] = {0, 1, 2, 3};

FDSD_INLINE I32x16 Set1Int(int32_t x) {
  I32x16 y;
  for (int i = 0; i < kLanes; ++i) y.v[i] = x;
  return y;
}
FDSD_INLINE F32x16 ToFloat(const I32x16& a) {
  F32x16 y;
  for (int i = 0; i < kLanes; ++i) y.v[i] = static_cast<float>(a.v[i]);
  return y;
}
FDSD_INLINE Int8Packs LoadInt8Packs(const int8_t* p) { return {p}; }
FDSD_INLINE I32x16 DotPacks(const int16_t* x, const Int8Packs& packs, I32x16 sum) {
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kPackSize<int8_t>; ++j) sum.v[i] += x[j] * packs.bytes[i * kPackSize<int8_t> + j];
  return sum;
}
FDSD_INLINE void StoreWeights(const F32x16& integral, Int8Weight* y) {
  for (int i = 0; i < kLanes; ++i) y[i] = std::isnan(integral.v[i]) ? 0 : static_cast<int16_t>(integral.v[i]);
}
FDSD_INLINE F32x16 ScaleWeights(const F32x16& weights, const float* scales) {
  F32x16 y;
  for (int i = 0; i < kLanes; ++i) y.v[i] = weights.v[i] == 0.0f ? 0.0f : weights.v[i] * scales[i];
  return y;
}

#endif

template <>
struct KvDot<int8_t> {
  using Query = Int8Query;
  using Weight = Int8Weight;
  using Packs = Int8Packs;
  using Sum = I32x16;
  static constexpr bool kPreparesQuery = true;
  static constexpr bool kSkipsHidden = false;

  template <typename Activation>
  FDSD_INLINE static QueryVector<Query> PrepareQuery(const Activation* q, int head_dim, float factor, Query* prepared) {
    alignas(64) float head[kMaxHeadDim];
    alignas(64) int8_t integers[kMaxHeadDim];
    for (int d = 0; d < head_dim; d += kLanes) Store(Load(q + d), head + d);
    const float scale = QuantizeVector(head, head_dim, integers);
    int32_t total = 0;
    for (int d = 0; d < head_dim; ++d) total += integers[d];
    for (int d = 0; d < head_dim; d += kPackSize<int8_t>)
      for (int i = 0; i < kPackSize<int8_t>; ++i) prepared[d + i] = integers[d + kPackOrder[i]];
    return {prepared, scale * factor, kKeyShift * total};
  }
  FDSD_INLINE static Packs LoadPacks(const int8_t* p) { return LoadInt8Packs(p); }
  template <typename Element>
  FDSD_INLINE static Sum Dot(const Element* x, const Packs& packs, const Sum& sum) {
    return DotPacks(x, packs, sum);
  }
  FDSD_INLINE static Sum StartScore(const QueryVector<Query>& q) { return Set1Int(-q.offset); }
  FDSD_INLINE static F32x16 FinishScore(const Sum& sum, const QueryVector<Query>& q, const float* k_scale) {
    return Mul(ToFloat(sum), Mul(Load(k_scale), Set1(q.factor)));
  }
  FDSD_INLINE static Sum StartValue(const float*) { return Set1Int(0); }
  FDSD_INLINE static void FinishValue(const Sum& sum, float factor, float* y) {
    Store(Fma(ToFloat(sum), Set1(factor), Load(y)), y);
  }

  // The rounding error of a key goes to the key 16 further on. Many weights far below the largest one then do not all
  // become 0, which would take their share from the output: the total of the weights is the one before the rounding.
  FDSD_INLINE static F32x16 RoundWeights(const F32x16* x, const float* const* v_scale, Weight* weights, float* factor) {
    F32x16 scaled[kBlockPanels];
    for (int i = 0; i < kBlockPanels; ++i) scaled[i] = ScaleWeights(x[i], v_scale[i]);
    const float max = MaxLane(Max(Max(scaled[0], scaled[1]), Max(scaled[2], scaled[3])));
    const F32x16 inverse = Set1(max >= kTinyWeight ? kMaxWeight / max : 0.0f);
    F32x16 error = Set1(0.0f);
    for (int i = 0; i < kBlockPanels; ++i) {
      const F32x16 wanted = Fma(scaled[i], inverse, error);
      const F32x16 rounded = RoundNearest(wanted);
      error = Sub(wanted, rounded);
      StoreWeights(rounded, weights + i * kPanelKeys);
    }
    *factor = max / kMaxWeight;
    // An error is NaN after a weight or a scale that is, which integers do not carry on.
    return Add(Add(Add(x[0], x[1]), Add(x[2], x[3])), Mul(error, Set1(0.0f)));
  }
};

}  // namespace FDSD_ISA
}  // namespace fdsd
