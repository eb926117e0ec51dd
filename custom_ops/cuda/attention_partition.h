#pragma once
// What a block computes for a tile of query rows: partitions of its keys; and which tiles and partitions are of groups.
#include "attention_partial.h"
#include "attention_values.h"
#include "device_limits.h"

namespace fdsd::cuda {

// Where the sections of a block's dynamic shared memory begin, in bytes. What is on its way and the warps' results are
// not there at the same time.
struct SharedSections {
  int32_t units;   // of all warps
  int32_t staged;  // of all warps
  int32_t merged;  // the partitions before
  int32_t num_bytes;
};

// What a warp prepares for products: a unit's values, or all weights of float32.
template <typename Cached>
__device__ __host__ int32_t StagedBytes(const AttentionShape& shape) {
  if (sizeof(Cached) == 2) return 0;
  return sizeof(Cached) == 4 ? kWarpKeys * kTileRows * 4 : kUnitKeys * ValueRowBytes<Cached>(shape);
}

template <typename Cached>
__device__ __host__ SharedSections SectionsOf(const AttentionShape& shape) {
  const int32_t head_dim = shape.cache.head_dim;
  const int32_t units = kAttentionWarps * shape.num_stages * kUnitKeys * UnitStream<Cached>::RowBytes(shape);
  const int32_t result = kTileRows * shape.PartialSize() * static_cast<int32_t>(sizeof(float));
  SharedSections sections;
  sections.units = kTileRows * QueryRowBytes<Cached>(head_dim);
  sections.staged = sections.units + (units > kAttentionWarps * result ? units : kAttentionWarps * result);
  sections.merged = sections.staged + kAttentionWarps * StagedBytes<Cached>(shape);
  // Where a block has all parts of the values, one after the other.
  const bool has_all_parts = head_dim > kMaxHeadDim;
  sections.num_bytes = sections.merged + result * (has_all_parts ? shape.NumParts() : 1);
  return sections;
}

// Units of a warp on their way, on a device with these limits; 0 = there is no shared memory even for one.
template <typename Cached>
int32_t NumStages(const DeviceLimits& limits, AttentionShape shape) {
  return StagesOf(limits, {kAttentionThreads, kAttentionBlocks}, {kMaxStages, 2, 1}, [&shape](int32_t count) {
    shape.num_stages = count;
    return SectionsOf<Cached>(shape).num_bytes + kArrivalBytes;
  });
}

// The results of a partition's keys, which the block's warps have summed, in `results`: merged in order. All threads.
template <int kColumnTiles>
__device__ __forceinline__ void MergeWarps(const float (*sums)[4], const float* max, const float* total,
                                           int num_columns, DevicePtr<float> results, Partial<kColumnTiles>* result) {
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int stride = num_columns + 2;
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const DevicePtr<float> row = results + (warp * kTileRows + lane / 4 + 8 * half) * stride;
    if (lane % 4 == 0) {
      row[num_columns] = max[half];
      row[num_columns + 1] = total[half];
    }
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      if (n * kMatrixColumns >= num_columns) break;
      row[n * kMatrixColumns + lane % 4 * 2] = sums[n][2 * half];
      row[n * kMatrixColumns + lane % 4 * 2 + 1] = sums[n][2 * half + 1];
    }
  }
  __syncthreads();
  result->Clear();
  for (int w = 0; w < kAttentionWarps; ++w) {
    Partial<kColumnTiles> other;
    other.Load(results + w * kTileRows * stride, num_columns);
    result->Merge(other);
  }
  FenceBulkWrites();
  __syncthreads();
}

