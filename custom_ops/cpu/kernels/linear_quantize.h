#pragma once
// Quantisation of one group of 128 values: int8 for weights and activations, wint4 for weights.
#include <algorithm>
#include <numeric>

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

// A group of wint4, see linear_layout.h.
struct Int4Group {
  float scale;
  uint8_t factors[kFactorGroups];
  alignas(64) uint8_t codes[kQuantGroup];
};

// What the smallest scale that clips nothing is multiplied by. The first with the smallest squared error wins: factors
// are whole, and few values gain from a coarser scale what the others lose.
constexpr float kInt4Stretches[] = {1.0f, 1.06f, 1.13f};
constexpr float kMaxCode = 15.0f;

// Rounds by adding and subtracting a number whose last bit is worth one, which is quicker than to ask for it: the
// values are at most some hundreds in magnitude, and the sum rounds to nearest, ties to even.
constexpr float kRoundingUnit = 0x1.8p23f;

// 16 inputs as codes: whole numbers from 0 to 15 of `step`, which zero counts from.
struct Int4Codes {
  float step;
  float inverse;
  int32_t factor;
  int32_t zero;

  FDSD_INLINE Int4Codes(float scale, int32_t factor, int32_t zero)
      : step(scale * static_cast<float>(factor)), inverse(1.0f / step), factor(factor), zero(zero) {}
  // Those that reach from `low` on, with the wanted factor or the largest that keeps integers within 127.
  static FDSD_INLINE Int4Codes From(float low, float scale, int32_t wanted) {
    const int32_t factor = std::clamp(wanted, 1, 15);
    const float start = -low * (1.0f / (scale * static_cast<float>(factor)));
    const int32_t zero = std::min(static_cast<int32_t>((start + kRoundingUnit) - kRoundingUnit), 15);
    return {scale, std::min(factor, 127 / std::max(zero, 15 - zero)), zero};
  }

  FDSD_INLINE F32x16 Of(F32x16 values) const {
    const F32x16 unit = Set1(kRoundingUnit);
    const F32x16 rounded = Sub(Add(Mul(values, Set1(inverse)), unit), unit);
    return Min(Max(Add(rounded, Set1(static_cast<float>(zero))), Set1(0.0f)), Set1(kMaxCode));
  }
  FDSD_INLINE float Error(F32x16 values) const {
    const F32x16 integers = Sub(Of(values), Set1(static_cast<float>(zero)));
    const F32x16 error = Sub(values, Mul(integers, Set1(step)));
    return ReduceAdd(Mul(error, error));
  }
};

// Integers of steps that differ among each 16 inputs, as whole multiples of one scale. That is a bfloat16 times a small
// number, so that its products with factors are exact.
FDSD_INLINE void QuantizeInt4(const float* values, Int4Group* group) {
  static_assert(kFactorInputs == kLanes);
  std::memset(group, 0, sizeof(*group));
  const float max = MaxMagnitude(values);
  int8_t none[kQuantGroup];
  if (!HasScale(max, none, &group->scale)) return;
  float low[kFactorGroups], high[kFactorGroups];
  float least = max / 127.0f;
  for (int g = 0; g < kFactorGroups; ++g) {
    const F32x16 own = Load(values + g * kLanes);
    low[g] = -ReduceMax(Max(Sub(Set1(0.0f), own), Set1(0.0f)));
    high[g] = ReduceMax(Max(own, Set1(0.0f)));
    least = std::max(least, high[g] / 225.0f - low[g] / 225.0f);
  }
  uint8_t factors[kFactorGroups];
  float best_error = 0.0f;
  for (const float stretch : kInt4Stretches) {
    const float scale = ToFloat(RoundToBf16(least * stretch));
    float sum = 0.0f;
    for (int g = 0; g < kFactorGroups; ++g) {
      const F32x16 own = Load(values + g * kLanes);
      const auto wanted = static_cast<int32_t>((high[g] / scale - low[g] / scale) / kMaxCode);
      const auto fine = Int4Codes::From(low[g], scale, wanted), coarse = Int4Codes::From(low[g], scale, wanted + 1);
      const float fine_error = fine.Error(own), coarse_error = coarse.Error(own);
      const Int4Codes& better = coarse_error < fine_error ? coarse : fine;
      factors[g] = static_cast<uint8_t>(better.factor | better.zero << 4);
      sum += coarse_error < fine_error ? coarse_error : fine_error;
    }
    if (group->scale != 0.0f && !(sum < best_error)) continue;
    best_error = sum;
    group->scale = scale;
    std::memcpy(group->factors, factors, sizeof(factors));
  }
  int32_t common = 0;
  for (const uint8_t factor : group->factors) common = std::gcd(common, factor & 15);
  for (int g = 0; g < kFactorGroups; ++g) {
    const Int4Codes codes(group->scale, group->factors[g] & 15, group->factors[g] >> 4);
    alignas(64) float whole[kLanes];
    Store(codes.Of(Load(values + g * kLanes)), whole);
    for (int i = 0; i < kLanes; ++i) {
      group->codes[g * kLanes + i] = static_cast<uint8_t>(static_cast<int32_t>(whole[i]));
    }
    group->factors[g] = static_cast<uint8_t>(codes.factor / common | codes.zero << 4);
  }
  group->scale *= static_cast<float>(common);
}

}  // namespace FDSD_ISA
}  // namespace fdsd
