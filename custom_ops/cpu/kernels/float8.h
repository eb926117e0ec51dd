#pragma once
// The 8-bit float of weights, and of activations on GPUs, e4m3: a sign, 4 bits of exponent with bias 7, 3 of fraction;
// no infinity, and the largest number is 448.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "linear_quantize.h"

namespace fdsd {
namespace FDSD_ISA {

constexpr float kMaxE4m3 = 448.0f;

// To nearest, ties to even; magnitudes below 464.
FDSD_INLINE uint8_t ToE4m3(float x) {
  constexpr float kMinNormal = 0x1p-6f;
  constexpr float kSubnormalsPerOne = 0x1p9f;
  constexpr int kDroppedBits = 23 - 3;
  constexpr uint32_t kRebias = 127 - 7;
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t magnitude = bits & 0x7fffffffu;
  const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
  const float value = std::fabs(x);
  if (value < kMinNormal) return sign | static_cast<uint8_t>(std::nearbyint(value * kSubnormalsPerOne));
  const uint32_t half = (1u << (kDroppedBits - 1)) - 1 + (magnitude >> kDroppedBits & 1u);
  return sign | static_cast<uint8_t>(((magnitude + half) >> kDroppedBits) - (kRebias << 3));
}

// Numbers of e4m3, scale = largest magnitude / 448.
FDSD_INLINE float QuantizeFp8(const float* values, uint8_t* q) {
  const float max = MaxMagnitude(values);
  float scale;
  if (!HasScale(max, reinterpret_cast<int8_t*>(q), &scale)) return scale;
  const float inverse = kMaxE4m3 / max;
  for (int i = 0; i < kQuantGroup; ++i) q[i] = ToE4m3(values[i] * inverse);
  return max / kMaxE4m3;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
