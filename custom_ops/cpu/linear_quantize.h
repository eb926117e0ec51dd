#pragma once
// Symmetric quantisation of one group of 128 values, for weights and activations alike.
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

// q = values * inverse_scale, rounded to nearest even. |values * inverse_scale| must stay below 128.
FDSD_INLINE void RoundGroup(const float* values, float inverse_scale, int8_t* q) {
  alignas(64) float rounded[kQuantGroup];
  for (int i = 0; i < kQuantGroup; i += kLanes) {
    Store(RoundNearest(Mul(Load(values + i), Set1(inverse_scale))), rounded + i);
  }
  for (int i = 0; i < kQuantGroup; ++i) q[i] = static_cast<int8_t>(static_cast<int32_t>(rounded[i]));
}

// Quantise to [-max_q, max_q] and return the scale. A group with an infinity or a NaN gets zeros and the scale NaN, so
// every sum that reads it is NaN.
FDSD_INLINE float QuantizeGroup(const float* values, float max_q, int8_t* q) {
  const float max = MaxMagnitude(values);
  const bool is_finite = max <= std::numeric_limits<float>::max();
  if (max >= kTinyGroup && is_finite) {
    RoundGroup(values, max_q / max, q);
    return max / max_q;
  }
  std::memset(q, 0, kQuantGroup);
  return is_finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
}

}  // namespace FDSD_ISA
}  // namespace fdsd
