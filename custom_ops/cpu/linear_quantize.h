#pragma once
// Quantisation of one group of 128 values: int8 for weights and activations, int4 for weights.
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

FDSD_INLINE F32x16 RoundInt4(F32x16 values, float inverse_scale) {
  return Min(Max(RoundNearest(Mul(values, Set1(inverse_scale))), Set1(-8.0f)), Set1(7.0f));
}

FDSD_INLINE float QuantizeInt4(const float* values, int8_t* q) {
  const float max = MaxMagnitude(values);
  float scale;
  if (!HasScale(max, q, &scale)) return scale;
  int peak = 0;
  while (std::abs(values[peak]) != max) ++peak;
  float best_target = 0.0f;
  float best_error = std::numeric_limits<float>::infinity();
  for (const float target : kInt4Targets) {
    const float candidate = values[peak] / target;
    F32x16 squares = Set1(0.0f);
    for (int i = 0; i < kQuantGroup; i += kLanes) {
      const F32x16 v = Load(values + i);
      const F32x16 error = Sub(v, Mul(RoundInt4(v, target / values[peak]), Set1(candidate)));
      squares = Add(squares, Mul(error, error));
    }
    const float error = ReduceAdd(squares);
    if (best_target == 0.0f || error < best_error) {
      best_target = target;
      best_error = error;
    }
  }
  alignas(64) float rounded[kQuantGroup];
  for (int i = 0; i < kQuantGroup; i += kLanes) {
    Store(RoundInt4(Load(values + i), best_target / values[peak]), rounded + i);
  }
  ToInt8(rounded, q);
  return values[peak] / best_target;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
