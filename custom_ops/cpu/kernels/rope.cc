#include "attention_layout.h"
#include "attention_plan.h"
#include "attention_quantize.h"
#include "fdsd/attention.h"
#include "fdsd/runtime.h"
#include "simd.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// Neighbouring tokens share the cache lines of K, so one task takes up to this many.
constexpr int64_t kMaxTokensPerTask = 16;

template <typename T>
FDSD_INLINE void LoadHead(const T* x, int head_dim, float* head) {
  for (int i = 0; i < head_dim; i += kLanes) Store(Load(x + i), head + i);
}

template <typename T>
FDSD_INLINE void StoreHead(const float* head, int head_dim, T* y) {
  for (int i = 0; i < head_dim; i += kLanes) Store(Load(head + i), y + i);
}

void NormHead(const float* weight, float eps, int head_dim, float* head) {
  F32x16 squares = Set1(0.0f);
  for (int i = 0; i < head_dim; i += kLanes) {
    const F32x16 v = Load(head + i);
    squares = Fma(v, v, squares);
  }
  const F32x16 scale = Set1(1.0f / std::sqrt(ReduceAdd(squares) / static_cast<float>(head_dim) + eps));
  for (int i = 0; i < head_dim; i += kLanes) Store(Mul(Mul(Load(head + i), scale), Load(weight + i)), head + i);
}

// Pairs (x[i * step], x[i * step + gap]) turn by the angle whose cosine and sine are cos[i], sin[i].
FDSD_INLINE void RotatePairs(const float* cos, const float* sin, int num_pairs, int step, int gap, float* x) {
  for (int i = 0; i < num_pairs; ++i) {
    const float a = x[i * step];
    const float b = x[i * step + gap];
    x[i * step] = a * cos[i] - b * sin[i];
    x[i * step + gap] = b * cos[i] + a * sin[i];
  }
}

// The same for pairs (x[i], x[i + num_pairs]).
FDSD_INLINE void RotateHalves(const float* cos, const float* sin, int num_pairs, float* x) {
  int i = 0;
  for (; i + kLanes <= num_pairs; i += kLanes) {
    const F32x16 a = Load(x + i);
    const F32x16 b = Load(x + i + num_pairs);
    const F32x16 c = Load(cos + i);
    const F32x16 s = Load(sin + i);
    Store(Sub(Mul(a, c), Mul(b, s)), x + i);
    Store(Add(Mul(b, c), Mul(a, s)), x + i + num_pairs);
  }
  RotatePairs(cos + i, sin + i, num_pairs - i, 1, num_pairs, x + i);
}

void RotateHead(const RopeStoreKvParams& p, int32_t position, float* head) {
  const int num_pairs = p.rotary_dim / 2;
  const float* cos = p.cos_sin + static_cast<int64_t>(position) * p.rotary_dim;
  const float* sin = cos + num_pairs;
  if (p.interleaved != 0) {
    RotatePairs(cos, sin, num_pairs, 2, 1, head);
  } else {
    RotateHalves(cos, sin, num_pairs, head);
  }
}

template <typename T>
void PutKey(const KvCache& cache, int64_t slot, int64_t head_index, const T* x) {
  constexpr int kPack = kPackSize<T>;
  T* k = KeyAddress<T>(cache, slot / cache.block_size, head_index, slot % cache.block_size);
  for (int d = 0; d < cache.head_dim; d += kPack) {
    std::memcpy(k + static_cast<int64_t>(d) * cache.block_size, x + d, kPack * sizeof(T));
  }
}

// Only this token's elements are written: its neighbour's lie between them and may be written at the same time.
template <typename T>
void PutValue(const KvCache& cache, int64_t slot, int64_t head_index, const T* x) {
  T* v = ValueAddress<T>(cache, slot / cache.block_size, head_index, slot % cache.block_size);
  for (int d = 0; d < cache.head_dim; ++d) v[d * kPackSize<T>] = x[d];
}

template <typename T>
void StoreKey(const KvCache& cache, int64_t slot, int64_t head_index, const float* head) {
  if (cache.kv_dtype == KvDType::kInt8) {
    alignas(64) int8_t integers[kMaxHeadDim];
    const int64_t scale = ScaleIndex(cache, slot / cache.block_size, head_index, slot % cache.block_size);
    cache.k_scale[scale] = QuantizeVector(head, cache.head_dim, integers);
    PutKey(cache, slot, head_index, integers);
  } else {
    alignas(64) T rounded[kMaxHeadDim];
    StoreHead(head, cache.head_dim, rounded);
    PutKey(cache, slot, head_index, rounded);
  }
}

template <typename T>
void StoreValue(const KvCache& cache, int64_t slot, int64_t head_index, const T* x) {
  if (cache.kv_dtype == KvDType::kInt8) {
    alignas(64) float head[kMaxHeadDim];
    alignas(64) int8_t integers[kMaxHeadDim];
    LoadHead(x, cache.head_dim, head);
    const int64_t scale = ScaleIndex(cache, slot / cache.block_size, head_index, slot % cache.block_size);
    cache.v_scale[scale] = QuantizeVector(head, cache.head_dim, integers);
    PutValue(cache, slot, head_index, integers);
  } else {
    PutValue(cache, slot, head_index, x);
  }
}

