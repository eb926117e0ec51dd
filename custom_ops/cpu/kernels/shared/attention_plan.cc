#include "attention_plan.h"

#include <algorithm>
#include <new>
#include <vector>

#include "fdsd/runtime.h"
#include "thread_pool.h"

namespace fdsd {
namespace {

// Reading a key and its value takes about as long as computing this many query vectors on it.
constexpr int64_t kReadCost = 6;
// Pieces that a thread's share of the work is cut into, if no run is longer. More pieces cut more runs in two. With
// fewer, there is less to give to threads that have ended theirs.
constexpr int64_t kPiecesPerThread = 8;
// So few vectors per KV head wait for memory only.
constexpr int32_t kMaxStreamVectors = 3;

// Length of the line of tasks, without what rounding up adds: less than what a loop over it can count.
constexpr int64_t kMaxUnits = 1 << 20;

int32_t NumRows(const CascadeAppendAttentionParams& p, int32_t request) {
  return p.query_start_loc[request + 1] - p.query_start_loc[request];
}

// Whether a row of the request does not see all of its new tokens before it.
bool IsTree(const CascadeAppendAttentionParams& p, int32_t r) {
  const int32_t num_rows = NumRows(p, r);
  if (p.tree_mask == nullptr || num_rows > kMaxTreeRows) return false;
  for (int32_t i = 1; i < num_rows; ++i) {
    const uint64_t before = (uint64_t{1} << i) - 1;
    if ((static_cast<uint64_t>(p.tree_mask[p.query_start_loc[r] + i]) & before) != before) return true;
  }
  return false;
}

// Makes the tiles: first those of rows that share a prefix, then trees' trunks, then each request's own.
class Planner {
 public:
  explicit Planner(const CascadeAppendAttentionParams& p)
      : p_(p),
        heads_(HeadGroupsOf(p.num_heads, p.cache.num_kv_heads)),
        group_(heads_.size),
        rows_per_tile_(kMaxTileVectors / group_) {
    tiles_.clear();
    kept_.clear();
    before_.assign(static_cast<size_t>(p.num_requests), Before{});
  }

  AttentionPlan Plan() {
    if (p_.prefixes.group_rows != nullptr) {
      for (int32_t g = 0; g < p_.num_requests; ++g) AddSharedTiles(g);
      for (int32_t r = 0; r < p_.num_requests; ++r) FindBefore(r);
    }
    for (int32_t r = 0; r < p_.num_requests; ++r) {
      if (p_.scores.window <= 0 && IsTree(p_, r)) AddTrunk(r);  // rows of a tree have different windows
    }
    for (int32_t r = 0; r < p_.num_requests; ++r) IsTree(p_, r) ? AddTreeRows(r) : AddOwnTiles(r);
    SplitTiles();
    return Number();
  }

 private:
  // Where a request finds its results over the partitions before its rows' own.
  struct Before {
    int32_t num_partitions = 0;
    KeptVectors kept;
  };

  // Of group g, whose results are kept at index g.
  void AddSharedTiles(int32_t g) {
    const SharedPrefixes& prefixes = p_.prefixes;
    const int32_t first = prefixes.group_starts[g];
    const int32_t num_rows = prefixes.group_starts[g + 1] - first;
    if (num_rows == 0) return;
    const int32_t leader = prefixes.group_leaders[g];
    const int32_t num_partitions = prefixes.shared_partitions[leader];
    const auto kept = static_cast<int32_t>(kept_.size());
    kept_.push_back({0, num_rows * group_, 1});
    for (int32_t begin = 0; begin < num_rows; begin += rows_per_tile_) {
      AttentionTile tile{};
      tile.is_common = true;
      tile.rows = prefixes.group_rows + first + begin;
      tile.request = leader;
      tile.num_rows = std::min(rows_per_tile_, num_rows - begin);
      tile.num_keys = num_partitions * kPartitionKeys;
      tile.end_partition = num_partitions;
      tile.kept = {kept, begin * group_};
      tiles_.push_back(tile);
    }
  }

