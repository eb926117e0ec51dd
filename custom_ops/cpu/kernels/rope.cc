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

void RotateHead(const RopeStoreKvParams& p, int32_t position, float* head) {
  const int num_pairs = p.rotary_dim / 2;
  const float* cos = p.cos_sin + static_cast<int64_t>(position) * p.rotary_dim;
  const float* sin = cos + num_pairs;
  if (p.interleaved != 0) {
    RotatePairs(cos, sin, num_pairs, 2, 1, head);
  } else {
    RotatePairs(cos, sin, num_pairs, 1, num_pairs, head);
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

template <typename T>
void ProcessToken(const RopeStoreKvParams& p, int64_t token) {
  const int head_dim = p.cache.head_dim;
  const int num_kv_heads = p.cache.num_kv_heads;
  const int32_t position = p.positions[token];
  const int64_t slot = p.slot_mapping[token];
  const T* x = static_cast<const T*>(p.qkv) + token * (p.num_heads + 2 * num_kv_heads) * head_dim;
  T* q = static_cast<T*>(p.q) + token * p.num_heads * head_dim;
  alignas(64) float head[kMaxHeadDim];
  for (int h = 0; h < p.num_heads; ++h, x += head_dim) {
    LoadHead(x, head_dim, head);
    if (p.q_norm != nullptr) NormHead(p.q_norm, p.norm_eps, head_dim, head);
    RotateHead(p, position, head);
    StoreHead(head, head_dim, q + static_cast<int64_t>(h) * head_dim);
  }
  if (slot < 0) return;
  for (int h = 0; h < num_kv_heads; ++h, x += head_dim) {
    LoadHead(x, head_dim, head);
    if (p.k_norm != nullptr) NormHead(p.k_norm, p.norm_eps, head_dim, head);
    RotateHead(p, position, head);
    StoreKey<T>(p.cache, slot, h, head);
  }
  for (int h = 0; h < num_kv_heads; ++h, x += head_dim) StoreValue<T>(p.cache, slot, h, x);
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
  const int64_t share = (p.num_tokens + NumThreads() - 1) / NumThreads();
  const int64_t per_task = std::min(std::max<int64_t>(share, 1), kMaxTokensPerTask);
  ParallelFor((p.num_tokens + per_task - 1) / per_task, [&](int64_t task) {
    const int64_t end = std::min<int64_t>((task + 1) * per_task, p.num_tokens);
    for (int64_t token = task * per_task; token < end; ++token) {
      if (p.cache.dtype == DType::kFloat32) {
        ProcessToken<float>(p, token);
      } else {
        ProcessToken<bf16>(p, token);
      }
    }
  });
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
