#include "linear_layout.h"

namespace fdsd {

int32_t NumUnits(int32_t in_features, LinearFormat format) {
  switch (format) {
    case LinearFormat::kFloat32:
      return in_features;
    case LinearFormat::kBFloat16:
      return static_cast<int32_t>(DivideUp(in_features, 2));
    case LinearFormat::kWint8:
    case LinearFormat::kWint4:
      break;
  }
  return static_cast<int32_t>(DivideUp(in_features, kQuantGroup));
}

int64_t PanelBytes(int32_t in_features, LinearFormat format) {
  const int64_t units = NumUnits(in_features, format);
  switch (format) {
    case LinearFormat::kFloat32:
    case LinearFormat::kBFloat16:
      return units * kPanelColumns * kStepBytes;
    case LinearFormat::kWint8:
      return units * (kWint8Bytes + kScaleBytes);
    case LinearFormat::kWint4:
      break;
  }
  return units * (kWint4Bytes + kScaleBytes);
}

int64_t PackedLinearBytes(int32_t in_features, int32_t out_features, LinearFormat format) {
  return DivideUp(out_features, kPanelColumns) * PanelBytes(in_features, format);
}

Error CheckLinear(int32_t in_features, int32_t out_features, LinearFormat format, const void* packed) {
  if (in_features < 0) return "in_features: expected 0 or more, got a negative number";
  if (out_features < 0) return "out_features: expected 0 or more, got a negative number";
  if (static_cast<int32_t>(format) < 0 || format > LinearFormat::kWint4) {
    return "format: expected float32 (0), bfloat16 (1), wint8 (2) or wint4 (3), got another number";
  }
  const bool is_empty = in_features == 0 || out_features == 0;
  if (!is_empty && reinterpret_cast<uintptr_t>(packed) % 64 != 0) {
    return "packed: expected an address that is a multiple of 64, got another";
  }
  return nullptr;
}

}  // namespace fdsd
