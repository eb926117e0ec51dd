#pragma once
// What the products of all formats share. A block of C is 32 rows by 32 columns, in tiles 0-3: the left two above the
// right two in pairs of columns. Tiles 4 and 5 are of A, 6 and 7 of B. A panel is read as it lies: the 64 bytes of 16
// columns, 128 bytes apart, are the rows of B.
//
// A format has kChunkSteps, NumSteps(slice) and
//   template <bool kBoth> Multiply(x, rows, slice, begin, end, sums, ahead)
//     sums [32][32] += products over steps [begin, end) of the slice, or = them where begin is 0;
//     kBoth: there are more than 16 rows
#include "amx/linear_layout.h"
#include "amx/tiles.h"
#include "scratch.h"

namespace fdsd {
namespace FDSD_ISA {
namespace FDSD_TILES {

static_assert(kPackRows == 2 * kTileRows && kPanelColumns == 2 * kTileColumns);

constexpr int kBlockSums = kPackRows * kPanelColumns;
constexpr int kPanelStepBytes = kPanelColumns * kStepBytes;  // 4 bytes of every column
constexpr int kBf16StepPanelBytes = kStepUnits * kPanelStepBytes;
constexpr int kHalfColumnsBytes = kTileColumns * kStepBytes;
// Where several packs pass over a panel: as much of it at a time as fits the first-level cache together with them.
constexpr int kChunkBytes = 16 * 1024;
// The second-level cache of a processor with AMX has 2 MiB.
constexpr int64_t kBlockBytes = 1024 * 1024;
// How far ahead of the weights one pack alone asks for more, where that was not measured.
constexpr int kPrefetchAhead = 8 * 1024;

// Asks for the lines of weights that come after those in use, in equal parts. One pack alone asks for those of its own
// stream, `alone` bytes ahead (0 = not at all). Several packs ask for the next panel, while they pass over this one.
class Ahead {
 public:
  Ahead(const uint8_t* panel, int64_t panel_bytes, int64_t num_packs, int64_t num_steps, int64_t alone)
      : next_(panel + (num_packs == 1 ? alone : panel_bytes)),
        lines_(num_packs == 1 && alone == 0
                   ? 0
                   : static_cast<int>(DivideUp(panel_bytes / 64, std::max<int64_t>(num_packs * num_steps, 1)))) {}

  FDSD_INLINE void Step() {
    for (int i = 0; i < lines_; ++i, next_ += 64) _mm_prefetch(reinterpret_cast<const char*>(next_), _MM_HINT_T1);
  }

 private:
  const uint8_t* next_;
  const int lines_;
};

// One pack and the sums of its rows in this panel.
struct Rows {
  const uint8_t* pack;
  int count;
  float* levels;  // [levels][32][32], see AddLevels
};

// multiply(packs, num_packs): the sums of tiles of x in a panel, which then go to columns of `out`.
template <typename Multiply>
void WithPacks(const PackedRows& x, int64_t tile_begin, int64_t tile_end, int64_t index, const LinearOutput& out,
               Multiply&& multiply) {
  const int64_t num_packs = tile_end - tile_begin;
  const int last_level = SumLevel(x.slices.count - 1);
  const int64_t pack_sums = (last_level + 1) * kBlockSums;
  float* const levels = ScratchArray<float>(Scratch::kInnerTask, num_packs * pack_sums);
  Rows* const packs = ScratchArray<Rows>(Scratch::kTask, num_packs);
  for (int64_t i = 0; i < num_packs; ++i) {
    packs[i] = {x.Tile(tile_begin + i), x.Size(tile_begin + i), levels + i * pack_sums};
  }
  multiply(packs, num_packs);
  for (int64_t i = 0; i < num_packs; ++i) {
    StoreSums(packs[i].levels + last_level * kBlockSums, packs[i].count, x.Begin(tile_begin + i), index, out);
  }
}

// Ends slice `index` of a pack: adds the sums that wait in the levels below to the slice's own.
FDSD_INLINE void EndSlice(int32_t index, const Rows& pack) {
  const int level = SumLevel(index);
  float* const sums = pack.levels + level * kBlockSums;
  for (int i = 0; i < pack.count * kPanelColumns && level > 0; i += kLanes) {
    F32x16 sum = Load(sums + i);
    for (int l = 0; l < level; ++l) sum = Add(Load(pack.levels + l * kBlockSums + i), sum);
    Store(sum, sums + i);
  }
}

// A slice of a panel: units [first, first + num_units) of the whole sum.
struct Slice {
  int32_t index;
  int32_t first;
  int32_t num_units;
  const uint8_t* weights;
};

template <bool kBoth>
FDSD_INLINE void LoadSums(const float* sums) {
  constexpr int64_t kStride = kPanelColumns * sizeof(float);
  LoadTile<0>(sums, kStride);
  LoadTile<1>(sums + kTileColumns, kStride);
  if constexpr (kBoth) {
    LoadTile<2>(sums + kTileRows * kPanelColumns, kStride);
    LoadTile<3>(sums + kTileRows * kPanelColumns + kTileColumns, kStride);
  }
}
template <bool kBoth>
FDSD_INLINE void StoreTiles(void* sums) {
  constexpr int64_t kStride = kPanelColumns * sizeof(float);
  uint8_t* const to = static_cast<uint8_t*>(sums);
  StoreTile<0>(to, kStride);
  StoreTile<1>(to + kHalfColumnsBytes, kStride);
  if constexpr (kBoth) {
    StoreTile<2>(to + kTileRows * kStride, kStride);
    StoreTile<3>(to + kTileRows * kStride + kHalfColumnsBytes, kStride);
  }
}
template <bool kBoth>
FDSD_INLINE void ZeroSums() {
  ZeroTile<0>();
  ZeroTile<1>();
  if constexpr (kBoth) {
    ZeroTile<2>();
    ZeroTile<3>();
  }
}

}  // namespace FDSD_TILES
}  // namespace FDSD_ISA
}  // namespace fdsd
