#pragma once
// Weights and rows of x on their way to shared memory: a ring of stages, filled by asynchronous copies while others are
// multiplied. What is on its way hides the memory's latency: an H100 wants 3.35 TB/s x 0.8 us / 132 SMs = 20 KB per SM,
// a B200 8 TB/s x 0.9 us / 148 = 49 KB.
#include <type_traits>

#include "linear_weights.h"

namespace fdsd::cuda {

// What stages are copied from: some panels of a matrix, and some rows.
struct StageSource {
  const SliceBorders& slices;
  DevicePtr<const uint8_t> panels;
  int64_t panel_bytes;
  int32_t num_panels;  // that there are
  LinearInput x;
  int64_t row;       // the first
  int32_t num_rows;  // that there are
};

// Stages of a ring, the most first: as many as the device has shared memory for. A ring of several sides has so many
// times as many.
constexpr int kMaxRingStages = 4;
constexpr int kMinRingStages = 2;

// For the thread's copies but those of the stages that follow, in a ring of so many times kSides. The instruction has
// their number in it.
template <int kSides>
__device__ __forceinline__ void WaitForStage(int num_stages) {
  static_assert(kMinRingStages == 2 && kMaxRingStages == 4);
  if (num_stages == 4) return WaitForCopies<4 * kSides - 2>();
  if (num_stages == 3) return WaitForCopies<3 * kSides - 2>();
  WaitForCopies<2 * kSides - 2>();
}

// All threads that fill a ring.
template <int kThreads>
__device__ __forceinline__ void MeetThreads() {
  if constexpr (kThreads == kWarpSize) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// What the rows have of a stage, zeros from row `num_rows` on; by kThreads threads.
template <int kRows, int kThreads>
__device__ __forceinline__ void CopyStageRows(const StageSource& source, int32_t stage, int32_t num_rows, int thread,
                                              DevicePtr<uint8_t> to) {
  constexpr int kRowsAtOnce = kThreads / kRowChunks;
  const int row = thread / kRowChunks;
  const int chunk = thread % kRowChunks;
  const int64_t first = (stage * source.x.num_rows + source.row + row) * kStageWords;
  const DevicePtr<const uint8_t> from = ViewAs<const uint8_t>(source.x.words + first) + chunk * kChunkBytes;
  const DevicePtr<uint8_t> own = to + (row * kStageRowBytes + RowPlaceOf(row, chunk) * kChunkBytes);
  static_assert(kRowsAtOnce % kMatrixColumns == 0 && (kRows % kRowsAtOnce == 0 || kRows < kRowsAtOnce));
  if (kRows < kRowsAtOnce && row >= kRows) return;
#pragma unroll
  for (int i = 0; i < kRows; i += kRowsAtOnce)
    CopyAsync<kChunkBytes>(own + i * kStageRowBytes, from + i * kStageRowBytes, row + i < num_rows);
}

// The rows' scales of a stage's unit, likewise.
template <int kRows, int kThreads>
__device__ __forceinline__ void CopyRowScales(const StageSource& source, int32_t stage, int32_t num_rows, int thread,
                                              DevicePtr<uint8_t> to) {
  constexpr int kPairBytes = sizeof(GroupScale);
  const int64_t first = stage / kGroupStages * source.x.num_rows + source.row;
  const auto from = ViewAs<const uint8_t>(source.x.scales + first);
#pragma unroll
  for (int i = 0; i < kRows; i += kThreads) {
    const int row = i + thread;
    if (kRows % kThreads != 0 && row >= kRows) break;
    CopyAsync<kPairBytes>(to + row * kPairBytes, from + row * kPairBytes, row < num_rows);
  }
}

// A ring of stages of kPanels panels and kRows rows, or kSides such rings side by side, each at its own place of the
// sum. kThreads threads fill a side: one warp, which then is its only reader, or several where all of a block read. A
// stage has the panels' lines of all sides, the rows, and where it ends a group the scales of both.
template <typename Weights, int kPanels, int kRows, int kThreads, int kSides = 1>
class StageRing {
 public:
  using Walk = std::conditional_t<kSides == 1, StageWalk, StepWalk>;
  static constexpr int kAlignment = kThreads == kWarpSize ? kChunkBytes : kWarpgroupAlignment;
  static constexpr int kCodeBytes = Weights::kStageLines * Weights::kLineBytes;
  static constexpr int kLineBytes = kCodeBytes + Weights::kStageFactorBytes;  // of a panel
  static constexpr int kRowsAt = (kSides * kPanels * kLineBytes + kAlignment - 1) / kAlignment * kAlignment;
  static constexpr int kWeightScalesAt = kRowsAt + kSides * kRows * kStageRowBytes;
  static constexpr int kRowScalesAt = kWeightScalesAt + (Weights::kIsScaled ? kSides * kPanels * kScaleBytes : 0);
  static constexpr int kUsedBytes =
      kRowScalesAt + (Weights::kHasRowScales ? kSides * kRows * int{sizeof(GroupScale)} : 0);
  static constexpr int kStageBytes = (kUsedBytes + kAlignment - 1) / kAlignment * kAlignment;

  // Of a ring with so many stages for each side.
  static __host__ __device__ __forceinline__ constexpr int Bytes(int num_stages) {
    return kSides * num_stages * kStageBytes;
  }

  // A ring in this memory, over the stages of a walk (the side's own); the first copies begin.
  __device__ __forceinline__ StageRing(DevicePtr<uint8_t> memory, int num_stages, const StageSource& source,
                                       const Walk& walk)
      : memory_(memory), num_stages_(num_stages), next_(walk) {
#pragma unroll 1
    for (int slot = 0; slot < kSides * num_stages_ - 1; ++slot) Fill(source, slot);
  }

  // The next stage, once it is there. Until the next call. kIsFenced: for products of a warpgroup.
  template <bool kIsFenced>
  __device__ __forceinline__ DevicePtr<const uint8_t> Next(const StageSource& source) {
    WaitForStage<kSides>(num_stages_);
    if constexpr (kIsFenced) FenceCopies();
    MeetThreads<kThreads>();  // all threads have what each has copied, and are done with the stage before, whose place
                              // is filled now
    const int last = kSides * num_stages_ - 1;
    Fill(source, slot_ == 0 ? last : slot_ - 1);
    const DevicePtr<const uint8_t> stage = memory_ + slot_ * kStageBytes;
    slot_ = slot_ == last ? 0 : slot_ + 1;
    return stage;
  }

 private:
  static __device__ __forceinline__ int Thread() { return static_cast<int>(threadIdx.x) % kThreads; }
  static __device__ __forceinline__ int Side() { return static_cast<int>(threadIdx.x) / kThreads % kSides; }

  __device__ __forceinline__ void Fill(const StageSource& source, int slot) {
    if (next_.HasStage(source.slices)) {
      const DevicePtr<uint8_t> stage = memory_ + slot * kStageBytes;
      CopyLines(source, stage + Side() * kPanels * kLineBytes);
      if constexpr (Weights::kStageFactorBytes != 0) CopyFactors(source, stage + Side() * kPanels * kLineBytes);
      const int32_t num_rows = next_.IsThere() ? source.num_rows : 0;
      CopyStageRows<kRows, kThreads>(source, next_.stage, num_rows, Thread(),
                                     stage + (kRowsAt + Side() * kRows * kStageRowBytes));
      if constexpr (Weights::kIsScaled) {
        if (next_.stage % Weights::kPieceStages == Weights::kPieceStages - 1) CopyScales(source, stage);
      }
      next_.Advance(source.slices);
    }
    CommitCopies();
  }

  // Units of a slice may end within a stage: lines after them are zero, as is all of a stage that is not there.
  __device__ __forceinline__ void CopyLines(const StageSource& source, DevicePtr<uint8_t> to) const {
    constexpr int kLineChunks = Weights::kLineBytes / kChunkBytes;
    constexpr int kPanelChunks = Weights::kStageLines * kLineChunks;
    const int32_t begin = source.slices.units[next_.slice];
    const int32_t stage = next_.stage - source.slices.stages[next_.slice];
    int64_t offset;
    int32_t num_lines = Weights::kStageLines;
    if constexpr (Weights::kIsScaled) {
      offset =
          (begin + stage / Weights::kPieceStages) * Weights::kUnitBytes + stage % Weights::kPieceStages * kCodeBytes;
    } else {
      const int32_t unit = begin + stage * kStageWords;
      offset = unit * Weights::kUnitBytes;
      num_lines = min(kStageWords, source.slices.units[next_.slice + 1] - unit);
    }
    if (!next_.IsThere()) num_lines = 0;
    static_assert(kThreads % kPanelChunks == 0 || (kPanels == 1 && kPanelChunks % kThreads == 0));
    // A thread's chunks are as far apart on either side: what differs among them is known to the compiler.
    const int thread = Thread();
    const int panel = thread / kPanelChunks;
    const int line = thread / kLineChunks % Weights::kStageLines;
    const DevicePtr<uint8_t> own = to + (panel * kLineBytes + line * Weights::kLineBytes +
                                         Weights::PlaceOf(line, thread % kLineChunks) * kChunkBytes);
    const DevicePtr<const uint8_t> from =
        source.panels + (offset + panel * source.panel_bytes + thread % kPanelChunks * kChunkBytes);
#pragma unroll
    for (int i = 0; i < kPanels * kPanelChunks; i += kThreads) {
      const int next_panel = i / kPanelChunks;
      const int rest = i % kPanelChunks;
      if (kPanels * kPanelChunks < kThreads && panel >= kPanels) break;
      const bool is_there = kPanels == 1 || panel + next_panel < source.num_panels;
      CopyAsync<kChunkBytes>(own + (next_panel * kLineBytes + rest * kChunkBytes),
                             from + (next_panel * source.panel_bytes + rest * kChunkBytes),
                             is_there && line + rest / kLineChunks < num_lines);
    }
  }

  __device__ __forceinline__ void CopyFactors(const StageSource& source, DevicePtr<uint8_t> to) const {
    constexpr int kBytes = Weights::kStageFactorBytes;
    constexpr int kPanelChunks = kBytes / kChunkBytes;
    static_assert(kPanels * kPanelChunks <= kThreads);
    const int panel = Thread() / kPanelChunks;
    const int chunk = Thread() % kPanelChunks;
    if (panel >= kPanels) return;
    const int64_t offset = next_.stage / kGroupStages * Weights::kUnitBytes + Weights::kValueBytes +
                           next_.stage % kGroupStages * kBytes + chunk * kChunkBytes;
    CopyAsync<kChunkBytes>(to + (panel * kLineBytes + kCodeBytes + chunk * kChunkBytes),
                           source.panels + (offset + panel * source.panel_bytes),
                           next_.IsThere() && panel < source.num_panels);
  }

  __device__ __forceinline__ void CopyScales(const StageSource& source, DevicePtr<uint8_t> stage) const {
    constexpr int kPanelChunks = kScaleBytes / kChunkBytes;
    const int32_t group = next_.stage / Weights::kPieceStages;
    const int64_t offset = (group + 1) * Weights::kUnitBytes - kScaleBytes;
    const int chunk = Thread();
    if (chunk < kPanels * kPanelChunks) {
      const int panel = chunk / kPanelChunks;
      const int64_t from = offset + panel * source.panel_bytes + chunk % kPanelChunks * kChunkBytes;
      CopyAsync<kChunkBytes>(stage + (kWeightScalesAt + Side() * kPanels * kScaleBytes + chunk * kChunkBytes),
                             source.panels + from, next_.IsThere() && panel < source.num_panels);
    }
    if constexpr (Weights::kHasRowScales)
      CopyRowScales<kRows, kThreads>(source, next_.stage, next_.IsThere() ? source.num_rows : 0, Thread(),
                                     stage + (kRowScalesAt + Side() * kRows * int{sizeof(GroupScale)}));
  }

  DevicePtr<uint8_t> memory_;
  int num_stages_;  // of a side
  Walk next_;       // the stage to copy next
  int slot_ = 0;    // where the stage to multiply next lies
};

// What a warp multiplies of a block's panels and rows: kProducts products of a panel, from `product` on, with rows from
// `row` on.
struct WarpShare {
  int panel;
  int product;
  int row;
};

// sums += the products of a ring's next piece. One product of a panel: by the warpgroup.
template <typename Weights, int kRowTiles, int kProducts, typename Ring>
__device__ __forceinline__ void AddPiece(Ring* ring, const StageSource& source, const WarpShare& share,
                                         Products<float, kRowTiles, kProducts>* sums) {
  constexpr bool kByWarpgroup = kProducts == 1;
  const int lines = share.panel * Ring::kLineBytes;
  const int rows = Ring::kRowsAt + share.row * kStageRowBytes;
  if constexpr (Weights::kIsScaled) {
    Products<typename Weights::Sum, kRowTiles, kProducts> products = {};
    DevicePtr<const uint8_t> stage = nullptr;
#pragma unroll 1
    for (int i = 0; i < Weights::kPieceStages; ++i) {
      stage = ring->template Next<kByWarpgroup>(source);
      if constexpr (kByWarpgroup) {
        AddStageByWarpgroup<Weights, kRowTiles>(stage + lines, stage + rows, share.product, &products);
      } else {
        AddStage<Weights, kRowTiles>(stage + lines, stage + rows, &products);
      }
    }
    const auto scales = ViewAs<const float>(stage + (Ring::kWeightScalesAt + share.panel * kScaleBytes));
    const auto row_scales = ViewAs<const GroupScale>(stage + Ring::kRowScalesAt) + share.row;
    AddScaled<Weights, kRowTiles, kProducts>(scales, row_scales, products, share.product, sums);
  } else {
    const DevicePtr<const uint8_t> stage = ring->template Next<kByWarpgroup>(source);
    if constexpr (kByWarpgroup) {
      AddStageByWarpgroup<Weights, kRowTiles>(stage + lines, stage + rows, share.product, sums);
    } else {
      AddStage<Weights, kRowTiles>(stage + lines, stage + rows, sums);
    }
  }
}

}  // namespace fdsd::cuda
