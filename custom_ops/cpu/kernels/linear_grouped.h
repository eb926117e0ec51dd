#pragma once
// The packed form of integers with a scale per output and group of 16 to 128 inputs.
//
// A panel holds units of 128 inputs of its 32 columns:
//   codes   u8 [32][16][4] as wint4 of the lowest four bits of each code, or u8 [32][32][4] of eight bits
//   highs   of codes of 5 or 6 bits: u8 [32 / s][32][4], each byte the upper bits of s = 8 or 4 steps
//   scales  half or float [groups][32]; or half [32] and int8 [groups][32], whose product is a group's scale
//   minima  half or float [groups][32]; or half [32] and uint8 [groups][32], whose product is subtracted; or zero
//   points
//          int8 [groups][32], whose product with the scale is subtracted
// A weight is scale * (code - zero) + minimum.
#include <cstdint>

#include "linear_layout.h"

namespace fdsd {

enum class GroupScale : uint8_t { kHalf, kFloat, kSteps, kFactors };  // kFactors: wint4's
enum class GroupMinimum : uint8_t { kNone, kHalf, kFloat, kSteps, kZeros };

struct GroupFormat {
  int32_t bits;   // of a code: 4, 5, 6 or 8; 0 = no format of groups
  int32_t group;  // inputs: 16, 32, 64 or 128
  GroupScale scale;
  GroupMinimum minimum;
  int32_t zero;

  __attribute__((always_inline)) constexpr int32_t num_groups() const { return kQuantGroup / group; }
  __attribute__((always_inline)) constexpr int64_t high_bytes() const {
    return bits == 8 ? 0 : int64_t{bits - 4} * kQuantGroup * kPanelColumns / 8;
  }
  __attribute__((always_inline)) constexpr int64_t code_bytes() const {
    return (bits == 8 ? kWint8Bytes : kWint4Bytes) + high_bytes();
  }
  __attribute__((always_inline)) constexpr int64_t scale_bytes() const {
    if (scale == GroupScale::kFactors) return kFactorBytes + kScaleBytes;
    return kPanelColumns *
           (scale == GroupScale::kSteps ? 2 + num_groups() : (scale == GroupScale::kHalf ? 2 : 4) * num_groups());
  }
  __attribute__((always_inline)) constexpr int64_t unit_bytes() const {
    switch (minimum) {
      case GroupMinimum::kNone:
        return code_bytes() + scale_bytes();
      case GroupMinimum::kHalf:
        return code_bytes() + scale_bytes() + kPanelColumns * 2 * num_groups();
      case GroupMinimum::kFloat:
        return code_bytes() + scale_bytes() + kPanelColumns * 4 * num_groups();
      case GroupMinimum::kSteps:
        return code_bytes() + scale_bytes() + kPanelColumns * (2 + num_groups());
      default:
        return code_bytes() + scale_bytes() + kPanelColumns * num_groups();
    }
  }
};

__attribute__((always_inline)) constexpr GroupFormat GroupFormatOf(LinearFormat format) {
  using enum LinearFormat;
  switch (format) {
    case kWint4:
      return {4, kFactorInputs, GroupScale::kFactors, GroupMinimum::kNone, 0};
    case kWint8:
      return {8, kQuantGroup, GroupScale::kFloat, GroupMinimum::kNone, kWint8ZeroPoint};
    case kQ4Of0:
      return {4, 32, GroupScale::kHalf, GroupMinimum::kNone, 8};
    case kQ4Of1:
      return {4, 32, GroupScale::kHalf, GroupMinimum::kHalf, 0};
    case kQ5Of0:
      return {5, 32, GroupScale::kHalf, GroupMinimum::kNone, 16};
    case kQ5Of1:
      return {5, 32, GroupScale::kHalf, GroupMinimum::kHalf, 0};
    case kQ8Of0:
      return {8, 32, GroupScale::kHalf, GroupMinimum::kNone, 128};
    case kQ2K:
      return {4, 16, GroupScale::kSteps, GroupMinimum::kSteps, 0};
    case kQ3K:
      return {4, 16, GroupScale::kSteps, GroupMinimum::kNone, 8};
    case kQ4K:
      return {4, 32, GroupScale::kSteps, GroupMinimum::kSteps, 0};
    case kQ5K:
      return {5, 32, GroupScale::kSteps, GroupMinimum::kSteps, 0};
    case kQ6K:
      return {6, 16, GroupScale::kSteps, GroupMinimum::kNone, 32};
    case kIq4Xs:
      return {8, 32, GroupScale::kSteps, GroupMinimum::kNone, 128};
    case kMxfp4:
      return {5, 32, GroupScale::kFloat, GroupMinimum::kNone, 16};
    case kInt8Of16:
      return {8, 16, GroupScale::kFloat, GroupMinimum::kFloat, 128};
    case kInt6Of16:
      return {6, 16, GroupScale::kSteps, GroupMinimum::kSteps, 32};
    case kInt4Of32:
      return {4, 32, GroupScale::kFloat, GroupMinimum::kZeros, 8};
    case kInt4Of64:
      return {4, 64, GroupScale::kFloat, GroupMinimum::kZeros, 8};
    case kInt4Of128:
      return {4, 128, GroupScale::kFloat, GroupMinimum::kZeros, 8};
    case kInt8Of32:
      return {8, 32, GroupScale::kFloat, GroupMinimum::kZeros, 128};
    default:
      return {0, kQuantGroup, GroupScale::kFloat, GroupMinimum::kNone, 0};
  }
}
// How the codes of any format that has some are packed: e4m3 as eight bits from 0 on.
__attribute__((always_inline)) constexpr GroupFormat CodeFormatOf(LinearFormat format) {
  if (format != LinearFormat::kFp8 && format != LinearFormat::kE4m3) return GroupFormatOf(format);
  GroupFormat codes = GroupFormatOf(LinearFormat::kWint8);
  codes.zero = 0;
  return codes;
}
// The byte that stands where a unit's inputs or a matrix's outputs have ended.
__attribute__((always_inline)) constexpr uint32_t PaddingOf(LinearFormat format) {
  return format == LinearFormat::kWint8 ? kWint8ZeroPoint : 0;
}
__attribute__((always_inline)) constexpr bool IsGrouped(LinearFormat format) { return format > LinearFormat::kE4m3; }

}  // namespace fdsd
