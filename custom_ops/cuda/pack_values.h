#pragma once
// How weights are read and quantised, operation for operation as processors do it (float16.h, linear_quantize.h); the
// last part packs a group of wint4.
#include "linear_layout.h"
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

constexpr int kPackThreads = 128;
constexpr int kPackWarps = kPackThreads / kWarpSize;
// One float more than a column has, so that neither neighbouring inputs nor neighbouring columns meet in a bank.
constexpr int kPackStride = kQuantGroup + 1;
static_assert(kPackThreads == kQuantGroup && kPanelColumns == kWarpSize, "a warp has the columns of a panel");

// Up to 128 inputs of the 32 columns of a panel, [column][input], zero where the matrix ends.
using PackTile = DevicePtr<float>;

// What the smallest scale of wint4 that clips nothing is multiplied by.
constexpr int kNumInt4Stretches = 3;
__device__ __forceinline__ float Int4Stretch(int i) {
  constexpr float kStretches[kNumInt4Stretches] = {1.0f, 1.06f, 1.13f};
  return kStretches[i];
}

// 16 inputs of wint4 as codes; see linear_quantize.h.
struct Int4Codes {
  float step;
  float inverse;
  int32_t factor;
  int32_t zero;

  __device__ __forceinline__ Int4Codes(float scale, int32_t factor, int32_t zero)
      : step(scale * static_cast<float>(factor)), inverse(1.0f / step), factor(factor), zero(zero) {}
  static __device__ __forceinline__ Int4Codes From(float low, float scale, int32_t wanted) {
    const int32_t factor = wanted < 1 ? 1 : min(wanted, 15);
    constexpr float kUnit = 0x1.8p23f;
    const float start = -low * (1.0f / (scale * static_cast<float>(factor)));
    const int32_t zero = min(static_cast<int32_t>((start + kUnit) - kUnit), 15);
    return {scale, min(factor, 127 / max(zero, 15 - zero)), zero};
  }

  __device__ __forceinline__ float Of(float value) const {
    constexpr float kUnit = 0x1.8p23f;  // its last bit is worth one
    const float code = (value * inverse + kUnit - kUnit) + static_cast<float>(zero);
    const float above = code > 0.0f ? code : 0.0f;
    return above < 15.0f ? above : 15.0f;
  }
  // The squared errors, added in a tree.
  __device__ __forceinline__ float Error(DevicePtr<const float> values) const {
    float squares[kFactorInputs];
#pragma unroll
    for (int i = 0; i < kFactorInputs; ++i) {
      const float value = values[i];
      const float error = value - (Of(value) - static_cast<float>(zero)) * step;
      squares[i] = error * error;
    }
#pragma unroll
    for (int half = kFactorInputs / 2; half > 0; half /= 2) {
#pragma unroll
      for (int i = 0; i < kFactorInputs / 2; ++i) {
        if (i < half) squares[i] += squares[i + half];
      }
    }
    return squares[0];
  }
};

// What a column of wint4 is packed with: a scale of 0 and no factors where it has none.
struct Int4Scale {
  float scale;
  float peak;
  int32_t common;  // of the factors: the scale that is stored is so many times this one
};

