// Rows of a packed weight matrix as numbers: the embedding of a checkpoint that stores integers. Rounds as NumPy does
// where weights are made numbers: code * scale, then + minimum. And columns of x in the order of a matrix's inputs.
#include "fdsd/linear.h"
#include "float16.h"
#include "linear_grouped.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// What a unit of a panel holds of one column.
class UnitColumn {
 public:
  UnitColumn(const GroupFormat& format, const uint8_t* unit, int column)
      : format_(format), unit_(unit), column_(column) {}

  void Read(float* values) const {
    const uint8_t* scales = unit_ + format_.code_bytes();
    const uint8_t* minima = scales + format_.scale_bytes();
    for (int g = 0; g < format_.num_groups(); ++g) {
      const float scale = Scale(scales, g);
      const int32_t zero = format_.scale == GroupScale::kFactors ? Factor(scales, g) >> 4 : format_.zero;
      for (int i = g * format_.group; i < (g + 1) * format_.group; ++i) {
        values[i] = static_cast<float>(Code(i) - zero) * scale;
      }
      if (format_.minimum == GroupMinimum::kNone) continue;
      const float minimum = Minimum(minima, g, scale);
      for (int i = g * format_.group; i < (g + 1) * format_.group; ++i) values[i] += minimum;
    }
  }

 private:
  int32_t Code(int input) const {
    const int step = input / 4;
    const int byte = input % 4;
    if (format_.bits == 8) return unit_[(step * kPanelColumns + column_) * 4 + byte];
    constexpr int kHalf = kPanelColumns / 2;
    const int pair = unit_[(step * kHalf + column_ % kHalf) * 4 + byte];
    const int low = column_ < kHalf ? pair & 15 : pair >> 4;
    if (format_.bits == 4) return low;
    const int bits = format_.bits - 4;
    const int sharing = 8 / bits;
    const int shared = unit_[kWint4Bytes + (step / sharing * kPanelColumns + column_) * 4 + byte];
    return low | (shared >> (step % sharing * bits + 4) % 8 & ((1 << bits) - 1)) << 4;
  }

  float Half(const uint8_t* halves, int group) const {
    half16 half;
    std::memcpy(&half, halves + (group * kPanelColumns + column_) * sizeof(half), sizeof(half));
    return ToFloat(half);
  }
  float Float(const uint8_t* floats, int group) const {
    float value;
    std::memcpy(&value, floats + (group * kPanelColumns + column_) * sizeof(value), sizeof(value));
    return value;
  }
  float Int8(const uint8_t* counts, int group) const {
    return static_cast<float>(static_cast<int8_t>(counts[group * kPanelColumns + column_]));
  }
  float Steps(const uint8_t* from, int group) const {
    return Half(from, 0) * Int8(from + kPanelColumns * sizeof(half16), group);
  }

  int32_t Factor(const uint8_t* from, int group) const { return from[group * kPanelColumns + column_]; }

  float Scale(const uint8_t* from, int group) const {
    switch (format_.scale) {
      case GroupScale::kFactors:
        return Float(from + kFactorBytes, 0) * static_cast<float>(Factor(from, group) & 15);
      case GroupScale::kHalf:
        return Half(from, group);
      case GroupScale::kFloat:
        return Float(from, group);
      default:
        return Steps(from, group);
    }
  }
  float Minimum(const uint8_t* from, int group, float scale) const {
    switch (format_.minimum) {
      case GroupMinimum::kHalf:
        return Half(from, group);
      case GroupMinimum::kFloat:
        return Float(from, group);
      case GroupMinimum::kSteps:
        return -Steps(from, group);
      default:
        return -(scale * Int8(from, group));
    }
  }

  const GroupFormat& format_;
  const uint8_t* const unit_;
  const int column_;
};

void StoreNumbers(const float* values, int count, DType dtype, void* y) {
  if (dtype == DType::kFloat32) {
    std::memcpy(y, values, sizeof(float) * static_cast<size_t>(count));
    return;
  }
  for (int i = 0; i < count; ++i) static_cast<bf16*>(y)[i] = RoundToBf16(values[i]);
}

template <typename T>
void GatherRow(const T* x, const int32_t* columns, int32_t count, T* y) {
  for (int32_t i = 0; i < count; ++i) y[i] = columns[i] < 0 ? T{} : x[columns[i]];
}

}  // namespace

Error GatherColumns(const GatherColumnsParams& p) {
  if (p.num_rows < 0) return "num_rows: expected 0 or more, got a negative number";
  for (int32_t i = 0; i < p.num_gathered; ++i) {
    if (p.columns[i] < -1 || p.columns[i] >= p.num_columns) return "columns: expected columns of x, got one outside";
  }
  ParallelForRows(p.num_rows, p.num_gathered * int64_t{8}, [&](int64_t row) {
    const int64_t from = row * p.num_columns;
    const int64_t to = row * p.num_gathered;
    if (p.dtype == DType::kFloat32) {
      GatherRow(static_cast<const float*>(p.x) + from, p.columns, p.num_gathered, static_cast<float*>(p.y) + to);
    } else {
      GatherRow(static_cast<const bf16*>(p.x) + from, p.columns, p.num_gathered, static_cast<bf16*>(p.y) + to);
    }
  });
  return nullptr;
}

Error GatherWeightRows(const GatherWeightRowsParams& p) {
  constexpr SliceRule kWhole = {1, 1};
  if (p.num_rows_out < 0) return "num_rows_out: expected 0 or more, got a negative number";
  if (const Error error = CheckLinear(p.in_features, p.out_features, p.format, kWhole, p.packed)) return error;
  const GroupFormat format = GroupFormatOf(p.format);
  if (format.bits == 0) return "format: expected one of integers, got another";
  for (int32_t i = 0; i < p.num_rows_out; ++i) {
    if (p.indices[i] < 0 || p.indices[i] >= p.out_features) return "indices: expected rows of x, got one outside";
  }
  const int64_t unit_bytes = format.unit_bytes();
  const int64_t panel_bytes = PanelBytes(SlicesOf(p.in_features, p.format, kWhole), p.format);
  const int64_t element_bytes = p.y_dtype == DType::kFloat32 ? 4 : 2;
  ParallelForRows(p.num_rows_out, p.in_features * int64_t{8}, [&](int64_t row) {
    const int32_t index = p.indices[row];
    const uint8_t* unit = static_cast<const uint8_t*>(p.packed) + index / kPanelColumns * panel_bytes;
    char* y = static_cast<char*>(p.y) + row * p.in_features * element_bytes;
    for (int32_t k = 0; k < p.in_features; k += kQuantGroup, unit += unit_bytes) {
      float values[kQuantGroup];
      UnitColumn(format, unit, index % kPanelColumns).Read(values);
      StoreNumbers(values, std::min(kQuantGroup, p.in_features - k), p.y_dtype, y + k * element_bytes);
    }
  });
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
