// Rewrites rows of x into tiles.
#include "linear_quantize.h"
#include "linear_tile.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// Where row `index` of a tile of `num_rows` lies: 4 bytes (8 for a bf16 step of two floats) of every step.
struct TileRow {
  uint8_t* tile;
  int num_rows;
  int index;
  int32_t unit_begin, unit_end;
};

template <typename T>
void PackFloat32(const T* x, const TileRow& row) {
  float* out = reinterpret_cast<float*>(row.tile) + row.index;
  for (int64_t k = row.unit_begin; k < row.unit_end; ++k) out[k * row.num_rows] = ToFloat(x[k]);
}

// The bits of x as bf16, rounded when x is float32.
FDSD_INLINE uint32_t Bf16Bits(bf16 x) { return x.bits; }
FDSD_INLINE uint32_t Bf16Bits(float x) { return RoundToBf16(x).bits; }

FDSD_INLINE void StoreBf16Step(uint32_t first, uint32_t second, uint8_t* out) {
  if constexpr (kBf16StepBytes == kStepBytes) {
    const uint32_t pair = first | second << 16;
    std::memcpy(out, &pair, sizeof(pair));
  } else {
    const uint32_t floats[2] = {first << 16, second << 16};
    std::memcpy(out, floats, sizeof(floats));
  }
}

template <typename T>
void PackBf16(const T* x, int32_t in_features, const TileRow& row) {
  const int64_t stride = static_cast<int64_t>(row.num_rows) * kBf16StepBytes;
  const int32_t full_end = std::min(row.unit_end, in_features / 2);
  uint8_t* out = row.tile + row.index * kBf16StepBytes;
  for (int64_t k = row.unit_begin; k < full_end; ++k) {
    StoreBf16Step(Bf16Bits(x[2 * k]), Bf16Bits(x[2 * k + 1]), out + k * stride);
  }
  if (full_end < row.unit_end) StoreBf16Step(Bf16Bits(x[in_features - 1]), 0, out + full_end * stride);
}

// Inputs [128 g, 128 g + 128), zero padded.
template <typename T>
FDSD_INLINE void ReadGroup(const T* x, int32_t in_features, int64_t g, float* values) {
  const T* from = x + g * kQuantGroup;
  const int64_t count = std::min<int64_t>(kQuantGroup, in_features - g * kQuantGroup);
  for (int i = 0; i < kQuantGroup; i += kLanes) {
    const int n = static_cast<int>(std::clamp<int64_t>(count - i, 0, kLanes));
    Store(n == kLanes ? Load(from + i) : n == 0 ? Set1(0.0f) : LoadPartial(from + i, n), values + i);
  }
}

template <typename T>
void PackGroups(const T* x, int32_t in_features, int32_t zero_point, const TileRow& row) {
  for (int64_t g = row.unit_begin; g < row.unit_end; ++g) {
    alignas(64) float values[kQuantGroup];
    alignas(64) int8_t q[kQuantGroup];
    ReadGroup(x, in_features, g, values);
    const float scale = QuantizeInt8(values, q);
    int32_t sum = 0;
    for (int i = 0; i < kQuantGroup; ++i) sum += q[i];
    const int32_t start = -zero_point * sum;
    uint8_t* group = row.tile + g * row.num_rows * kRowGroupBytes;
    for (int s = 0; s < kGroupSteps; ++s) std::memcpy(group + (s * row.num_rows + row.index) * 4, q + s * 4, 4);
    uint8_t* scales = group + row.num_rows * kQuantGroup;
    std::memcpy(scales + row.index * 4, &scale, 4);
    std::memcpy(scales + (row.num_rows + row.index) * 4, &start, 4);
  }
}

template <typename T>
void PackRow(const XRows& rows, const TileRow& row) {
  const T* x = static_cast<const T*>(rows.x) + static_cast<int64_t>(row.index) * rows.in_features;
  switch (rows.format) {
    case LinearFormat::kFloat32:
      return PackFloat32(x, row);
    case LinearFormat::kBFloat16:
      return PackBf16(x, rows.in_features, row);
    case LinearFormat::kWint8:
      return PackGroups(x, rows.in_features, kWint8ZeroPoint, row);
    case LinearFormat::kWint4:
      return PackGroups(x, rows.in_features, kWint4ZeroPoint, row);
  }
}

}  // namespace

void PackTile(const XRows& rows, int num_rows, int32_t unit_begin, int32_t unit_end, uint8_t* tile) {
  for (int r = 0; r < num_rows; ++r) {
    const TileRow row{tile, num_rows, r, unit_begin, unit_end};
    if (rows.dtype == DType::kFloat32) {
      PackRow<float>(rows, row);
    } else {
      PackRow<bf16>(rows, row);
    }
  }
}

}  // namespace FDSD_ISA
}  // namespace fdsd
