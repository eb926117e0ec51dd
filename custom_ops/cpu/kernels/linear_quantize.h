#pragma once
// Quantisation of one group of 128 values: int8 for weights and activations, int4 for weights.
#include <iterator>

#include "linear_layout.h"
#include "simd.h"

namespace fdsd {
namespace FDSD_ISA {

// Groups whose largest magnitude is below this become zero: their scale would leave float's normal range.
constexpr float kTinyGroup = 1e-30f;

// Largest magnitude; infinity or NaN when the group holds one (as integers, NaNs compare above everything).
FDSD_INLINE float MaxMagnitude(const float* values) {
  uint32_t bits[kQuantGroup];
  std::memcpy(bits, values, sizeof(bits));
  int32_t max = 0;
  for (int i = 0; i < kQuantGroup; ++i) max = std::max(max, static_cast<int32_t>(bits[i] & 0x7fffffffu));
  float magnitude;
  std::memcpy(&magnitude, &max, sizeof(magnitude));
  return magnitude;
}

FDSD_INLINE void ToInt8(const float* integral, int8_t* q) {
  for (int i = 0; i < kQuantGroup; ++i) q[i] = static_cast<int8_t>(static_cast<int32_t>(integral[i]));
}

// Whether a group with this largest magnitude has a scale. If not, its integers become zero and its scale is set here:
// 0, or NaN for a group with an infinity or a NaN, so that every sum that reads it is NaN.
FDSD_INLINE bool HasScale(float max, int8_t* q, float* scale) {
  const bool is_finite = max <= std::numeric_limits<float>::max();
  if (max >= kTinyGroup && is_finite) return true;
  std::memset(q, 0, kQuantGroup);
  *scale = is_finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  return false;
}

// Integers in [-127, 127], scale = largest magnitude / 127.
FDSD_INLINE float QuantizeInt8(const float* values, int8_t* q) {
  const float max = MaxMagnitude(values);
  float scale;
  if (!HasScale(max, q, &scale)) return scale;
  alignas(64) float rounded[kQuantGroup];
  for (int i = 0; i < kQuantGroup; i += kLanes) {
    Store(RoundNearest(Mul(Load(values + i), Set1(127.0f / max))), rounded + i);
  }
  ToInt8(rounded, q);
  return max / 127.0f;
}

// Integers in [-8, 7]. The value of largest magnitude goes to about -8, which has no positive counterpart, so the scale
// may be negative. Of several scales around that one the first with the smallest squared error wins: on bell-shaped
// weights clipping the largest values a little costs less than a coarser grid for all (a sixth less error than
// scale = largest magnitude / 7).
constexpr float kInt4Targets[] = {-8.0f, -7.0f, -7.5f, -8.5f, -9.0f, -9.5f, -10.0f};
constexpr int kNumInt4Targets = static_cast<int>(std::size(kInt4Targets));

// Rounds by adding and subtracting a number whose last bit is worth one, which is quicker than to ask for it: the
// scaled values are at most 10 in magnitude, and the sum rounds to nearest, ties to even.
FDSD_INLINE F32x16 RoundInt4(F32x16 values, float inverse_scale) {
  constexpr float kUnit = 0x1.8p23f;
  const F32x16 rounded = Sub(Add(Mul(values, Set1(inverse_scale)), Set1(kUnit)), Set1(kUnit));
  return Min(Max(rounded, Set1(-8.0f)), Set1(7.0f));
}

// The first value of magnitude `max`; there is one.
FDSD_INLINE float PeakValue(const float* values, float max) {
  int peak = kQuantGroup;
  for (int i = kQuantGroup - 1; i >= 0; --i) peak = std::abs(values[i]) == max ? i : peak;
  return values[peak];
}

FDSD_INLINE float QuantizeInt4(const float* values, int8_t* q) {
  const float max = MaxMagnitude(values);
  float scale;
  if (!HasScale(max, q, &scale)) return scale;
  const float peak = PeakValue(values, max);
  float scales[kNumInt4Targets], inverse_scales[kNumInt4Targets];
  F32x16 squares[kNumInt4Targets];
  for (int c = 0; c < kNumInt4Targets; ++c) {
    scales[c] = peak / kInt4Targets[c];
    inverse_scales[c] = kInt4Targets[c] / peak;
    squares[c] = Set1(0.0f);
  }
  for (int i = 0; i < kQuantGroup; i += kLanes) {
    const F32x16 v = Load(values + i);
    for (int c = 0; c < kNumInt4Targets; ++c) {
      const F32x16 error = Sub(v, Mul(RoundInt4(v, inverse_scales[c]), Set1(scales[c])));
      squares[c] = Add(squares[c], Mul(error, error));
    }
  }
  int best = 0;
  float best_error = ReduceAdd(squares[0]);
  for (int c = 1; c < kNumInt4Targets; ++c) {
    const float error = ReduceAdd(squares[c]);
    if (error < best_error) {
      best = c;
      best_error = error;
    }
  }
  alignas(64) float rounded[kQuantGroup];
  for (int i = 0; i < kQuantGroup; i += kLanes) {
    Store(RoundInt4(Load(values + i), inverse_scales[best]), rounded + i);
  }
  ToInt8(rounded, q);
  return scales[best];
}

}  // namespace FDSD_ISA
}  // namespace fdsd
