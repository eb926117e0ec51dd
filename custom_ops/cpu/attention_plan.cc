#include "attention_plan.h"

#include <algorithm>

#include "fdsd/runtime.h"
#include "thread_pool.h"

namespace fdsd {
namespace {

// Reading a key and its value takes about as long as computing this many query vectors on it.
constexpr int64_t kReadCost = 4;

int32_t RowsPerTile(const CascadeAppendAttentionParams& p) {
  return kMaxTileVectors / (p.num_heads / p.cache.num_kv_heads);
}

int32_t NumRows(const CascadeAppendAttentionParams& p, int32_t request) {
  return p.query_start_loc[request + 1] - p.query_start_loc[request];
}

int64_t Cost(const CascadeAppendAttentionParams& p, const AttentionTile& tile) {
  const int64_t vectors = static_cast<int64_t>(tile.num_rows) * (p.num_heads / p.cache.num_kv_heads);
  return (tile.first_position + tile.num_rows) * (vectors + kReadCost);
}

int32_t CountTiles(const CascadeAppendAttentionParams& p) {
  int32_t count = 0;
  for (int32_t r = 0; r < p.num_requests; ++r) count += (NumRows(p, r) + RowsPerTile(p) - 1) / RowsPerTile(p);
  return count;
}

void FillTiles(const CascadeAppendAttentionParams& p, AttentionTile* tiles) {
  const int32_t per_tile = RowsPerTile(p);
  for (int32_t r = 0; r < p.num_requests; ++r) {
    const int32_t num_rows = NumRows(p, r);
    const int32_t first_position = p.seq_lens[r] - num_rows;
    for (int32_t tile = (num_rows + per_tile - 1) / per_tile - 1; tile >= 0; --tile) {
      const int32_t begin = tile * per_tile;
      const int32_t end = std::min(begin + per_tile, num_rows);
      const int32_t num_partitions = (first_position + end + kPartitionKeys - 1) / kPartitionKeys;
      *tiles++ = {r, p.query_start_loc[r] + begin, end - begin, first_position + begin, num_partitions, 0, -1};
    }
  }
}

// A tile is split when it alone would keep one thread busy while the others have run out of work. That is true of few
// tiles at a time, which bounds the memory for partial results. Returns the number of these.
int64_t SplitTiles(const CascadeAppendAttentionParams& p, int32_t num_tiles, AttentionTile* tiles) {
  const int64_t kv_heads = p.cache.num_kv_heads;
  const int64_t threads = NumThreads();
  int64_t total = 0;
  for (int32_t i = 0; i < num_tiles; ++i) total += Cost(p, tiles[i]) * kv_heads;
  int64_t num_partials = 0;
  for (int32_t i = 0; i < num_tiles; ++i) {
    AttentionTile& tile = tiles[i];
    if (threads == 1 || tile.num_partitions == 1 || Cost(p, tile) * 2 * threads <= total) continue;
    tile.first_partial = num_partials;
    num_partials += static_cast<int64_t>(tile.num_partitions) * tile.num_rows * p.num_heads;
  }
  return num_partials;
}

int32_t TasksPerHead(const AttentionTile& tile) { return tile.first_partial < 0 ? 1 : tile.num_partitions; }

Error CheckRequest(const CascadeAppendAttentionParams& p, int32_t r) {
  if (p.query_start_loc[r + 1] < p.query_start_loc[r]) return "query_start_loc: expected offsets that never decrease";
  const int32_t num_rows = NumRows(p, r);
  if (num_rows == 0) return nullptr;
  if (p.seq_lens[r] < num_rows) return "seq_lens: expected at least the request's new tokens, got fewer";
  const int64_t num_blocks = (static_cast<int64_t>(p.seq_lens[r]) + p.cache.block_size - 1) / p.cache.block_size;
  if (num_blocks > p.max_blocks) return "seq_lens: expected at most max_blocks * block_size tokens, got more";
  const int32_t* table = p.block_tables + static_cast<int64_t>(r) * p.max_blocks;
  for (int64_t i = 0; i < num_blocks; ++i) {
    if (table[i] < 0 || table[i] >= p.cache.num_blocks)
      return "block_tables: expected a block of the cache for every token, got an id outside";
  }
  return nullptr;
}

}  // namespace

Error CheckKvCache(const KvCache& cache) {
  if (cache.dtype != DType::kFloat32 && cache.dtype != DType::kBFloat16) return "dtype: expected float32 or bfloat16";
  if (cache.num_blocks < 0) return "num_blocks: expected no negative number";
  if (cache.num_kv_heads <= 0) return "num_kv_heads: expected a positive number";
  if (cache.block_size <= 0 || cache.block_size % 16 != 0) return "block_size: expected a positive multiple of 16";
  if (cache.head_dim <= 0 || cache.head_dim > kMaxHeadDim || cache.head_dim % 16 != 0)
    return "head_dim: expected a multiple of 16 in 16..256";
  return nullptr;
}

Error CheckAttention(const CascadeAppendAttentionParams& p) {
  if (const Error error = CheckKvCache(p.cache); error != nullptr) return error;
  if (p.num_heads <= 0 || p.num_heads % p.cache.num_kv_heads != 0)
    return "num_heads: expected a positive multiple of num_kv_heads";
  if (p.num_heads / p.cache.num_kv_heads > kMaxGroupSize) return "num_heads: expected at most 16 per KV head, got more";
  if (p.num_requests < 0 || p.num_tokens < 0 || p.max_blocks < 0) return "sizes: expected no negative number";
  if (p.first_key < 0 || p.first_key > kMaxFirstKey) return "first_key: expected 0..63, got a number outside";
  if (p.query_start_loc[0] != 0 || p.query_start_loc[p.num_requests] != p.num_tokens)
    return "query_start_loc: expected to start at 0 and to end at the number of rows of q";
  for (int32_t r = 0; r < p.num_requests; ++r) {
    if (const Error error = CheckRequest(p, r); error != nullptr) return error;
  }
  return nullptr;
}

AttentionPlan PlanAttention(const CascadeAppendAttentionParams& p) {
  const int32_t num_tiles = CountTiles(p);
  auto* tiles = ScratchArray<AttentionTile>(Scratch::kOp, num_tiles);
  FillTiles(p, tiles);
  const int64_t num_partials = SplitTiles(p, num_tiles, tiles);
  int64_t num_tasks = 0;
  for (int32_t i = 0; i < num_tiles; ++i) {
    tiles[i].first_task = num_tasks;
    num_tasks += static_cast<int64_t>(p.cache.num_kv_heads) * TasksPerHead(tiles[i]);
  }
  return {num_tiles, p.cache.num_kv_heads, num_tasks, num_partials, tiles};
}

AttentionTask TaskAt(const AttentionPlan& plan, int64_t i) {
  const auto starts_after = [](int64_t task, const AttentionTile& tile) { return task < tile.first_task; };
  const AttentionTile* tile = std::upper_bound(plan.tiles, plan.tiles + plan.num_tiles, i, starts_after) - 1;
  const auto index = static_cast<int32_t>(i - tile->first_task);
  if (tile->first_partial < 0) return {tile, index, -1};
  return {tile, index / tile->num_partitions, index % tile->num_partitions};
}

}  // namespace fdsd
