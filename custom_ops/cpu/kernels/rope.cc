#include <type_traits>

#include "attention_plan.h"
#include "attention_store.h"
#include "fdsd/attention.h"
#include "fdsd/runtime.h"
#include "rope_heads.h"
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

template <typename T>
FDSD_INLINE void StoreScaledHead(const float* head, float scale, int head_dim, T* y) {
  for (int i = 0; i < head_dim; i += kLanes) Store(Mul(Load(head + i), Set1(scale)), y + i);
}

// What RMS norm multiplies a head with, besides the weights.
template <typename T>
FDSD_INLINE float NormScale(const T* x, int head_dim, float eps) {
  F32x16 squares = Set1(0.0f);
  for (int i = 0; i < head_dim; i += kLanes) {
    const F32x16 v = Load(x + i);
    squares = Fma(v, v, squares);
  }
  return 1.0f / std::sqrt(ReduceAdd(squares) / static_cast<float>(head_dim) + eps);
}

template <typename T>
FDSD_INLINE void LoadNormedHead(const T* x, float scale, const float* weight, int head_dim, float* head) {
  for (int i = 0; i < head_dim; i += kLanes) Store(Mul(Mul(Load(x + i), Set1(scale)), Load(weight + i)), head + i);
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
  if (p.cache.v == nullptr) head += p.cache.head_dim - p.rotary_dim;
  if (p.interleaved != 0) {
    RotatePairs(cos, sin, num_pairs, 2, 1, head);
  } else {
    RotateHalves(cos, sin, num_pairs, head);
  }
}

// Heads of q or k whose norms are taken together: each is a chain of instructions that wait for one another, and the
// chains of several heads run in parallel.
constexpr int kHeadsAtOnce = 4;

// `count` heads, normed and turned. Head i begins at x + i * stride and is at position positions[i * position_step];
// `put(i, head)` takes it as float.
template <typename T, typename Put>
FDSD_INLINE void RotateHeads(const RopeStoreKvParams& p, const float* norm, const T* x, int64_t stride, int count,
                             const int32_t* positions, int position_step, const Put& put) {
  const int head_dim = p.cache.head_dim;
  float scales[kHeadsAtOnce];
  if (norm != nullptr) {
    for (int i = 0; i < count; ++i) scales[i] = NormScale(x + i * stride, head_dim, p.norm_eps);
  }
  for (int i = 0; i < count; ++i) {
    alignas(64) float head[kMaxLatentDim];
    if (norm != nullptr) {
      LoadNormedHead(x + i * stride, scales[i], norm, head_dim, head);
    } else {
      LoadHead(x + i * stride, head_dim, head);
    }
    RotateHead(p, positions[i * position_step], head);
    put(i, head);
  }
}

// Heads of a fused row: those of q come first, then those of k, then those of v.
struct HeadRange {
  int begin;
  int end;
};

// Heads of a row of qkv; keys and values of latent vectors come by themselves.
int64_t RowHeads(const RopeStoreKvParams& p) {
  return p.num_heads + (p.cache.v == nullptr ? 0 : 2 * p.cache.num_kv_heads);
}

template <typename T>
void ProcessQueries(const RopeStoreKvParams& p, int64_t token, HeadRange heads) {
  const int64_t head_dim = p.cache.head_dim;
  const T* x = static_cast<const T*>(p.qkv) + token * RowHeads(p) * head_dim;
  T* q = static_cast<T*>(p.q) + token * p.num_heads * head_dim;
  const float scale = p.q_scale == nullptr ? 1.0f : p.q_scale[p.positions[token]];
  for (int64_t first = heads.begin; first < heads.end; first += kHeadsAtOnce) {
    const int count = static_cast<int>(std::min<int64_t>(kHeadsAtOnce, heads.end - first));
    RotateHeads(
        p, p.q_norm, x + first * head_dim, head_dim, count, p.positions + token, 0,
        [&](int i, const float* head) { StoreScaledHead(head, scale, p.cache.head_dim, q + (first + i) * head_dim); });
  }
}

