#pragma once
// The part of the attention ops that does not depend on the instruction set: argument checks and the list of tasks.
//
// A request's query rows are cut into tiles, and the keys of a row into partitions at fixed absolute positions. A row's
// partitions are computed independently of each other and merged in order, whether by one task or by many, so neither
// the tiles nor the choice made here can show in a result.
#include "fdsd/attention.h"

namespace fdsd {

constexpr int kMaxHeadDim = 256;
constexpr int kMaxGroupSize = 16;    // query heads per KV head
constexpr int kMaxTileVectors = 64;  // query rows of a tile times query heads of its KV head
constexpr int kPartitionKeys = 512;  // part of every row's arithmetic: another value gives other bits
// Less than the first step of the running softmax (64 keys), in which every later row then sees at least one key.
constexpr int kMaxFirstKey = 63;

// Consecutive query rows of one request; for each KV head they are one task, or one task per partition.
struct AttentionTile {
  int32_t request;
  int32_t first_row;  // in q and y
  int32_t num_rows;
  int32_t first_position;  // of first_row
  int32_t num_partitions;  // that its last row needs
  int64_t first_task;
  int64_t first_partial;  // where its partial results are kept; -1: one task runs all partitions and keeps none
};

struct AttentionPlan {
  int32_t num_tiles;
  int32_t num_kv_heads;
  int64_t num_tasks;
  int64_t num_partials;  // query vectors times partitions to keep until the merge
  const AttentionTile* tiles;
};

struct AttentionTask {
  const AttentionTile* tile;
  int32_t kv_head;
  int32_t partition;  // -1: all of them
};

// nullptr when the kernels can work on a cache of this geometry.
Error CheckKvCache(const KvCache& cache);

// nullptr when every index the kernel would follow is inside its array.
Error CheckAttention(const CascadeAppendAttentionParams& p);

// Cut checked arguments into tasks, the longest first within a request. The tiles live in Scratch::kOp.
AttentionPlan PlanAttention(const CascadeAppendAttentionParams& p);

// Task `i` in [0, num_tasks).
AttentionTask TaskAt(const AttentionPlan& plan, int64_t i);

}  // namespace fdsd
