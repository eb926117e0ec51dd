#pragma once
// How a call of attention is cut into blocks, from its sizes and the device alone.
#include <algorithm>

#include "attention_tile.h"
#include "fdsd/attention.h"
#include "warpgroup.h"

namespace fdsd::cuda {

constexpr int kWarpgroupRows = kWarpgroupWarps * kTileRows;

struct AttentionGrid {
  unsigned num_tiles;
  unsigned num_parts;       // of all KV heads
  unsigned num_partitions;  // 1 = blocks go through all of theirs
  int32_t tile_rows;        // 16, or where products are of warpgroups 64 or 128
  int64_t num_rows;         // packed, of a KV head
  int64_t num_shared_rows;  // that may be in groups, packed; 0 = nothing is shared
  int32_t num_slots;        // see AttentionShape
};

// Tiles of so many rows as there can be: see TilePlace::Find.
inline unsigned NumTiles(const CascadeAppendAttentionParams& p, int64_t num_rows, int32_t tile_rows) {
  return static_cast<unsigned>(num_rows / tile_rows + p.num_requests);
}

// Rows of a tile. Two warpgroups of a block share what it copies, which pays off where requests have many rows. Queries
// of larger heads do not fit in registers together with the sums. Their products are those of warps, for all rows, as
// are those of float16.
inline int32_t TileRows(const CascadeAppendAttentionParams& p, int64_t num_rows) {
  if (p.cache.kv_dtype == KvDType::kFloat32 || p.cache.head_dim > kPartColumns) return kTileRows;
  if (p.cache.dtype == DType::kFloat16 || !DeviceHasWarpgroupProducts()) return kTileRows;
  return num_rows > int64_t{kWarpgroupRows} * p.num_requests ? 2 * kWarpgroupRows : kWarpgroupRows;
}

inline AttentionGrid GridOf(const CascadeAppendAttentionParams& p) {
  constexpr int64_t kEnoughBlocks = 512;     // fill a GPU
  constexpr int64_t kMaxPartials = 1 << 14;  // of 16 rows, what a workspace has room for
  const int64_t num_rows = int64_t{p.num_tokens} * (p.num_heads / p.cache.num_kv_heads);
  const int32_t tile_rows = TileRows(p, num_rows);
  const unsigned num_tiles = NumTiles(p, num_rows, tile_rows);
  const int64_t num_parts = p.cache.num_kv_heads * DivideUp(p.cache.head_dim, kPartColumns);
  const int64_t num_partitions = DivideUp(static_cast<int64_t>(p.max_blocks) * p.cache.block_size, kPartitionKeys);
  const bool is_split = num_tiles * num_parts < kEnoughBlocks &&
                        DivideUp(num_rows, kTileRows) * num_parts * num_partitions <= kMaxPartials;
  AttentionGrid grid{num_tiles,
                     static_cast<unsigned>(num_parts),
                     is_split && num_partitions > 1 ? static_cast<unsigned>(num_partitions) : 1u,
                     tile_rows,
                     num_rows,
                     0,
                     1};
  if (p.prefixes.group_rows == nullptr || p.num_requests < 2 || num_partitions < 2) return grid;
  grid.num_shared_rows = std::min<int64_t>(num_rows, int64_t{kMaxSharedVectors} * p.num_requests);
  const int64_t num_partials = DivideUp(grid.num_shared_rows, kTileRows) * num_parts * num_partitions;
  if (num_partials <= kMaxPartials) grid.num_slots = static_cast<int32_t>(num_partitions);
  return grid;
}

// Rows of a tile of a group.
inline int32_t SharedTileRows(const AttentionGrid& grid) { return std::min(grid.tile_rows, int32_t{kWarpgroupRows}); }

// Blocks for tasks of shared partitions: as many as fill a GPU, where there can be so many.
inline unsigned NumSharedBlocks(const CascadeAppendAttentionParams& p, const AttentionGrid& grid) {
  constexpr int64_t kEnoughBlocks = 528;
  const int64_t num_tiles = grid.num_shared_rows / SharedTileRows(grid) + p.num_requests / 2;
  return static_cast<unsigned>(std::min<int64_t>(num_tiles * grid.num_parts * grid.num_slots, kEnoughBlocks));
}

inline AttentionShape ShapeOf(const CascadeAppendAttentionParams& p, const AttentionGrid& grid) {
  return AttentionShape{cuda::ShapeOf(p.cache),
                        p.num_requests,
                        p.num_heads,
                        p.max_blocks,
                        p.scores.scale,
                        p.scores.softcap,
                        p.scores.first_key,
                        p.scores.window,
                        static_cast<int32_t>(grid.num_partitions),
                        grid.num_slots,
                        grid.tile_rows,
                        0,
                        grid.num_rows,
                        p.cache.dtype == DType::kFloat32};
}

// Bytes of the blocks' own results, which those over shared partitions follow.
inline int64_t OwnBytes(const AttentionGrid& grid, const AttentionShape& shape) {
  if (grid.num_partitions == 1) return 0;
  const int64_t num_partials = grid.num_rows * grid.num_parts * grid.num_partitions;
  return num_partials * shape.PartialSize() * static_cast<int64_t>(sizeof(float));
}

}  // namespace fdsd::cuda
