#pragma once
// Few rows: how a block adds up a product of few rows with a panel, by products of warps or of warpgroups.
#include <type_traits>

#include "device_limits.h"
#include "linear_groups_stages.h"

namespace fdsd::cuda {

constexpr int kWarps = kParts;
constexpr int kThreads = kWarps * kWarpSize;

// Products of integers are exact, whichever instruction makes them. For floats, Hopper's two sorts of products are not
// known to be the same. So a chip with products of warpgroups multiplies floats by these alone, few rows and many.
template <typename Weights>
constexpr bool kIsByWarpgroup = std::is_same_v<typename Weights::Sum, float>;

// A warpgroup has 64 rows of A, a panel's columns twice: half of its warps are at one part of the sum, half at another,
// a side each.
constexpr int kSides = 2;
constexpr int kSideThreads = kWarpgroupWarps / kSides * kWarpSize;
static_assert(kThreads / kSideThreads == kPartsInStep);

// The ring that stages of these weights go through, of one side.
template <typename Weights, int kPanels, int kRows, int kRingThreads>
using RingOf = std::conditional_t<Weights::kIsGrouped, GroupedRing<Weights, kPanels, kRows, kRingThreads>,
                                  StageRing<Weights, kPanels, kRows, kRingThreads>>;

// Few rows, where reading the weights takes the time. Block (panel, tile) has 32 columns of kRowTiles * 8 rows of a
// group. Each of its warps has a part of every slice, with a ring of its own.
template <typename Weights, int kRowTiles>
struct FewRows {
  static constexpr int kRows = kRowTiles * kMatrixColumns;
  static constexpr int kExchangedRows = kRows < 16 || Weights::kIsGrouped ? 8 : 16;
  static constexpr int kExchanged = kExchangedRows * kPanelColumns;
  static constexpr int kPerThread = kExchanged / kThreads;
  using Ring = RingOf<Weights, 1, kRows, kWarpSize>;
  // Of a warpgroup, with as much on its way.
  using WarpgroupRing = StageRing<Weights, 1, kRows, kSideThreads, kSides>;
  // Minimum blocks of a multiprocessor. Without this number nvcc would take more registers than two blocks have, or
  // spill those that it needs.
  static constexpr int kMinBlocks = kRowTiles == 1 && Weights::kFormat != LinearFormat::kFp8 ? 2 : 1;
  static constexpr int kStaticBytes = kWarps * kExchanged * int{sizeof(float)};

