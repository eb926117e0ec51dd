#pragma once
// Attention on Hopper: the kernels of attention.cu with tiles of 64 or 128 rows, whose products are those of
// warpgroups.
#include "attention_apart.h"
#include "attention_partition.h"

namespace fdsd::cuda {

// 2^x of a weight: of what is smaller than any normal number, 0.
__device__ __forceinline__ float WeightOf(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

// The scores of 64 keys.
template <typename Block>
__device__ __forceinline__ void ScoreStep(const QueryWords<Block::kHead>& queries, DevicePtr<const uint8_t> keys,
                                          DevicePtr<const uint8_t> slot, float (*scores)[4]) {
#pragma unroll
  for (int i = 0; i < 4 * kKeyTiles; ++i) scores[i / 4][i % 4] = 0.0f;
  BeginWarpgroupProducts<4 * kKeyTiles>(scores[0]);
#pragma unroll
  for (int step = 0; step < QueryWords<Block::kHead>::kSteps; ++step)
    AddWarpgroupProduct<Bf16Products, kStepKeys>(scores[0], queries.words[step], keys + step / 2 * Block::kPanelBytes,
                                                 step % 2);
  WaitForWarpgroupProducts<4 * kKeyTiles>(scores[0]);
  if constexpr (Block::kIsStaged) {
    const auto scales = ViewAs<const float>(slot + Block::kScalesAt);
#pragma unroll
    for (int i = 0; i < 2 * kKeyTiles; ++i) {
      const float scale = scales[OwnColumn(i / 2) + i % 2];
      scores[i / 2][i % 2] *= scale;
      scores[i / 2][2 + i % 2] *= scale;
    }
  }
}

// Scores of 64 keys to weights 2^(score - max), which are rounded as they are multiplied; 0 where a row, at its
// position, does not see a key. The result so far is made to the new largest score. is_whole: every row sees all keys.
template <typename Block>
__device__ __forceinline__ void WeighStep(const AttentionShape& shape, const int* positions, int block, bool is_whole,
                                          float (*scores)[4], uint32_t (*weights)[4], WideResult<Block>* result) {
  const float scale = shape.scale * kLog2E;
#pragma unroll
  for (int i = 0; i < 4 * kKeyTiles; ++i) scores[i / 4][i % 4] = shape.Capped(scores[i / 4][i % 4] * scale);
  if (!is_whole) {
#pragma unroll
    for (int i = 0; i < 4 * kKeyTiles; ++i) {
      const int key = block * kStepKeys + OwnColumn(i / 4) + i % 2;
      const int position = positions[i % 4 / 2];
      if (!shape.IsSeen(key, position)) scores[i / 4][i % 4] = kMasked;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float before = result->max[half];
    float largest = before;
#pragma unroll
    for (int i = 0; i < 2 * kKeyTiles; ++i) largest = fmaxf(largest, scores[i / 2][2 * half + i % 2]);
    for (int lanes = 1; lanes < 4; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, lanes));
    const float base = largest == kMasked ? 0.0f : largest;
    float total = 0.0f;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      const uint32_t word =
          RoundedPair<bf16>(WeightOf(scores[n][2 * half] - base), WeightOf(scores[n][2 * half + 1] - base));
      weights[n / kUnitTiles][n % kUnitTiles * 2 + half] = word;
      total += __uint_as_float(word << 16);
      total += __uint_as_float(word & 0xffff0000u);
    }
    for (int lanes = 1; lanes < 4; lanes *= 2) total += __shfl_xor_sync(kAllLanes, total, lanes);
    const float factor = before == largest ? 1.0f : WeightOf(before - largest);
    result->max[half] = largest;
    result->total[half] = result->total[half] * factor + total;
#pragma unroll
    for (int i = 0; i < 2 * Block::kColumnTiles; ++i) result->sums[i / 2][2 * half + i % 2] *= factor;
  }
}

// The tile's partitions [begin, end), the last of which may end before: merged in order onto those before. Within one,
// 64 keys after the other join the sums. All threads of the block.
template <typename Block>
__device__ __forceinline__ void ComputePartitions(const AttentionShape& shape, const AttentionArrays& a,
                                                  const TilePlace& tile, const TilePlace& own, int begin, int end,
                                                  ResultBefore<Block>* before, WideResult<Block>* result) {
  const int first_block = begin * kPartitionSteps;
  const int end_block = min(end * kPartitionSteps, static_cast<int>(DivideUp(tile.end_key, kStepKeys)));
  const int positions[2] = {own.Position(shape, a, OwnRow(0)), own.Position(shape, a, OwnRow(1))};
  const QueryWords<Block::kHead> queries(shape, a, own);
  const ApartUnits<Block> apart(shape, a, tile, own);
  StepStream<Block> steps(shape, a, tile, first_block, end_block);
  result->Clear();
#pragma unroll 1
  for (int block = first_block; block < end_block; ++block) {
    if (block % kPartitionSteps == 0 && block > first_block) {
      before->MergeInto(result);
      before->Store(*result);
      result->Clear();
    }
    const DevicePtr<const uint8_t> slot = steps.Next();
    const DevicePtr<const uint8_t> step = steps.Prepare(slot);
    const DevicePtr<const uint8_t> values = step + Block::kValuesAt;
    float scores[kKeyTiles][4];
    ScoreStep<Block>(queries, step, slot, scores);
    const bool is_tree = apart.IsTree(block);
    if (is_tree) apart.Score(block, queries, scores);
    const bool is_whole = apart.IsWhole(block);
    uint32_t weights[kUnits][4];
    WeighStep<Block>(shape, positions, block, is_whole, scores, weights, result);
    const bool is_bad = !is_whole && apart.HasBadValue(values);
    HoldWords<4 * kUnits>(weights[0]);
    if (is_tree || is_bad) {
      apart.AddValues(block, is_bad, weights, values, result->sums);
      continue;
    }
    BeginWarpgroupProducts<4 * Block::kColumnTiles>(result->sums[0]);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit)
      AddWarpgroupColumns<Bf16Products, Block::kColumns, Block::kPanelBytes>(
          result->sums[0], weights[unit], values + unit * kUnitKeys * kWarpgroupRowBytes);
    WaitForWarpgroupProducts<4 * Block::kColumnTiles>(result->sums[0]);
  }
  __syncthreads();  // before others fill what is multiplied here
}

