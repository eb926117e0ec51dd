#pragma once
// The two products of attention on register tiles: scores of query vectors with 64 keys, and weights with their values.
//
// Each score is one chain of dot products over the head dimension. Each output element is one chain over the keys, in
// order, whatever the size of the register tile. Instruction-level parallelism comes from neighbouring vectors and
// keys. What depends on the element type of the cache is in KvDot<T>, below and in attention_dot_int8.h.
#include "attention_layout.h"
#include "attention_plan.h"
#include "simd.h"

namespace fdsd {
namespace FDSD_ISA {

constexpr int kPanelKeys = kLanes;  // keys of one vector load of K
constexpr int kBlockPanels = 4;
constexpr int kBlockKeys = kBlockPanels * kPanelKeys;  // keys that share one step of the running softmax
static_assert(kPartitionKeys % kBlockKeys == 0);

// Query vectors of a register tile, which fills the registers with its other operands: 32 of 64 bytes, or 16 of 32. As
// few vectors as kStreamVectors wait for memory only. Their values are read in rows of 8 vectors (a whole head of 128),
// in order.
#if defined(FDSD_SIMD_AVX512)
constexpr int kScoreVectors = 6;
constexpr int kValueVectors = 6;
constexpr int kStreamVectors = 3;
constexpr int ScorePanels(int) { return 4; }
constexpr int ValueLanes(int vectors) { return vectors <= kStreamVectors ? 8 : 4; }
#else
constexpr int kScoreVectors = 4;
constexpr int kValueVectors = 4;
constexpr int kStreamVectors = 1;
constexpr int ScorePanels(int vectors) { return vectors == 1 ? 4 : vectors == 2 ? 2 : 1; }
constexpr int ValueLanes(int vectors) { return vectors == 1 ? 4 : vectors == 2 ? 2 : 1; }
#endif

// The 64 keys and values of one head from one absolute position on; a panel lies within one block of the cache.
template <typename T>
struct KvBlock {
  const T* k[kBlockPanels];
  const T* v[kBlockPanels];
  const float* k_scale[kBlockPanels];  // int8: of the 16 keys of a panel; else nullptr
  const float* v_scale[kBlockPanels];  // likewise
  // The keys or values that are read next. They are fetched during the arithmetic, when memory would otherwise be idle;
  // nullptr: left to the processor's prefetcher.
  const T* next[kBlockPanels];
  int64_t k_stride;  // elements between the packs of a key
  int head_dim;
};

// A query vector in the form its products are computed in.
template <typename Element>
struct QueryVector {
  const Element* elements;  // [head_dim]
  float factor;             // a sum of products times this is a score
  int32_t offset;           // int8: what moving the keys adds to the sum of products
};

// Arithmetic on a cache of element type T. A pack is 4 bytes: neighbouring elements of a key, or the elements of
// neighbouring keys in a column of V. Each specialisation defines:
//
//   Query, Weight   element types of query vectors and of softmax weights
//   Packs           16 packs of the cache, ready to be multiplied
//   Sum             16 running sums of products
//   kPreparesQuery  whether query vectors are converted, or used where they are
//   kSkipsHidden    values of keys that a vector does not see may be infinite or NaN and are left out; otherwise their
//                   weights of 0 do that, and all vectors take all keys of a block
//   PrepareQuery(q, head_dim, factor, prepared)  the QueryVector of q, converted ones at `prepared`
//   LoadPacks(p)                16 packs from memory
//   LoadSome(p, begin, end)     the same with 0 for elements of a pack outside [begin, end); only if kSkipsHidden
//   Dot(x, packs, sum)          sum + products of the pack of Query or Weight elements at `x` with each of 16 packs
//   StartScore(query)           a sum before the first product of a score
//   FinishScore(sum, query, k_scale)  16 scores
//   StartValue(y), FinishValue(sum, factor, y)  16 output elements at `y`, before the first and after the last product
//   RoundWeights(x, v_scale, weights, factor)
//                   store x[64], 0 for hidden keys, as Weights; returns 16 lanes whose total is the weight of the
//                   keys: the sum of what their values are going to be multiplied with
template <typename T>
struct KvDot;

FDSD_INLINE void Prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Compilers move no load from one side to the other. The processor's prefetcher follows loads in ascending order only.
FDSD_INLINE void KeepLoadOrder() { __asm__ volatile("" ::: "memory"); }

// scores[v][..64] of kVectors query vectors with the keys of a block.
template <typename T, bool kFetches, int kVectors>
void ScoreTile(const QueryVector<typename KvDot<T>::Query>* q, const KvBlock<T>& block, float* scores) {
  using Kv = KvDot<T>;
  constexpr int kPanels = ScorePanels(kVectors);
  for (int first = 0; first < kBlockPanels; first += kPanels) {
    typename Kv::Sum sum[kVectors][kPanels];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 8
      for (int i = 0; i < kPanels; ++i) sum[v][i] = Kv::StartScore(q[v]);
    for (int d = 0; d < block.head_dim; d += kPackSize<T>) {
      const int64_t offset = d / kPackSize<T> * block.k_stride;
#pragma GCC unroll 8
      for (int i = 0; i < kPanels; ++i) {
        if constexpr (kFetches) Prefetch(block.next[first + i] + offset);
        const typename Kv::Packs keys = Kv::LoadPacks(block.k[first + i] + offset);
        if constexpr (!kFetches) KeepLoadOrder();
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sum[v][i] = Kv::Dot(q[v].elements + d, keys, sum[v][i]);
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 8
      for (int i = 0; i < kPanels; ++i)
        Store(Kv::FinishScore(sum[v][i], q[v], block.k_scale[first + i]),
              scores + v * kPartitionKeys + (first + i) * kPanelKeys);
  }
}

// The same for `num_vectors` query vectors in 1..kVectors.
template <typename T, int kVectors = kScoreVectors>
void Scores(int num_vectors, const QueryVector<typename KvDot<T>::Query>* q, const KvBlock<T>& block, float* scores) {
  if (num_vectors == kVectors) {
    if (block.next[0] == nullptr) {
      ScoreTile<T, false, kVectors>(q, block, scores);
    } else {
      ScoreTile<T, true, kVectors>(q, block, scores);
    }
  } else if constexpr (kVectors > 1) {
    Scores<T, kVectors - 1>(num_vectors, q, block, scores);
  }
}

// Softmax weights of some query vectors over the keys of a block, and the running sums of values they belong to.
template <typename T>
struct WeightedRows {
  const typename KvDot<T>::Weight* weights;  // [vectors][kPartitionKeys], from the block's first key on
  const float* factors;                      // [vectors], see KvDot
  float* sums;                               // [vectors][sums_stride]
  int64_t sums_stride;
};

// Keys [begin, end) of a block of which whole packs are used, or, kIsPart, keys within one pack.
struct KeyRange {
  int begin;
  int end;
};

// The packs of 16 columns of V; kIsPart: with 0 for keys that are not in `keys`, counted from the first of the pack.
template <typename T, bool kIsPart>
FDSD_INLINE typename KvDot<T>::Packs LoadValues(const T* p, KeyRange keys) {
  if constexpr (kIsPart) {
    return KvDot<T>::LoadSome(p, keys.begin, keys.end);
  } else {
    return KvDot<T>::LoadPacks(p);
  }
}

// sums[v][d..] += weights[v][key] * values[key][d..], kLanes * kWidth elements at a time, then the rest in narrower
// steps.
template <typename T, int kVectors, int kWidth, bool kIsPart, bool kFetches>
FDSD_INLINE void ValueColumns(const WeightedRows<T>& rows, const KvBlock<T>& block, KeyRange keys, int d) {
  using Kv = KvDot<T>;
  constexpr int kPack = kPackSize<T>;
  const typename Kv::Weight* const weights = rows.weights;
  const int64_t stride = block.head_dim;
  for (; d + kWidth * kLanes <= block.head_dim; d += kWidth * kLanes) {
    typename Kv::Sum sum[kVectors][kWidth];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 8
      for (int i = 0; i < kWidth; ++i) sum[v][i] = Kv::StartValue(rows.sums + v * rows.sums_stride + d + i * kLanes);
    for (int key = keys.begin / kPack * kPack; key < keys.end;) {
      const int panel = key / kPanelKeys;
      const int panel_end = std::min(keys.end, (panel + 1) * kPanelKeys);
      int64_t offset = key % kPanelKeys * stride + d * kPack;
      for (; key < panel_end; key += kPack, offset += kPack * stride) {
#pragma GCC unroll 8
        for (int i = 0; i < kWidth; ++i) {
          const int64_t column = offset + i * kLanes * kPack;
          if constexpr (kFetches) Prefetch(block.next[panel] + column);
          const typename Kv::Packs x =
              LoadValues<T, kIsPart>(block.v[panel] + column, {keys.begin - key, keys.end - key});
          if constexpr (!kFetches) KeepLoadOrder();
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) sum[v][i] = Kv::Dot(weights + v * kPartitionKeys + key, x, sum[v][i]);
        }
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 8
      for (int i = 0; i < kWidth; ++i)
        Kv::FinishValue(sum[v][i], rows.factors[v], rows.sums + v * rows.sums_stride + d + i * kLanes);
  }
  if constexpr (kWidth > 1) ValueColumns<T, kVectors, kWidth / 2, kIsPart, kFetches>(rows, block, keys, d);
}

template <typename T, int kVectors>
void ValueTile(const WeightedRows<T>& rows, const KvBlock<T>& block, KeyRange keys) {
  constexpr int kPack = kPackSize<T>;
  constexpr int kWidth = ValueLanes(kVectors);
  const auto add_whole = [&](KeyRange whole) {
    if (block.next[0] == nullptr) {
      ValueColumns<T, kVectors, kWidth, false, false>(rows, block, whole, 0);
    } else {
      ValueColumns<T, kVectors, kWidth, false, true>(rows, block, whole, 0);
    }
  };
  if constexpr (!KvDot<T>::kSkipsHidden) {
    add_whole(keys);
  } else {
    const auto add_part = [&](KeyRange part) { ValueColumns<T, kVectors, kWidth, true, false>(rows, block, part, 0); };
    if (keys.begin % kPack != 0) {
      const int end = std::min(keys.end, (keys.begin / kPack + 1) * kPack);
      add_part({keys.begin, end});
      keys.begin = end;
    }
    const int whole_end = keys.end / kPack * kPack;
    if (keys.begin < whole_end) add_whole({keys.begin, whole_end});
    const int part_begin = std::max(keys.begin, whole_end);
    if (part_begin < keys.end) add_part({part_begin, keys.end});
  }
}

// Add the values of `keys`, all of them seen by all of `num_vectors` query vectors in 1..kVectors.
template <typename T, int kVectors = kValueVectors>
void AddValues(int num_vectors, const WeightedRows<T>& rows, const KvBlock<T>& block, KeyRange keys) {
  if (num_vectors == kVectors) {
    ValueTile<T, kVectors>(rows, block, keys);
  } else if constexpr (kVectors > 1) {
    AddValues<T, kVectors - 1>(num_vectors, rows, block, keys);
  }
}

}  // namespace FDSD_ISA
}  // namespace fdsd
