// Quantises and reorders a weight matrix into panels.
#include "fdsd/linear.h"
#include "linear_quantize.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// Inputs [k, k + 128) of output `column`, zero padded on both sides of the matrix.
template <typename T>
void ReadWeights(const PackLinearParams& p, int64_t column, int64_t k, float* values) {
  const int count = column < p.out_features ? static_cast<int>(std::min<int64_t>(kQuantGroup, p.in_features - k)) : 0;
  const T* from = static_cast<const T*>(p.weight) + column * p.in_features + k;
  for (int i = 0; i < kQuantGroup; i += kLanes) {
    const int n = std::clamp(count - i, 0, kLanes);
    Store(n == kLanes ? Load(from + i) : n == 0 ? Set1(0.0f) : LoadPartial(from + i, n), values + i);
  }
}

// Each of the following writes inputs [k, k + 128) of column j of a panel; `values` holds them.

void WriteFloat32(const PackLinearParams& p, const float* values, int64_t k, int j, uint8_t* panel) {
  float* out = reinterpret_cast<float*>(panel) + k * kPanelColumns + j;
  const int count = static_cast<int>(std::min<int64_t>(kQuantGroup, p.in_features - k));
  for (int i = 0; i < count; ++i) out[i * kPanelColumns] = values[i];
}

void WriteBf16(const PackLinearParams& p, const float* values, int64_t k, int j, uint8_t* panel) {
  bf16* out = reinterpret_cast<bf16*>(panel) + k * kPanelColumns + 2 * j;
  const int count = static_cast<int>(std::min<int64_t>(kQuantGroup, (p.in_features + 1) / 2 * 2 - k));
  for (int i = 0; i < count; i += 2) {
    out[i * kPanelColumns] = RoundToBf16(values[i]);
    out[i * kPanelColumns + 1] = RoundToBf16(values[i + 1]);
  }
}

void WriteWint8(const float* values, int j, uint8_t* group) {
  alignas(64) int8_t q[kQuantGroup];
  const float scale = QuantizeInt8(values, q);
  uint8_t* out = group + 4 * j;
  for (int i = 0; i < kQuantGroup; ++i) {
    out[i / 4 * kPanelColumns * 4 + i % 4] = static_cast<uint8_t>(q[i] + kWint8ZeroPoint);
  }
  std::memcpy(group + kWint8Bytes + 4 * j, &scale, sizeof(scale));
}

// Columns j and j + 16 share bytes, so the panel must be zero before and both write with "or".
void WriteWint4(const float* values, int j, uint8_t* group) {
  alignas(64) int8_t q[kQuantGroup];
  const float scale = QuantizeInt4(values, q);
  constexpr int kHalf = kPanelColumns / 2;
  uint8_t* out = group + 4 * (j % kHalf);
  const int shift = j < kHalf ? 0 : 4;
  for (int i = 0; i < kQuantGroup; ++i) {
    out[i / 4 * kHalf * 4 + i % 4] |= static_cast<uint8_t>((q[i] + kWint4ZeroPoint) << shift);
  }
  std::memcpy(group + kWint4Bytes + 4 * j, &scale, sizeof(scale));
}

template <typename T>
void PackPanel(const PackLinearParams& p, int64_t index) {
  const int64_t panel_bytes = PanelBytes(p.in_features, p.format);
  uint8_t* panel = static_cast<uint8_t*>(p.packed) + index * panel_bytes;
  std::memset(panel, 0, static_cast<size_t>(panel_bytes));
  for (int64_t k = 0; k < p.in_features; k += kQuantGroup) {
    const int64_t group = k / kQuantGroup;
    for (int j = 0; j < kPanelColumns; ++j) {
      alignas(64) float values[kQuantGroup];
      ReadWeights<T>(p, index * kPanelColumns + j, k, values);
      switch (p.format) {
        case LinearFormat::kFloat32:
          WriteFloat32(p, values, k, j, panel);
          break;
        case LinearFormat::kBFloat16:
          WriteBf16(p, values, k, j, panel);
          break;
        case LinearFormat::kWint8:
          WriteWint8(values, j, panel + group * (kWint8Bytes + kScaleBytes));
          break;
        case LinearFormat::kWint4:
          WriteWint4(values, j, panel + group * (kWint4Bytes + kScaleBytes));
          break;
      }
    }
  }
}

}  // namespace

Error PackLinear(const PackLinearParams& p) {
  if (const Error error = CheckLinear(p.in_features, p.out_features, p.format, p.packed)) return error;
  ParallelFor(DivideUp(p.out_features, kPanelColumns), [&](int64_t panel) {
    if (p.weight_dtype == DType::kFloat32) {
      PackPanel<float>(p, panel);
    } else {
      PackPanel<bf16>(p, panel);
    }
  });
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
