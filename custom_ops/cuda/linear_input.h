#pragma once
// The input of a linear layer as its matrix products read it: stage by stage, and row by row within each. So what some
// rows have of a stage is one piece of memory. A word of 4 bytes is two bfloat16 or float16, or four integers or e4m3.
// In the latter case a group of 128 has a scale and a sum of its integers. Slices are padded with zeros to whole
// stages.
#include "linear_stages.h"
#include "reduce.h"
#include "row_groups.h"

namespace fdsd::cuda {

// A group's scale and the sum of its integers, of one row.
using GroupScale = uint2;

struct LinearInput {
  int64_t num_rows;              // M
  DevicePtr<uint32_t> words;     // [num_stages, M, kStageWords]
  DevicePtr<GroupScale> scales;  // [num_groups, M], the int formats only
};

constexpr int kInputThreads = 128;

// The first input of a word. Where codes of e4m3 are widened, the eight words of 16 inputs lie as Bf16Codes makes them
// of four words of codes: inputs 0 and 2, 4 and 6, 8 and 10, 12 and 14, then 1 and 3, 5 and 7, ..
template <bool kIsWidened>
__device__ __forceinline__ int32_t FirstInputOf(int32_t word) {
  return kIsWidened ? word / 8 * 16 + word % 4 * 4 + word / 4 % 2 : 2 * word;
}

// Block (row, part): a thread has a word of two Words.
template <typename T, typename Words, bool kIsWidened>
__global__ __launch_bounds__(kInputThreads) void PairInputsKernel(int32_t in_features,
                                                                  const __grid_constant__ SliceBorders slices,
                                                                  RowGroups groups, DevicePtr<const T> x,
                                                                  LinearInput input) {
  const int32_t word = static_cast<int32_t>(blockIdx.y) * kInputThreads + static_cast<int32_t>(threadIdx.x);
  const int32_t stage = word / kStageWords;
  const int64_t row = blockIdx.x;
  if (stage >= slices.num_stages() || !groups.HasRow(row)) return;
  const int s = slices.Of(stage);
  const int32_t k = slices.inputs[s] + FirstInputOf<kIsWidened>(word - slices.stages[s] * kStageWords);
  constexpr int kNext = kIsWidened ? 2 : 1;
  const DevicePtr<const T> values = x + groups.SourceOf(row) * in_features;
  const int32_t end = slices.inputs[s + 1];
  const float first = k < end ? LoadFloat<T>(values, k) : 0.0f;
  const float second = k + kNext < end ? LoadFloat<T>(values, k + kNext) : 0.0f;
  input.words[(stage * input.num_rows + row) * kStageWords + word % kStageWords] = RoundedWord<Words>(first, second);
}

// Block (row, part): a warp has a group, a lane four of its inputs. Values are x * 127 / largest magnitude, rounded to
// an integer, and the scale largest / 127; for e4m3 448 in place of 127. A group without a scale (nearly zero, or with
// an infinity or a NaN) is zeros with scale 0 or NaN.
template <typename T, bool kIsFp8>
__global__ __launch_bounds__(kInputThreads) void QuantizeInputsKernel(int32_t in_features,
                                                                      const __grid_constant__ SliceBorders slices,
                                                                      RowGroups groups, DevicePtr<const T> x,
                                                                      LinearInput input) {
  constexpr float kTiny = 1e-30f;
  constexpr float kMaxValue = kIsFp8 ? 448.0f : 127.0f;
  constexpr float kMaxFloat = 3.402823466e38f;
  const int32_t num_groups = slices.units[slices.count];
  const int32_t group = static_cast<int32_t>(blockIdx.y * (kInputThreads / kWarpSize) + threadIdx.x / kWarpSize);
  const int64_t row = blockIdx.x;
  if (group >= num_groups || !groups.HasRow(row)) return;
  const DevicePtr<const T> inputs = x + groups.SourceOf(row) * in_features;
  const int lane = threadIdx.x % kWarpSize;
  const int s = slices.Of(group * kGroupStages);
  const int32_t first = slices.inputs[s] + (group - slices.units[s]) * kQuantGroup + 4 * lane;
  float values[4];
  unsigned largest = 0;
  for (int i = 0; i < 4; ++i) {
    values[i] = first + i < slices.inputs[s + 1] ? LoadFloat<T>(inputs, first + i) : 0.0f;
    const unsigned bits = __float_as_uint(values[i]) & 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
    const unsigned other = __shfl_xor_sync(kAllLanes, largest, lanes);
    largest = other > largest ? other : largest;
  }
  const float magnitude = __uint_as_float(largest);
  const bool is_finite = magnitude <= kMaxFloat;
  const bool has_scale = is_finite && magnitude >= kTiny;
  uint32_t word = 0;
  int32_t sum = 0;
  for (int i = 0; i < 4; ++i) {
    const float value = has_scale ? values[i] * (kMaxValue / magnitude) : 0.0f;
    if constexpr (kIsFp8) {
      word |= RoundToE4m3(value) << (8 * i);
    } else {
      const auto integer = static_cast<int32_t>(rintf(value));
      word |= (static_cast<uint32_t>(integer) & 0xffu) << (8 * i);
      sum += integer;
    }
  }
  for (int lanes = kIsFp8 ? 0 : kWarpSize / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kAllLanes, sum, lanes);
  const int64_t stage = group * kGroupStages + lane / kStageWords;
  input.words[(stage * input.num_rows + row) * kStageWords + lane % kStageWords] = word;
  if (lane != 0) return;
  const float scale = has_scale ? magnitude / kMaxValue : (is_finite ? 0.0f : __uint_as_float(0x7fc00000u));
  input.scales[group * input.num_rows + row] = GroupScale{__float_as_uint(scale), static_cast<unsigned>(sum)};
}

}  // namespace fdsd::cuda
