#pragma once
// The part of the attention ops that does not depend on the instruction set: argument checks and the list of tasks.
//
// Query rows are put together into tiles, and the keys of a row are cut into partitions at fixed absolute positions. A
// row's partitions are computed independently of each other and merged in order, whether by one task or by many, alone
// or with rows of other requests, so neither the tiles nor the choices made here can show in a result.
#include "fdsd/attention.h"

namespace fdsd {

constexpr int kMaxHeadDim = 256;
constexpr int kMaxGroupSize = 16;    // query heads per KV head
constexpr int kMaxTileVectors = 64;  // query rows of a tile times query heads of its KV head
constexpr int kPartitionKeys = 512;  // part of every row's arithmetic: another value gives other bits
// Less than the first step of the running softmax (64 keys), in which every later row then sees at least one key.
constexpr int kMaxFirstKey = 63;

// Where partial results are kept until they are merged: that of vector v of KV head h over part i is at first + (h *
// num_parts + i) * num_vectors + v, in units of one partial result.
struct KeptPartials {
  int64_t first;
  int32_t num_vectors;
  int32_t num_parts;  // 1: all partitions merged; else one for each
};

// Query rows that read the same keys together. Either consecutive rows of one request, which see one key more each, or,
// if `rows` is given, rows of requests that share a prefix, all of which see every key of the tile.
struct AttentionTile {
  const int32_t* rows;  // [num_rows] in q and y, or nullptr
  int32_t request;      // whose block table leads to the keys
  int32_t first_row;    // without `rows`
  int32_t num_rows;
  int32_t num_keys;         // that the first row sees
  int32_t first_partition;  // the tile computes these
  int32_t end_partition;
  // Indices in AttentionPlan::kept: of the partitions before first_partition, by tiles with `rows`, and of the tile's
  // own. -1: none; without `kept` its rows are finished at once.
  int32_t before;
  int32_t before_vector;  // the tile's first vector in there
  int32_t kept;
  int32_t kept_vector;
  int64_t first_task;
  int64_t first_merge;
};

struct AttentionPlan {
  int32_t num_tiles;
  int32_t num_kv_heads;
  int64_t num_tasks;     // to be done first, in any order
  int64_t num_merges;    // then these
  int64_t num_partials;  // to keep in between
  const AttentionTile* tiles;
  const KeptPartials* kept;
};

struct AttentionTask {
  const AttentionTile* tile;
  int32_t kv_head;
  int32_t partition;  // -1: all of the tile's
};

// nullptr when the kernels can work on a cache of this geometry.
Error CheckKvCache(const KvCache& cache);

// nullptr when every index the kernel would follow is inside its array.
Error CheckAttention(const CascadeAppendAttentionParams& p);

// Cut checked arguments into tasks, the longest first within a request. The tiles are the calling thread's, until its
// next plan.
AttentionPlan PlanAttention(const CascadeAppendAttentionParams& p);

// Task `i` in [0, num_tasks), and merge `i` in [0, num_merges): of the partial results of one tile and KV head.
AttentionTask TaskAt(const AttentionPlan& plan, int64_t i);
AttentionTask MergeAt(const AttentionPlan& plan, int64_t i);

}  // namespace fdsd