// take(tile, result) with the result of one partition, spread over the block: of the tile's part of the values or,
// kAllParts, of each part of them after the other, with the same weights. All threads of the block.
template <typename Cached, int kColumnTiles, bool kAllParts, typename Take>
__device__ __forceinline__ void ComputeParts(const AttentionShape& shape, const AttentionArrays& a,
                                             const TilePlace& whole, int partition, Arrivals* arrivals, Take&& take) {
  using Units = UnitStream<Cached>;
  const int warp = threadIdx.x / kWarpSize;
  const SharedSections sections = SectionsOf<Cached>(shape);
  const DevicePtr<uint8_t> shared = DynamicShared<uint8_t>();
  const DevicePtr<float> results = ViewAs<float>(shared + sections.units);
  const DevicePtr<uint8_t> staged = shared + sections.staged + warp * StagedBytes<Cached>(shape);
  const int first_key = partition * kPartitionKeys + warp * kWarpKeys;
  TilePlace tile = whole;
  float scores[kKeyTiles][4] = {};
  float max[2];
  float total[2];
  const DevicePtr<uint8_t> slots =
      shared + sections.units + warp * shape.num_stages * kUnitKeys * Units::RowBytes(shape);
  const Units units(shape, a, tile, first_key, slots, arrivals);
  ScoreKeys<Cached>(shape, a, tile, units, shared, scores);
#pragma unroll
  for (int half = 0; half < 2; ++half)
    WeighKeys<Cached>(shape, a, tile, first_key, half, scores, &max[half], &total[half]);
  const Weights<Cached> weights(scores, staged);
  const int num_parts = kAllParts ? shape.NumParts() : 1;
#pragma unroll 1
  for (int part = 0; part < num_parts; ++part) {
    if constexpr (kAllParts) tile.FindPart(shape, whole.kv_head * shape.NumParts() + part);
    if (part > 0) units.BeginValues();
    float sums[kColumnTiles][4] = {};
    AddValues<Cached, kColumnTiles>(shape, a, tile, units, weights, staged, sums);
    Partial<kColumnTiles> result;
    MergeWarps<kColumnTiles>(sums, max, total, tile.num_columns, results, &result);
    take(tile, result);
  }
}

// The result of one partition, spread over the block. All threads of the block.
template <typename Cached, int kColumnTiles>
__device__ void ComputePartition(const AttentionShape& shape, const AttentionArrays& a, const TilePlace& tile,
                                 int partition, Arrivals* arrivals, Partial<kColumnTiles>* result) {
  ComputeParts<Cached, kColumnTiles, false>(
      shape, a, tile, partition, arrivals,
      [&](const TilePlace&, const Partial<kColumnTiles>& found) { *result = found; });
}

// The tile's partitions [begin, end) onto those before, whose result is in shared memory.
template <typename Cached, int kColumnTiles>
__device__ __forceinline__ void MergePartitions(const AttentionShape& shape, const AttentionArrays& a,
                                                const TilePlace& tile, int begin, int end, Arrivals* arrivals,
                                                Partial<kColumnTiles>* merged) {
  // In shared memory, since registers are for what is computed.
  const auto before = ViewAs<float>(DynamicShared<uint8_t>() + SectionsOf<Cached>(shape).merged);
  for (int partition = begin; partition < end; ++partition) {
    Partial<kColumnTiles> next;
    ComputePartition<Cached, kColumnTiles>(shape, a, tile, partition, arrivals, &next);
    merged->Load(before, tile.num_columns);
    merged->Merge(next);
    if (partition + 1 == end) return;
    __syncwarp();
    merged->Store(before, tile.num_columns);
  }
}

// What a block of the shared partitions does.
struct SharedTask {
  TilePlace tile;
  int32_t begin;  // partitions
  int32_t end;

  // The i-th: of a partition of a tile, or of all its partitions where they are merged at once. Tiles that read the
  // same keys follow one another. False where there are not so many.
  __device__ bool Find(const AttentionShape& shape, const AttentionArrays& a, int64_t i) {
    const int32_t num_parts = shape.cache.num_kv_heads * shape.NumParts();
    for (int32_t group = 0; group < shape.num_requests; ++group) {
      const int32_t num_tokens = a.prefixes.group_starts[group + 1] - a.prefixes.group_starts[group];
      if (num_tokens == 0) return false;
      const auto num_tiles = static_cast<int32_t>(DivideUp(int64_t{num_tokens} * shape.GroupSize(), shape.tile_rows));
      const int32_t num_partitions = a.prefixes.shared_partitions[a.prefixes.group_leaders[group]];
      const bool is_split = shape.num_slots > 1;
      const int64_t num_tasks = int64_t{num_tiles} * num_parts * (is_split ? num_partitions : 1);
      if (i < num_tasks) {
        const auto part = static_cast<int32_t>(i / num_tiles % num_parts);
        tile.FindInGroup(shape, a, group, static_cast<int32_t>(i % num_tiles), part);
        begin = is_split ? static_cast<int32_t>(i / num_tiles / num_parts) : 0;
        end = is_split ? begin + 1 : num_partitions;
        return true;
      }
      i -= num_tasks;
    }
    return false;
  }
};

}  // namespace fdsd::cuda