  // Of all rings of a block. by_warpgroup: the device has such products.
  static constexpr int32_t DynamicBytes(int num_stages, bool by_warpgroup) {
    if constexpr (kIsByWarpgroup<Weights>) {
      if (by_warpgroup) return kWarps / kWarpgroupWarps * WarpgroupRing::Bytes(num_stages);
    }
    return kWarps * Ring::Bytes(num_stages);
  }
  // Stages of a ring; 0 = a device with these limits has no room for such tiles.
  static int32_t NumStages(const DeviceLimits& limits, bool by_warpgroup) {
    return StagesOf(limits, {kThreads, kMinBlocks}, {kMaxRingStages, 3, kMinRingStages},
                    [=](int32_t count) { return kStaticBytes + DynamicBytes(count, by_warpgroup); });
  }
};

// Adds the parts of a slice, in order, to the totals: a thread has some elements of the block's. `put(first, sums)`
// puts the warp's elements of rows first .. first + kExchangedRows - 1 to sums [part, row, column].
template <typename Few, typename Totals, typename Put>
__device__ __forceinline__ void AddParts(int slice, DevicePtr<float> part_sums, const Put& put, Totals* totals) {
#pragma unroll
  for (int first = 0; first < Few::kRows; first += Few::kExchangedRows) {
    __syncthreads();
    put(first, part_sums);
    __syncthreads();
#pragma unroll
    for (int e = 0; e < Few::kPerThread; ++e) {
      float sum = 0.0f;
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        sum += part_sums[part * Few::kExchanged + e * kThreads + static_cast<int>(threadIdx.x)];
      totals[first / Few::kExchangedRows][e].Add(slice, sum);
    }
  }
}

template <typename Weights, int kRowTiles, typename Totals>
__device__ __forceinline__ void MultiplyFewRows(const StageSource& source, int num_stages, DevicePtr<float> part_sums,
                                                Totals* totals) {
  using Few = FewRows<Weights, kRowTiles>;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  typename Few::Ring ring(DynamicShared<uint8_t>() + warp * Few::Ring::Bytes(num_stages), num_stages, source,
                          StageWalk(source.slices, warp, warp + 1, Weights::kPieceStages));
#pragma unroll 1
  for (int s = 0; s < source.slices.count; ++s) {
    Products<float, kRowTiles> sums = {};
    const int32_t end = source.slices.PartBegin(s, warp + 1, Weights::kPieceStages);
#pragma unroll 1
    for (int32_t stage = source.slices.PartBegin(s, warp, Weights::kPieceStages); stage < end;
         stage += Weights::kPieceStages)
      AddPiece<Weights>(&ring, source, WarpShare{0, 0, 0}, &sums);
    const auto put = [&](int first, DevicePtr<float> to) {
#pragma unroll
      for (int tile = 0; tile < Few::kExchangedRows / kMatrixColumns; ++tile) {
#pragma unroll
        for (int i = 0; i < kPanelProducts * 4; ++i) {
          const int row = tile * kMatrixColumns + 2 * (lane % 4) + i % 2;
          const int column = Weights::Column(i / 4, i / 2 % 2, lane / 4);
          to[warp * Few::kExchanged + row * kPanelColumns + column] =
              sums.values[first / kMatrixColumns + tile][i / 4][i % 4];
        }
      }
    };
    AddParts<Few>(s, part_sums, put, totals);
  }
}

// What a warp makes of its side of a warpgroup's products: the elements of its own rows.
template <typename T, int kRowTiles>
__device__ __forceinline__ Products<T, kRowTiles / kSides, 1> OwnSide(const Products<T, kRowTiles, 1>& products,
                                                                      int side) {
  Products<T, kRowTiles / kSides, 1> own;
#pragma unroll
  for (int tile = 0; tile < kRowTiles / kSides; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      own.values[tile][0][i] =
          side == 0 ? products.values[tile][0][i] : products.values[tile + kRowTiles / kSides][0][i];
  }
  return own;
}

// The sum of a part: the side's next num_stages stages, the last of which may not be there. They add nothing.
template <typename Weights, int kRowTiles, typename Ring>
__device__ __forceinline__ Products<float, kRowTiles, 1> SumOfPart(Ring* ring, const StageSource& source, int side,
                                                                   int product, int32_t num_there, int32_t num_stages) {
  using All = Products<typename Weights::Sum, kSides * kRowTiles, 1>;
  const int lines = side * Ring::kLineBytes;
  Products<float, kRowTiles, 1> sums = {};
  All products = {};
#pragma unroll 1
  for (int32_t i = 0; i < num_stages; ++i) {
    const DevicePtr<const uint8_t> stage = ring->template Next<true>(source);
    if constexpr (!Weights::kIsScaled) {
      if (i == num_there) sums = OwnSide(products, side);
    }
    AddStageByWarpgroup<Weights, kSides * kRowTiles>(stage + lines, stage + Ring::kRowsAt, product, &products);
    if constexpr (Weights::kIsScaled) {
      if (i % Weights::kPieceStages != Weights::kPieceStages - 1) continue;
      const auto scales = ViewAs<const float>(stage + (Ring::kWeightScalesAt + side * kScaleBytes));
      const auto row_scales = ViewAs<const GroupScale>(stage + Ring::kRowScalesAt) + side * kRowTiles * kMatrixColumns;
      if (i < num_there) {
        AddScaled<Weights, kRowTiles, 1>(scales, row_scales, OwnSide(products, side), product, &sums);
      }
      products = {};
    }
  }
  if constexpr (!Weights::kIsScaled) {
    if (num_there == num_stages) sums = OwnSide(products, side);
  }
  return sums;
}

// As MultiplyFewRows, where a warp has 16 columns of two parts, one after the other. Of what a warpgroup multiplies,
// columns with rows of the other side are not wanted: products are the least of what few rows take.
template <typename Weights, int kRowTiles, typename Totals>
__device__ __forceinline__ void MultiplyFewRowsByWarpgroup(const StageSource& source, int num_stages,
                                                           DevicePtr<float> part_sums, Totals* totals) {
  using Few = FewRows<Weights, kRowTiles>;
  using Ring = typename Few::WarpgroupRing;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int product = warp % kPanelProducts;
  const int step_side = static_cast<int>(threadIdx.x) / kSideThreads;
  Ring ring(DynamicShared<uint8_t>() + warp / kWarpgroupWarps * Ring::Bytes(num_stages), num_stages, source,
            StepWalk(source.slices, step_side, Weights::kPieceStages));
#pragma unroll 1
  for (int s = 0; s < source.slices.count; ++s) {
    Products<float, kRowTiles, 1> sums[kRounds];
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int part = kRounds * step_side + round;
      const int32_t num_stages = StagesInStep(source.slices, s, round, Weights::kPieceStages);
      const int32_t num_there = source.slices.PartBegin(s, part + 1, Weights::kPieceStages) -
                                source.slices.PartBegin(s, part, Weights::kPieceStages);
      sums[round] = SumOfPart<Weights, kRowTiles>(&ring, source, step_side % kSides, product, num_there, num_stages);
    }
    const auto put = [&](int first, DevicePtr<float> to) {
#pragma unroll
      for (int i = 0; i < kRounds * Few::kExchangedRows / kMatrixColumns * 4; ++i) {
        const int tile = i / 4 / kRounds;
        const int round = i / 4 % kRounds;
        const int row = tile * kMatrixColumns + 2 * (lane % 4) + i % 2;
        const int column = Weights::Column(product, i / 2 % 2, lane / 4);
        to[(kRounds * step_side + round) * Few::kExchanged + row * kPanelColumns + column] =
            sums[round].values[first / kMatrixColumns + tile][0][i % 4];
      }
    };
    AddParts<Few>(s, part_sums, put, totals);
  }
}

}  // namespace fdsd::cuda