// KV head `h` of the run's tokens, of which `token` is the first. Elements are stored as they are, or as int8.
template <typename T, typename Stored>
void ProcessKeyValues(const RopeStoreKvParams& p, int64_t token, const SlotRun& run, int h) {
  static_assert(kMaxRun <= kHeadsAtOnce);
  const KvCache& cache = p.cache;
  const int head_dim = cache.head_dim;
  const int64_t row_size = (p.num_heads + 2 * cache.num_kv_heads) * static_cast<int64_t>(head_dim);
  const T* k = static_cast<const T*>(p.qkv) + token * row_size + static_cast<int64_t>(p.num_heads + h) * head_dim;
  const T* v = k + static_cast<int64_t>(cache.num_kv_heads) * head_dim;
  RunHead<Stored> keys, integers;
  const Stored* values[kMaxRun];
  RotateHeads(p, p.k_norm, k, row_size, run.count, p.positions + token, 1, [&](int r, const float* key) {
    const T* value = v + r * row_size;
    if constexpr (std::is_same_v<T, Stored>) {
      StoreHead(key, head_dim, keys.values[r]);
      values[r] = value;
    } else {
      const int64_t scale = ScaleIndex(cache, run.block, h, run.offset + r);
      cache.k_scale[scale] = QuantizeVector(key, head_dim, keys.values[r]);
      alignas(64) float head[kMaxHeadDim];
      LoadHead(value, head_dim, head);
      cache.v_scale[scale] = QuantizeVector(head, head_dim, integers.values[r]);
      values[r] = integers.values[r];
    }
  });
  PutKeys(cache, run, h, keys);
  PutValues(cache, run, h, values);
}

// The latent vectors of the run's tokens, of which `token` is the first.
template <typename T>
void ProcessLatents(const RopeStoreKvParams& p, const void* latents, int64_t token, const SlotRun& run) {
  const int head_dim = p.cache.head_dim;
  const T* x = static_cast<const T*>(latents) + token * head_dim;
  RunHead<T> keys;
  RotateHeads(p, nullptr, x, head_dim, run.count, p.positions + token, 1,
              [&](int r, const float* key) { StoreHead(key, head_dim, keys.values[r]); });
  PutKeys(p.cache, run, 0, keys);
}

// put(token, run) for the tokens [begin, end) that have slots, run by run.
template <typename Put>
void ForEachRun(const RopeStoreKvParams& p, int64_t begin, int64_t end, const Put& put) {
  for (int64_t token = begin; token < end;) {
    if (p.slot_mapping[token] < 0) {
      ++token;
      continue;
    }
    const SlotRun run = FirstRun(p.slot_mapping + token, end - token, p.cache.block_size);
    put(token, run);
    token += run.count;
  }
}

// Tokens [begin, end) of KV heads [kv_heads.begin, kv_heads.end), and as large a part of the query heads.
template <typename T>
void ProcessTokens(const RopeStoreKvParams& p, int64_t begin, int64_t end, HeadRange kv_heads) {
  const int num_kv_heads = p.cache.num_kv_heads;
  const HeadRange queries{p.num_heads * kv_heads.begin / num_kv_heads, p.num_heads * kv_heads.end / num_kv_heads};
  for (int64_t token = begin; token < end; ++token) ProcessQueries<T>(p, token, queries);
  for (int h = kv_heads.begin; h < kv_heads.end; ++h) {
    ForEachRun(p, begin, end, [&](int64_t token, const SlotRun& run) {
      if (p.cache.kv_dtype == KvDType::kInt8) {
        ProcessKeyValues<T, int8_t>(p, token, run, h);
      } else {
        ProcessKeyValues<T, T>(p, token, run, h);
      }
    });
  }
}

Error CheckRope(const RopeStoreKvParams& p) {
  if (const Error error = CheckCpuKvCache(p.cache); error != nullptr) return error;
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
  if (p.cache.v == nullptr) return "v: expected values besides the keys, got none";
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

Error RopeStoreLatent(const RopeStoreLatentParams& p) {
  const RopeStoreKvParams own = RopeOfHeads(p);
  if (const Error error = CheckRope(own); error != nullptr) return error;
  if (p.cache.v != nullptr) return "v: expected none, as keys are the values, got some";
  const auto run = [&](auto element) {
    using T = decltype(element);
    // Of the heads of some tokens each: a cache line holds keys of several tokens, so one task has all of a chunk's.
    const int64_t num_chunks = (p.num_tokens + kMaxTokensPerTask - 1) / kMaxTokensPerTask;
    ParallelFor(num_chunks, [&](int64_t task) {
      const int64_t begin = task * kMaxTokensPerTask;
      const int64_t end = std::min<int64_t>(begin + kMaxTokensPerTask, p.num_tokens);
      ForEachRun(own, begin, end,
                 [&](int64_t token, const SlotRun& slots) { ProcessLatents<T>(own, p.latents, token, slots); });
    });
    ParallelFor(p.num_tokens, [&](int64_t token) { ProcessQueries<T>(own, token, {0, p.num_heads}); });
  };
  if (p.cache.dtype == DType::kFloat32) {
    run(float{});
  } else {
    run(bf16{});
  }
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
