#include "attention_plan.h"

#include <algorithm>
#include <vector>

#include "attention_sharing.h"
#include "fdsd/runtime.h"
#include "thread_pool.h"

namespace fdsd {
namespace {

// Reading a key and its value takes about as long as computing this many query vectors on it.
constexpr int64_t kReadCost = 6;

int32_t NumRows(const CascadeAppendAttentionParams& p, int32_t request) {
  return p.query_start_loc[request + 1] - p.query_start_loc[request];
}

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

// Makes the tiles: first those of rows that share a prefix, then each request's own.
class Planner {
 public:
  explicit Planner(const CascadeAppendAttentionParams& p)
      : p_(p), group_(p.num_heads / p.cache.num_kv_heads), rows_per_tile_(kMaxTileVectors / group_) {
    tiles_.clear();
    kept_.clear();
    shared_rows_.clear();
    // Tiles point into it. A row is in one prefix at most.
    shared_rows_.reserve(static_cast<size_t>(p.num_tokens));
    before_.assign(static_cast<size_t>(p.num_requests), Before{});
  }

  AttentionPlan Plan() {
    if (p_.num_requests > 1) {
      for (const SharedPrefix& prefix : FindSharedPrefixes(p_, rows_per_tile_)) AddSharedTiles(prefix);
    }
    for (int32_t r = 0; r < p_.num_requests; ++r) AddOwnTiles(r);
    SplitTiles();
    return Number();
  }

 private:
  // Where a request finds its results over shared partitions.
  struct Before {
    int32_t num_partitions = 0;
    int32_t kept = -1;
    int32_t vector = 0;
  };

  void AddSharedTiles(const SharedPrefix& prefix) {
    const size_t first = shared_rows_.size();
    const auto kept = static_cast<int32_t>(kept_.size());
    for (const int32_t r : prefix.requests) {
      const auto num_before = static_cast<int32_t>(shared_rows_.size() - first);
      before_[static_cast<size_t>(r)] = {prefix.num_partitions, kept, num_before * group_};
      for (int32_t row = p_.query_start_loc[r]; row < p_.query_start_loc[r + 1]; ++row) shared_rows_.push_back(row);
    }
    const auto num_rows = static_cast<int32_t>(shared_rows_.size() - first);
    kept_.push_back({0, num_rows * group_, 1});
    for (int32_t begin = 0; begin < num_rows; begin += rows_per_tile_) {
      AttentionTile tile{};
      tile.rows = shared_rows_.data() + first + begin;
      tile.request = prefix.requests[0];
      tile.num_rows = std::min(rows_per_tile_, num_rows - begin);
      tile.num_keys = prefix.num_partitions * kPartitionKeys;
      tile.end_partition = prefix.num_partitions;
      tile.before = -1;
      tile.kept = kept;
      tile.kept_vector = begin * group_;
      tiles_.push_back(tile);
    }
  }

  void AddOwnTiles(int32_t r) {
    const int32_t num_rows = NumRows(p_, r);
    const Before& before = before_[static_cast<size_t>(r)];
    for (int32_t index = (num_rows + rows_per_tile_ - 1) / rows_per_tile_ - 1; index >= 0; --index) {
      const int32_t begin = index * rows_per_tile_;
      const int32_t end = std::min(begin + rows_per_tile_, num_rows);
      AttentionTile tile{};
      tile.request = r;
      tile.first_row = p_.query_start_loc[r] + begin;
      tile.num_rows = end - begin;
      tile.num_keys = p_.seq_lens[r] - num_rows + begin + 1;
      tile.first_partition = before.num_partitions;
      tile.end_partition = (tile.num_keys + tile.num_rows - 2) / kPartitionKeys + 1;
      tile.before = before.kept;
      tile.before_vector = before.vector;
      tile.kept = -1;
      tiles_.push_back(tile);
    }
  }

  int64_t Cost(const AttentionTile& tile) const {
    const int64_t last = tile.num_keys + (tile.rows == nullptr ? tile.num_rows : 0);
    return (last - tile.first_partition * kPartitionKeys) * (tile.num_rows * group_ + kReadCost);
  }

