#pragma once
// Attention over latent vectors, which are keys and values. Their scores are long sums, so a block computes them once
// and goes through the columns of values in parts.
#include "attention_partition.h"

namespace fdsd::cuda {

// Block (tile, KV head, partition): as AttentionKernel, with all parts of the values.
template <typename T, typename Cached, int kColumnTiles>
__global__ __launch_bounds__(kAttentionThreads,
                             kAttentionBlocks) void LatentAttentionKernel(AttentionShape shape, AttentionArrays a,
                                                                          DevicePtr<float> partials,
                                                                          DevicePtr<const float> shared) {
  using Result = Partial<kColumnTiles>;
  TilePlace tile;
  if (!tile.Find(shape, a)) return;
  const auto own = static_cast<int>(blockIdx.z);
  const bool is_split = gridDim.z > 1;
  if (is_split && (own < tile.first_partition || own >= tile.NumPartitions())) return;
  Arrivals arrivals;
  LoadQueries<T, Cached>(shape, a, tile, DynamicShared<uint8_t>());
  const auto merged = ViewAs<float>(DynamicShared<uint8_t>() + SectionsOf<Cached>(shape).merged);
  const auto merged_at = [&](const TilePlace& part) {
    return merged + part.first_column / kPartColumns * kTileRows * (kPartColumns + 2);
  };
  if (!is_split) {
    TilePlace part = tile;
    for (int i = 0; i < shape.NumParts(); ++i) {
      part.FindPart(shape, tile.kv_head * shape.NumParts() + i);
      Result before;
      before.LoadShared(shape, part, shared);
      before.Store(merged_at(part), part.num_columns);
    }
  }
  __syncthreads();
  const int begin = is_split ? own : tile.first_partition;
  const int end = is_split ? own + 1 : tile.NumPartitions();
  for (int partition = begin; partition < end; ++partition) {
    ComputeParts<Cached, kColumnTiles, true>(shape, a, tile, partition, &arrivals,
                                             [&](const TilePlace& part, const Result& result) {
                                               if (is_split) return result.StoreOwn(shape, part, own, partials);
                                               Result all;
                                               all.Load(merged_at(part), part.num_columns);
                                               all.Merge(result);
                                               if (partition + 1 == end) return all.template Write<T>(shape, a, part);
                                               __syncwarp();
                                               all.Store(merged_at(part), part.num_columns);
                                             });
  }
}

}  // namespace fdsd::cuda
