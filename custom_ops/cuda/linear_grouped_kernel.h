#pragma once
// Products with integers that have a scale per group of 16 to 128 inputs (linear_grouped.h). A lane has a column of a
// panel, a warp a part of the sum, of 8 rows at a time: dot products of four codes and four int8 of x.
#include "linear_grouped.h"
#include "linear_input.h"
#include "linear_kernels.h"

namespace fdsd::cuda {

constexpr int kGroupedRows = 8;
constexpr int kGroupedThreads = kParts * kWarpSize;

#if defined(FDSD_EMULATED)
// sum + a . b, of four int8 each.
inline int32_t DotInt8(uint32_t a, uint32_t b, int32_t sum) {
  for (int i = 0; i < 32; i += 8) sum += int32_t{static_cast<int8_t>(a >> i)} * static_cast<int8_t>(b >> i);
  return sum;
}
#else
__device__ __forceinline__ int32_t DotInt8(uint32_t a, uint32_t b, int32_t sum) {
  return __dp4a(static_cast<int>(a), static_cast<int>(b), sum);
}
#endif

// What a lane reads of a unit of its panel.
template <LinearFormat kFormat>
struct GroupedUnit {
  static constexpr GroupFormat kGroups = GroupFormatOf(kFormat);
  static constexpr int kBits = kGroups.bits;
  static constexpr int kNumGroups = kGroups.num_groups();
  static constexpr int kGroupWords = kGroups.group / 4;
  static constexpr int64_t kScalesAt = kGroups.code_bytes();
  static constexpr int64_t kMinimaAt = kGroups.code_bytes() + kGroups.scale_bytes();
  static constexpr int64_t kUnitBytes = kGroups.unit_bytes();
  static constexpr bool kHasMinima = kGroups.minimum != GroupMinimum::kNone;

  DevicePtr<const uint8_t> unit;
  int lane;

  // Four codes less the zero, as int8.
  __device__ __forceinline__ uint32_t Codes(int step) const {
    constexpr uint32_t kOnes = 0x01010101u;
    constexpr uint32_t kSigns = 0x80808080u;
    const DevicePtr<const uint32_t> words = ViewAs<const uint32_t>(unit);
    if constexpr (kBits == 8) return words[step * kPanelColumns + lane] ^ kSigns;
    constexpr int kHalf = kPanelColumns / 2;
    uint32_t codes = words[step * kHalf + lane % kHalf] >> (lane < kHalf ? 0 : 4) & 15 * kOnes;
    if constexpr (kBits > 4) {
      constexpr int kHighBits = kBits - 4;
      constexpr int kSharing = 8 / kHighBits;
      const uint32_t shared = words[kWint4Bytes / 4 + step / kSharing * kPanelColumns + lane];
      const int shift = (step % kSharing * kHighBits + 4) % 8;
      codes |= (shared >> shift & ((1 << kHighBits) - 1) * kOnes) << 4;
    }
    uint32_t zero = kGroups.zero;
    if constexpr (kGroups.scale == fdsd::GroupScale::kFactors) zero = Factor(step / kGroupWords) >> 4;
    return ((codes | kSigns) - zero * kOnes) ^ kSigns;
  }

  __device__ __forceinline__ float Half(int64_t at, int group) const {
    return ToFloat(half16{ViewAs<const uint16_t>(unit + at)[group * kPanelColumns + lane]});
  }
  __device__ __forceinline__ float Float(int64_t at, int group) const {
    return ViewAs<const float>(unit + at)[group * kPanelColumns + lane];
  }
  __device__ __forceinline__ float Int8(int64_t at, int group) const {
    return static_cast<float>(static_cast<int8_t>(unit[at + group * kPanelColumns + lane]));
  }
  __device__ __forceinline__ float Steps(int64_t at, int group) const {
    return Half(at, 0) * Int8(at + kPanelColumns * int64_t{sizeof(half16)}, group);
  }

  __device__ __forceinline__ uint32_t Factor(int group) const { return unit[kScalesAt + group * kPanelColumns + lane]; }

  __device__ __forceinline__ float Scale(int group) const {
    if constexpr (kGroups.scale == fdsd::GroupScale::kFactors)
      return Float(kUnitBytes - kScaleBytes, 0) * static_cast<float>(Factor(group) & 15);
    if constexpr (kGroups.scale == fdsd::GroupScale::kSteps) return Steps(kScalesAt, group);
    if constexpr (kGroups.scale == fdsd::GroupScale::kHalf) return Half(kScalesAt, group);
    if constexpr (kGroups.scale == fdsd::GroupScale::kFloat) return Float(kScalesAt, group);
  }
  __device__ __forceinline__ float Minimum(int group, float scale) const {
    if constexpr (kGroups.minimum == GroupMinimum::kSteps) return -Steps(kMinimaAt, group);
    if constexpr (kGroups.minimum == GroupMinimum::kHalf) return Half(kMinimaAt, group);
    if constexpr (kGroups.minimum == GroupMinimum::kFloat) return Float(kMinimaAt, group);
    if constexpr (kGroups.minimum == GroupMinimum::kZeros) return -(scale * Int8(kMinimaAt, group));
    return 0.0f;
  }