// The scale of the thread's column and its factors, factors [groups][columns] of a byte each; all threads call it and
// wait at its end. Warp w has groups 2 w and 2 w + 1.
__device__ inline Int4Scale ScaleInt4(PackTile tile, DevicePtr<uint8_t> factors) {
  constexpr int kOwn = kFactorGroups / kPackWarps;
  constexpr int kBytes = kFactorGroups * kPanelColumns;
  FDSD_SHARED(float, peaks, kPackWarps* kPanelColumns);
  FDSD_SHARED(float, leasts, kPackWarps* kPanelColumns);
  FDSD_SHARED(float, errors, kNumInt4Stretches* kBytes);
  FDSD_SHARED(uint8_t, found, kNumInt4Stretches* kBytes);
  const int column = threadIdx.x % kWarpSize;
  const int first = static_cast<int>(threadIdx.x) / kWarpSize * kOwn;
  const DevicePtr<const float> values = tile + column * kPackStride;
  float low[kOwn] = {}, high[kOwn] = {};
  float least = 0.0f;
  for (int g = 0; g < kOwn; ++g) {
    for (int i = 0; i < kFactorInputs; ++i) {
      const float value = values[(first + g) * kFactorInputs + i];
      low[g] = value < low[g] ? value : low[g];
      high[g] = value > high[g] ? value : high[g];
    }
    const float own = high[g] / 225.0f - low[g] / 225.0f;
    least = own > least ? own : least;
  }
  leasts[threadIdx.x] = least;
  peaks[threadIdx.x] = PeakOf(values + first * kFactorInputs, kOwn * kFactorInputs);
  __syncthreads();
  const float peak = PeakOf(peaks + column, kPackWarps, kPanelColumns);
  const bool has_scale = HasScale(peak);
  least = fabsf(peak) / 127.0f;
  for (int w = 0; w < kPackWarps; ++w)
    least = leasts[w * kPanelColumns + column] > least ? leasts[w * kPanelColumns + column] : least;
  for (int s = 0; s < kNumInt4Stretches && has_scale; ++s) {
    const float scale = ToFloat(RoundToBf16(least * Int4Stretch(s)));
    for (int g = 0; g < kOwn; ++g) {
      const DevicePtr<const float> own = values + (first + g) * kFactorInputs;
      const auto wanted = static_cast<int32_t>((high[g] / scale - low[g] / scale) / 15.0f);
      const Int4Codes fine = Int4Codes::From(low[g], scale, wanted);
      const Int4Codes coarse = Int4Codes::From(low[g], scale, wanted + 1);
      const float fine_error = fine.Error(own);
      const float coarse_error = coarse.Error(own);
      const Int4Codes& better = coarse_error < fine_error ? coarse : fine;
      const int at = (s * kFactorGroups + first + g) * kPanelColumns + column;
      errors[at] = coarse_error < fine_error ? coarse_error : fine_error;
      found[at] = static_cast<uint8_t>(better.factor | better.zero << 4);
    }
  }
  __syncthreads();
  int best = 0;
  float best_error = 0.0f;
  for (int s = 0; s < kNumInt4Stretches && has_scale; ++s) {
    float sum = 0.0f;
    for (int g = 0; g < kFactorGroups; ++g) sum += errors[(s * kFactorGroups + g) * kPanelColumns + column];
    if (s > 0 && !(sum < best_error)) continue;
    best = s;
    best_error = sum;
  }
  int32_t common = 0;
  for (int g = 0; g < kFactorGroups && has_scale; ++g) {
    int32_t other = found[(best * kFactorGroups + g) * kPanelColumns + column] & 15;
    while (other != 0) {
      const int32_t rest = common % other;
      common = other;
      other = rest;
    }
  }
  for (int g = first; g < first + kOwn; ++g) {
    const int at = g * kPanelColumns + column;
    factors[at] = has_scale ? found[best * kBytes + at] : 0;
  }
  __syncthreads();
  return {has_scale ? ToFloat(RoundToBf16(least * Int4Stretch(best))) : 0.0f, peak, common};
}

// Four inputs of a column, in the low nibbles of a word's bytes.
__device__ inline uint32_t Int4Word(DevicePtr<const float> values, float scale, uint8_t factor) {
  if (scale == 0.0f) return 0;
  const Int4Codes codes(scale, factor & 15, factor >> 4);
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(codes.Of(values[i])) << (8 * i);
  return word;
}

__device__ inline void PackInt4(PackTile tile, DevicePtr<uint8_t> out) {
  constexpr int kColumns = kPanelColumns / 2;
  FDSD_SHARED(float, scales, kPanelColumns);
  FDSD_SHARED(uint8_t, factors, kFactorBytes);
  const Int4Scale own = ScaleInt4(tile, factors);
  const int column = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  if (warp == 0) {
    scales[column] = own.scale;
    ViewAs<float>(out + (kWint4Bytes + kFactorBytes))[column] =
        own.scale == 0.0f ? NoScale(own.peak) : own.scale * static_cast<float>(own.common);
  }
  for (int g = warp; g < kFactorGroups; g += kPackWarps) {
    const int32_t factor = factors[g * kPanelColumns + column];
    out[kWint4Bytes + g * kPanelColumns + column] =
        static_cast<uint8_t>(own.common == 0 ? 0 : (factor & 15) / own.common | (factor & 0xf0));
  }
  __syncthreads();
  const DevicePtr<uint32_t> words = ViewAs<uint32_t>(out);
  for (int w = threadIdx.x; w < kGroupSteps * kColumns; w += kPackThreads) {
    const int low = w % kColumns;
    const int first = w / kColumns * 4;
    const int factor = first / kFactorInputs * kPanelColumns + low;
    words[w] =
        Int4Word(tile + (low * kPackStride + first), scales[low], factors[factor]) |
        Int4Word(tile + ((low + kColumns) * kPackStride + first), scales[low + kColumns], factors[factor + kColumns])
            << 4;
  }
}

}  // namespace fdsd::cuda
