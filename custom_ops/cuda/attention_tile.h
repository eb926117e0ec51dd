#pragma once
// A tile of query rows, and which keys they see.
#include "attention_sharing.h"
#include "kv_layout.h"
#include "matrix.h"
#include "numbers.h"

namespace fdsd::cuda {

constexpr int kTileRows = kMatrixRows;
constexpr int kAttentionWarps = 4;
constexpr int kAttentionThreads = kAttentionWarps * kWarpSize;
constexpr int kAttentionBlocks = 2;  // of a multiprocessor, for which there are registers
constexpr int kUnitKeys = 16;        // of one product with values
constexpr int kUnits = 4;            // of a warp
constexpr int kWarpKeys = kUnits * kUnitKeys;
constexpr int kPartitionKeys = kAttentionWarps * kWarpKeys;
static_assert(kPartitionKeys == fdsd::kPartitionKeys);
constexpr float kLog2E = 1.4426950408889634f;
constexpr int kPartColumns = 128;  // of values, at most, that a block has; as many sums find room in registers

struct AttentionShape {
  KvShape cache;
  int32_t num_requests;
  int32_t num_heads;
  int32_t max_blocks;
  float scale;
  float softcap;  // 0 = none
  int32_t first_key;
  int32_t window;          // 0 = none
  int32_t num_partitions;  // of the grid
  int32_t num_slots;       // for results over shared partitions: one for each of them, or 1 for all merged
  int32_t tile_rows;       // kTileRows, or so many times that
  int32_t num_stages;      // units of a warp on their way, see UnitStream: a power of two
  int64_t num_rows;        // packed, of a KV head; there is room for so many results over a partition
  bool is_float32;         // activations; else bfloat16

  // The first key that a row at this position sees.
  __device__ __forceinline__ int32_t FirstKey(int32_t position) const {
    const int32_t first = min(first_key, position);
    return window > 0 ? max(first, position + 1 - window) : first;
  }
  __device__ __forceinline__ bool IsSeen(int32_t key, int32_t position) const {
    return key <= position && key >= FirstKey(position);
  }

  // A score in units of log 2.
  __device__ __forceinline__ float Capped(float score) const {
    const float cap = softcap * kLog2E;
    return softcap > 0.0f ? cap * tanhf(score / cap) : score;
  }

  __device__ __forceinline__ int32_t GroupSize() const { return num_heads / cache.num_kv_heads; }

  // Parts of a head. Different blocks have those of its values.
  __device__ __host__ __forceinline__ int32_t NumParts() const {
    return static_cast<int32_t>(DivideUp(cache.head_dim, kPartColumns));
  }
  // Elements of a head that are copied at a time, at most; NumParts of them are a head.
  __device__ __host__ __forceinline__ int32_t PartSize() const {
    return cache.head_dim < kPartColumns ? cache.head_dim : kPartColumns;
  }
  // Floats of a row's result over some keys: its sums, a maximum and a total.
  __device__ __host__ __forceinline__ int32_t PartialSize() const { return PartSize() + 2; }
};

// See fdsd::SharedPrefixes. Without group_rows nothing is shared.
struct PrefixArrays {
  DevicePtr<const int32_t> group_rows;
  DevicePtr<const int32_t> group_starts;
  DevicePtr<const int32_t> group_leaders;
  DevicePtr<const int32_t> group_places;
  DevicePtr<const int32_t> shared_partitions;
};

struct AttentionArrays {
  DevicePtr<const uint8_t> q;
  DevicePtr<const uint8_t> k;
  DevicePtr<const uint8_t> v;
  DevicePtr<const float> k_scale;
  DevicePtr<const float> v_scale;
  DevicePtr<const int32_t> query_start_loc;
  DevicePtr<const int32_t> seq_lens;
  DevicePtr<const int32_t> table_rows;
  DevicePtr<const int32_t> block_tables;
  PrefixArrays prefixes;
  DevicePtr<const int64_t> tree_mask;
  DevicePtr<const float> sinks;  // [Hq], or nullptr
  DevicePtr<uint8_t> y;
};

__device__ __forceinline__ int NumBits(uint64_t bits) {
  return __popc(static_cast<uint32_t>(bits)) + __popc(static_cast<uint32_t>(bits >> 32));
}

// Which rows a block has, and which part of their values. The rows are some of those of a request and a KV head, which
// are numbered by new token, then by head. Or they are rows of all requests of a group, which all see every key of what
// they share.
//
// Keys are numbered as a row sees them: the new tokens that it sees follow one another, after the `num_before` tokens
// of the cache. In a tree that is another key for every new token.
struct TilePlace {
  DevicePtr<const int32_t> rows;  // of a group, in place of the tokens that follow first_token; else nullptr
  int32_t request;
  int32_t kv_head;
  int32_t first_column;
  int32_t num_columns;
  int32_t first_row;    // of the request's packed rows
  int32_t height;       // rows, there or not
  int32_t num_rows;     // of the request, packed
  int32_t first_token;  // of the request among those of the call
  int32_t num_new;
  int32_t num_before;
  int32_t end_key;          // after the last key that a row of the tile sees
  int32_t begin_key;        // before it no row of the tile sees a key of the cache
  int32_t num_shared;       // partitions that have been computed for the request's group
  int32_t first_partition;  // of the tile's own, after those or from begin_key on
  int32_t place;            // of its rows among those of groups
  bool is_tree;

