#pragma once
// Which experts read which tokens: kernels that know the router's weights and nothing of the experts'.
#include "linear_layout.h"
#include "logits_prefix.h"
#include "reduce.h"
#include "row_groups.h"
#include "scan.h"

namespace fdsd::cuda {

constexpr int kRouterThreads = 256;
constexpr int kRouterWarps = kRouterThreads / kWarpSize;

struct RouterShape {
  int32_t num_tokens;
  int32_t hidden_size;
  int32_t num_experts;
  int32_t first_expert;       // of those that are here
  int32_t num_local_experts;  // L
  int32_t top_k;
  int32_t normalize;
  float norm_min;
  float scale;
  int32_t sigmoid;
  int32_t num_groups;
  int32_t num_chosen_groups;
};

// A pair is a token and an expert that it chose. Those of experts that are here are rows, by expert, then by token.
struct RouterArrays {
  DevicePtr<const float> weight;          // [E, H]
  DevicePtr<const float> bias;            // [E], may be nullptr
  DevicePtr<const float> selection_bias;  // [E], may be nullptr
  DevicePtr<float> probs;                 // [T, E]
  DevicePtr<uint32_t> ranks;              // [T, E] larger for a better expert, 0 for one that is chosen
  DevicePtr<int32_t> chosen;              // [T, top_k] best first
  DevicePtr<int32_t> experts;             // [T, top_k] the same, ascending
  DevicePtr<float> pair_weights;          // [T, top_k] of these
  DevicePtr<int32_t> rows;                // [T, top_k] of these, where the expert is here
  DevicePtr<int32_t> tokens;              // [T * top_k] by row
  DevicePtr<int32_t> first;               // [L + 1] see RowGroups
  DevicePtr<int32_t> first_tile;          // [L + 1]
};

// A warp's: the logit of one expert, lanes of a sum in turn.
template <typename T>
__device__ float ScoreExpert(const RouterShape& shape, DevicePtr<const T> x, DevicePtr<const float> weight) {
  float sum = 0.0f;
  for (int32_t i = threadIdx.x % kWarpSize; i < shape.hidden_size; i += kWarpSize)
    sum = fmaf(LoadFloat<T>(x, i), weight[i], sum);
  return WarpSum(sum);
}

// A warp's: logits become probabilities, a lane for every 32nd.
__device__ inline void Softmax(const RouterShape& shape, DevicePtr<float> probs) {
  const int lane = threadIdx.x % kWarpSize;
  float max = -INFINITY;
  for (int32_t e = lane; e < shape.num_experts; e += kWarpSize) max = fmaxf(max, probs[e]);
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, lanes));
  float sum = 0.0f;
  for (int32_t e = lane; e < shape.num_experts; e += kWarpSize) {
    const float exponential = expf(probs[e] - max);
    probs[e] = exponential;
    sum += exponential;
  }
  sum = WarpSum(sum);
  for (int32_t e = lane; e < shape.num_experts; e += kWarpSize) probs[e] = probs[e] / sum;
}

// Larger for a better score, at least 1; NaN has the lowest of all.
__device__ inline uint32_t RankOf(float score) { return score == score ? KeyOf(score) : 1u; }

__device__ inline float ScoreOf(const RouterArrays& a, DevicePtr<const float> probs, int32_t expert) {
  return a.selection_bias == nullptr ? probs[expert] : probs[expert] + a.selection_bias[expert];
}

// A warp's, a lane for each group: experts outside of the chosen groups get the rank of those that are chosen already.
__device__ inline void ExcludeGroups(const RouterShape& shape, const RouterArrays& a, DevicePtr<const float> probs,
                                     DevicePtr<uint32_t> ranks) {
  const int32_t group = threadIdx.x % kWarpSize;
  const int32_t size = shape.num_experts / shape.num_groups;
  uint32_t rank = 0;
  if (group < shape.num_groups) {
    float best = -INFINITY;
    float second = -INFINITY;
    for (int32_t e = group * size; e < (group + 1) * size; ++e) {
      const float score = ScoreOf(a, probs, e);
      second = score > best ? best : score > second ? score : second;
      best = score > best ? score : best;
    }
    rank = RankOf(best + second);
  }
  int32_t num_better = 0;
  for (int32_t other = 0; other < shape.num_groups; ++other) {
    const uint32_t its = __shfl_sync(kAllLanes, rank, other);
    num_better += its > rank || (its == rank && other < group) ? 1 : 0;
  }
  if (group >= shape.num_groups || num_better < shape.num_chosen_groups) return;
  for (int32_t e = group * size; e < (group + 1) * size; ++e) ranks[e] = 0;
}

// A warp's: logits become probabilities; and the ranks by which experts are chosen.
__device__ inline void RankExperts(const RouterShape& shape, const RouterArrays& a, DevicePtr<float> probs,
                                   DevicePtr<uint32_t> ranks) {
  const int lane = threadIdx.x % kWarpSize;
  if (shape.sigmoid != 0) {
    for (int32_t e = lane; e < shape.num_experts; e += kWarpSize) probs[e] = 1.0f / (1.0f + expf(-probs[e]));
  } else {
    Softmax(shape, probs);
  }
  for (int32_t e = lane; e < shape.num_experts; e += kWarpSize) ranks[e] = RankOf(ScoreOf(a, probs, e));
  if (shape.num_chosen_groups >= shape.num_groups) return;
  __syncwarp();
  ExcludeGroups(shape, a, probs, ranks);
  __syncwarp();
}

