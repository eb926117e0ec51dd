#include <algorithm>

#include "linear_grouped.h"

namespace fdsd {
namespace {

int32_t UnitsOf(int32_t in_features, LinearFormat format) {
  switch (format) {
    case LinearFormat::kFloat32:
      return in_features;
    case LinearFormat::kBFloat16:
    case LinearFormat::kFloat16:
      return static_cast<int32_t>(DivideUp(in_features, 2));
    case LinearFormat::kWint8:
    case LinearFormat::kWint4:
    case LinearFormat::kFp8:
    case LinearFormat::kE4m3:
    default:
      break;
  }
  return static_cast<int32_t>(DivideUp(in_features, kQuantGroup));
}

}  // namespace

int64_t HalvingBorder(int64_t size, int32_t count, int64_t unit, int32_t index) {
  int64_t begin = 0;
  int64_t end = DivideUp(size, unit);
  // The part lies to the right of every border that its index reaches.
  for (int32_t half = count / 2; half > 0; half /= 2) {
    const int64_t middle = begin + (end - begin) / 2;
    const bool is_right = index >= half;
    (is_right ? begin : end) = middle;
    index -= is_right ? half : 0;
  }
  return std::min(size, (index > 0 ? end : begin) * unit);
}

Slices SlicesOf(int32_t in_features, LinearFormat format, SliceRule rule) {
  Slices slices{};
  slices.count = rule.num_slices;
  for (int32_t s = 0; s < rule.num_slices; ++s) {
    slices.inputs[s + 1] = static_cast<int32_t>(HalvingBorder(in_features, rule.num_slices, rule.slice_unit, s + 1));
    slices.units[s + 1] = slices.units[s] + UnitsOf(slices.inputs[s + 1] - slices.inputs[s], format);
  }
  return slices;
}

int64_t PanelUnitBytes(LinearFormat format) {
  switch (format) {
    case LinearFormat::kFloat32:
    case LinearFormat::kBFloat16:
    case LinearFormat::kFloat16:
      return kPanelColumns * kStepBytes;
    case LinearFormat::kWint8:
    case LinearFormat::kFp8:
    case LinearFormat::kE4m3:
      return kWint8Bytes + kScaleBytes;
    case LinearFormat::kWint4:
      return kWint4Bytes + kFactorBytes + kScaleBytes;
    default:
      break;
  }
  return GroupFormatOf(format).unit_bytes();
}

int64_t PanelBytes(const Slices& slices, LinearFormat format) { return slices.num_units() * PanelUnitBytes(format); }

int64_t PackedLinearBytes(int32_t in_features, int32_t out_features, LinearFormat format, SliceRule slices) {
  return DivideUp(out_features, kPanelColumns) * PanelBytes(SlicesOf(in_features, format, slices), format);
}

Error CheckLinear(int32_t in_features, int32_t out_features, LinearFormat format, SliceRule slices,
                  const void* packed) {
  if (in_features < 0) return "in_features: expected 0 or more, got a negative number";
  if (out_features < 0) return "out_features: expected 0 or more, got a negative number";
  if (static_cast<int32_t>(format) < 0 || static_cast<int32_t>(format) >= kNumLinearFormats) {
    return "format: expected 0 to 24, got another number";
  }
  if (slices.num_slices != 1 && slices.num_slices != 2 && slices.num_slices != 4) {
    return "num_slices: expected 1, 2 or 4, got another number";
  }
  if (slices.slice_unit < 1) return "slice_unit: expected 1 or more, got another number";
  const bool is_empty = in_features == 0 || out_features == 0;
  if (!is_empty && reinterpret_cast<uintptr_t>(packed) % 64 != 0) {
    return "packed: expected an address that is a multiple of 64, got another";
  }
  return nullptr;
}

Error CheckProcessorFormat(LinearFormat format) {
  if (format != LinearFormat::kFloat16 && format != LinearFormat::kFp8) return nullptr;
  return "format: expected another one on a processor, got float16 or fp8, which only GPUs multiply";
}

}  // namespace fdsd
