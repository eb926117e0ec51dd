#pragma once
// Kernels of attention over a paged cache, as attention.cu describes them, and their launches. Every type of cache is
// compiled by itself (attention_bf16.cu and others), as together they take a compiler minutes.
#include "attention_grid.h"
#include "attention_latent_kernel.h"
#include "attention_over.h"
#include "attention_wide_kernels.h"

namespace fdsd::cuda {

// Blocks take tasks in turn, as only the device knows how many there are.
template <typename T, typename Cached, int kColumnTiles>
__global__ __launch_bounds__(kAttentionThreads,
                             kAttentionBlocks) void SharedPartitionsKernel(AttentionShape shape, AttentionArrays a,
                                                                           DevicePtr<float> results) {
  const auto before = ViewAs<float>(DynamicShared<uint8_t>() + SectionsOf<Cached>(shape).merged);
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
__global__ __launch_bounds__(kAttentionThreads, kAttentionBlocks) void AttentionKernel(AttentionShape shape,
                                                                                       AttentionArrays a,
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
    merged.StoreOwn(shape, tile, own, partials);
    return;
  }
  merged.LoadShared(shape, tile, shared);
  merged.Store(ViewAs<float>(DynamicShared<uint8_t>() + SectionsOf<Cached>(shape).merged), tile.num_columns);
  __syncthreads();
  MergePartitions<Cached, kColumnTiles>(shape, a, tile, tile.first_partition, tile.NumPartitions(), &arrivals, &merged);
  merged.template Write<T>(shape, a, tile);
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
    next.LoadOwn(shape, tile, partition, partials);
    merged.Merge(next);
  }
  merged.template Write<T>(shape, a, tile);
}

inline PrefixArrays ArraysOf(const SharedPrefixes& prefixes, const AttentionGrid& grid) {
  if (grid.num_shared_rows == 0) return PrefixArrays{};
  return PrefixArrays{DevicePtr<const int32_t>(prefixes.group_rows), DevicePtr<const int32_t>(prefixes.group_starts),
                      DevicePtr<const int32_t>(prefixes.group_leaders), DevicePtr<const int32_t>(prefixes.group_places),
                      DevicePtr<const int32_t>(prefixes.shared_partitions)};
}

// A call of the op: what its launches have in common.
struct AttentionCall {
  const CascadeAppendAttentionParams& p;
  Stream stream;
  AttentionGrid grid;
  AttentionShape shape;
  AttentionArrays arrays;
  DevicePtr<float> partials;
  DevicePtr<float> shared;

  AttentionCall(const CascadeAppendAttentionParams& p, void* workspace, Stream stream)
      : p(p),
        stream(stream),
        grid(GridOf(p)),
        shape(ShapeOf(p, grid)),
        arrays{DevicePtr<const uint8_t>(p.q),
               DevicePtr<const uint8_t>(p.cache.k),
               DevicePtr<const uint8_t>(p.cache.v == nullptr ? p.cache.k : p.cache.v),
               DevicePtr<const float>(p.cache.k_scale),
               DevicePtr<const float>(p.cache.v_scale),
               DevicePtr<const int32_t>(p.query_start_loc),
               DevicePtr<const int32_t>(p.seq_lens),
               DevicePtr<const int32_t>(p.table_rows),
               DevicePtr<const int32_t>(p.block_tables),
               ArraysOf(p.prefixes, grid),
               DevicePtr<const int64_t>(p.tree_mask),
               DevicePtr<const float>(p.sinks),
               DevicePtr<uint8_t>(p.y)},
        partials(static_cast<float*>(workspace)),
        shared(nullptr) {
    if (grid.num_shared_rows > 0) shared = DevicePtr<float>(static_cast<char*>(workspace) + OwnBytes(grid, shape));
  }

  // The tiles' own partitions, by blocks of so many threads.
  template <auto kernel>
  Error LaunchTiles(int num_threads, int32_t dynamic_bytes, unsigned num_parts) const {
    const LaunchShape launch{dim3(grid.num_tiles, num_parts, grid.num_partitions),
                             dim3(static_cast<unsigned>(num_threads)), dynamic_bytes};
    return Launch<kernel>(launch, stream, shape, arrays, partials, DevicePtr<const float>(shared));
  }

  // What requests share, if there can be anything.
  template <auto kernel>
  Error LaunchShared(int num_threads, int32_t dynamic_bytes) const {
    if (grid.num_shared_rows == 0) return nullptr;
    AttentionShape own = shape;
    own.tile_rows = SharedTileRows(grid);
    const LaunchShape launch{dim3(NumSharedBlocks(p, grid)), dim3(static_cast<unsigned>(num_threads)), dynamic_bytes};
    return Launch<kernel>(launch, stream, own, arrays, shared);
  }