  // The tile of block (x, y). False where there are no rows: the grid has room for as many tiles as any requests with
  // these sizes have. Those of request r begin at floor(first token of r * group size / height) + r.
  __device__ bool Find(const AttentionShape& shape, const AttentionArrays& a) {
    const int64_t group = shape.GroupSize();
    const int64_t slot = blockIdx.x;
    int32_t low = 0;
    int32_t high = shape.num_requests;
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      const bool is_behind = a.query_start_loc[middle] * group / shape.tile_rows + middle > slot;
      (is_behind ? high : low) = middle;
    }
    rows = nullptr;
    request = low;
    FindPart(shape, static_cast<int32_t>(blockIdx.y));
    first_token = a.query_start_loc[request];
    num_new = a.query_start_loc[request + 1] - first_token;
    num_rows = static_cast<int32_t>(num_new * group);
    height = shape.tile_rows;
    first_row = static_cast<int32_t>(slot - (first_token * group / height + request)) * height;
    if (first_row >= num_rows) return false;
    num_before = a.seq_lens[request] - num_new;
    is_tree = !(a.tree_mask == nullptr) && num_new <= kMaxTreeRows;
    is_tree = is_tree && Seen(a, num_new - 1) != ~uint64_t{0} >> (kMaxTreeRows - num_new);
    begin_key = min(shape.FirstKey(num_before + (is_tree ? 0 : FirstToken(shape))), num_before);
    num_shared = 0;
    if (!(a.prefixes.group_rows == nullptr)) {
      num_shared = a.prefixes.shared_partitions[request];
      place = a.prefixes.group_places[request];
    }
    first_partition = max(num_shared, begin_key / kPartitionKeys);
    end_key = 0;
    for (int token = FirstToken(shape); token <= LastToken(shape); ++token)
      end_key = max(end_key, PositionOf(a, token) + 1);
    return true;
  }

  // A part of the rows of a group's tile: all of them come after the last key.
  __device__ void FindInGroup(const AttentionShape& shape, const AttentionArrays& a, int32_t group, int32_t tile,
                              int32_t part) {
    place = a.prefixes.group_starts[group];
    rows = a.prefixes.group_rows + place;
    request = a.prefixes.group_leaders[group];
    FindPart(shape, part);
    first_token = 0;
    num_new = a.prefixes.group_starts[group + 1] - place;
    num_rows = num_new * shape.GroupSize();
    height = shape.tile_rows;
    first_row = tile * height;
    end_key = a.prefixes.shared_partitions[request] * kPartitionKeys;
    num_before = end_key;
    begin_key = shape.first_key;
    num_shared = 0;
    first_partition = 0;
    is_tree = false;
  }

