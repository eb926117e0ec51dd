#pragma once
// The kernels of linear: one for few rows, one for many, which give a row the same bits.
#include "linear_few_rows.h"
#include "row_groups.h"

namespace fdsd::cuda {

// Rows that a warp has many of, in tiles of 8, where a sum has one slice.
constexpr int kWholeSumTiles = 8;

struct LinearShape {
  int32_t out_features;
  SliceBorders slices;
  DType y_dtype;
  int32_t num_stages;  // of a ring, see StageRing
};

// What every product ends with. The type of y is no argument of templates: that would double what there is to compile.
struct LinearOutput {
  DevicePtr<const float> bias;  // may be nullptr
  DevicePtr<uint8_t> y;

  __device__ __forceinline__ void Store(const LinearShape& shape, int64_t row, int32_t column, float sum) const {
    const int64_t i = row * shape.out_features + column;
    if (bias != nullptr) sum = sum + bias[column];
    StoreFloat(shape.y_dtype, y, i, sum);
  }
};

template <typename Weights>
__device__ __forceinline__ StageSource SourceOf(const LinearShape& shape, const LinearInput& x,
                                                const RowGroups::Tile& rows, DevicePtr<const uint8_t> packed,
                                                int num_panels) {
  const int64_t panel_bytes = shape.slices.units[shape.slices.count] * Weights::kUnitBytes;
  const auto all_panels = static_cast<int32_t>(DivideUp(shape.out_features, kPanelColumns));
  const int32_t panel = static_cast<int32_t>(blockIdx.x) * num_panels;
  const DevicePtr<const uint8_t> panels = packed + (int64_t{rows.group} * all_panels + panel) * panel_bytes;
  return {shape.slices, panels, panel_bytes, all_panels - panel, x, rows.begin, rows.end - rows.begin};
}

template <typename Weights, int kRowTiles>
__global__ __launch_bounds__(kThreads, (FewRows<Weights, kRowTiles>::kMinBlocks)) void FewRowsKernel(
    const __grid_constant__ LinearShape shape, RowGroups groups, LinearInput x, DevicePtr<const uint8_t> packed,
    LinearOutput output) {
  using Few = FewRows<Weights, kRowTiles>;
  FDSD_SHARED(float, part_sums, kParts* Few::kExchanged);
  const RowGroups::Tile rows = groups.TileOf(static_cast<int32_t>(blockIdx.y), Few::kRows);
  if (rows.begin >= rows.end) return;
  const StageSource source = SourceOf<Weights>(shape, x, rows, packed, 1);
  SliceTree totals[Few::kRows / Few::kExchangedRows][Few::kPerThread] = {};
  // Blocks of all chips have the same memory, and only one of the two branches.
  bool is_done = false;
  if constexpr (kIsByWarpgroup<Weights>) {
    if (HasWarpgroupProducts()) {
      MultiplyFewRowsByWarpgroup<Weights, kRowTiles>(source, shape.num_stages, part_sums, totals);
      is_done = true;
    }
  }
  if (!is_done) MultiplyFewRows<Weights, kRowTiles>(source, shape.num_stages, part_sums, totals);
#pragma unroll
  for (int e = 0; e < Few::kRows * kPanelColumns / kThreads; ++e) {
    const int element = e * kThreads + static_cast<int>(threadIdx.x);
    const int64_t row = rows.begin + element / kPanelColumns;
    const int32_t column = static_cast<int32_t>(blockIdx.x) * kPanelColumns + element % kPanelColumns;
    if (row >= rows.end || column >= shape.out_features) continue;
    output.Store(shape, row, column, totals[e / Few::kPerThread][e % Few::kPerThread].Total(shape.slices.count));
  }
}

// Many rows, where products take the time. Block (panels, tile) has 128 rows of a group. A warp has 32 columns of
// kRowTiles * 8 of them, or 16 columns of twice as many, and all parts of their sums, one after the other.
template <typename Weights, int kRowTiles>
struct ManyRows {
  static constexpr int kWarpRows = kRowTiles * kMatrixColumns;
  static constexpr int kPanels = kWarps * kWarpRows / kManyRows;
  using Ring = RingOf<Weights, kPanels, kManyRows, kThreads>;
  // Registers have no room for the sums of slices: a thread's are in shared memory, two for each of its elements.
  static constexpr int kElements = kRowTiles * kPanelProducts * 4;
  static constexpr bool kHasSlices = kRowTiles != kWholeSumTiles;