  // A tile is split when it alone would keep one thread busy while the others have run out of work. That is true of few
  // tiles at a time, which bounds the memory for partial results.
  void SplitTiles() {
    const int64_t threads = NumThreads();
    if (threads == 1) return;
    int64_t total = 0;
    for (const AttentionTile& tile : tiles_) total += Cost(tile) * p_.cache.num_kv_heads;
    for (AttentionTile& tile : tiles_) {
      const int32_t num_parts = tile.end_partition - tile.first_partition;
      if (num_parts <= 1 || Cost(tile) * 2 * threads <= total) continue;
      if (tile.kept < 0) {
        tile.kept = static_cast<int32_t>(kept_.size());
        kept_.push_back({0, tile.num_rows * group_, 1});
      }
      kept_[static_cast<size_t>(tile.kept)].num_parts = num_parts;
    }
  }

  AttentionPlan Number() {
    const int32_t heads = p_.cache.num_kv_heads;
    AttentionPlan plan{static_cast<int32_t>(tiles_.size()), heads, 0, 0, 0, tiles_.data(), kept_.data()};
    for (KeptPartials& kept : kept_) {
      kept.first = plan.num_partials;
      plan.num_partials += static_cast<int64_t>(heads) * kept.num_parts * kept.num_vectors;
    }
    for (AttentionTile& tile : tiles_) {
      tile.first_task = plan.num_tasks;
      tile.first_merge = plan.num_merges;
      const bool is_merged = tile.rows == nullptr && (tile.before >= 0 || tile.kept >= 0);
      if (tile.kept >= 0) {
        plan.num_tasks += static_cast<int64_t>(heads) * kept_[static_cast<size_t>(tile.kept)].num_parts;
      } else if (!is_merged) {
        plan.num_tasks += heads;
      }
      if (is_merged) plan.num_merges += heads;
    }
    return plan;
  }

  // Kept from plan to plan for their memory.
  static thread_local std::vector<AttentionTile> tiles_;
  static thread_local std::vector<KeptPartials> kept_;
  static thread_local std::vector<int32_t> shared_rows_;
  static thread_local std::vector<Before> before_;

  const CascadeAppendAttentionParams& p_;
  const int32_t group_;
  const int32_t rows_per_tile_;
};

thread_local std::vector<AttentionTile> Planner::tiles_;
thread_local std::vector<KeptPartials> Planner::kept_;
thread_local std::vector<int32_t> Planner::shared_rows_;
thread_local std::vector<Planner::Before> Planner::before_;

}  // namespace

Error CheckKvCache(const KvCache& cache) {
  if (cache.dtype != DType::kFloat32 && cache.dtype != DType::kBFloat16) return "dtype: expected float32 or bfloat16";
  const KvDType same = cache.dtype == DType::kFloat32 ? KvDType::kFloat32 : KvDType::kBFloat16;
  if (cache.kv_dtype != same && cache.kv_dtype != KvDType::kInt8)
    return "kv_dtype: expected int8 or the type of the activations, got another";
  const bool has_scales = cache.k_scale != nullptr && cache.v_scale != nullptr;
  if (cache.kv_dtype == KvDType::kInt8 && !has_scales) return "k_scale, v_scale: expected both with int8, got none";
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

AttentionPlan PlanAttention(const CascadeAppendAttentionParams& p) { return Planner(p).Plan(); }

AttentionTask TaskAt(const AttentionPlan& plan, int64_t i) {
  const auto starts_after = [](int64_t task, const AttentionTile& tile) { return task < tile.first_task; };
  const AttentionTile* tile = std::upper_bound(plan.tiles, plan.tiles + plan.num_tiles, i, starts_after) - 1;
  const auto index = static_cast<int32_t>(i - tile->first_task);
  const int32_t num_parts = tile->kept < 0 ? 1 : plan.kept[tile->kept].num_parts;
  if (num_parts == 1) return {tile, index, -1};
  return {tile, index / num_parts, tile->first_partition + index % num_parts};
}

AttentionTask MergeAt(const AttentionPlan& plan, int64_t i) {
  const auto starts_after = [](int64_t merge, const AttentionTile& tile) { return merge < tile.first_merge; };
  const AttentionTile* tile = std::upper_bound(plan.tiles, plan.tiles + plan.num_tiles, i, starts_after) - 1;
  return {tile, static_cast<int32_t>(i - tile->first_merge), -1};
}

}  // namespace fdsd
