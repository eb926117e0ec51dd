#pragma once
// The two products of attention at level amx: amx/attention.cc computes them in AMX tiles of 16 query vectors. Softmax
// stays with the vector instructions.
//
// Over a bfloat16 cache every number of vectors takes this path, as tile products round otherwise than
// attention_dot_float.h. Over an int8 cache sums are exact, and results are those of attention_dot_int8.h.
#include "attention_dot_float.h"
#include "attention_dot_int8.h"

namespace fdsd {
namespace FDSD_ISA {

#if defined(FDSD_SIMD_AVX512)
template <typename T>
constexpr bool kHasAmx = !std::is_same_v<T, float>;
#else
template <typename T>
constexpr bool kHasAmx = false;
#endif

constexpr int kAmxVectors = 16;  // query vectors of an AMX tile
constexpr int kAmxPacks = 16;    // packs that one product sums over: of the head dimension, or of keys
// Elements of a query vector, or keys, that one product sums over.
template <typename T>
constexpr int kAmxElements = kAmxPacks * kPackSize<T>;
constexpr int kMaxAmxSteps = 8;  // products along a partition's keys: 8 of bfloat16, 4 of int8

// Vectors come in whole tiles: rows of q, scores and weights after the last vector exist up to a multiple of 16 rows,
// and may hold anything.
constexpr int RoundUpTo(int size, int multiple) { return (size + multiple - 1) / multiple * multiple; }

// Scores of one head's vectors with the 64 keys of a block.
template <typename T>
struct AmxScores {
  const typename KvDot<T>::Query* q;  // [vectors][q_stride]
  int q_stride;                       // head_dim rounded up to kAmxElements; zeros fill it
  int num_vectors;
  KvBlock<T> block;
  // [vectors][kPartitionKeys] receives sums of products, float32 or, over an int8 cache, int32.
  float* scores;
};

// Values of a partition's keys times one head's weights. A step is the keys of one product.
template <typename T>
struct AmxValues {
  const typename KvDot<T>::Weight* weights;  // [vectors][kPartitionKeys], 0 for keys that a vector does not see
  int num_vectors;
  int num_steps;
  int head_dim;
  const T* v[kMaxAmxSteps];  // of each step: [16][head_dim] packs; no infinity or NaN where a weight is 0 (see RunAmx)
  const T* next[kMaxAmxSteps];  // read next, likewise: fetched meanwhile
  // [num_vectors] sums, `sums_stride` apart: over a bfloat16 cache overwritten, over an int8 cache added to.
  float* sums;
  int64_t sums_stride;
  // int8: of each step [kMaxRunVectors], see KvDot; and its first vector that sees one of its keys.
  const float* factors;
  int first_vectors[kMaxAmxSteps];
};

// Functions of amx/attention.cc.
template <typename T>
struct AmxProducts {
  void (*scores)(const AmxScores<T>& scores);
  void (*values)(const AmxValues<T>& values);
};
struct AmxAttention {
  AmxProducts<bf16> float_products;
  AmxProducts<int8_t> int8_products;
  void (*release)();  // gives the calling thread's tiles back

  template <typename T>
  const AmxProducts<T>& Of() const {
    if constexpr (std::is_same_v<T, int8_t>) {
      return int8_products;
    } else {
      return float_products;
    }
  }
};
#if defined(FDSD_SIMD_AVX512)
namespace amx {
extern const AmxAttention kAmxAttention;
}
namespace amx_twin {
extern const AmxAttention kAmxAttention;
}
#endif

// What level amx computes with, nullptr at other levels.
const AmxAttention* AmxInUse();

}  // namespace FDSD_ISA
}  // namespace fdsd
