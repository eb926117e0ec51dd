#pragma once
// The running softmax of attention: partial results over some keys of a row, brought to a common base and merged.
//
// Scores are in units of log 2: the query's factor contains log2(e), so that e^x is 2^x here.
#include "attention_dot.h"
#include "simd_select.h"

namespace fdsd {
namespace FDSD_ISA {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;

// 2^r for |r| <= 1/2 with 2^0 = 1 exactly: the minimax polynomial, by Lawson's iteration. Relative error 1e-7.
FDSD_INLINE F32x16 Exp2Fraction(F32x16 r) {
  F32x16 y = Fma(Set1(0.00132647273f), r, Set1(0.00967151299f));
  y = Fma(y, r, Set1(0.0555073358f));
  y = Fma(y, r, Set1(0.240222424f));
  y = Fma(y, r, Set1(0.693147004f));
  return Fma(y, r, Set1(1.0f));
}

// 2^x for x <= 0: exactly 0 for -infinity, and NaN for NaN.
FDSD_INLINE F32x16 Exp2(F32x16 x) {
  // Max returns the second operand where one is NaN. 2^-160 is 0, and where Exp2Int is used so is its 2^-127.
#if defined(FDSD_SIMD_AVX512)
  const F32x16 clamped = Max(Set1(-160.0f), x);
#else
  const F32x16 clamped = Max(Set1(-127.0f), x);
#endif
  const F32x16 n = RoundNearest(clamped);
  const F32x16 y = Exp2Fraction(Sub(clamped, n));
#if defined(FDSD_SIMD_AVX512)
  return {_mm512_scalef_ps(y.v, n.v)};
#elif defined(FDSD_SIMD_AVX2)
  return Mul(y, Exp2Int(n));
#else
  F32x16 z = Mul(y, Exp2Int(n));
  for (int i = 0; i < kLanes; ++i)
    if (n.v[i] <= -127.0f) z.v[i] = 0.0f;
  return z;
#endif
}

#if defined(FDSD_SIMD_AVX512)
FDSD_INLINE float FirstLane(F32x16 a) { return _mm512_cvtss_f32(a.v); }
#elif defined(FDSD_SIMD_AVX2)
FDSD_INLINE float FirstLane(F32x16 a) { return _mm256_cvtss_f32(a.lo); }
#else
FDSD_INLINE float FirstLane(F32x16 a) { return a.v[0]; }
#endif

// Partial result of one query vector over some keys: sums[head_dim] = sum of 2^(score - max) * value, then weight, the
// sum of 2^(score - max), then max. In float32, one after another in memory.
struct Partial {
  float* sums;
  float* weight;
  float* max;
};
constexpr int64_t PartialSize(int head_dim) { return head_dim + kLanes; }
FDSD_INLINE Partial PartialAt(float* base, int64_t index, int head_dim) {
  float* start = base + index * PartialSize(head_dim);
  return {start, start + head_dim, start + head_dim + 1};
}

// total = total and then `next`, by log-sum-exp.
FDSD_INLINE void Merge(const Partial& next, int head_dim, const Partial& total) {
  const float max = std::max(*total.max, *next.max);
  const F32x16 scale = Exp2(Set1(*total.max - max));
  const F32x16 next_scale = Exp2(Set1(*next.max - max));
  for (int d = 0; d < head_dim; d += kLanes) {
    Store(Fma(Load(next.sums + d), next_scale, Mul(Load(total.sums + d), scale)), total.sums + d);
  }
  *total.weight = *next.weight * FirstLane(next_scale) + *total.weight * FirstLane(scale);
  *total.max = max;
}

// total = total and then a key of value 0 with this score, which is the last of a row.
FDSD_INLINE void MergeSink(float score, int head_dim, const Partial& total) {
  const float max = std::max(*total.max, score);
  const F32x16 scale = Exp2(Set1(*total.max - max));
  for (int d = 0; d < head_dim; d += kLanes) Store(Mul(Load(total.sums + d), scale), total.sums + d);
  *total.weight = *total.weight * FirstLane(scale) + FirstLane(Exp2(Set1(score - max)));
  *total.max = max;
}

// Scores s become c tanh(s / c) = c - 2c / (1 + e^(2s / c)), for a softcap of c log2(e) in their units: those of the
// panels with keys that are seen.
FDSD_INLINE void CapScores(float softcap, KeyRange seen, float* scores) {
  const float cap = softcap * kLog2E;
  for (int key = seen.begin / kPanelKeys * kPanelKeys; key < seen.end; key += kPanelKeys) {
    const F32x16 e = Exp(Mul(Load(scores + key), Set1(2.0f / cap)));
    Store(Sub(Set1(cap), Div(Set1(2.0f * cap), Add(e, Set1(1.0f)))), scores + key);
  }
}

// Largest of a vector's scores of a partition's keys, of which it sees `seen`; the others become -infinity. Written are
// whole blocks of 64 keys, as far as the vector sees one of them.
FDSD_INLINE float LargestScore(KeyRange seen, float* scores) {
  // Scores before hold nothing; those after belong to later positions or to none. Both may be anything.
  for (int key = 0; key < seen.begin; ++key) scores[key] = kMinusInfinity;
  const int end = (seen.end + kBlockKeys - 1) / kBlockKeys * kBlockKeys;
  for (int key = seen.end; key < end; ++key) scores[key] = kMinusInfinity;
  F32x16 max[kBlockPanels];
  for (int i = 0; i < kBlockPanels; ++i) max[i] = Load(scores + i * kPanelKeys);
  for (int key = kBlockKeys; key < end; key += kBlockKeys)
    for (int i = 0; i < kBlockPanels; ++i) max[i] = Max(max[i], Load(scores + key + i * kPanelKeys));
  return MaxLane(Max(Max(max[0], max[1]), Max(max[2], max[3])));
}

// Turn 64 scores into weights relative to `max`. Returns 16 lanes whose total is the weight of the keys.
template <typename T>
FDSD_INLINE F32x16 Weigh(float max, const float* const* v_scale, const float* scores,
                         typename KvDot<T>::Weight* weights, float* factor) {
  F32x16 x[kBlockPanels];
  for (int i = 0; i < kBlockPanels; ++i) x[i] = Exp2(Sub(Load(scores + i * kPanelKeys), Set1(max)));
  return KvDot<T>::RoundWeights(x, v_scale, weights, factor);
}

}  // namespace FDSD_ISA
}  // namespace fdsd