  __device__ __forceinline__ void FindPart(const AttentionShape& shape, int32_t part) {
    kv_head = part / shape.NumParts();
    first_column = part % shape.NumParts() * kPartColumns;
    num_columns = min(shape.cache.head_dim - first_column, kPartColumns);
  }

  __device__ __forceinline__ int NumPartitions() const { return static_cast<int>(DivideUp(end_key, kPartitionKeys)); }

  // New tokens of the request that the tile has rows of.
  __device__ __forceinline__ int FirstToken(const AttentionShape& shape) const { return first_row / shape.GroupSize(); }
  __device__ __forceinline__ int LastToken(const AttentionShape& shape) const {
    return (min(first_row + height, num_rows) - 1) / shape.GroupSize();
  }
  __device__ __forceinline__ int TokenOf(const AttentionShape& shape, int row) const {
    return (first_row + row) / shape.GroupSize();
  }

  // The new tokens of a tree that one of them sees, itself included.
  __device__ __forceinline__ uint64_t Seen(const AttentionArrays& a, int token) const {
    const uint64_t own = uint64_t{1} << token;
    return (static_cast<uint64_t>(a.tree_mask[first_token + token]) & (own - 1)) | own;
  }

  // Where a new token stands among the keys that it sees: the last.
  __device__ __forceinline__ int PositionOf(const AttentionArrays& a, int token) const {
    return num_before + (is_tree ? NumBits(Seen(a, token)) - 1 : token);
  }

  // Position of the tile's row, -1 = there is none.
  __device__ __forceinline__ int Position(const AttentionShape& shape, const AttentionArrays& a, int row) const {
    return first_row + row < num_rows ? PositionOf(a, TokenOf(shape, row)) : -1;
  }

  // Where the key that a new token sees at `key` lies among the request's in the cache.
  __device__ int Stored(const AttentionArrays& a, int token, int key) const {
    if (!is_tree || key < num_before) return key;
    uint64_t seen = Seen(a, token);
    for (int i = num_before; i < key; ++i) seen &= seen - 1;
    return num_before + NumBits((seen & (~seen + 1)) - 1);
  }

  // Where the results of the tile's rows over one of its own partitions begin; a row's follow those of all rows before.
  __device__ __forceinline__ int64_t PartialOffset(const AttentionShape& shape, int64_t partition) const {
    const int64_t part = int64_t{kv_head} * shape.NumParts() + first_column / kPartColumns;
    const int64_t slot = part * shape.num_partitions + partition;
    const int64_t row = int64_t{first_token} * shape.GroupSize() + first_row;
    return slot * shape.num_rows * shape.PartialSize() + row * (num_columns + 2);
  }

  // The 16 rows of a warp, where a block has more: the tile's from `row` on.
  __device__ __forceinline__ TilePlace RowsOfWarp(int row) const {
    TilePlace own = *this;
    own.first_row += row;
    own.height = kTileRows;
    return own;
  }

  // Where the results over shared partitions of a row that there is begin.
  __device__ __forceinline__ int64_t SharedOffset(const AttentionShape& shape, int row) const {
    const int64_t vector = int64_t{place} * shape.GroupSize() + first_row + row;
    const int64_t part = kv_head * shape.NumParts() + first_column / kPartColumns;
    const int64_t num_parts = int64_t{shape.cache.num_kv_heads} * shape.NumParts();
    return (vector * num_parts + part) * shape.num_slots * shape.PartialSize();
  }

  // Row of q and y, counted in heads; -1 = there is none.
  __device__ __forceinline__ int64_t HeadRow(const AttentionShape& shape, int row) const {
    if (first_row + row >= num_rows) return -1;
    const int packed = first_row + row;
    const int packed_token = packed / shape.GroupSize();
    const int64_t token = rows == nullptr ? first_token + packed_token : static_cast<int>(rows[packed_token]);
    return token * shape.num_heads + kv_head * shape.GroupSize() + packed % shape.GroupSize();
  }
};

}  // namespace fdsd::cuda
