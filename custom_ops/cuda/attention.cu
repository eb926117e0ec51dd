// Attention over a paged cache. The query rows of a request that share a KV head (its group of heads times its new
// tokens) are packed into tiles of 16, so that one read of keys and values serves all of them.
//
// Keys are split at fixed positions: a warp takes 64 of them, the four warps of a block a partition of 256. A
// partition's result is that of its warps merged in order, a row's that of its partitions merged in order. Where the
// tiles alone do not fill a GPU, partitions are computed by blocks of their own and merged by another kernel, by the
// same additions: the bits are the same. Keys that a row does not see add nothing, exactly, so it does not matter whose
// tile it is in. In a tree of drafts the keys of each new token are put together as if they followed one another, so
// its rows have the bits of a chain.
//
// Source: arXiv:2307.08691 (online softmax in tiles); the packing of heads and drafts and the fixed split are ours.
#include "attention_partial.h"
#include "attention_values.h"
#include "fdsd/attention.h"
#include "ops.h"

namespace fdsd::cuda {
namespace {

// Where the parts of a block's dynamic shared memory begin, in bytes. What is on its way and the warps' results are not
// there at the same time.
struct SharedParts {
  int32_t units;   // of all warps
  int32_t staged;  // of all warps
  int32_t merged;  // the partitions before
  int32_t num_bytes;
};

// What a warp prepares for products: a unit's values, or all weights of float32.
template <typename Cached>
__device__ __host__ int32_t StagedBytes(const KvShape& cache) {
  if (sizeof(Cached) == 2) return 0;
  return sizeof(Cached) == 4 ? kWarpKeys * kTileRows * 4 : kUnitKeys * ValueRowBytes<Cached>(cache);
}

template <typename Cached>
__device__ __host__ SharedParts PartsOf(const AttentionShape& shape) {
  const int32_t head_dim = shape.cache.head_dim;
  const int32_t units = kAttentionWarps * kStages<Cached> * kUnitKeys * UnitStream<Cached, 1>::RowBytes(head_dim);
  const int32_t result = kTileRows * shape.PartialSize() * static_cast<int32_t>(sizeof(float));
  SharedParts parts;
  parts.units = kTileRows * QueryRowBytes<Cached>(head_dim);
  parts.staged = parts.units + (units > kAttentionWarps * result ? units : kAttentionWarps * result);
  parts.merged = parts.staged + kAttentionWarps * StagedBytes<Cached>(shape.cache);
  parts.num_bytes = parts.merged + result;
  return parts;
}

// The result of one partition, spread over the block. All threads of the block.
template <typename Cached, int kColumnTiles>
__device__ void ComputePartition(const AttentionShape& shape, const AttentionArrays& a, const TilePlace& tile,
                                 int partition, Partial<kColumnTiles>* result) {
  constexpr int kSlots = kStages<Cached>;
  using Units = UnitStream<Cached, kSlots>;
  const int head_dim = shape.cache.head_dim;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const SharedParts parts = PartsOf<Cached>(shape);
  const DevicePtr<uint8_t> shared = DynamicShared<uint8_t>();
  const DevicePtr<float> results = ViewAs<float>(shared + parts.units);
  const DevicePtr<uint8_t> staged = shared + parts.staged + warp * StagedBytes<Cached>(shape.cache);
  const int first_key = partition * kPartitionKeys + warp * kWarpKeys;
  float scores[kKeyTiles][4] = {};
  float max[2];
  float total[2];
  const DevicePtr<uint8_t> slots = shared + parts.units + warp * kSlots * kUnitKeys * Units::RowBytes(head_dim);
  const Units units(shape, a, tile, first_key, slots);
  ScoreKeys<Cached, kSlots>(shape, a, tile, units, shared, scores);
#pragma unroll
  for (int half = 0; half < 2; ++half)
    WeighKeys<Cached>(shape, a, tile, first_key, half, scores, &max[half], &total[half]);
  float sums[kColumnTiles][4] = {};
  const Weights<Cached> weights(scores, staged);
  AddValues<Cached, kSlots, kColumnTiles>(shape, a, tile, units, weights, staged, sums);
  const int num_columns = tile.num_columns;
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
  __syncthreads();
}

// Block (tile, part of a KV head, partition) writes a partition's result; with one partition in the grid, block (tile,
// part of a KV head) merges all of them and writes y.
template <typename T, typename Cached, int kColumnTiles>
__global__ __launch_bounds__(kAttentionThreads, 2) void AttentionKernel(AttentionShape shape, AttentionArrays a,
                                                                        DevicePtr<float> partials) {
  TilePlace tile;
  if (!tile.Find(shape, a)) return;
  const bool is_split = gridDim.z > 1;
  const int begin = static_cast<int>(blockIdx.z);
  const int end = is_split ? begin + 1 : tile.NumPartitions();
  if (begin >= tile.NumPartitions()) return;
  LoadQueries<T, Cached>(shape, a, tile, DynamicShared<uint8_t>());
  __syncthreads();
  // In shared memory, since registers are for what is computed.
  const auto before = ViewAs<float>(DynamicShared<uint8_t>() + PartsOf<Cached>(shape).merged);
  for (int partition = begin; partition < end; ++partition) {
    Partial<kColumnTiles> next;
    ComputePartition<Cached, kColumnTiles>(shape, a, tile, partition, &next);
    if (is_split) {
      next.Store(partials + tile.PartialOffset(shape, partition), tile.num_columns);
      return;
    }
    Partial<kColumnTiles> merged;
    merged.Clear();
    if (partition > 0) merged.Load(before, tile.num_columns);
    merged.Merge(next);
    if (partition + 1 == end) {
      merged.Write(shape, tile, ViewAs<T>(a.y));
    } else {
      __syncwarp();
      merged.Store(before, tile.num_columns);
    }
  }
}

// Block (tile, part of a KV head): the partitions that blocks of their own have left.
template <typename T, int kColumnTiles>
__global__ __launch_bounds__(kAttentionThreads) void MergePartitionsKernel(AttentionShape shape, AttentionArrays a,
                                                                           DevicePtr<const float> partials) {
  TilePlace tile;
  if (!tile.Find(shape, a)) return;
  Partial<kColumnTiles> merged;
  merged.Clear();
  for (int partition = 0; partition < tile.NumPartitions(); ++partition) {
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
  return AttentionGrid{static_cast<unsigned>(num_tiles), static_cast<unsigned>(num_parts),
                       is_split && num_partitions > 1 ? static_cast<unsigned>(num_partitions) : 1u};
}

AttentionShape ShapeOf(const CascadeAppendAttentionParams& p, const AttentionGrid& grid) {
  return AttentionShape{cuda::ShapeOf(p.cache),
                        p.num_requests,
                        p.num_heads,
                        p.max_blocks,
                        p.scale,
                        p.first_key,
                        static_cast<int32_t>(grid.num_partitions)};
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
                               DevicePtr<const int64_t>(p.tree_mask),
                               DevicePtr<uint8_t>(p.y)};
  LaunchShape launch{dim3(grid.num_tiles, grid.num_parts, grid.num_partitions), dim3(kAttentionThreads),
                     PartsOf<Cached>(shape).num_bytes};
  const auto partials = DevicePtr<float>(workspace);
  if (Error error = Launch<AttentionKernel<T, Cached, kColumnTiles>>(launch, stream, shape, arrays, partials))
    return error;
  if (grid.num_partitions == 1) return nullptr;
  launch = LaunchShape{dim3(grid.num_tiles, grid.num_parts), dim3(kAttentionThreads)};
  return Launch<MergePartitionsKernel<T, kColumnTiles>>(launch, stream, shape, arrays,
                                                        DevicePtr<const float>(workspace));
}

template <typename Cached>
Error LaunchOver(const CascadeAppendAttentionParams& p, void* workspace, Stream stream) {
  // Activations of float32 are not for speed: nobody serves them on a GPU.
  if constexpr (sizeof(Cached) != 2) {
    if (p.cache.dtype == DType::kFloat32) return LaunchAttention<float, Cached, 16>(p, workspace, stream);
  }
  if constexpr (sizeof(Cached) != 4) {
    if (p.cache.head_dim <= 64) return LaunchAttention<bf16, Cached, 8>(p, workspace, stream);
    return LaunchAttention<bf16, Cached, 16>(p, workspace, stream);
  }
  return nullptr;
}

}  // namespace

int64_t CascadeAppendAttentionWorkspaceBytes(const CascadeAppendAttentionParams& p) {
  const AttentionGrid grid = GridOf(p);
  if (grid.num_partitions == 1) return 0;
  const int64_t num_partials = static_cast<int64_t>(grid.num_tiles) * grid.num_parts * grid.num_partitions;
  const int64_t size = ShapeOf(p, grid).PartialSize();
  return num_partials * kTileRows * size * static_cast<int64_t>(sizeof(float));
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
  }
  return "kv_dtype: expected one of the types of a cache, got another";
}

}  // namespace fdsd::cuda
