#pragma once
// Keys and values on their way to a block of warpgroups, laid out as their products read them: in steps of 64, one on
// its way while another is multiplied.
//
// Copies are of 16 bytes each (cp.async), not of whole rows: a row's chunks lie in several panels, changed round, and a
// bulk copy leaves bytes in a row.
#include "attention_units.h"
#include "warpgroup_columns.h"

namespace fdsd::cuda {

constexpr int kStepKeys = kWarpKeys;
constexpr int kPartitionSteps = kPartitionKeys / kStepKeys;
constexpr int kApartTokens = 2;  // new tokens whose keys are fetched at a time where each sees others
constexpr int kApartRows = kApartTokens * kUnitKeys;
constexpr int kChunkBytes = 16;
constexpr int kPanelChunks = kWarpgroupRowBytes / kChunkBytes;

// Where a chunk of a row lies in panels of `num_rows` rows.
__device__ __host__ __forceinline__ constexpr int PlaceOfChunk(int num_rows, int row, int chunk) {
  return (chunk / kPanelChunks * num_rows + row) * kWarpgroupRowBytes +
         (chunk % kPanelChunks ^ (row / 2 % kPanelChunks)) * kChunkBytes;
}

// A block of kGroups_ warpgroups, each with 64 rows, over a cache of heads of up to kHead_ elements: what lies where in
// its dynamic shared memory, in bytes. Elements after a head's last are zeros.
template <typename Cached_, int kHead_, int kGroups_>
struct WideBlock {
  using Cached = Cached_;
  static constexpr int kHead = kHead_;
  static constexpr int kGroups = kGroups_;
  static constexpr int kThreads = kGroups * kWarpgroupWarps * kWarpSize;
  static constexpr int kRows = kGroups * kWarpgroupWarps * kTileRows;
  static constexpr int kColumns = kHead < kPartColumns ? kHead : kPartColumns;  // of values
  static constexpr int kColumnTiles = kColumns / kMatrixColumns;
  static constexpr int kSlots = 2;

  static constexpr int kPanelBytes = kStepKeys * kWarpgroupRowBytes;
  static constexpr int kValuesAt = kHead / kPanelColumns * kPanelBytes;  // after the keys
  static constexpr int kStepBytes = kValuesAt + kColumns / kPanelColumns * kPanelBytes;
  // Elements of a byte are copied as they are, their scales with them, and staged as products take them.
  static constexpr bool kIsStaged = kIsScaled<Cached>;
  static constexpr int kCopiedValuesAt = kIsStaged ? kStepKeys * kHead : kValuesAt;
  static constexpr int kCopiedBytes = kIsStaged ? kStepKeys * (kHead + kColumns) : kStepBytes;
  static constexpr int kScalesAt = kCopiedBytes;  // of 64 keys, then of 64 values
  static constexpr int kSlotBytes = kCopiedBytes + (kIsStaged ? 2 * kStepKeys * int{sizeof(float)} : 0);

  static constexpr int kStagedAt = kSlots * kSlotBytes;
  static constexpr int kApartPanelBytes = kApartRows * kWarpgroupRowBytes;
  static constexpr int kApartAt = kStagedAt + (kIsStaged ? kStepBytes : 0);
  static constexpr int kApartScalesAt = kApartAt + kHead / kPanelColumns * kApartPanelBytes;
  static constexpr int kApartIndexesAt = kApartScalesAt + kApartRows * int{sizeof(float)};
  static constexpr int kUnitsAt = kApartIndexesAt + kApartRows * int{sizeof(int64_t)};
  static constexpr int kUnitTables = 4;
  static constexpr int kPartitionUnits = kPartitionKeys / kUnitKeys;
  static constexpr int kBeforeAt = kUnitsAt + kUnitTables * kPartitionUnits * int{sizeof(int64_t)};
  static constexpr int kBytesOfOne = kBeforeAt;  // where a block has one partition
  static constexpr int kBytes = kBeforeAt + kRows * kColumns * int{sizeof(float)};
  static_assert(kApartAt % kWarpgroupAlignment == 0 && kSlotBytes % kWarpgroupAlignment == 0);
};

// Steps of a tile, over the keys [64 * first, 64 * end). Rows that no row of the tile sees are zeros, as are those that
// each new token has by itself.
template <typename Block>
class StepStream {
 public:
  using Cached = typename Block::Cached;

  // All threads of the block.
  __device__ StepStream(const AttentionShape& shape, const AttentionArrays& a, const TilePlace& tile, int first,
                        int end)
      : shape_(shape), a_(a), tile_(tile), first_(first), end_(end), step_(0) {
    begin_key_ = tile.begin_key;
    end_key_ = min(tile.end_key, tile.is_tree ? tile.num_before / kUnitKeys * kUnitKeys : tile.end_key);
    WriteUnits(first / kPartitionSteps);
    __syncthreads();
    Fill(0);
  }

  // The next step, as copied, until the next call.
  __device__ __forceinline__ DevicePtr<const uint8_t> Next() {
    WaitForCopies<0>();
    FenceCopies();
    __syncthreads();  // all threads have what each has copied, and are done with the step before
    const DevicePtr<const uint8_t> slot = Slot(step_);
    ++step_;
    Fill(step_);
    return slot;
  }

  // The step as products take it: keys, then values at Block::kValuesAt. All threads.
  __device__ __forceinline__ DevicePtr<const uint8_t> Prepare(DevicePtr<const uint8_t> slot) const {
    if constexpr (!Block::kIsStaged) {
      return slot;
    } else {
      const DevicePtr<uint8_t> staged = DynamicShared<uint8_t>() + Block::kStagedAt;
      Stage<Block::kHead, false>(slot, nullptr, staged);
      const auto scales = ViewAs<const float>(slot + Block::kScalesAt) + kStepKeys;
      Stage<Block::kColumns, true>(slot + Block::kCopiedValuesAt, scales, staged + Block::kValuesAt);
      FenceCopies();
      __syncthreads();
      return staged;
    }
  }