// A warp's: the best expert that is not chosen yet, the lowest id among equals. It is then chosen.
__device__ inline int32_t TakeBest(int32_t num_experts, DevicePtr<uint32_t> ranks) {
  const int lane = threadIdx.x % kWarpSize;
  Amount best = 0;
  for (int32_t e = lane; e < num_experts; e += kWarpSize) {
    const Amount own = static_cast<Amount>(static_cast<uint32_t>(ranks[e])) << 32 | ~static_cast<uint32_t>(e);
    if (own > best) best = own;
  }
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
    const Amount other = __shfl_xor_sync(kAllLanes, best, lanes);
    if (other > best) best = other;
  }
  const auto expert = static_cast<int32_t>(~static_cast<uint32_t>(best));
  if (expert % kWarpSize == lane) ranks[expert] = 0;
  return expert;
}

// Block (token): the experts it chooses and their weights.
template <typename T>
__global__ __launch_bounds__(kRouterThreads) void RouteKernel(RouterShape shape, DevicePtr<const T> x, RouterArrays a) {
  const int64_t token = blockIdx.x;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const DevicePtr<float> probs = a.probs + token * shape.num_experts;
  for (int32_t e = warp; e < shape.num_experts; e += kRouterWarps) {
    const float score =
        ScoreExpert<T>(shape, x + token * shape.hidden_size, a.weight + static_cast<int64_t>(e) * shape.hidden_size);
    if (lane == 0) probs[e] = a.bias == nullptr ? score : score + a.bias[e];
  }
  __syncthreads();
  if (warp != 0) return;
  const DevicePtr<uint32_t> ranks = a.ranks + token * shape.num_experts;
  const DevicePtr<int32_t> chosen = a.chosen + token * shape.top_k;
  RankExperts(shape, a, probs, ranks);
  for (int32_t i = 0; i < shape.top_k; ++i) {
    const int32_t expert = TakeBest(shape.num_experts, ranks);
    if (lane == 0) chosen[i] = expert;
  }
  __syncwarp();
  float sum = 0.0f;
  for (int32_t i = 0; i < shape.top_k; ++i) sum += probs[chosen[i]];
  const float floored = sum > shape.norm_min || sum != sum ? sum : shape.norm_min;
  const float divisor = shape.normalize != 0 ? floored : 1.0f;
  for (int32_t i = lane; i < shape.top_k; i += kWarpSize) {
    const int32_t expert = chosen[i];
    int32_t place = 0;
    for (int32_t other = 0; other < shape.top_k; ++other) place += chosen[other] < expert ? 1 : 0;
    a.experts[token * shape.top_k + place] = expert;
    a.pair_weights[token * shape.top_k + place] = probs[expert] / divisor * shape.scale;
  }
}

// Block (expert that is here): the rows of its pairs, in the order of tokens.
static __global__ __launch_bounds__(kRouterThreads) void NumberPairsKernel(RouterShape shape, RouterArrays a) {
  const int32_t expert = shape.first_expert + static_cast<int32_t>(blockIdx.x);
  const int32_t num_pairs = shape.num_tokens * shape.top_k;
  int32_t num_before = 0;
  for (int32_t pair = threadIdx.x; pair < num_pairs; pair += kRouterThreads) {
    const int32_t other = a.experts[pair];
    num_before += other >= shape.first_expert && other < expert ? 1 : 0;
  }
  int32_t next_row;
  BlockRunningSum<kRouterThreads>(num_before, &next_row);
  if (threadIdx.x == 0) a.first[blockIdx.x] = next_row;
  for (int32_t begin = 0; begin < num_pairs; begin += kRouterThreads) {
    const int32_t pair = begin + static_cast<int32_t>(threadIdx.x);
    const bool is_own = pair < num_pairs && a.experts[pair] == expert;
    int32_t num_own;
    const int32_t row = next_row + BlockRunningSum<kRouterThreads>(is_own ? 1 : 0, &num_own) - 1;
    if (is_own) {
      a.rows[pair] = row;
      a.tokens[row] = pair / shape.top_k;
    }
    next_row += num_own;
  }
  if (threadIdx.x == 0 && blockIdx.x == gridDim.x - 1) a.first[gridDim.x] = next_row;
}

// One block: where the tiles of each expert begin.
static __global__ __launch_bounds__(kRouterThreads) void NumberTilesKernel(int32_t num_experts, int32_t tile_rows,
                                                                           RouterArrays a) {
  int32_t next_tile = 0;
  for (int32_t begin = 0; begin < num_experts; begin += kRouterThreads) {
    const int32_t e = begin + static_cast<int32_t>(threadIdx.x);
    int32_t own = 0;
    if (e < num_experts) own = static_cast<int32_t>(DivideUp(a.first[e + 1] - a.first[e], tile_rows));
    int32_t total;
    const int32_t up_to_own = BlockRunningSum<kRouterThreads>(own, &total);
    if (e < num_experts) a.first_tile[e] = next_tile + up_to_own - own;
    next_tile += total;
  }
  if (threadIdx.x == 0) a.first_tile[num_experts] = next_tile;
}

}  // namespace fdsd::cuda