// Heads of a fused row: those of q come first, then those of k, then those of v.
struct HeadRange {
  int begin;
  int end;
};

template <typename T>
void ProcessQueries(const RopeStoreKvParams& p, int64_t token, HeadRange heads) {
  const int head_dim = p.cache.head_dim;
  const T* x = static_cast<const T*>(p.qkv) + token * (p.num_heads + 2 * p.cache.num_kv_heads) * head_dim;
  T* q = static_cast<T*>(p.q) + token * p.num_heads * head_dim;
  alignas(64) float head[kMaxHeadDim];
  for (int h = heads.begin; h < heads.end; ++h) {
    LoadHead(x + static_cast<int64_t>(h) * head_dim, head_dim, head);
    if (p.q_norm != nullptr) NormHead(p.q_norm, p.norm_eps, head_dim, head);
    RotateHead(p, p.positions[token], head);
    StoreHead(head, head_dim, q + static_cast<int64_t>(h) * head_dim);
  }
}

template <typename T>
void ProcessKeyValue(const RopeStoreKvParams& p, int64_t token, int h) {
  const int64_t slot = p.slot_mapping[token];
  if (slot < 0) return;
  const int head_dim = p.cache.head_dim;
  const int num_kv_heads = p.cache.num_kv_heads;
  const T* x = static_cast<const T*>(p.qkv) + (token * (p.num_heads + 2 * num_kv_heads) + p.num_heads + h) * head_dim;
  alignas(64) float head[kMaxHeadDim];
  LoadHead(x, head_dim, head);
  if (p.k_norm != nullptr) NormHead(p.k_norm, p.norm_eps, head_dim, head);
  RotateHead(p, p.positions[token], head);
  StoreKey<T>(p.cache, slot, h, head);
  StoreValue<T>(p.cache, slot, h, x + static_cast<int64_t>(num_kv_heads) * head_dim);
}

// Tokens [begin, end) of KV heads [kv_heads.begin, kv_heads.end), and as large a part of the query heads.
template <typename T>
void ProcessTokens(const RopeStoreKvParams& p, int64_t begin, int64_t end, HeadRange kv_heads) {
  const int num_kv_heads = p.cache.num_kv_heads;
  const HeadRange queries{p.num_heads * kv_heads.begin / num_kv_heads, p.num_heads * kv_heads.end / num_kv_heads};
  for (int64_t token = begin; token < end; ++token) ProcessQueries<T>(p, token, queries);
  for (int h = kv_heads.begin; h < kv_heads.end; ++h) {
    for (int64_t token = begin; token < end; ++token) ProcessKeyValue<T>(p, token, h);
  }
}

Error CheckRope(const RopeStoreKvParams& p) {
  if (const Error error = CheckKvCache(p.cache); error != nullptr) return error;
  if (p.num_tokens < 0) return "num_tokens: expected no negative number";
  if (p.num_heads <= 0) return "num_heads: expected a positive number";
  if (p.rotary_dim <= 0 || p.rotary_dim % 2 != 0 || p.rotary_dim > p.cache.head_dim)
    return "rotary_dim: expected an even number in 2..head_dim";
  const int64_t num_slots = static_cast<int64_t>(p.cache.num_blocks) * p.cache.block_size;
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    if (p.positions[t] < 0 || p.positions[t] >= p.max_position)
      return "positions: expected values in [0, max_position), got one outside";
    if (p.slot_mapping[t] < -1 || p.slot_mapping[t] >= num_slots)
      return "slot_mapping: expected -1 or a slot of the cache, got a value outside";
  }
  return nullptr;
}

}  // namespace

Error RopeStoreKv(const RopeStoreKvParams& p) {
  if (const Error error = CheckRope(p); error != nullptr) return error;
  // A token's keys lie in many lines, most of the time of the op goes into fetching them: all threads do. They take
  // different heads of a chunk, since different tokens of it may be in the same lines.
  const int64_t num_chunks = (p.num_tokens + kMaxTokensPerTask - 1) / kMaxTokensPerTask;
  const int num_kv_heads = p.cache.num_kv_heads;
  const int64_t wanted = num_chunks == 0 ? 1 : (NumThreads() + num_chunks - 1) / num_chunks;
  const int num_parts = static_cast<int>(std::min<int64_t>(wanted, num_kv_heads));
  ParallelFor(num_chunks * num_parts, [&](int64_t task) {
    const int64_t begin = task / num_parts * kMaxTokensPerTask;
    const int64_t end = std::min<int64_t>(begin + kMaxTokensPerTask, p.num_tokens);
    const int part = static_cast<int>(task % num_parts);
    const HeadRange kv_heads{num_kv_heads * part / num_parts, num_kv_heads * (part + 1) / num_parts};
    if (p.cache.dtype == DType::kFloat32) {
      ProcessTokens<float>(p, begin, end, kv_heads);
    } else {
      ProcessTokens<bf16>(p, begin, end, kv_heads);
    }
  });
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