  // sums[r] += what the unit makes of row `row` + r of x.
  __device__ __forceinline__ void Add(const LinearInput& x, int32_t index, int64_t row, int num_rows,
                                      float* sums) const {
    for (int group = 0; group < kNumGroups; ++group) {
      int32_t dots[kGroupedRows] = {};
      int32_t x_sums[kGroupedRows] = {};
#pragma unroll 4
      for (int step = group * kGroupWords; step < (group + 1) * kGroupWords; ++step) {
        const uint32_t codes = Codes(step);
        const int64_t stage = index * int64_t{kGroupStages} + step / kStageWords;
        const DevicePtr<const uint32_t> words = x.words + (stage * x.num_rows + row) * kStageWords + step % kStageWords;
#pragma unroll
        for (int r = 0; r < kGroupedRows; ++r) {
          const uint32_t word = r < num_rows ? words[r * kStageWords] : 0;
          dots[r] = DotInt8(codes, word, dots[r]);
          if constexpr (kHasMinima) x_sums[r] = DotInt8(0x01010101u, word, x_sums[r]);
        }
      }
      const float scale = Scale(group);
      const float minimum = Minimum(group, scale);
#pragma unroll
      for (int r = 0; r < kGroupedRows; ++r) {
        const GroupScale x_group = x.scales[index * x.num_rows + row + min(r, num_rows - 1)];
        const float x_scale = __uint_as_float(x_group.x);
        sums[r] = fmaf(static_cast<float>(dots[r]), scale * x_scale, sums[r]);
        if constexpr (kHasMinima) sums[r] = fmaf(minimum, x_scale * static_cast<float>(x_sums[r]), sums[r]);
      }
    }
  }
};

// Block (panel, tile): 32 columns of the rows of a tile of a group. The parts of a slice are added in their order.
template <LinearFormat kFormat>
__global__ __launch_bounds__(kGroupedThreads, 1) void GroupedKernel(const __grid_constant__ LinearShape shape,
                                                                    RowGroups groups, LinearInput x,
                                                                    DevicePtr<const uint8_t> packed,
                                                                    LinearOutput output) {
  using Unit = GroupedUnit<kFormat>;
  FDSD_SHARED(float, part_sums, kParts * kGroupedRows * kPanelColumns);
  const RowGroups::Tile rows = groups.TileOf(static_cast<int32_t>(blockIdx.y), groups.tile_rows);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int32_t column = static_cast<int32_t>(blockIdx.x) * kPanelColumns + lane;
  const int64_t panel = int64_t{rows.group} * gridDim.x + blockIdx.x;
  const DevicePtr<const uint8_t> units = packed + panel * shape.slices.units[shape.slices.count] * Unit::kUnitBytes;
  const int64_t end = min(rows.begin + groups.tile_rows, rows.end);
  for (int64_t first = rows.begin; first < end; first += kGroupedRows) {
    const int num_rows = static_cast<int>(min(int64_t{kGroupedRows}, end - first));
    SliceTree total{};
    for (int s = 0; s < shape.slices.count; ++s) {
      float sums[kGroupedRows] = {};
      const int32_t unit_end = shape.slices.PartBegin(s, warp + 1, kGroupStages) / kGroupStages;
      for (int32_t unit = shape.slices.PartBegin(s, warp, kGroupStages) / kGroupStages; unit < unit_end; ++unit)
        Unit{units + unit * Unit::kUnitBytes, lane}.Add(x, unit, first, num_rows, sums);
#pragma unroll
      for (int r = 0; r < kGroupedRows; ++r) part_sums[(warp * kGroupedRows + r) * kPanelColumns + lane] = sums[r];
      __syncthreads();
      // A warp has a row of what the parts have.
      float sum = 0.0f;
      for (int part = 0; part < kParts; ++part) sum += part_sums[(part * kGroupedRows + warp) * kPanelColumns + lane];
      total.Add(s, sum);
      __syncthreads();
    }
    if (warp < num_rows && column < shape.out_features)
      output.Store(shape, first + warp, column, total.Total(shape.slices.count));
  }
}

}  // namespace fdsd::cuda
