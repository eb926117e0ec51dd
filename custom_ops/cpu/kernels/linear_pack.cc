// Quantises and reorders a weight matrix into panels.
#include "fdsd/linear.h"
#include "float16.h"
#include "float8.h"
#include "linear_grouped.h"
#include "linear_quantize.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// What is packed at a time: up to 128 inputs of the 32 columns of a panel, zero where the matrix ends.
using Tile = float[kPanelColumns][kQuantGroup];

template <typename T>
void ReadRow(const T* from, int count, float* values) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) Store(Load(from + i), values + i);
  if (i < count) Store(LoadPartial(from + i, count - i), values + i);
}

void ReadRow(const half16* from, int count, float* values) {
  for (int i = 0; i < count; ++i) values[i] = ToFloat(from[i]);
}

// Inputs [k, k + count) of `num_columns` rows of a part, from `row` on.
template <typename T>
void ReadPart(const WeightRows& part, int64_t row, int num_columns, int64_t k, int count, float (*tile)[kQuantGroup]) {
  const T* data = static_cast<const T*>(part.data);
  if (part.is_transposed != 0) {
    for (int i = 0; i < count; ++i) {
      const T* from = data + (k + i) * part.stride + row;
      for (int j = 0; j < num_columns; ++j) tile[j][i] = ToFloat(from[j]);
    }
    return;
  }
  for (int j = 0; j < num_columns; ++j) ReadRow(data + (row + j) * part.stride + k, count, tile[j]);
}

void ReadTile(const PackLinearParams& p, int64_t first_column, int64_t k, int count, Tile tile) {
  if (count < kQuantGroup || first_column + kPanelColumns > p.out_features) std::memset(tile, 0, sizeof(Tile));
  int64_t part_begin = 0;
  for (int32_t i = 0; i < p.num_parts; ++i) {
    const WeightRows& part = p.parts[i];
    const int64_t begin = std::max(first_column, part_begin);
    const int64_t end = std::min(first_column + kPanelColumns, part_begin + part.num_rows);
    if (begin < end) {
      const auto read = part.dtype == WeightDType::kFloat32    ? ReadPart<float>
                        : part.dtype == WeightDType::kBFloat16 ? ReadPart<bf16>
                                                               : ReadPart<half16>;
      read(part, begin - part_begin, static_cast<int>(end - begin), k, count, tile + (begin - first_column));
    }
    part_begin += part.num_rows;
  }
}

// out[step][column] of what lies as columns of kSteps steps; only the first num_steps are wanted.
template <int kSteps>
void StoreSteps(const void* columns, int num_steps, uint8_t* out) {
  static_assert(kStepBytes == sizeof(uint32_t));
  const uint32_t* from = static_cast<const uint32_t*>(columns);
  uint32_t* to = reinterpret_cast<uint32_t*>(out);
  for (int step = 0; step < num_steps; ++step) {
    for (int j = 0; j < kPanelColumns; ++j) to[step * kPanelColumns + j] = from[j * kSteps + step];
  }
}

void PackHalf16(const Tile tile, int count, uint8_t* out) {
  alignas(64) half16 rounded[kPanelColumns][kQuantGroup];
  for (int j = 0; j < kPanelColumns; ++j) {
    for (int i = 0; i < kQuantGroup; ++i) rounded[j][i] = RoundToHalf16(tile[j][i]);
  }
  StoreSteps<kQuantGroup / 2>(rounded, static_cast<int>(DivideUp(count, 2)), out);
}

void PackBf16(const Tile tile, int count, uint8_t* out) {
  alignas(64) bf16 rounded[kPanelColumns][kQuantGroup];
  for (int j = 0; j < kPanelColumns; ++j) {
    for (int i = 0; i < kQuantGroup; i += kLanes) Store(Load(tile[j] + i), rounded[j] + i);
  }
  StoreSteps<kQuantGroup / 2>(rounded, static_cast<int>(DivideUp(count, 2)), out);
}

void PackWint8(const Tile tile, uint8_t* out) {
  alignas(64) int8_t q[kPanelColumns][kQuantGroup];
  float scales[kPanelColumns];
  for (int j = 0; j < kPanelColumns; ++j) scales[j] = QuantizeInt8(tile[j], q[j]);
  for (int j = 0; j < kPanelColumns; ++j) {
    for (int i = 0; i < kQuantGroup; ++i) q[j][i] = static_cast<int8_t>(q[j][i] ^ -kWint8ZeroPoint);
  }
  StoreSteps<kGroupSteps>(q, kGroupSteps, out);
  std::memcpy(out + kWint8Bytes, scales, sizeof(scales));
}

