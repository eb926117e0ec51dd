// Rewrites rows of x into packs for tiles.
#include "amx/linear_layout.h"
#include "linear_group.h"

namespace fdsd {
namespace FDSD_ISA {
namespace FDSD_TILES {
namespace {

FDSD_INLINE void CopyInputs(const bf16* from, int count, bf16* to) {
  std::memcpy(to, from, static_cast<size_t>(count) * sizeof(bf16));
}
FDSD_INLINE void CopyInputs(const float* from, int count, bf16* to) {
  for (int i = 0; i < count; i += kLanes) {
    const int n = std::min(kLanes, count - i);
    StorePartial(LoadPartial(from + i, n), to + i, n);
  }
}

// Units [begin, end) of one row of a slice; `row` is the row's place in the slice's first step.
template <typename T>
void PackBf16Row(const T* x, int32_t in_features, int32_t num_units, int32_t begin, int32_t end, int64_t step_bytes,
                 uint8_t* row) {
  for (int32_t unit = begin; unit < end;) {
    const int32_t step = unit / kStepUnits;
    const int32_t last = std::min(end, (step + 1) * kStepUnits);
    bf16* to = reinterpret_cast<bf16*>(row + step * step_bytes) + 2 * (unit % kStepUnits);
    const int count = std::min(2 * last, in_features) - 2 * unit;
    CopyInputs(x + 2 * unit, count, to);
    const int room = last == num_units ? 2 * ((step + 1) * kStepUnits - unit) : count;
    std::memset(to + count, 0, static_cast<size_t>(room - count) * sizeof(bf16));
    unit = last;
  }
}

// Groups [begin, end) of a slice, whose first group is `first`.
template <typename T>
void PackGroups(const XRows& rows, int num_rows, int32_t first, int32_t begin, int32_t end, const IntPack& pack) {
  QuantizeGroups<T>(rows, num_rows, begin, end, [&](int row, int count, int64_t g, const GroupRows& group) {
    for (int r = 0; r < count; ++r) {
      const int64_t at = (first + g) * num_rows + row + r;
      pack.scales[at] = group.scale[r];
      pack.starts[at] = -kWint8ZeroPoint * group.sum[r];
      for (int s = 0; s < kGroupRowSteps; ++s) {
        const int64_t step_row = ((first + g) * kGroupRowSteps + s) * num_rows + row + r;
        std::memcpy(pack.integers + step_row * kStepRowBytes, group.q[r] + s * kStepRowBytes, kStepRowBytes);
      }
    }
  });
}

// Units [begin, end) of a slice, whose first unit is `first`.
template <typename T>
void PackUnits(const XRows& rows, int num_rows, int32_t first, int32_t begin, int32_t end, const GroupPack& pack) {
  const GroupFormat format = GroupFormatOf(rows.format);
  const int num_groups = format.minimum == GroupMinimum::kNone ? 0 : format.num_groups();
  QuantizeGroups<T>(rows, num_rows, begin, end, [&](int row, int count, int64_t g, const GroupRows& group) {
    for (int r = 0; r < count; ++r) {
      const int64_t unit = first + g;
      const int64_t at = unit * num_rows + row + r;
      std::memcpy(pack.integers + at * kQuantGroup, group.q[r], kQuantGroup);
      pack.scales[at] = group.scale[r];
      for (int i = 0; i < num_groups; ++i) {
        pack.sums[(unit * num_groups + i) * num_rows + row + r] =
            static_cast<float>(SumOf(group.q[r] + i * format.group, format.group));
      }
    }
  });
}

template <typename T>
void PackSlice(const XRows& rows, const Slices& slices, int32_t s, int num_rows, int32_t begin, int32_t end,
               uint8_t* pack) {
  if (IsGrouped(rows.format)) {
    return PackUnits<T>(rows, num_rows, slices.units[s], begin, end, GroupPack(pack, slices, num_rows));
  }
  if (IsQuantized(rows.format)) {
    return PackGroups<T>(rows, num_rows, slices.units[s], begin, end, IntPack(pack, slices, num_rows));
  }
  const int64_t step_bytes = int64_t{num_rows} * kStepRowBytes;
  uint8_t* const slice = pack + StepsBefore(slices, s) * step_bytes;
  for (int r = 0; r < num_rows; ++r) {
    PackBf16Row(rows.Row<T>(r), rows.in_features, slices.units[s + 1] - slices.units[s], begin, end, step_bytes,
                slice + r * kStepRowBytes);
  }
}

}  // namespace

int64_t RowBytes(const Slices& slices, LinearFormat format) {
  if (!IsQuantized(format)) return StepsBefore(slices, slices.count) * kStepRowBytes;
  int64_t unit_bytes = kQuantGroup + sizeof(float) + sizeof(int32_t);
  if (IsGrouped(format)) {
    const GroupFormat groups = GroupFormatOf(format);
    const int num_sums = groups.minimum == GroupMinimum::kNone ? 0 : groups.num_groups();
    unit_bytes = kQuantGroup + static_cast<int64_t>(sizeof(float)) * (1 + num_sums);
  }
  return DivideUp(slices.num_units() * unit_bytes, kStepRowBytes) * kStepRowBytes;
}

void PackRows(const XRows& rows, const Slices& slices, int num_rows, int32_t unit_begin, int32_t unit_end,
              uint8_t* pack) {
  ForEachSlice(rows, slices, unit_begin, unit_end, [&](const XRows& slice, int32_t s, int32_t begin, int32_t end) {
    if (rows.dtype == DType::kFloat32) {
      PackSlice<float>(slice, slices, s, num_rows, begin, end, pack);
    } else {
      PackSlice<bf16>(slice, slices, s, num_rows, begin, end, pack);
    }
  });
}

}  // namespace FDSD_TILES
}  // namespace FDSD_ISA
}  // namespace fdsd
