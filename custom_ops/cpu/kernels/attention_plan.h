#pragma once
// The part of the attention ops that does not depend on the instruction set: argument checks and the list of tasks.
//
// Query rows are put together into tiles, and the keys of a row are cut into partitions at fixed absolute positions. A
// row's partitions are computed independently of each other and merged in order. One task or many may do that, for the
// row alone or with rows of other requests. So neither the tiles nor the choices made here can show in a result.
#include <algorithm>

#include "attention_sharing.h"
#include "fdsd/attention.h"
#include "kv_check.h"

namespace fdsd {

constexpr int kMaxGroupSize = 256;   // query heads per KV head
constexpr int kMaxTileVectors = 64;  // query rows of a tile times query heads of its head group
static_assert(kMaxTileVectors >= kMaxSharedVectors);
constexpr int kMaxRunVectors = 64;  // query vectors that a thread works on at a time
// Less than a partition: every later row then sees at least one key of the first one.
constexpr int kMaxFirstKey = 63;

// Where partial results are kept until they are merged: that of vector v of head group h over part i is at first + (i *
// groups + h) * num_vectors + v, in units of one partial result.
struct KeptPartials {
  int64_t first;
  int32_t num_vectors;
  int32_t num_parts;  // 1: all partitions merged; else one for each
};

// The results of a tile's vectors among those of AttentionPlan::kept.
struct KeptVectors {
  int32_t index = -1;      // -1: none
  int32_t first = 0;       // the tile's first vector in there
  bool is_merged = false;  // the parts have become one, where the first was
};

// Query rows that read the same keys together. A tile may finish its rows: consecutive ones of one request, which see
// one key more each, or one row of a tree. Or its rows all see every key of the tile, and tiles of their own finish
// them: rows of requests that share a prefix, or of a tree before its first new token (its trunk).
struct AttentionTile {
  bool is_common;       // the rows see the same keys, and are finished elsewhere
  const int32_t* rows;  // [num_rows] in q and y; nullptr: they are consecutive
  int32_t request;      // whose block table leads to the keys
  int32_t first_row;    // without `rows`
  int32_t num_rows;
  int32_t num_keys;         // that the first row sees
  uint64_t seen;            // a row of a tree: the new tokens that it sees, itself included; else 0
  int32_t num_before;       // a row of a tree: keys before the first new token
  int32_t first_partition;  // the tile computes these
  int32_t end_partition;
  // Partitions before first_partition, by common tiles, and the tile's own. A tile without either finishes its rows at
  // once. What a trunk's tile merges takes the place of its `before`.
  KeptVectors before;
  KeptVectors kept;
  int64_t first_unit;       // see AttentionPlan
  int64_t part_units;       // of a task, but for the last part
  int64_t last_part_units;  // of a task over the last part
  int32_t num_parts;        // that are tasks by themselves; 1: all partitions are one; 0: nothing but merges
  int64_t first_merge;
  int32_t heads_per_run;  // what a thread works on together, at most: fewer of many rows, whatever other tiles have
};

// Query heads that read the same keys are a head group: all of a KV head, or equal parts of them where they are more
// than a tile holds. Head groups are numbered KV head by KV head.
struct HeadGroups {
  int32_t count;
  int32_t size;      // query heads of each
  int32_t per_head;  // of a KV head
};
inline HeadGroups HeadGroupsOf(int32_t num_heads, int32_t num_kv_heads) {
  const int32_t heads = num_heads / num_kv_heads;
  int32_t size = std::min(heads, kMaxTileVectors);
  while (heads % size != 0) --size;
  return {num_heads / size, size, heads / size};
}

// Each task is of one head group, and of one partition where a tile is split. Tasks lie one after the other on a line
// of units, as many for each as it costs; neighbours read neighbouring memory.
struct AttentionPlan {
  int32_t num_tiles;
  int32_t num_groups;        // of heads
  int64_t num_units;         // of all tasks, to be done first, in any order
  int64_t units_per_run;     // what a thread takes at a time
  int64_t num_trunk_merges;  // then these, of one tile and head group each, in any order
  int64_t num_merges;        // then those after them, up to this, likewise
  bool computes_in_merges;   // some tiles' own partitions, whose results are kept nowhere
  int64_t num_partials;      // to keep in between
  const AttentionTile* tiles;
  const KeptPartials* kept;
};

// Neighbouring tasks or merges of one tile. None: num_heads is 0.
struct AttentionRun {
  const AttentionTile* tile;
  int32_t partition;  // -1: all of the tile's
  int32_t first_head;
  int32_t num_heads;
  int64_t end;  // where the next run begins
};

// The blocks of request r, in the order of its tokens.
template <typename Params>
const int32_t* BlocksOf(const Params& p, int32_t r) {
  return p.block_tables + static_cast<int64_t>(p.table_rows[r]) * p.max_blocks;
}

// Position of the first key that a row with so many keys up to its own sees.
inline int32_t FirstKeySeen(const CascadeAppendAttentionParams& p, int32_t num_keys) {
  const int32_t first = std::min(p.scores.first_key, num_keys - 1);
  return p.scores.window > 0 ? std::max(first, num_keys - p.scores.window) : first;
}

// nullptr when what says of request r which rows and blocks it has fits together.
template <typename Params>
Error CheckRequest(const Params& p, int32_t r, int32_t block_size) {
  if (p.query_start_loc[r + 1] < p.query_start_loc[r]) return "query_start_loc: expected offsets that never decrease";
  const int32_t num_rows = p.query_start_loc[r + 1] - p.query_start_loc[r];
  if (num_rows == 0) return nullptr;
  if (p.seq_lens[r] < num_rows) return "seq_lens: expected at least the request's new tokens, got fewer";
  if ((static_cast<int64_t>(p.seq_lens[r]) + block_size - 1) / block_size > p.max_blocks)
    return "seq_lens: expected at most max_blocks * block_size tokens, got more";
  if (p.table_rows[r] < 0 || p.table_rows[r] >= p.num_table_rows)
    return "table_rows: expected rows of block_tables, got one outside";
  return nullptr;
}

// FindSharedPrefixes, which has no use for vector instructions.
Error FindGroupsOfRequests(const FindSharedPrefixesParams& p);
// nullptr when the groups that attention is given are within their arrays and the requests. It assumes that the
// requests of a group have the same blocks.
Error CheckPrefixes(const CascadeAppendAttentionParams& p);
// The group that has this place in group_rows.
int32_t GroupAt(const CascadeAppendAttentionParams& p, int32_t place);

// nullptr when the CPU's kernels can work on this cache.
Error CheckCpuKvCache(const KvCache& cache);

// nullptr when every index the kernel would follow is inside its array.
Error CheckAttention(const CascadeAppendAttentionParams& p);

// Cut checked arguments into tasks, the longest first within a request; an error when there is no memory for them. The
// tiles are the calling thread's, until its next plan.
Error PlanAttention(const CascadeAppendAttentionParams& p, AttentionPlan* plan);

// The first run of the tasks that begin in units [begin, end) of the line.
AttentionRun RunAt(const AttentionPlan& plan, int64_t begin, int64_t end);
// The first run of merges [begin, end).
AttentionRun MergesAt(const AttentionPlan& plan, int64_t begin, int64_t end);

}  // namespace fdsd
