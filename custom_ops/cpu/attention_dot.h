#pragma once
// The two products of attention on register tiles: scores of query vectors with 64 keys, and weights with their values.
//
// Each score is one chain of additions over the head dimension and each output element one chain over the keys, in
// order, whatever the size of the register tile: instruction-level parallelism comes from neighbouring vectors and
// keys.
#include "attention_layout.h"
#include "attention_plan.h"
#include "simd.h"

namespace fdsd {
namespace FDSD_ISA {

constexpr int kPanelKeys = kLanes;  // keys of one vector load of K
constexpr int kBlockPanels = 4;
constexpr int kBlockKeys = kBlockPanels * kPanelKeys;  // keys that share one step of the running softmax
static_assert(kPartitionKeys % kBlockKeys == 0);

// Query vectors of a register tile, and what beside them fills the registers: 32 of 64 bytes, or 16 of 32.
#if defined(FDSD_SIMD_AVX512)
constexpr int kTileVectors = 6;
constexpr int ScorePanels(int) { return 4; }
constexpr int ValueLanes(int vectors) { return vectors <= 3 ? 8 : 4; }
#else
constexpr int kTileVectors = 4;
constexpr int ScorePanels(int vectors) { return vectors == 1 ? 4 : vectors == 2 ? 2 : 1; }
constexpr int ValueLanes(int vectors) { return vectors == 1 ? 4 : vectors == 2 ? 2 : 1; }
#endif

// The 64 keys and values from one absolute position on; a panel lies within one block of the cache.
template <typename T>
struct KvBlock {
  const T* k[kBlockPanels];
  const T* v[kBlockPanels];
  const T* next_k[kBlockPanels];  // fetched meanwhile, or nobody would ask memory for anything during the arithmetic
  const T* next_v[kBlockPanels];
  int64_t k_stride;  // elements between the pairs of a key
  int head_dim;
};

FDSD_INLINE void Prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// acc + the products of one query pair (float32: one element) with that of 16 keys.
FDSD_INLINE F32x16 DotPair(const float* q, const float* k, F32x16 acc) { return Fma(Set1(*q), Load(k), acc); }

#if defined(FDSD_SIMD_AVX512)
FDSD_INLINE F32x16 DotPair(const bf16* q, const bf16* k, F32x16 acc) {
  int32_t pair;
  std::memcpy(&pair, q, sizeof(pair));
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)_mm512_loadu_si512(k))};
}
#elif defined(FDSD_SIMD_AVX2)
// The first and second elements of eight pairs, as floats.
FDSD_INLINE __m256 FirstOfPairs(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
FDSD_INLINE __m256 SecondOfPairs(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
FDSD_INLINE __m256 DotPairHalf(__m256i q, const bf16* k, __m256 acc) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(k));
  acc = _mm256_fmadd_ps(FirstOfPairs(q), FirstOfPairs(pairs), acc);
  return _mm256_fmadd_ps(SecondOfPairs(q), SecondOfPairs(pairs), acc);
}
FDSD_INLINE F32x16 DotPair(const bf16* q, const bf16* k, F32x16 acc) {
  int32_t pair;
  std::memcpy(&pair, q, sizeof(pair));
  const __m256i q8 = _mm256_set1_epi32(pair);
  return {DotPairHalf(q8, k, acc.lo), DotPairHalf(q8, k + kLanes, acc.hi)};
}
#else
FDSD_INLINE F32x16 DotPair(const bf16* q, const bf16* k, F32x16 acc) {
  const float q0 = ToFloat(q[0]);
  const float q1 = ToFloat(q[1]);
  for (int i = 0; i < kLanes; ++i) {
    acc.v[i] += q0 * ToFloat(k[2 * i]);
    acc.v[i] += q1 * ToFloat(k[2 * i + 1]);
  }
  return acc;
}
#endif

