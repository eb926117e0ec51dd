// Rewrites rows of x into tiles.
#include "interleave.h"
#include "linear_codes.h"
#include "linear_group.h"

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
  for (int64_t k = std::max(full_end, row.unit_begin); k < row.unit_end; ++k) {
    StoreBf16Step(2 * k < in_features ? Bf16Bits(x[2 * k]) : 0, 0, out + k * stride);
  }
}

// `rows` [count] of a tile of num_rows rows; `out` is the place of the first one's step 0.
FDSD_INLINE void InterleaveSteps(const uint8_t* const* rows, int count, int64_t num_steps, int num_rows, uint8_t* out) {
  static_assert(kStepBytes == kWordBytes && kRowsAtOnce == kInterleavedRows);
  if (num_rows == 1) {
    std::memcpy(out, rows[0], static_cast<size_t>(num_steps) * kStepBytes);
    return;
  }
  Interleave(rows, count, num_steps, int64_t{num_rows} * kStepBytes, out);
}

// Quantised rows [first, first + count) of a tile; `group` is the tile's group, of `num_rows` rows.
FDSD_INLINE void WriteGroup(const GroupRows& rows, int first, int count, int num_rows, uint8_t* group) {
  const uint8_t* integers[kRowsAtOnce];
  for (int r = 0; r < kRowsAtOnce; ++r) integers[r] = reinterpret_cast<const uint8_t*>(rows.q[r]);
  InterleaveSteps(integers, count, kGroupSteps, num_rows, group + first * kStepBytes);
  float* scales = reinterpret_cast<float*>(group + num_rows * kQuantGroup) + first;
  int32_t* starts = reinterpret_cast<int32_t*>(scales + num_rows);
  for (int r = 0; r < count; ++r) {
    scales[r] = rows.scale[r];
    starts[r] = -kWint8ZeroPoint * rows.sum[r];
  }
}

template <typename T>
void PackGroups(const XRows& rows, int num_rows, int32_t unit_begin, int32_t unit_end, uint8_t* tile) {
  QuantizeGroups<T>(rows, num_rows, unit_begin, unit_end, [&](int first, int count, int64_t g, const GroupRows& group) {
    WriteGroup(group, first, count, num_rows, tile + g * num_rows * kRowGroupBytes);
  });
}

// As WriteGroup, for the formats with groups of fewer inputs.
FDSD_INLINE void WriteGroupedRows(const GroupRows& rows, int first, int count, int num_rows, const GroupFormat& format,
                                  uint8_t* unit) {
  const uint8_t* integers[kRowsAtOnce];
  for (int r = 0; r < kRowsAtOnce; ++r) integers[r] = reinterpret_cast<const uint8_t*>(rows.q[r]);
  InterleaveSteps(integers, count, kGroupSteps, num_rows, unit + first * kStepBytes);
  float* scales = reinterpret_cast<float*>(unit + num_rows * kQuantGroup) + first;
  int32_t* starts = reinterpret_cast<int32_t*>(scales + num_rows);
  float* sums = scales + num_rows * (1 + format.num_groups());
  const bool has_minima = format.minimum != GroupMinimum::kNone;
  const int32_t zero = format.bits == 8 && !kHasZero<8> ? 0 : format.zero;
  for (int r = 0; r < count; ++r) {
    scales[r] = rows.scale[r];
    for (int g = 0; g < format.num_groups(); ++g) {
      const int32_t sum = SumOf(rows.q[r] + g * format.group, format.group);
      starts[g * num_rows + r] = -zero * sum;
      if (has_minima) sums[g * num_rows + r] = static_cast<float>(sum);
    }
  }
}

// One row of a float format.
template <typename T>
void PackRow(const XRows& rows, const TileRow& row) {
  const T* x = rows.Row<T>(row.index);
  if (rows.format == LinearFormat::kFloat32) return PackFloat32(x, row);
  PackBf16(x, rows.in_features, row);
}

// Steps that are pairs as x holds them. Returns the first unit that is left to do: the last few of the whole x.
int32_t PackBf16Pairs(const XRows& rows, int num_rows, int32_t unit_begin, int32_t unit_end, uint8_t* tile) {
  if (rows.format == LinearFormat::kFloat32 || rows.dtype != DType::kBFloat16 || kBf16StepBytes != kStepBytes) {
    return unit_begin;
  }
  const int64_t num_steps = std::max(0, std::min(unit_end, rows.in_features / 2) - unit_begin) / 4 * 4;
  for (int first = 0; first < num_rows; first += kRowsAtOnce) {
    const int count = std::min(kRowsAtOnce, num_rows - first);
    const uint8_t* pairs[kRowsAtOnce];
    for (int r = 0; r < count; ++r) {
      pairs[r] = reinterpret_cast<const uint8_t*>(rows.Row<bf16>(first + r)) + int64_t{unit_begin} * kStepBytes;
    }
    InterleaveSteps(pairs, count, num_steps, num_rows, tile + (int64_t{unit_begin} * num_rows + first) * kStepBytes);
  }
  return unit_begin + static_cast<int32_t>(num_steps);
}

template <typename T>
void PackRows(const XRows& rows, int num_rows, int32_t unit_begin, int32_t unit_end, uint8_t* tile) {
  if (IsGrouped(rows.format)) {
    const int64_t unit_bytes = int64_t{num_rows} * RowUnitBytes(rows.format);
    const GroupFormat format = GroupFormatOf(rows.format);
    return QuantizeGroups<T>(rows, num_rows, unit_begin, unit_end,
                             [&](int first, int count, int64_t g, const GroupRows& group) {
                               WriteGroupedRows(group, first, count, num_rows, format, tile + g * unit_bytes);
                             });
  }
  if (rows.format == LinearFormat::kE4m3) {
    unit_begin *= kQuantGroup / 2;
    unit_end *= kQuantGroup / 2;
  } else if (IsQuantized(rows.format)) {
    return PackGroups<T>(rows, num_rows, unit_begin, unit_end, tile);
  }
  const int32_t begin = PackBf16Pairs(rows, num_rows, unit_begin, unit_end, tile);
  for (int r = 0; r < num_rows; ++r) PackRow<T>(rows, {tile, num_rows, r, begin, unit_end});
}

}  // namespace

void PackTile(const XRows& rows, const Slices& slices, int num_rows, int32_t unit_begin, int32_t unit_end,
              uint8_t* tile) {
  const int64_t unit_bytes = int64_t{num_rows} * RowUnitBytes(rows.format);
  ForEachSlice(rows, slices, unit_begin, unit_end, [&](const XRows& slice, int32_t s, int32_t begin, int32_t end) {
    uint8_t* const slice_tile = tile + slices.units[s] * unit_bytes;
    if (rows.dtype == DType::kFloat32) {
      PackRows<float>(slice, num_rows, begin, end, slice_tile);
    } else {
      PackRows<bf16>(slice, num_rows, begin, end, slice_tile);
    }
  });
}

}  // namespace FDSD_ISA
}  // namespace fdsd