void PackFp8(const Tile tile, uint8_t* out) {
  alignas(64) uint8_t q[kPanelColumns][kQuantGroup];
  float scales[kPanelColumns];
  for (int j = 0; j < kPanelColumns; ++j) scales[j] = QuantizeFp8(tile[j], q[j]);
  StoreSteps<kGroupSteps>(q, kGroupSteps, out);
  std::memcpy(out + kWint8Bytes, scales, sizeof(scales));
}

void PackWint4(const Tile tile, uint8_t* out) {
  constexpr int kHalf = kPanelColumns / 2;
  Int4Group groups[kPanelColumns];
  for (int j = 0; j < kPanelColumns; ++j) QuantizeInt4(tile[j], groups + j);
  // Columns j and j + 16 share bytes.
  for (int step = 0; step < kGroupSteps; ++step) {
    for (int j = 0; j < kHalf; ++j, out += kStepBytes) {
      for (int i = 0; i < kStepBytes; ++i) {
        const int at = step * kStepBytes + i;
        out[i] = static_cast<uint8_t>(groups[j].codes[at] | groups[j + kHalf].codes[at] << 4);
      }
    }
  }
  for (int g = 0; g < kFactorGroups; ++g) {
    for (const Int4Group& group : groups) *out++ = group.factors[g];
  }
  for (const Int4Group& group : groups) {
    std::memcpy(out, &group.scale, sizeof(group.scale));
    out += sizeof(group.scale);
  }
}

// Inputs [begin, end), a slice.
void PackSlice(const PackLinearParams& p, int64_t first_column, int64_t begin, int64_t end, uint8_t* out) {
  for (int64_t k = 0; k < end - begin; k += kQuantGroup) {
    const int count = static_cast<int>(std::min<int64_t>(kQuantGroup, end - begin - k));
    alignas(64) Tile tile;
    ReadTile(p, first_column, begin + k, count, tile);
    const int64_t group = k / kQuantGroup;
    switch (p.format) {
      case LinearFormat::kFloat32:
        StoreSteps<kQuantGroup>(tile, count, out + k * kPanelColumns * kStepBytes);
        break;
      case LinearFormat::kBFloat16:
        PackBf16(tile, count, out + k / 2 * kPanelColumns * kStepBytes);
        break;
      case LinearFormat::kFloat16:
        PackHalf16(tile, count, out + k / 2 * kPanelColumns * kStepBytes);
        break;
      case LinearFormat::kWint8:
        PackWint8(tile, out + group * (kWint8Bytes + kScaleBytes));
        break;
      case LinearFormat::kWint4:
        PackWint4(tile, out + group * (kWint4Bytes + kFactorBytes + kScaleBytes));
        break;
      case LinearFormat::kFp8:
      case LinearFormat::kE4m3:
        PackFp8(tile, out + group * (kWint8Bytes + kScaleBytes));
        break;
      default:  // refused before
        break;
    }
  }
}

void PackPanel(const PackLinearParams& p, const Slices& slices, int64_t index) {
  uint8_t* const panel = static_cast<uint8_t*>(p.packed) + index * PanelBytes(slices, p.format);
  for (int32_t s = 0; s < slices.count; ++s) {
    PackSlice(p, index * kPanelColumns, slices.inputs[s], slices.inputs[s + 1],
              panel + slices.units[s] * PanelUnitBytes(p.format));
  }
}

Error CheckParts(const PackLinearParams& p) {
  int64_t num_rows = 0;
  for (int32_t i = 0; i < p.num_parts; ++i) {
    const WeightRows& part = p.parts[i];
    if (part.num_rows < 0) return "parts: expected num_rows of 0 or more, got a negative number";
    if (part.stride < (part.is_transposed != 0 ? part.num_rows : p.in_features)) {
      return "parts: expected a stride of at least the length of a row, got a smaller one";
    }
    if (static_cast<int32_t>(part.dtype) < 0 || part.dtype > WeightDType::kFloat16) {
      return "parts: expected dtype float32 (0), bfloat16 (1) or float16 (2), "
             "got another number";
    }
    num_rows += part.num_rows;
  }
  if (num_rows != p.out_features) return "parts: expected out_features rows in all, got another number";
  return nullptr;
}

}  // namespace

Error PackLinear(const PackLinearParams& p) {
  if (const Error error = CheckLinear(p.in_features, p.out_features, p.format, p.slices, p.packed)) return error;
  if (IsGrouped(p.format)) {
    return "format: expected one that numbers are rounded to, got one of integers with groups";
  }
  if (const Error error = CheckParts(p)) return error;
  const Slices slices = SlicesOf(p.in_features, p.format, p.slices);
  ParallelFor(DivideUp(p.out_features, kPanelColumns), [&](int64_t panel) { PackPanel(p, slices, panel); });
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