// See SharedPartitionsKernel.
template <typename Block>
__global__ __launch_bounds__(Block::kThreads,
                             Block::kGroups == 1 ? 2 : 1) void WideSharedPartitionsKernel(AttentionShape shape,
                                                                                          AttentionArrays a,
                                                                                          DevicePtr<float> results) {
  if (!HasWarpgroupProducts()) return;
  for (int64_t i = blockIdx.x;; i += gridDim.x) {
    SharedTask task;
    if (!task.Find(shape, a, i)) return;
    const TilePlace own = task.tile.RowsOfWarp(WarpRow());
    ResultBefore<Block> before;
    WideResult<Block> merged;
    ComputePartitions<Block>(shape, a, task.tile, own, task.begin, task.end, &before, &merged);
    if (task.begin + 1 < task.end) before.MergeInto(&merged);
    merged.StoreShared(shape, own, task.begin, results);
  }
}

// See AttentionKernel.
template <typename Block>
__global__ __launch_bounds__(Block::kThreads, Block::kGroups == 1 ? 2 : 1) void WideAttentionKernel(
    AttentionShape shape, AttentionArrays a, DevicePtr<float> partials, DevicePtr<const float> shared) {
  if (!HasWarpgroupProducts()) return;
  TilePlace tile;
  if (!tile.Find(shape, a)) return;
  const TilePlace own = tile.RowsOfWarp(WarpRow());
  const bool is_split = gridDim.z > 1;
  const int begin = is_split ? static_cast<int>(blockIdx.z) : tile.first_partition;
  const int end = is_split ? begin + 1 : tile.NumPartitions();
  if (is_split && (begin < tile.first_partition || begin >= tile.NumPartitions())) return;
  ResultBefore<Block> before;
  WideResult<Block> merged;
  if (!is_split && tile.num_shared > 0) {
    merged.LoadShared(shape, own, shared);
    before.Store(merged);
  }
  ComputePartitions<Block>(shape, a, tile, own, begin, end, &before, &merged);
  if (is_split) return merged.StoreOwn(shape, own, begin, partials);
  before.MergeInto(&merged);
  merged.Write(shape, a, own);
}

}  // namespace fdsd::cuda