  // What blocks of partitions have left.
  template <typename T, int kColumnTiles>
  Error LaunchMerge() const {
    if (grid.num_partitions == 1) return nullptr;
    AttentionShape own = shape;
    own.tile_rows = kTileRows;
    const LaunchShape launch{dim3(NumTiles(p, grid.num_rows, kTileRows), grid.num_parts), dim3(kAttentionThreads)};
    return Launch<MergePartitionsKernel<T, kColumnTiles>>(launch, stream, own, arrays, DevicePtr<const float>(partials),
                                                          DevicePtr<const float>(shared));
  }
};

// What requests share, then the tiles' own partitions by another kernel, whose blocks have so many parts.
template <typename T, typename Cached, int kColumnTiles, auto kernel>
Error LaunchAttention(AttentionCall call, unsigned num_parts) {
  call.shape.num_stages = NumStages<Cached>(LimitsOfDevice(), call.shape);
  if (call.shape.num_stages == 0) return kNoSharedMemory;
  const int32_t bytes = SectionsOf<Cached>(call.shape).num_bytes;
  Error error = call.LaunchShared<SharedPartitionsKernel<T, Cached, kColumnTiles>>(kAttentionThreads, bytes);
  if (error == nullptr) error = call.LaunchTiles<kernel>(kAttentionThreads, bytes, num_parts);
  return error == nullptr ? call.LaunchMerge<T, kColumnTiles>() : error;
}

template <typename T, typename Cached, int kColumnTiles>
Error LaunchParts(const AttentionCall& call) {
  return LaunchAttention<T, Cached, kColumnTiles, AttentionKernel<T, Cached, kColumnTiles>>(call, call.grid.num_parts);
}

template <typename T, typename Cached>
Error LaunchLatent(const AttentionCall& call) {
  constexpr int kColumnTiles = kPartColumns / kMatrixColumns;
  const auto num_heads = static_cast<unsigned>(call.p.cache.num_kv_heads);
  return LaunchAttention<T, Cached, kColumnTiles, LatentAttentionKernel<T, Cached, kColumnTiles>>(call, num_heads);
}

template <typename Cached, int kHead>
Error LaunchWide(const AttentionCall& call) {
  using One = WideBlock<Cached, kHead, 1>;
  const int32_t shared_bytes = call.grid.num_slots > 1 ? One::kBytesOfOne : One::kBytes;
  Error error = call.LaunchShared<WideSharedPartitionsKernel<One>>(One::kThreads, shared_bytes);
  if (error != nullptr) return error;
  if (call.grid.tile_rows == One::kRows) {
    const bool has_one = call.grid.num_partitions > 1;
    error = call.LaunchTiles<WideAttentionKernel<One>>(One::kThreads, has_one ? One::kBytesOfOne : One::kBytes,
                                                       call.grid.num_parts);
  } else {
    using Two = WideBlock<Cached, kHead, 2>;
    error = call.LaunchTiles<WideAttentionKernel<Two>>(Two::kThreads, Two::kBytes, call.grid.num_parts);
  }
  if (error != nullptr) return error;
  constexpr int kColumnTiles = One::kColumnTiles;
  return call.shape.is_float32 ? call.LaunchMerge<float, kColumnTiles>() : call.LaunchMerge<bf16, kColumnTiles>();
}

template <typename T, typename Cached>
Error LaunchHeads(const AttentionCall& call) {
  if constexpr (!kIsScaled<Cached>) {
    if (call.p.cache.head_dim > kMaxHeadDim) return LaunchLatent<T, Cached>(call);
  }
  if (call.p.cache.head_dim <= 64) return LaunchParts<T, Cached, 8>(call);
  return LaunchParts<T, Cached, 16>(call);
}

template <typename Cached>
Error LaunchOver(const CascadeAppendAttentionParams& p, void* workspace, Stream stream) {
  const AttentionCall call(p, workspace, stream);
  if constexpr (sizeof(Cached) != 4 && !kIsHalf16<Cached>) {
    if (call.grid.tile_rows != kTileRows) {
      return p.cache.head_dim <= 64 ? LaunchWide<Cached, 64>(call) : LaunchWide<Cached, kPartColumns>(call);
    }
  }
  // Activations of float32 need no speed: no GPU serves them.
  if constexpr (sizeof(Cached) != 2) {
    if (p.cache.dtype == DType::kFloat32) return LaunchParts<float, Cached, 16>(call);
  }
  if constexpr (kIsScaled<Cached>) {
    if (p.cache.dtype == DType::kFloat16) return LaunchHeads<half16, ForHalf16<Cached>>(call);
  }
  if constexpr (kIsHalf16<Cached>) return LaunchHeads<half16, Cached>(call);
  if constexpr (sizeof(Cached) != 4 && !kIsHalf16<Cached>) return LaunchHeads<bf16, Cached>(call);
  return nullptr;
}

}  // namespace fdsd::cuda