 private:
  __device__ __forceinline__ DevicePtr<uint8_t> Slot(int step) const {
    return DynamicShared<uint8_t>() + step % Block::kSlots * Block::kSlotBytes;
  }
  // Indexes of the first tokens of a partition's units.
  __device__ __forceinline__ DevicePtr<int64_t> Units(int partition) const {
    return ViewAs<int64_t>(DynamicShared<uint8_t>() + Block::kUnitsAt) +
           partition % Block::kUnitTables * Block::kPartitionUnits;
  }
  __device__ __forceinline__ void WriteUnits(int partition) const {
    const int unit = threadIdx.x;
    if (unit >= Block::kPartitionUnits) return;
    const int first = partition * kPartitionKeys + unit * kUnitKeys;
    Units(partition)[unit] = first < end_key_ ? UnitKeys(shape_, a_, tile_, first, kNobody).at_first : 0;
  }

  // Tables of units are written a partition ahead: other threads read them after a barrier.
  __device__ __forceinline__ void Fill(int step) const {
    const int block = first_ + step;
    if (block >= end_) return;
    if (block % kPartitionSteps == 0) WriteUnits(block / kPartitionSteps + 1);
    const DevicePtr<uint8_t> slot = Slot(step);
    const DevicePtr<const uint8_t> values = a_.v + tile_.first_column * static_cast<int>(sizeof(Cached));
    Copy<Block::kHead>(slot, a_.k, shape_.cache.head_dim, block);
    Copy<Block::kColumns>(slot + Block::kCopiedValuesAt, values, tile_.num_columns, block);
    if constexpr (Block::kIsStaged) CopyScales(slot + Block::kScalesAt, block);
    CommitCopies();
  }

  __device__ __forceinline__ bool IsThere(int key) const { return key >= begin_key_ && key < end_key_; }
  __device__ __forceinline__ int64_t IndexOf(int key) const {
    return Units(key / kPartitionKeys)[key % kPartitionKeys / kUnitKeys] + key % kUnitKeys;
  }

  // Chunks of kElements elements of each key of a 64-key block, of which the cache has num_elements.
  template <int kElements>
  __device__ __forceinline__ void Copy(DevicePtr<uint8_t> to, DevicePtr<const uint8_t> from, int num_elements,
                                       int block) const {
    constexpr int kChunks = kElements * int{sizeof(Cached)} / kChunkBytes;
    const int num_chunks = num_elements * static_cast<int>(sizeof(Cached)) / kChunkBytes;
    const int64_t token_bytes = int64_t{shape_.cache.head_dim} * static_cast<int>(sizeof(Cached));
    static_assert(Block::kThreads % kChunks == 0);
    const int chunk = static_cast<int>(threadIdx.x) % kChunks;
#pragma unroll 4
    for (int i = 0; i < kStepKeys * kChunks; i += Block::kThreads) {
      const int row = (i + static_cast<int>(threadIdx.x)) / kChunks;
      const int key = block * kStepKeys + row;
      const bool is_here = chunk < num_chunks && IsThere(key);
      const int64_t at = is_here ? IndexOf(key) * token_bytes + chunk * kChunkBytes : 0;
      const int place = Block::kIsStaged ? row * kElements + chunk * kChunkBytes : PlaceOfChunk(kStepKeys, row, chunk);
      CopyAsync<kChunkBytes>(to + place, from + at, is_here);
    }
  }

  // Of keys, then of values: a thread has one.
  __device__ __forceinline__ void CopyScales(DevicePtr<uint8_t> to, int block) const {
    static_assert(Block::kThreads >= 2 * kStepKeys);
    const int i = threadIdx.x;
    if (i >= 2 * kStepKeys) return;
    const int key = block * kStepKeys + i % kStepKeys;
    const bool is_here = IsThere(key);
    const DevicePtr<const float> scales = (i < kStepKeys ? a_.k_scale : a_.v_scale) + (is_here ? IndexOf(key) : 0);
    CopyAsync<int{sizeof(float)}>(to + i * int{sizeof(float)}, ViewAs<const uint8_t>(scales), is_here);
  }

  // kElements bytes of 64 rows as panels of bfloat16; times their scales where they are values.
  template <int kElements, bool kScale>
  __device__ __forceinline__ void Stage(DevicePtr<const uint8_t> from, DevicePtr<const float> scales,
                                        DevicePtr<uint8_t> to) const {
    constexpr int kChunks = kElements / kChunkBytes;
#pragma unroll 4
    for (int i = threadIdx.x; i < kStepKeys * kChunks; i += Block::kThreads) {
      const int row = i / kChunks;
      const int chunk = i % kChunks;
      const uint4 bytes = ViewAs<const uint4>(from + i * kChunkBytes)[0];
      uint4 words[2];
      const float scale = kScale ? static_cast<float>(scales[row]) : 1.0f;
      WordsOf<Cached, kScale>(bytes, scale, words);
      for (int half = 0; half < 2; ++half)
        ViewAs<uint4>(to + PlaceOfChunk(kStepKeys, row, 2 * chunk + half))[0] = words[half];
    }
  }

  const AttentionShape& shape_;
  const AttentionArrays& a_;
  const TilePlace& tile_;
  const int first_;
  const int end_;
  int begin_key_;
  int end_key_;
  int step_;
};

}  // namespace fdsd::cuda
