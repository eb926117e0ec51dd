#pragma once
// Integers that have a scale, and perhaps a minimum, per group of 16 to 128 inputs (linear_grouped.h): one description
// of all such formats. Where speed counts, it is a constant of a kernel.
#include "linear_grouped.h"
#include "numbers.h"

namespace fdsd::cuda {

// How a scale or a minimum is stored; kSteps and kZeros are multiples, of a half per unit and of the scale.
enum class FactorKind : int32_t { kNone, kHalf, kFloat, kSteps, kZeros, kOfWint4 };

// Parts of a unit, in order: the codes' low bits (or all 8), their high bits, scales, minima.
constexpr int kNumPlanes = 4;
constexpr int kScalePlane = 2;
constexpr int kMinimumPlane = 3;
constexpr int kStepPlaneBytes = kPanelColumns * int{sizeof(half16)};  // that multiples begin with

struct GroupLayout {
  int32_t bits;  // of a code
  int32_t group_words;
  int32_t zero;
  FactorKind scale;
  FactorKind minimum;
  // Where planes begin, and their end: in a unit of 128 inputs, and in a stage, a unit of half as many.
  int32_t unit[kNumPlanes + 1];
  int32_t stage[kNumPlanes + 1];

  __host__ __device__ __forceinline__ constexpr int32_t unit_bytes() const { return unit[kNumPlanes]; }
  __host__ __device__ __forceinline__ constexpr int32_t stage_bytes() const { return stage[kNumPlanes]; }
};

constexpr FactorKind FactorKindOf(fdsd::GroupScale scale) {
  constexpr FactorKind kKinds[] = {FactorKind::kHalf, FactorKind::kFloat, FactorKind::kSteps, FactorKind::kOfWint4};
  return kKinds[static_cast<int>(scale)];
}

constexpr FactorKind FactorKindOf(GroupMinimum minimum) {
  constexpr FactorKind kKinds[] = {FactorKind::kNone, FactorKind::kHalf, FactorKind::kFloat, FactorKind::kSteps,
                                   FactorKind::kZeros};
  return kKinds[static_cast<int>(minimum)];
}

constexpr int32_t FactorPlaneBytes(FactorKind kind, int32_t num_groups) {
  switch (kind) {
    case FactorKind::kNone:
      return 0;
    case FactorKind::kHalf:
      return num_groups * kPanelColumns * 2;
    case FactorKind::kFloat:
      return num_groups * kPanelColumns * 4;
    case FactorKind::kSteps:
      return kStepPlaneBytes + num_groups * kPanelColumns;
    case FactorKind::kZeros:
      return num_groups * kPanelColumns;
    case FactorKind::kOfWint4:
      return num_groups * kPanelColumns + kScaleBytes;
  }
  return 0;
}

// Of a format of codes, else all zeros.
constexpr GroupLayout LayoutOf(const GroupFormat& own) {
  if (own.bits == 0) return {};
  GroupLayout layout{own.bits, own.group / 4, own.zero, FactorKindOf(own.scale), FactorKindOf(own.minimum), {}, {}};
  const auto place = [&](int32_t inputs, int32_t* begins) {
    const int32_t num_groups = inputs < own.group ? 1 : inputs / own.group;
    const int32_t bit_bytes = inputs * kPanelColumns / 8;
    begins[1] = (own.bits == 8 ? 8 : 4) * bit_bytes;
    begins[2] = begins[1] + (own.bits == 8 ? 0 : own.bits - 4) * bit_bytes;
    begins[3] = begins[2] + FactorPlaneBytes(layout.scale, num_groups);
    begins[4] = begins[3] + FactorPlaneBytes(layout.minimum, num_groups);
  };
  place(kQuantGroup, layout.unit);
  place(kQuantGroup / 2, layout.stage);
  return layout;
}

constexpr GroupLayout GroupLayoutOf(LinearFormat format) { return LayoutOf(GroupFormatOf(format)); }

// Of two columns.
struct FactorPair {
  float low;
  float high;
};

__device__ __forceinline__ FactorPair HalfPair(uint32_t word) {
  return {ToFloat(half16{static_cast<uint16_t>(word)}), ToFloat(half16{static_cast<uint16_t>(word >> 16)})};
}

// The scales or minima of a group's two columns, of which `column` is the first, an even one; of kZeros the multiples.
__device__ __forceinline__ FactorPair FactorsOf(FactorKind kind, DevicePtr<const uint8_t> plane, int group,
                                                int column) {
  const int at = group * kPanelColumns + column;
  if (kind == FactorKind::kHalf) return HalfPair(ViewAs<const uint32_t>(plane)[at / 2]);
  if (kind == FactorKind::kFloat) {
    const uint2 pair = ViewAs<const uint2>(plane)[at / 2];
    return {__uint_as_float(pair.x), __uint_as_float(pair.y)};
  }
  if (kind == FactorKind::kOfWint4) {
    const DevicePtr<const float> scales = ViewAs<const float>(plane + kFactorBytes) + column;
    return {scales[0] * static_cast<float>(plane[at] & 15), scales[1] * static_cast<float>(plane[at + 1] & 15)};
  }
  const bool has_steps = kind == FactorKind::kSteps;
  const uint32_t pair = ViewAs<const uint16_t>(plane + (has_steps ? kStepPlaneBytes : 0))[at / 2];
  FactorPair found{static_cast<float>(static_cast<int8_t>(pair)), static_cast<float>(static_cast<int8_t>(pair >> 8))};
  if (has_steps) {
    const FactorPair steps = HalfPair(ViewAs<const uint32_t>(plane)[column / 2]);
    found.low = steps.low * found.low;
    found.high = steps.high * found.high;
  }
  return found;
}

// Minima as they are added to what scales make of codes.
__device__ __forceinline__ FactorPair MinimaOf(FactorKind kind, DevicePtr<const uint8_t> plane, int group, int column,
                                               const FactorPair& scales) {
  if (kind == FactorKind::kNone) return {0.0f, 0.0f};
  const FactorPair stored = FactorsOf(kind, plane, group, column);
  if (kind == FactorKind::kSteps) return {-stored.low, -stored.high};
  if (kind == FactorKind::kZeros) return {-(scales.low * stored.low), -(scales.high * stored.high)};
  return stored;
}

// Four codes less the zero, as int8.
__device__ __forceinline__ uint32_t SignedCodes(uint32_t codes, uint32_t zero) {
  constexpr uint32_t kOnes = 0x01010101u;
  constexpr uint32_t kSigns = 0x80808080u;
  // Of 8 bits there is no bit to spare, and this is their zero.
  if (zero == 128) return codes ^ kSigns;
  return ((codes | kSigns) - zero * kOnes) ^ kSigns;
}

// So many low bits of each byte.
__device__ __forceinline__ uint32_t HighMask(int num_bits) { return ((1u << num_bits) - 1) * 0x01010101u; }

// The bits of codes above the low four, in their place: those that steps of four inputs share, of which this is one.
__device__ __forceinline__ uint32_t HighBits(uint32_t shared, int step, int num_bits) {
  return (shared >> (step * num_bits + 4) % 8 & HighMask(num_bits)) << 4;
}

}  // namespace fdsd::cuda
