#pragma once
// Drawing a token of a row of which the chunks are known. All threads of a block call these, in step.
#include "philox.h"
#include "sampling_chunks.h"
#include "tokens_in_order.h"

namespace fdsd::cuda {

__device__ inline ListedTokens ListRow(const ChunkArrays& chunks, int64_t row) {
  FDSD_SHARED(Amount, places, kRowListed);
  FDSD_SHARED(int32_t, count, 1);
  const int64_t first = row * chunks.num_chunks;
  uint32_t bound = 0;
  for (int32_t c = threadIdx.x % kWarpSize; c < chunks.num_chunks; c += kWarpSize)
    bound = max(bound, static_cast<uint32_t>(chunks.bounds[first + c]));
  bound = __reduce_max_sync(kAllLanes, bound);
  if (bound == kNothingListed) return ListedTokens{places, -1, bound};
  if (threadIdx.x == 0) count[0] = 0;
  __syncthreads();
  // So many loads are under way at a time.
  constexpr int32_t kAtOnce = 8;
  const int32_t end = chunks.num_chunks * kChunkListed;
  for (int32_t begin = threadIdx.x; begin < end; begin += kAtOnce * kRowThreads) {
    Amount loaded[kAtOnce];
#pragma unroll
    for (int32_t j = 0; j < kAtOnce; ++j) {
      const int32_t i = begin + j * kRowThreads;
      const bool is_listed = i < end && i % kChunkListed < chunks.counts[first + i / kChunkListed];
      loaded[j] = 0;
      if (is_listed) loaded[j] = chunks.listed[first * kChunkListed + i];
    }
#pragma unroll
    for (int32_t j = 0; j < kAtOnce; ++j) {
      if (loaded[j] == 0 || static_cast<uint32_t>(loaded[j] >> 32) < bound) continue;
      const int32_t at = atomicAdd(count + 0, 1);
      if (at < kRowListed) places[at] = loaded[j];
    }
  }
  __syncthreads();
  const int32_t num_listed = count[0];
  return ListedTokens{places, num_listed > kRowListed ? -1 : num_listed, bound};
}

// The row's first token in the order.
__device__ inline Best BestOfChunks(const ChunkArrays& chunks, int64_t row) {
  const int64_t first = row * chunks.num_chunks;
  Amount best = 0;
  for (int32_t c = threadIdx.x % kWarpSize; c < chunks.num_chunks; c += kWarpSize) {
    const Amount place = chunks.places[first + c];
    if (place > best) best = place;
  }
  return BestAt(WarpGreatest(best));
}

// What a row's chunks weigh where the row's most likely token weighs 2^44: what they weigh by their own, rounded down.
// So a total depends on nothing but the row.
__device__ inline DevicePtr<const Amount> WeightsOfChunks(const ChunkArrays& chunks, int64_t row,
                                                          const WeightMeasure& measure) {
  FDSD_SHARED(Amount, weights, kMaxChunks);
  for (int32_t c = threadIdx.x; c < chunks.num_chunks; c += kRowThreads) {
    const int64_t place = row * chunks.num_chunks + c;
    const Amount share = measure(LogitOf(chunks.places[place]));
    const auto own = static_cast<unsigned __int128>(static_cast<Amount>(chunks.weights[place]));
    weights[c] = static_cast<Amount>(own * share >> WeightMeasure::kOneBits);
  }
  __syncthreads();
  return weights;
}

__device__ inline Amount TotalOfChunks(DevicePtr<const Amount> weights, int32_t num_chunks) {
  Amount total = 0;
  for (int32_t c = threadIdx.x % kWarpSize; c < num_chunks; c += kWarpSize) total += weights[c];
  return WarpTotal(total);
}

// The token of a chunk, by id, at which the running sum of weights reaches the target, 1..that of all. Its logits are
// read once more.
__device__ inline int32_t TokenInChunk(const SampledRow& row, int32_t chunk, const WeightMeasure& measure,
                                       Amount target) {
  FDSD_SHARED(Amount, totals, kRowWarps);
  FDSD_SHARED(int32_t, found, 1);
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const OwnLogits own = row.Load(chunk);
  bool is_found = false;
  int32_t first = own.first;  // the thread's token among those of which one is wanted
  Amount weight = 0;
#pragma unroll
  for (int32_t j = 0; j < kOwnTokens; ++j) {
    const Amount line = measure(own.logits[j]);
    const Amount total = BlockTotal(line);
    if (is_found) continue;
    if (target <= total) {
      is_found = true;
      first = own.first + j * kRowThreads;
      weight = line;
    } else {
      target -= total;
    }
  }
  Amount running = weight;
  for (int lanes = 1; lanes < kWarpSize; lanes *= 2) {
    const Amount before = __shfl_up_sync(kAllLanes, running, static_cast<unsigned>(lanes));
    if (lane >= lanes) running += before;
  }
  if (lane == kWarpSize - 1) totals[warp] = running;
  __syncthreads();
  for (int other = 0; other < warp; ++other) running += totals[other];
  if (running >= target && running - weight < target) found[0] = first;
  __syncthreads();
  return found[0];
}

// The first token, by id, whose running weight exceeds u times that of all.
__device__ inline int32_t DrawOfAll(const SampledRow& row, const ChunkArrays& chunks, const DrawSettings& settings,
                                    const WeightMeasure& measure, double u) {
  const DevicePtr<const Amount> weights = WeightsOfChunks(chunks, row.index(), measure);
  const Amount total = TotalOfChunks(weights, chunks.num_chunks);
  Amount target = static_cast<Amount>(u * static_cast<double>(total)) + 1;
  if (target > total) target = total;
  int32_t chunk = 0;
  while (chunk < chunks.num_chunks - 1 && weights[chunk] < target) target -= weights[chunk++];
  const int64_t place = row.index() * chunks.num_chunks + chunk;
  // As a share of what the chunk weighs by its own.
  const Amount whole = chunks.weights[place];
  const double share = static_cast<double>(target) / static_cast<double>(static_cast<Amount>(weights[chunk]));
  auto own_target = static_cast<Amount>(ceil(share * static_cast<double>(whole)));
  if (own_target < 1) own_target = 1;
  if (own_target > whole) own_target = whole;
  const WeightMeasure own = WeightingOf(LogitOf(chunks.places[place]), settings.temperature);
  return TokenInChunk(row, chunk, own, own_target);
}

// What of a row may be drawn.
struct DrawnPart {
  WeightMeasure measure;
  Kept kept;     // by min_p and by what has any weight, then by top_k
  Amount total;  // weight of these
};

// What the tokens that top_p leaves weigh at least; 1..part.total.
__device__ inline Amount NucleusOf(const DrawnPart& part, float top_p) {
  const auto target = static_cast<Amount>(ceil(static_cast<double>(top_p) * static_cast<double>(part.total)));
  return target > 0 ? target : 1;
}

// The token of what top_p leaves of a part, all of which that is above the threshold is among `tokens`.
template <typename Row>
__device__ int32_t DrawPart(const Row& tokens, DrawnPart part, float top_p, double u) {
  if (top_p < 1.0f) part.total = KeepPrefix(tokens, part.measure, NucleusOf(part, top_p), &part.kept);
  const Amount target = static_cast<Amount>(u * static_cast<double>(part.total)) + 1;
  return TokenAt(tokens, part.kept, part.measure, target < part.total ? target : part.total);
}

}  // namespace fdsd::cuda
