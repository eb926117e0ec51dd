#pragma once
// Quantisation of one head's vector to int8 with a scale: keys and values as they enter the cache, queries as they
// meet it.
#include "simd.h"

namespace fdsd {
namespace FDSD_ISA {

constexpr float kInt8Max = 127.0f;
// A vector whose largest magnitude is below this becomes zero: its scale would leave float's normal range.
constexpr float kTinyMagnitude = 1e-30f;

// Largest magnitude; infinity or NaN when there is one (as integers, NaNs compare above everything).
FDSD_INLINE float LargestMagnitude(const float* x, int size) {
  int32_t max = 0;
  for (int i = 0; i < size; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    max = std::max(max, bits & 0x7fffffff);
  }
  float magnitude;
  std::memcpy(&magnitude, &max, sizeof(magnitude));
  return magnitude;
}

// integers[size] in [-127, 127] and the returned scale, largest magnitude / 127. A vector with an infinity or a NaN
// gets the scale NaN, so that every result it takes part in is NaN.
FDSD_INLINE float QuantizeVector(const float* x, int size, int8_t* integers) {
  const float max = LargestMagnitude(x, size);
  const bool is_finite = max <= std::numeric_limits<float>::max();
  if (!is_finite || max < kTinyMagnitude) {
    for (int i = 0; i < size; ++i) integers[i] = 0;
    return is_finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  }
  const F32x16 inverse = Set1(kInt8Max / max);
  for (int i = 0; i < size; i += kLanes) {
    alignas(64) float rounded[kLanes];
    Store(RoundNearest(Mul(Load(x + i), inverse)), rounded);
    for (int j = 0; j < kLanes; ++j) integers[i + j] = static_cast<int8_t>(static_cast<int32_t>(rounded[j]));
  }
  return max / kInt8Max;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