  void FindBefore(int32_t r) {
    const SharedPrefixes& prefixes = p_.prefixes;
    if (prefixes.shared_partitions[r] == 0) return;
    const int32_t g = GroupAt(p_, prefixes.group_places[r]);
    const int32_t num_before = prefixes.group_places[r] - prefixes.group_starts[g];
    before_[static_cast<size_t>(r)] = {prefixes.shared_partitions[r], {g, num_before * group_}};
  }

  int32_t FirstPartition(const Before& before, int32_t num_keys) const {
    return std::max(before.num_partitions, FirstKeySeen(p_, num_keys) / kPartitionKeys);
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
      tile.first_partition = FirstPartition(before, tile.num_keys);
      tile.end_partition = (tile.num_keys + tile.num_rows - 2) / kPartitionKeys + 1;
      tile.before = before.kept;
      tiles_.push_back(tile);
    }
  }

  // The whole partitions of a tree before its first new token, which are read for all of its rows together. Where
  // requests share partitions before these, the results are merged onto those of the shared ones, in place. So sums
  // follow the order of the keys.
  void AddTrunk(int32_t r) {
    const int32_t num_rows = NumRows(p_, r);
    const int32_t end = (p_.seq_lens[r] - num_rows) / kPartitionKeys;
    Before* const before = &before_[static_cast<size_t>(r)];
    if (end <= before->num_partitions) return;
    const bool is_behind = before->kept.index >= 0;
    if (!is_behind) {
      before->kept.index = static_cast<int32_t>(kept_.size());
      kept_.push_back({0, num_rows * group_, 1});
    }
    for (int32_t row = 0; row < num_rows; row += rows_per_tile_) {
      AttentionTile tile{};
      tile.is_common = true;
      tile.request = r;
      tile.first_row = p_.query_start_loc[r] + row;
      tile.num_rows = std::min(rows_per_tile_, num_rows - row);
      tile.num_keys = end * kPartitionKeys;
      tile.first_partition = before->num_partitions;
      tile.end_partition = end;
      (is_behind ? tile.before : tile.kept) = {before->kept.index, before->kept.first + row * group_};
      tiles_.push_back(tile);
    }
    before->num_partitions = end;
    before->kept.is_merged = is_behind;
  }

  // Each row has keys of its own.
  void AddTreeRows(int32_t r) {
    const int32_t num_rows = NumRows(p_, r);
    const int32_t first_row = p_.query_start_loc[r];
    const Before& before = before_[static_cast<size_t>(r)];
    for (int32_t i = 0; i < num_rows; ++i) {
      const uint64_t own = uint64_t{1} << i;
      AttentionTile tile{};
      tile.request = r;
      tile.first_row = first_row + i;
      tile.num_rows = 1;
      tile.seen = (static_cast<uint64_t>(p_.tree_mask[first_row + i]) & (own - 1)) | own;
      tile.num_before = p_.seq_lens[r] - num_rows;
      tile.num_keys = tile.num_before + __builtin_popcountll(tile.seen);
      tile.first_partition = FirstPartition(before, tile.num_keys);
      tile.end_partition = (tile.num_keys - 1) / kPartitionKeys + 1;
      tile.before = before.kept;
      tile.before.first += i * group_;
      tiles_.push_back(tile);
    }
  }

  // Of the tile's keys in partitions from `begin` on, before `end`.
  int64_t Cost(const AttentionTile& tile, int32_t begin, int32_t end) const {
    const int64_t num_keys = tile.num_keys + (tile.is_common ? 0 : tile.num_rows - 1);
    const int64_t last = std::min<int64_t>(num_keys, int64_t{end} * kPartitionKeys);
    return (last - int64_t{begin} * kPartitionKeys) * (tile.num_rows * group_ + kReadCost);
  }
  int64_t Cost(const AttentionTile& tile) const { return Cost(tile, tile.first_partition, tile.end_partition); }

