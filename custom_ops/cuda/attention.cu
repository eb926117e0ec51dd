// Attention over a paged cache. The query rows of a request that share a KV head (its group of heads times its new
// tokens) are packed into tiles of 16, so that one read of keys and values serves all of them.
//
// Keys are split at fixed positions: a warp takes 64 of them, the four warps of a block a partition of 256. A
// partition's result is that of its warps merged in order, a row's that of its partitions merged in order. Where the
// tiles alone do not fill a GPU, partitions are computed by blocks of their own and merged by another kernel, by the
// same additions: the bits are the same. Keys that a row does not see add nothing, exactly, so it does not matter whose
// tile it is in.
//
// Partitions that a group of requests shares are computed by tiles of the group's rows, which leave their results for
// the rows' own tiles: these go on from there.
//
// In a tree of drafts the keys of each new token are put together as if they followed one another, so
// its rows have the bits of a chain.
//
// Source: arXiv:2307.08691 (online softmax in tiles); the packing of heads and drafts and the fixed split are ours.
#include <algorithm>

#include "attention_partition.h"
#include "fdsd/attention.h"
#include "ops.h"

namespace fdsd::cuda {
namespace {

// Blocks take tasks in turn, as only the device knows how many there are.
template <typename T, typename Cached, int kColumnTiles>
__global__ __launch_bounds__(kAttentionThreads, 2) void SharedPartitionsKernel(AttentionShape shape, AttentionArrays a,
                                                                               DevicePtr<float> results) {
  const auto before = ViewAs<float>(DynamicShared<uint8_t>() + PartsOf<Cached>(shape).merged);
  Arrivals arrivals;
  for (int64_t i = blockIdx.x;; i += gridDim.x) {
    SharedTask task;
    if (!task.Find(shape, a, i)) return;
    LoadQueries<T, Cached>(shape, a, task.tile, DynamicShared<uint8_t>());
    Partial<kColumnTiles> merged;
    merged.Clear();
    merged.Store(before, task.tile.num_columns);
    __syncthreads();
    MergePartitions<Cached, kColumnTiles>(shape, a, task.tile, task.begin, task.end, &arrivals, &merged);
    merged.StoreShared(shape, task.tile, task.begin, results);
    __syncthreads();
  }
}

// Block (tile, part of a KV head, partition) writes a partition's result; with one partition in the grid, block (tile,
// part of a KV head) merges all of them and writes y.
template <typename T, typename Cached, int kColumnTiles>
__global__ __launch_bounds__(kAttentionThreads, 2) void AttentionKernel(AttentionShape shape, AttentionArrays a,
                                                                        DevicePtr<float> partials,
                                                                        DevicePtr<const float> shared) {
  TilePlace tile;
  if (!tile.Find(shape, a)) return;
  const auto own = static_cast<int>(blockIdx.z);
  const bool is_split = gridDim.z > 1;
  if (is_split && (own < tile.first_partition || own >= tile.NumPartitions())) return;
  Arrivals arrivals;
  LoadQueries<T, Cached>(shape, a, tile, DynamicShared<uint8_t>());
  Partial<kColumnTiles> merged;
  if (is_split) {
    __syncthreads();
    ComputePartition<Cached, kColumnTiles>(shape, a, tile, own, &arrivals, &merged);
    merged.Store(partials + tile.PartialOffset(shape, own), tile.num_columns);
    return;
  }
  merged.LoadShared(shape, tile, shared);
  merged.Store(ViewAs<float>(DynamicShared<uint8_t>() + PartsOf<Cached>(shape).merged), tile.num_columns);
  __syncthreads();
  MergePartitions<Cached, kColumnTiles>(shape, a, tile, tile.first_partition, tile.NumPartitions(), &arrivals, &merged);
  merged.Write(shape, tile, ViewAs<T>(a.y));
}

// Block (tile, part of a KV head): the partitions that blocks of their own have left.
template <typename T, int kColumnTiles>
__global__ __launch_bounds__(kAttentionThreads) void MergePartitionsKernel(AttentionShape shape, AttentionArrays a,
                                                                           DevicePtr<const float> partials,
                                                                           DevicePtr<const float> shared) {
  TilePlace tile;
  if (!tile.Find(shape, a)) return;
  Partial<kColumnTiles> merged;
  merged.LoadShared(shape, tile, shared);
  for (int partition = tile.first_partition; partition < tile.NumPartitions(); ++partition) {
    Partial<kColumnTiles> next;
    next.Load(partials + tile.PartialOffset(shape, partition), tile.num_columns);
    merged.Merge(next);
  }
  merged.Write(shape, tile, ViewAs<T>(a.y));
}

// How a call is cut, from its sizes alone.
struct AttentionGrid {
  unsigned num_tiles;
  unsigned num_parts;       // of all KV heads
  unsigned num_partitions;  // 1 = blocks go through all of theirs
  int64_t num_shared_rows;  // that may be in groups, packed; 0 = nothing is shared
  int32_t num_slots;        // see AttentionShape
};

AttentionGrid GridOf(const CascadeAppendAttentionParams& p) {
  constexpr int64_t kEnoughBlocks = 512;     // fill a GPU
  constexpr int64_t kMaxPartials = 1 << 14;  // what a workspace has room for
  const int64_t group = p.num_heads / p.cache.num_kv_heads;
  const int64_t num_tiles = p.num_tokens * group / kTileRows + p.num_requests;
  const int64_t num_parts = p.cache.num_kv_heads * DivideUp(p.cache.head_dim, kPartColumns);
  const int64_t num_blocks = num_tiles * num_parts;
  const int64_t num_partitions = DivideUp(static_cast<int64_t>(p.max_blocks) * p.cache.block_size, kPartitionKeys);
  const bool is_split = num_blocks < kEnoughBlocks && num_blocks * num_partitions <= kMaxPartials;
  AttentionGrid grid{static_cast<unsigned>(num_tiles), static_cast<unsigned>(num_parts),
                     is_split && num_partitions > 1 ? static_cast<unsigned>(num_partitions) : 1u, 0, 1};
  if (p.prefixes.group_rows == nullptr || p.num_requests < 2 || num_partitions < 2) return grid;
  grid.num_shared_rows = std::min<int64_t>(p.num_tokens * group, int64_t{kMaxSharedVectors} * p.num_requests);
  const int64_t num_partials = DivideUp(grid.num_shared_rows, kTileRows) * num_parts * num_partitions;
  if (num_partials <= kMaxPartials) grid.num_slots = static_cast<int32_t>(num_partitions);
  return grid;
}

// Blocks for tasks of shared partitions: as many as fill a GPU, where there can be so many.
unsigned NumSharedBlocks(const CascadeAppendAttentionParams& p, const AttentionGrid& grid) {
  constexpr int64_t kEnoughBlocks = 528;
  const int64_t num_tiles = grid.num_shared_rows / kTileRows + p.num_requests / 2;
  return static_cast<unsigned>(std::min<int64_t>(num_tiles * grid.num_parts * grid.num_slots, kEnoughBlocks));
}

AttentionShape ShapeOf(const CascadeAppendAttentionParams& p, const AttentionGrid& grid) {
  return AttentionShape{cuda::ShapeOf(p.cache),
                        p.num_requests,
                        p.num_heads,
                        p.max_blocks,
                        p.scale,
                        p.first_key,
                        static_cast<int32_t>(grid.num_partitions),
                        grid.num_slots};
}

// Bytes of the blocks' own results, which those over shared partitions follow.
int64_t OwnBytes(const AttentionGrid& grid, const AttentionShape& shape) {
  if (grid.num_partitions == 1) return 0;
  const int64_t num_partials = static_cast<int64_t>(grid.num_tiles) * grid.num_parts * grid.num_partitions;
  return num_partials * kTileRows * shape.PartialSize() * static_cast<int64_t>(sizeof(float));
}

PrefixArrays ArraysOf(const SharedPrefixes& prefixes, const AttentionGrid& grid) {
  if (grid.num_shared_rows == 0) return PrefixArrays{};
  return PrefixArrays{DevicePtr<const int32_t>(prefixes.group_rows), DevicePtr<const int32_t>(prefixes.group_starts),
                      DevicePtr<const int32_t>(prefixes.group_leaders), DevicePtr<const int32_t>(prefixes.group_places),
                      DevicePtr<const int32_t>(prefixes.shared_partitions)};
}

template <typename T, typename Cached, int kColumnTiles>
Error LaunchAttention(const CascadeAppendAttentionParams& p, void* workspace, Stream stream) {
  const AttentionGrid grid = GridOf(p);
  const AttentionShape shape = ShapeOf(p, grid);
  const AttentionArrays arrays{DevicePtr<const uint8_t>(p.q),
                               DevicePtr<const uint8_t>(p.cache.k),
                               DevicePtr<const uint8_t>(p.cache.v),
                               DevicePtr<const float>(p.cache.k_scale),
                               DevicePtr<const float>(p.cache.v_scale),
                               DevicePtr<const int32_t>(p.query_start_loc),
                               DevicePtr<const int32_t>(p.seq_lens),
                               DevicePtr<const int32_t>(p.table_rows),
                               DevicePtr<const int32_t>(p.block_tables),
                               ArraysOf(p.prefixes, grid),
                               DevicePtr<const int64_t>(p.tree_mask),
                               DevicePtr<uint8_t>(p.y)};
  const dim3 block(kAttentionThreads);
  const int32_t dynamic_bytes = PartsOf<Cached>(shape).num_bytes;
  const auto partials = DevicePtr<float>(workspace);
  auto shared = DevicePtr<float>(nullptr);
  if (grid.num_shared_rows > 0) {
    shared = DevicePtr<float>(static_cast<char*>(workspace) + OwnBytes(grid, shape));
    const LaunchShape launch{dim3(NumSharedBlocks(p, grid)), block, dynamic_bytes};
    if (Error error = Launch<SharedPartitionsKernel<T, Cached, kColumnTiles>>(launch, stream, shape, arrays, shared))
      return error;
  }
  LaunchShape launch{dim3(grid.num_tiles, grid.num_parts, grid.num_partitions), block, dynamic_bytes};
  if (Error error = Launch<AttentionKernel<T, Cached, kColumnTiles>>(launch, stream, shape, arrays, partials,
                                                                     DevicePtr<const float>(shared)))
    return error;
  if (grid.num_partitions == 1) return nullptr;
  launch = LaunchShape{dim3(grid.num_tiles, grid.num_parts), block};
  return Launch<MergePartitionsKernel<T, kColumnTiles>>(launch, stream, shape, arrays, DevicePtr<const float>(partials),
                                                        DevicePtr<const float>(shared));
}

template <typename T, typename Cached>
Error LaunchHeads(const CascadeAppendAttentionParams& p, void* workspace, Stream stream) {
  if (p.cache.head_dim <= 64) return LaunchAttention<T, Cached, 8>(p, workspace, stream);
  return LaunchAttention<T, Cached, 16>(p, workspace, stream);
}

template <typename Cached>
Error LaunchOver(const CascadeAppendAttentionParams& p, void* workspace, Stream stream) {
  // Activations of float32 are not for speed: nobody serves them on a GPU.
  if constexpr (sizeof(Cached) != 2) {
    if (p.cache.dtype == DType::kFloat32) return LaunchAttention<float, Cached, 16>(p, workspace, stream);
  }
  if constexpr (kIsScaled<Cached>) {
    if (p.cache.dtype == DType::kFloat16) return LaunchHeads<half16, ForHalf16<Cached>>(p, workspace, stream);
  }
  if constexpr (kIsHalf16<Cached>) return LaunchHeads<half16, Cached>(p, workspace, stream);
  if constexpr (sizeof(Cached) != 4 && !kIsHalf16<Cached>) return LaunchHeads<bf16, Cached>(p, workspace, stream);
  return nullptr;
}

}  // namespace

int64_t CascadeAppendAttentionWorkspaceBytes(const CascadeAppendAttentionParams& p) {
  const AttentionGrid grid = GridOf(p);
  const AttentionShape shape = ShapeOf(p, grid);
  const int64_t num_shared = grid.num_shared_rows * grid.num_parts * grid.num_slots;
  return OwnBytes(grid, shape) + num_shared * shape.PartialSize() * static_cast<int64_t>(sizeof(float));
}

Error CascadeAppendAttention(const CascadeAppendAttentionParams& p, void* workspace, Stream stream) {
  if (const Error error = CheckKvCache(p.cache); error != nullptr) return error;
  if (p.num_heads <= 0 || p.num_heads % p.cache.num_kv_heads != 0)
    return "num_heads: expected a positive multiple of num_kv_heads";
  if (p.num_requests < 0 || p.num_tokens < 0 || p.max_blocks < 0) return "sizes: expected no negative number";
  if (p.first_key < 0 || p.first_key > 63) return "first_key: expected 0..63, got a number outside";
  switch (p.cache.kv_dtype) {
    case KvDType::kFloat32:
      return LaunchOver<float>(p, workspace, stream);
    case KvDType::kBFloat16:
      return LaunchOver<bf16>(p, workspace, stream);
    case KvDType::kInt8:
      return LaunchOver<int8_t>(p, workspace, stream);
    case KvDType::kFloat8:
      return LaunchOver<float8>(p, workspace, stream);
    case KvDType::kFloat16:
      return LaunchOver<half16>(p, workspace, stream);
  }
  return "kv_dtype: expected one of the types of a cache, got another";
}

}  // namespace fdsd::cuda