// scores[v][64] = scale * q[v] . keys for kVectors query vectors.
template <typename T, int kVectors>
void ScoreTile(const T* const* q, const KvBlock<T>& block, float scale, float* scores) {
  constexpr int kPanels = ScorePanels(kVectors);
  for (int first = 0; first < kBlockPanels; first += kPanels) {
    F32x16 acc[kVectors][kPanels];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 8
      for (int i = 0; i < kPanels; ++i) acc[v][i] = Set1(0.0f);
    for (int d = 0; d < block.head_dim; d += kPairSize<T>) {
      const int64_t offset = d / kPairSize<T> * block.k_stride;
#pragma GCC unroll 8
      for (int i = 0; i < kPanels; ++i) Prefetch(block.next_k[first + i] + offset);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 8
        for (int i = 0; i < kPanels; ++i) acc[v][i] = DotPair(q[v] + d, block.k[first + i] + offset, acc[v][i]);
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 8
      for (int i = 0; i < kPanels; ++i)
        Store(Mul(acc[v][i], Set1(scale)), scores + v * kBlockKeys + (first + i) * kPanelKeys);
  }
}

// acc[v][d..] += weights[v][key] * values[key][d..] for keys [begin, end), kLanes * kWidth elements at a time, then the
// rest in narrower steps.
template <typename T, int kVectors, int kWidth>
FDSD_INLINE void ValueColumns(const float* weights, const KvBlock<T>& block, int begin, int end, int64_t acc_stride,
                              float* acc, int d) {
  for (; d + kWidth * kLanes <= block.head_dim; d += kWidth * kLanes) {
    F32x16 sum[kVectors][kWidth];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 8
      for (int i = 0; i < kWidth; ++i) sum[v][i] = Load(acc + v * acc_stride + d + i * kLanes);
    for (int key = begin; key < end; ++key) {
      const int offset = key % kPanelKeys * block.head_dim + d;
      const T* value = block.v[key / kPanelKeys] + offset;
      const T* next = block.next_v[key / kPanelKeys] + offset;
#pragma GCC unroll 8
      for (int i = 0; i < kWidth; ++i) {
        if (i * kLanes * sizeof(T) % 64 == 0) Prefetch(next + i * kLanes);
        const F32x16 x = Load(value + i * kLanes);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sum[v][i] = Fma(Set1(weights[v * kBlockKeys + key]), x, sum[v][i]);
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 8
      for (int i = 0; i < kWidth; ++i) Store(sum[v][i], acc + v * acc_stride + d + i * kLanes);
  }
  if constexpr (kWidth > 1) ValueColumns<T, kVectors, kWidth / 2>(weights, block, begin, end, acc_stride, acc, d);
}

// The same for `num_vectors` query vectors in 1..kVectors.
template <typename T, int kVectors = kTileVectors>
void Scores(int num_vectors, const T* const* q, const KvBlock<T>& block, float scale, float* scores) {
  if (num_vectors == kVectors) {
    ScoreTile<T, kVectors>(q, block, scale, scores);
  } else if constexpr (kVectors > 1) {
    Scores<T, kVectors - 1>(num_vectors, q, block, scale, scores);
  }
}

template <typename T, int kVectors>
void ValueTile(const float* weights, const KvBlock<T>& block, int begin, int end, int64_t acc_stride, float* acc) {
  ValueColumns<T, kVectors, ValueLanes(kVectors)>(weights, block, begin, end, acc_stride, acc, 0);
}

template <typename T, int kVectors = kTileVectors>
void AddValues(int num_vectors, const float* weights, const KvBlock<T>& block, int begin, int end, int64_t acc_stride,
               float* acc) {
  if (num_vectors == kVectors) {
    ValueTile<T, kVectors>(weights, block, begin, end, acc_stride, acc);
  } else if constexpr (kVectors > 1) {
    AddValues<T, kVectors - 1>(num_vectors, weights, block, begin, end, acc_stride, acc);
  }
}

}  // namespace FDSD_ISA
}  // namespace fdsd
