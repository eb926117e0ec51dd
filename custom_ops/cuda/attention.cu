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
// On Hopper tiles are of 64 or 128 rows for most models: attention_wide_kernels.h.
//
// Source: arXiv:2307.08691 (online softmax in tiles); the packing of heads and drafts and the fixed split are ours.
#include "attention_grid.h"
#include "attention_latent_kernel.h"
#include "attention_wide_kernels.h"
#include "ops.h"

namespace fdsd::cuda {
namespace {

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

PrefixArrays ArraysOf(const SharedPrefixes& prefixes, const AttentionGrid& grid) {
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
  if (p.scores.window < 0) return "window: expected 0 (none) or a number of tokens, got less";
  if (p.scores.window > 0 && p.prefixes.group_rows != nullptr) return "prefixes: expected none with a window";
  if (p.cache.head_dim > kMaxHeadDim && p.cache.kv_dtype == KvDType::kFloat32)
    return "head_dim: expected at most 256 elements of float32, for which there is shared memory, got more";
  if (!(p.scores.softcap >= 0)) return "softcap: expected 0 (none) or a positive number, got another";
  if (p.scores.first_key < 0 || p.scores.first_key > 63) return "first_key: expected 0..63, got a number outside";
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
