#pragma once
// Rows of logits as a step draws from them: as the rules of their requests leave them, a chunk of tokens at a time, in
// registers. Nothing of them is written.
#include "ruled_logits.h"
#include "token_weights.h"

namespace fdsd::cuda {

constexpr int32_t kOwnTokens = 16;
constexpr int32_t kChunkTokens = kRowThreads * kOwnTokens;

struct SampleArrays {
  DevicePtr<const float> logits;
  DevicePtr<const int32_t> requests;
  DevicePtr<const int32_t> positions;
  DevicePtr<const float> temperature;
  DevicePtr<const int32_t> top_k;
  DevicePtr<const float> top_p;
  DevicePtr<const float> min_p;
  DevicePtr<const uint64_t> seed;
  DevicePtr<int32_t> token_ids;
};

inline SampleArrays SampleArraysOf(const SampleParams& p) {
  return SampleArrays{DevicePtr<const float>(p.logits),      DevicePtr<const int32_t>(p.batch_id_per_output),
                      DevicePtr<const int32_t>(p.positions), DevicePtr<const float>(p.temperature),
                      DevicePtr<const int32_t>(p.top_k),     DevicePtr<const float>(p.top_p),
                      DevicePtr<const float>(p.min_p),       DevicePtr<const uint64_t>(p.seed),
                      DevicePtr<int32_t>(p.token_ids)};
}

inline Error CheckSampleSizes(const SampleParams& p) {
  if (p.vocab_size <= 0 || p.vocab_size > kMaxVocabSize) return "vocab_size: expected 1..524288, got another number";
  if (p.num_rows < 0 || p.num_requests < 0) return "sizes: expected no negative number";
  return nullptr;
}

__host__ __device__ constexpr int32_t NumChunks(int32_t vocab_size) {
  return static_cast<int32_t>(DivideUp(vocab_size, kChunkTokens));
}

// What a thread has of a chunk: tokens first, first + kRowThreads, ...; -inf after the last one.
struct OwnLogits {
  int32_t first;
  float logits[kOwnTokens];

  // visit(logit, token) for those that exist.
  template <typename Visit>
  __device__ __forceinline__ void ForEach(int32_t vocab_size, const Visit& visit) const {
#pragma unroll
    for (int32_t j = 0; j < kOwnTokens; ++j) {
      const int32_t token = first + j * kRowThreads;
      if (token < vocab_size) visit(logits[j], token);
    }
  }
};

// A row that is drawn from.
struct SampledRow {
  RuleArrays rules;
  RuledRow ruled;
  DevicePtr<const float> logits;

  __device__ SampledRow(const RuleArrays& all, const SampleArrays& a, int64_t index)
      : rules(all), ruled(all, index, a.requests[index]), logits(a.logits + index * all.vocab_size) {}

  __device__ __forceinline__ int64_t index() const { return ruled.index; }
  // The row of its request's settings.
  __device__ __forceinline__ int32_t settings() const { return ruled.table_row; }

  // All threads.
  __device__ OwnLogits Load(int32_t chunk) const {
    const int32_t begin = chunk * kChunkTokens;
    OwnLogits own;
    own.first = begin + static_cast<int32_t>(threadIdx.x);
#pragma unroll
    for (int32_t j = 0; j < kOwnTokens; ++j) {
      const int32_t token = own.first + j * kRowThreads;
      own.logits[j] = -INFINITY;
      if (token < rules.vocab_size) own.logits[j] = logits[token];
    }
    if (rules.count_rows[settings()] >= 0 || rules.allowed_rows[index()] >= 0) {
#pragma unroll
      for (int32_t j = 0; j < kOwnTokens; ++j) {
        const int32_t token = own.first + j * kRowThreads;
        if (token < rules.vocab_size) own.logits[j] = ruled.Penalised(rules, token, own.logits[j]);
      }
    }
    if (ruled.HasLists(rules)) ApplyLists(begin, &own);
    return own;
  }

  // All tokens, chunk by chunk. All threads.
  template <typename Visit>
  __device__ __forceinline__ void ForEach(const Visit& visit) const {
    const DevicePtr<const float> chunk = SharedChunk();
    for (int32_t begin = 0; begin < rules.vocab_size; begin += kChunkTokens) {
      LoadShared(begin / kChunkTokens);
      // A thread visits what it has loaded itself.
      for (int32_t i = threadIdx.x; i < min(kChunkTokens, rules.vocab_size - begin); i += kRowThreads)
        visit(chunk[i], begin + i);
    }
  }

 private:
  __device__ static DevicePtr<float> SharedChunk() {
    FDSD_SHARED(float, chunk, kChunkTokens);
    return chunk;
  }

  __device__ __forceinline__ static void Store(const OwnLogits& own, DevicePtr<float> chunk) {
#pragma unroll
    for (int32_t j = 0; j < kOwnTokens; ++j) chunk[static_cast<int32_t>(threadIdx.x) + j * kRowThreads] = own.logits[j];
  }

  __device__ __noinline__ void LoadShared(int32_t chunk) const { Store(Load(chunk), SharedChunk()); }

  __device__ void ApplyLists(int32_t begin, OwnLogits* own) const {
    const DevicePtr<float> chunk = SharedChunk();
    Store(*own, chunk);
    __syncthreads();
    BiasAndMask(rules, ruled, begin, begin + kChunkTokens, chunk);
    __syncthreads();
#pragma unroll
    for (int32_t j = 0; j < kOwnTokens; ++j)
      own->logits[j] = chunk[static_cast<int32_t>(threadIdx.x) + j * kRowThreads];
  }
};

// How a row is drawn.
struct DrawSettings {
  float temperature;  // 0 = the most likely token
  int32_t top_k;      // 0 = off
  float top_p;
  float min_p;

  __device__ DrawSettings(const SampleArrays& a, const SampledRow& row)
      : temperature(a.temperature[row.settings()]),
        top_k(a.top_k[row.settings()]),
        top_p(a.top_p[row.settings()]),
        min_p(a.min_p[row.settings()]) {
    if (top_k >= row.rules.vocab_size) top_k = 0;
  }
  __device__ __forceinline__ bool HasFilters() const { return top_k > 0 || top_p < 1.0f || min_p > 0.0f; }
  // Whether the weight of all tokens matters.
  __device__ __forceinline__ bool WeighsAll() const { return top_k == 0 && !(min_p > 0.0f); }
};

}  // namespace fdsd::cuda