  // A tile is split when one head of it would keep a thread busy while the others have run out of work. That is true of
  // few tiles at a time, which bounds the memory for partial results. With few vectors these are small, and all heads
  // are best read together: such tiles are split earlier, to have all threads busy to the end.
  void SplitTiles() {
    const int64_t threads = NumThreads();
    const int64_t num_heads = heads_.count;
    int64_t total = 0;
    for (const AttentionTile& tile : tiles_) total += Cost(tile);
    unit_ = 1 + total / kMaxUnits;
    for (AttentionTile& tile : tiles_) {
      const int32_t num_parts = tile.end_partition - tile.first_partition;
      const int64_t task = tile.num_rows * group_ <= kMaxStreamVectors ? 4 * Cost(tile) : Cost(tile) / num_heads;
      if (threads == 1 || num_parts <= 1 || task * 2 * threads <= total) continue;
      if (tile.kept.index < 0) {
        tile.kept.index = static_cast<int32_t>(kept_.size());
        kept_.push_back({0, tile.num_rows * group_, 1});
      }
      kept_[static_cast<size_t>(tile.kept.index)].num_parts = num_parts;
    }
  }

  // Lays out the line of tasks.
  AttentionPlan Number() {
    AttentionPlan plan{};
    plan.num_tiles = static_cast<int32_t>(tiles_.size());
    plan.num_groups = heads_.count;
    plan.tiles = tiles_.data();
    plan.kept = kept_.data();
    for (KeptPartials& kept : kept_) {
      kept.first = plan.num_partials;
      plan.num_partials += static_cast<int64_t>(plan.num_groups) * kept.num_parts * kept.num_vectors;
    }
    int64_t longest = 0;  // of the runs of any tile
    for (AttentionTile& tile : tiles_) {
      tile.first_unit = plan.num_units;
      tile.first_merge = plan.num_merges;
      tile.heads_per_run = std::min(plan.num_groups, kMaxRunVectors / (tile.num_rows * group_));
      const bool is_merged = tile.before.index >= 0 || (!tile.is_common && tile.kept.index >= 0);
      if (is_merged) plan.num_merges += plan.num_groups;
      if (tile.is_common) plan.num_trunk_merges = plan.num_merges;  // they come first
      if (is_merged && tile.kept.index < 0) {
        plan.computes_in_merges |= tile.first_partition < tile.end_partition;
        continue;
      }
      LayOut(&tile);
      plan.num_units += plan.num_groups * ((tile.num_parts - 1) * tile.part_units + tile.last_part_units);
      longest = std::max(longest, tile.heads_per_run * tile.part_units);
    }
    const int64_t threads = NumThreads();
    const int64_t share = (plan.num_units + threads - 1) / threads;
    plan.units_per_run = std::max<int64_t>(1, std::min(std::max(longest, share / kPiecesPerThread), share));
    return plan;
  }

  void LayOut(AttentionTile* tile) const {
    const bool is_split = tile->kept.index >= 0 && kept_[static_cast<size_t>(tile->kept.index)].num_parts > 1;
    const int32_t split_end = is_split ? tile->first_partition + 1 : tile->end_partition;
    tile->num_parts = is_split ? tile->end_partition - tile->first_partition : 1;
    tile->part_units = 1 + Cost(*tile, tile->first_partition, split_end) / unit_;
    tile->last_part_units = 1 + Cost(*tile, tile->first_partition + tile->num_parts - 1, tile->end_partition) / unit_;
  }

  // Kept from plan to plan for their memory.
  static thread_local std::vector<AttentionTile> tiles_;
  static thread_local std::vector<KeptPartials> kept_;
  static thread_local std::vector<Before> before_;

  const CascadeAppendAttentionParams& p_;
  const HeadGroups heads_;
  const int32_t group_;
  const int32_t rows_per_tile_;
  int64_t unit_ = 1;  // cost that is one unit
};

thread_local std::vector<AttentionTile> Planner::tiles_;
thread_local std::vector<KeptPartials> Planner::kept_;
thread_local std::vector<Planner::Before> Planner::before_;

}  // namespace

Error PlanAttention(const CascadeAppendAttentionParams& p, AttentionPlan* plan) {
  try {
    *plan = Planner(p).Plan();
  } catch (const std::bad_alloc&) {
    return "memory: expected room for the tasks of the call, got none";
  }
  return nullptr;
}

}  // namespace fdsd