  static constexpr int32_t DynamicBytes(int num_stages, int num_slices) {
    const int num_sums = kHasSlices ? (num_slices + 1) / 2 * kElements * kThreads : 0;
    return Ring::Bytes(num_stages) + num_sums * int{sizeof(float)};
  }
  // Stages of the ring, of a sum of so many slices.
  static int32_t NumStages(const DeviceLimits& limits, int num_slices) {
    return StagesOf(limits, {kThreads, 1}, {kMaxRingStages, 3, kMinRingStages},
                    [=](int32_t count) { return DynamicBytes(count, num_slices); });
  }
};

template <typename Weights, int kRowTiles, int kProducts>
__device__ __forceinline__ void MultiplyManyRows(const LinearShape& shape, const RowGroups& groups,
                                                 const LinearInput& x, DevicePtr<const uint8_t> packed,
                                                 const LinearOutput& output) {
  using Many = ManyRows<Weights, kRowTiles * kProducts / kPanelProducts>;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  // A warpgroup has two panels, of all rows or of half of them.
  constexpr int kOwnRows = kRowTiles * kMatrixColumns;
  const int warpgroup = warp / kWarpgroupWarps;
  const WarpShare share =
      kProducts == 1
          ? WarpShare{warpgroup * kOwnRows / kManyRows * kPanelProducts + warp % kWarpgroupWarps / kPanelProducts,
                      warp % kPanelProducts, warpgroup * kOwnRows % kManyRows}
          : WarpShare{warp % Many::kPanels, 0, warp / Many::kPanels * Many::kWarpRows};
  const RowGroups::Tile rows = groups.TileOf(static_cast<int32_t>(blockIdx.y), kManyRows);
  if (rows.begin >= rows.end) return;
  const StageSource source = SourceOf<Weights>(shape, x, rows, packed, Many::kPanels);
  typename Many::Ring ring(DynamicShared<uint8_t>(), shape.num_stages, source,
                           StageWalk(shape.slices, 0, kParts, Weights::kPieceStages));
  const DevicePtr<float> slice_sums =
      ViewAs<float>(DynamicShared<uint8_t>() + Many::Ring::Bytes(shape.num_stages)) + static_cast<int>(threadIdx.x);
  const int num_slices = Many::kHasSlices ? shape.slices.count : 1;
  Products<float, kRowTiles, kProducts> totals = {};  // of a slice, then of all
#pragma unroll 1
  for (int s = 0; s < num_slices; ++s) {
    totals = {};
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      Products<float, kRowTiles, kProducts> sums = {};
      const int32_t end = shape.slices.PartBegin(s, part + 1, Weights::kPieceStages);
#pragma unroll 1
      for (int32_t stage = shape.slices.PartBegin(s, part, Weights::kPieceStages); stage < end;
           stage += Weights::kPieceStages)
        AddPiece<Weights>(&ring, source, share, &sums);
#pragma unroll
      for (int i = 0; i < Many::kElements; ++i) totals.At(i) += sums.At(i);
    }
    if constexpr (Many::kHasSlices) {
      const DevicePtr<float> pair = slice_sums + s / 2 * Many::kElements * kThreads;
#pragma unroll
      for (int i = 0; i < Many::kElements; ++i)
        pair[i * kThreads] = s % 2 == 0 ? totals.At(i) : pair[i * kThreads] + totals.At(i);
    }
  }
#pragma unroll
  for (int i = 0; i < Many::kElements; ++i) {
    const int64_t row = rows.begin + share.row + i / 4 / kProducts * kMatrixColumns + 2 * (lane % 4) + i % 2;
    const int32_t column = (static_cast<int32_t>(blockIdx.x) * Many::kPanels + share.panel) * kPanelColumns +
                           Weights::Column(share.product + i / 4 % kProducts, i / 2 % 2, lane / 4);
    if (row >= rows.end || column >= shape.out_features) continue;
    float total = totals.At(i);
    if constexpr (Many::kHasSlices) {
      total = slice_sums[i * kThreads];
      if (num_slices == kMaxSlices) total = total + slice_sums[(Many::kElements + i) * kThreads];
    }
    output.Store(shape, row, column, total);
  }
}

template <typename Weights, int kRowTiles>
__global__ __launch_bounds__(kThreads, 1) void ManyRowsKernel(const __grid_constant__ LinearShape shape,
                                                              RowGroups groups, LinearInput x,
                                                              DevicePtr<const uint8_t> packed, LinearOutput output) {
  // Of groups, scaling takes longer than products do.
  if constexpr (!Weights::kIsGrouped) {
    if (HasWarpgroupProducts()) return MultiplyManyRows<Weights, 2 * kRowTiles, 1>(shape, groups, x, packed, output);
  }
  MultiplyManyRows<Weights, kRowTiles, kPanelProducts>(shape, groups, x, packed, output);
}

}  // namespace fdsd::cuda
