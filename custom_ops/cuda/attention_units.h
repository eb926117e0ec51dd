#pragma once
// How a warp's keys and values come to shared memory: in units of a part of 16 tokens, several on their way at a time.
#include "attention_cache.h"
#include "attention_tile.h"
#include "bulk_copies.h"

namespace fdsd::cuda {

constexpr int kPadding = 16;  // bytes after a row in shared memory, so that neighbours lie in different banks
constexpr int kNobody = -1;

constexpr int kMaxStages = 4;
constexpr int kArrivalBytes = kAttentionWarps * kMaxStages * int{sizeof(BulkBarrier)};  // of Arrivals

// Which tokens of the cache are a unit's keys: those that all rows of the tile see at these places, or those that one
// new token sees.
struct UnitKeys {
  const AttentionShape& shape;
  const AttentionArrays& a;
  const TilePlace& tile;
  int first;
  int token;         // kNobody: of all rows
  int64_t at_first;  // index of the first key's head, see KvShape

  __device__ UnitKeys(const AttentionShape& shape, const AttentionArrays& a, const TilePlace& tile, int first,
                      int token)
      : shape(shape), a(a), tile(tile), first(first), token(token), at_first(token == kNobody ? IndexOf(first) : 0) {}

  // Index of a token of the request.
  __device__ __forceinline__ int64_t IndexOf(int stored) const {
    const KvShape& cache = shape.cache;
    const int64_t table = static_cast<int64_t>(a.table_rows[tile.request]) * shape.max_blocks;
    const int64_t block = a.block_tables[table + stored / cache.block_size];
    return cache.Index(block * cache.block_size + stored % cache.block_size, tile.kv_head);
  }

  // Index of the unit's key i, -1 where the cache has no content for it.
  __device__ __forceinline__ int64_t Index(int i) const {
    const int key = first + i;
    if (token == kNobody) {
      if (key < tile.begin_key) return -1;
      return key < tile.num_before + tile.num_new ? at_first + i : -1;
    }
    const int position = tile.PositionOf(a, token);
    if (!shape.IsSeen(key, position)) return -1;
    return IndexOf(tile.Stored(a, token, key));
  }
};

// The barriers of a block's slots, where rows come as bulk copies, and the phases of the warp's.
struct Arrivals {
  DevicePtr<BulkBarrier> barriers;
  uint32_t phase_bits;  // bit s: of slot s

  // All threads of the block, which then meet.
  __device__ __forceinline__ Arrivals() : phase_bits(0) {
    if (!HasBulkCopies()) return;
    FDSD_SHARED(BulkBarrier, all, kAttentionWarps * kMaxStages);
    barriers = all + threadIdx.x / kWarpSize * kMaxStages;
    if (threadIdx.x != 0) return;
    for (int i = 0; i < kAttentionWarps * kMaxStages; ++i) InitBulkBarrier(all + i);
    FenceBulkBarriers();
  }

  // The slot's bytes, once. All lanes.
  __device__ __forceinline__ void Wait(int slot) {
    WaitForBytes(barriers + slot, phase_bits >> slot & 1u);
    phase_bits ^= 1u << slot;
    __syncwarp();
  }
};

// The warp's units of a partition that a row of the tile sees: of the keys all parts, unit by unit, then the tile's
// part of the values. A slot has a part of 16 tokens as rows of bytes as the cache has them, zeros where there is no
// content.
template <typename Cached>
class UnitStream {
 public:
  __device__ UnitStream(const AttentionShape& shape, const AttentionArrays& a, const TilePlace& tile, int first_key,
                        DevicePtr<uint8_t> slots, Arrivals* arrivals)
      : shape_(shape), a_(a), tile_(tile), first_key_(first_key), slots_(slots), arrivals_(arrivals) {
    const int num_keys = min(tile.end_key - first_key, kWarpKeys);
    num_units_ = num_keys > 0 ? static_cast<int>(DivideUp(num_keys, kUnitKeys)) : 0;
#pragma unroll 1
    for (int stage = 0; stage < shape_.num_stages; ++stage) Begin(stage);
  }

  static __device__ __host__ __forceinline__ int32_t RowBytes(const AttentionShape& shape) {
    return shape.PartSize() * static_cast<int32_t>(sizeof(Cached)) + kPadding;
  }

  __device__ __forceinline__ int num_units() const { return num_units_; }
  // The stages of a unit: of a part of its keys, and of its values.
  __device__ __forceinline__ int KeyStage(int unit, int part) const { return unit * shape_.NumParts() + part; }
  __device__ __forceinline__ int ValueStage(int unit) const { return num_units_ * shape_.NumParts() + unit; }
  __device__ __forceinline__ UnitKeys KeysOf(int unit, int token) const {
    return UnitKeys(shape_, a_, tile_, first_key_ + unit * kUnitKeys, token);
  }

  // Whether new tokens of the tile see different keys in the unit, each then has it by itself.
  __device__ __forceinline__ bool IsApart(int unit) const {
    return tile_.is_tree && first_key_ + (unit + 1) * kUnitKeys > tile_.num_before;
  }
  // Whether the unit has keys that not every row sees.
  __device__ __forceinline__ bool IsPartlySeen(int unit) const {
    const int first = first_key_ + unit * kUnitKeys;
    return first < shape_.FirstKey(tile_.end_key - 1) ||
           first + kUnitKeys > tile_.num_before + tile_.FirstToken(shape_) + 1;
  }

  // Begin with the values again, of another part of the tile: what came before has been released.
  __device__ __forceinline__ void BeginValues() const {
#pragma unroll 1
    for (int i = 0; i < shape_.num_stages; ++i) Begin(ValueStage(i));
  }

