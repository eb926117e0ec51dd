#pragma once
// How weights are read and quantised, operation for operation as processors do it (float16.h, linear_quantize.h).
#include "fdsd/linear.h"
#include "numbers.h"

namespace fdsd::cuda {

// The first value of the largest magnitude; one with an infinity or a NaN where there is one (as integers, NaNs compare
// above everything).
__device__ __forceinline__ float PeakOf(DevicePtr<const float> values, int count, int stride = 1) {
  float peak = 0.0f;
  for (int i = 0; i < count; ++i) {
    const float value = values[i * stride];
    if ((__float_as_uint(value) & 0x7fffffffu) > (__float_as_uint(peak) & 0x7fffffffu)) peak = value;
  }
  return peak;
}

// Whether a group with this peak has a scale: one that is nearly zero, or has an infinity or a NaN, has none.
__device__ __forceinline__ bool HasScale(float peak) {
  constexpr float kTinyGroup = 1e-30f;
  constexpr float kMaxFloat = 3.402823466e38f;
  const float magnitude = fabsf(peak);
  return magnitude >= kTinyGroup && magnitude <= kMaxFloat;
}

// What stands for the scale of a group that has none: 0, or NaN, so that every sum that reads it is NaN.
__device__ __forceinline__ float NoScale(float peak) {
  return fabsf(peak) < 1.0f ? 0.0f : __uint_as_float(0x7fc00000u);
}

// What the peak of a group of wint4 may go to; the first with the smallest squared error wins.
constexpr int kNumInt4Targets = 7;
__device__ __forceinline__ float Int4Target(int i) {
  constexpr float kTargets[kNumInt4Targets] = {-8.0f, -7.0f, -7.5f, -8.5f, -9.0f, -9.5f, -10.0f};
  return kTargets[i];
}

__device__ __forceinline__ float RoundInt4(float value, float inverse) {
  constexpr float kUnit = 0x1.8p23f;  // its last bit is worth one
  const float rounded = value * inverse + kUnit - kUnit;
  const float above = rounded > -8.0f ? rounded : -8.0f;
  return above < 7.0f ? above : 7.0f;
}

// The squared error of a group whose peak goes to `target`. 16 sums, each of every 16th value, are added in a tree.
__device__ __forceinline__ float Int4Error(DevicePtr<const float> values, float peak, float target) {
  constexpr int kSums = 16;
  const float scale = peak / target;
  const float inverse = target / peak;
  float sums[kSums];
#pragma unroll
  for (int lane = 0; lane < kSums; ++lane) {
    sums[lane] = 0.0f;
    for (int i = lane; i < kQuantGroup; i += kSums) {
      const float value = values[i];
      const float error = value - RoundInt4(value, inverse) * scale;
      sums[lane] += error * error;
    }
  }
#pragma unroll
  for (int half = kSums / 2; half > 0; half /= 2) {
#pragma unroll
    for (int lane = 0; lane < kSums / 2; ++lane) {
      if (lane < half) sums[lane] += sums[lane + half];
    }
  }
  return sums[0];
}

}  // namespace fdsd::cuda
