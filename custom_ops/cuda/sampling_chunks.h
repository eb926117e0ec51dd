#pragma once
// What is kept of a row's chunks when its logits have been read once: the most likely token, what all weigh, and the
// tokens above a bound. Most draws are decided by these; docs/kernels/sampling.md.
#include "sampling_rows.h"

namespace fdsd::cuda {

constexpr int32_t kMaxChunks = kMaxVocabSize / kChunkTokens;
// Of each warp's tokens of a chunk so many may be above the chunk's bound.
constexpr int32_t kWarpListed = 16;
constexpr int32_t kChunkListed = kWarpListed * kRowWarps;
// The bound of a chunk of which nothing is listed though it has tokens.
constexpr uint32_t kNothingListed = 0xffffffffu;

// In the workspace. C = number of chunks.
struct ChunkArrays {
  int32_t num_chunks;
  DevicePtr<Amount> places;    // [L, C] of the most likely token; kBroken
  DevicePtr<Amount> weights;   // [L, C] of all tokens, where the chunk's most likely one weighs 2^44
  DevicePtr<Amount> listed;    // [L, C, kChunkListed] places of the tokens from the bound on, in any order
  DevicePtr<uint32_t> bounds;  // [L, C] key of the least logit that is listed; no other token of the chunk reaches it
  DevicePtr<int32_t> counts;   // [L, C] how many are listed
};

constexpr int64_t kBytesPerChunk = (2 + kChunkListed) * sizeof(Amount) + sizeof(uint32_t) + sizeof(int32_t);

inline ChunkArrays ChunkArraysOf(const SampleParams& p, void* workspace) {
  const int32_t num_chunks = NumChunks(p.vocab_size);
  const int64_t count = static_cast<int64_t>(p.num_rows) * num_chunks;
  auto* const places = static_cast<Amount*>(workspace);
  Amount* const weights = places + count;
  Amount* const listed = weights + count;
  Amount* const bounds = listed + count * kChunkListed;
  return ChunkArrays{num_chunks,
                     DevicePtr<Amount>(places),
                     DevicePtr<Amount>(weights),
                     DevicePtr<Amount>(listed),
                     DevicePtr<uint32_t>(bounds),
                     DevicePtr<int32_t>(reinterpret_cast<uint32_t*>(bounds) + count)};
}

// The key of a bound that at most kWarpListed of the warp's tokens reach: the lowest one, else that of about the eighth
// best lane's best token, or of the fourth's, or of the best. All lanes.
__device__ inline uint32_t WarpBound(const OwnLogits& own) {
  constexpr int kRanks = 8;
  uint32_t best = KeyOf(kLowest);
#pragma unroll
  for (int32_t j = 0; j < kOwnTokens; ++j) best = max(best, KeyOf(own.logits[j]));
  uint32_t bounds[4] = {0, 0, 0, 0};  // the lowest, and those of ranks 8, 4 and 1
  uint32_t left = best;
#pragma unroll
  for (int rank = 1; rank <= kRanks; ++rank) {
    const uint32_t next = __reduce_max_sync(kAllLanes, left);
    if (rank == 1) bounds[3] = next;
    if (rank == 4) bounds[2] = next;
    if (rank == kRanks) bounds[1] = next;
    if (left == next) left = 0;
  }
#pragma unroll
  for (uint32_t bound : bounds) {
    const float least = ValueOf(max(bound, KeyOf(kLowest)));
    int32_t count = 0;
#pragma unroll
    for (int32_t j = 0; j < kOwnTokens; ++j) count += own.logits[j] >= least ? 1 : 0;
    for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) count += __shfl_xor_sync(kAllLanes, count, lanes);
    if (count <= kWarpListed) return KeyOf(least);
  }
  return kNothingListed;
}

// Lists the tokens of a chunk from its bound on, which is the greatest of its warps' bounds. All threads.
__device__ inline void ListChunk(const OwnLogits& own, int32_t vocab_size, int64_t place, const ChunkArrays& chunks) {
  FDSD_SHARED(uint32_t, warp_bounds, kRowWarps);
  FDSD_SHARED(int32_t, count, 1);
  const uint32_t own_bound = WarpBound(own);
  if (threadIdx.x % kWarpSize == 0) warp_bounds[threadIdx.x / kWarpSize] = own_bound;
  if (threadIdx.x == 0) count[0] = 0;
  __syncthreads();
  uint32_t bound = 0;
  for (int warp = 0; warp < kRowWarps; ++warp) bound = max(bound, static_cast<uint32_t>(warp_bounds[warp]));
  if (bound != kNothingListed) {
    const float least = ValueOf(bound);
    const DevicePtr<Amount> listed = chunks.listed + place * kChunkListed;
    own.ForEach(vocab_size, [&](float logit, int32_t token) {
      if (logit >= least) listed[atomicAdd(count + 0, 1)] = PlaceOf(logit, token);
    });
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  chunks.bounds[place] = bound;
  chunks.counts[place] = static_cast<int32_t>(count[0]);
}

// Block (row, chunk).
static __global__ __launch_bounds__(kRowThreads, 4) void ReadChunksKernel(RuleArrays rules, SampleArrays a,
                                                                          ChunkArrays chunks) {
  const SampledRow row(rules, a, static_cast<int64_t>(blockIdx.x));
  const int64_t place = row.index() * chunks.num_chunks + blockIdx.y;
  const OwnLogits own = row.Load(static_cast<int32_t>(blockIdx.y));
  OwnBest own_best;
  own.ForEach(rules.vocab_size, [&](float logit, int32_t token) { own_best.Look(logit, token); });
  const Amount best_place = BlockBest(own_best.place());
  if (threadIdx.x == 0) chunks.places[place] = best_place;
  const DrawSettings settings(a, row);
  if (settings.temperature == 0.0f) return;
  if (settings.WeighsAll()) {
    const Best best = BestAt(best_place);
    Amount weight = 0;
    if (best.token >= 0) {
      const WeightMeasure measure = WeightingOf(best.max, settings.temperature);
      own.ForEach(rules.vocab_size, [&](float logit, int32_t) { weight += measure(logit); });
    }
    weight = BlockTotal(weight);
    if (threadIdx.x == 0) chunks.weights[place] = weight;
  }
  if (settings.HasFilters()) ListChunk(own, rules.vocab_size, place, chunks);
}

}  // namespace fdsd::cuda