  // The slot of a stage, when it has arrived. Stages are waited for in order.
  __device__ __forceinline__ DevicePtr<uint8_t> Wait(int stage) const {
    if (HasBulkCopies()) {
      arrivals_->Wait(SlotOf(stage));
    } else {
      WaitForStage();
      __syncwarp();
    }
    return Slot(stage);
  }

  // Let the next stage have the slot of this one.
  __device__ __forceinline__ void Release(int stage) const {
    FenceBulkWrites();
    __syncwarp();
    Begin(stage + shape_.num_stages);
  }

  // The slot of a stage with what one new token sees of its unit.
  __device__ DevicePtr<uint8_t> Fetch(int stage, int token) const {
    FenceBulkWrites();
    __syncwarp();
    if (HasBulkCopies()) {
      CopyRows(stage, token);
      arrivals_->Wait(SlotOf(stage));
    } else {
      CopyPieces(stage, token);
      CommitCopies();
      WaitForCopies<0>();
      __syncwarp();
    }
    return Slot(stage);
  }

 private:
  __device__ __forceinline__ int SlotOf(int stage) const { return stage & (shape_.num_stages - 1); }
  __device__ __forceinline__ DevicePtr<uint8_t> Slot(int stage) const {
    return slots_ + SlotOf(stage) * kUnitKeys * RowBytes(shape_);
  }

  // For the thread's copies but those of the stages that follow. The instruction has their number in it.
  __device__ __forceinline__ void WaitForStage() const {
    static_assert(kMaxStages == 4);
    if (shape_.num_stages == 4) return WaitForCopies<3>();
    if (shape_.num_stages == 2) return WaitForCopies<1>();
    WaitForCopies<0>();
  }

  // The unit of a stage; num_units and more after the last.
  __device__ __forceinline__ int UnitOf(int stage) const {
    const int of_values = stage - ValueStage(0);
    return of_values < 0 ? stage / shape_.NumParts() : of_values;
  }

  // Without bulk copies every stage is a group of copies, also one after the last.
  __device__ __forceinline__ void Begin(int stage) const {
    const int unit = UnitOf(stage);
    const bool is_shared = unit < num_units_ && !IsApart(unit);
    if (HasBulkCopies()) {
      if (is_shared) CopyRows(stage, kNobody);
    } else {
      if (is_shared) CopyPieces(stage, kNobody);
      CommitCopies();
    }
  }

  // What a stage copies: of each of 16 tokens so many bytes of its key or value.
  struct Source {
    DevicePtr<const uint8_t> from;
    UnitKeys keys;
    int num_bytes;
  };
  __device__ __forceinline__ Source SourceOf(int stage, int token) const {
    constexpr int kElement = sizeof(Cached);
    const int unit = UnitOf(stage);
    if (stage >= ValueStage(0)) {
      const DevicePtr<const uint8_t> from = a_.v + tile_.first_column * kElement;
      return Source{from, KeysOf(unit, token), tile_.num_columns * kElement};
    }
    const int first = (stage - KeyStage(unit, 0)) * kPartColumns;
    const int num_elements = min(shape_.cache.head_dim - first, kPartColumns);
    return Source{a_.k + first * kElement, KeysOf(unit, token), num_elements * kElement};
  }

  // A lane has every 32nd piece of 16 bytes.
  __device__ __forceinline__ void CopyPieces(int stage, int token) const {
    constexpr int kPiece = 16;
    const int token_bytes = shape_.cache.head_dim * static_cast<int>(sizeof(Cached));
    const Source source = SourceOf(stage, token);
    const int num_pieces = source.num_bytes / kPiece;
    const DevicePtr<uint8_t> to = Slot(stage);
#pragma unroll 1
    for (int i = threadIdx.x % kWarpSize; i < kUnitKeys * num_pieces; i += kWarpSize) {
      const int row = i / num_pieces;
      const int piece = i % num_pieces * kPiece;
      const int64_t index = source.keys.Index(row);
      const int64_t at = (index < 0 ? 0 : index) * token_bytes + piece;
      CopyAsync<kPiece>(to + row * RowBytes(shape_) + piece, source.from + at, index >= 0);
    }
  }

  // A lane has one row as a bulk copy, or writes its zeros.
  __device__ __forceinline__ void CopyRows(int stage, int token) const {
    const int lane = threadIdx.x % kWarpSize;
    const Source source = SourceOf(stage, token);
    const int64_t index = lane < kUnitKeys ? source.keys.Index(lane) : -1;
    const int num_rows = __popc(__ballot_sync(kAllLanes, index >= 0));
    const DevicePtr<BulkBarrier> barrier = arrivals_->barriers + SlotOf(stage);
    if (lane == 0) ExpectBytes(barrier, num_rows * source.num_bytes);
    __syncwarp();
    if (lane >= kUnitKeys) return;
    const DevicePtr<uint8_t> row = Slot(stage) + lane * RowBytes(shape_);
    if (index >= 0) {
      const int64_t at = index * shape_.cache.head_dim * static_cast<int>(sizeof(Cached));
      return CopyBulk(row, source.from + at, source.num_bytes, barrier);
    }
#pragma unroll 1
    for (int i = 0; i < source.num_bytes / 4; ++i) ViewAs<uint32_t>(row)[i] = 0;
  }

  const AttentionShape& shape_;
  const AttentionArrays& a_;
  const TilePlace& tile_;
  const int first_key_;
  const DevicePtr<uint8_t> slots_;
  Arrivals* const arrivals_;
  int num_units_;
};

}  // namespace fdsd::cuda
