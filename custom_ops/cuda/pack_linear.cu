// Quantises and reorders a weight matrix into panels, as processors do (linear_pack.cc): the same bytes.
#include "linear_layout.h"
#include "ops.h"
#include "pack_values.h"
#include "struct_load.h"

namespace fdsd::cuda {
namespace {

template <LinearFormat format>
constexpr bool kIsQuantized = IsQuantized(format);
template <LinearFormat format>
constexpr bool kIsPaired = format == LinearFormat::kBFloat16 || format == LinearFormat::kFloat16;
// Inputs of a column in one unit of a panel.
template <LinearFormat format>
constexpr int32_t kUnitInputs = kIsQuantized<format> ? kQuantGroup
                                : kIsPaired<format>  ? 2
                                                     : 1;

// What is packed of a slice at a time.
struct Piece {
  int32_t first_input;  // of the matrix
  int32_t num_inputs;   // at most a group
  int32_t unit;         // of the panel, where it goes
};

// Piece `index` of all slices' pieces, in order.
template <LinearFormat format>
__device__ Piece PieceOf(const Slices& slices, int32_t index) {
  int s = 0;
  for (; s + 1 < slices.count; ++s) {
    const auto own = static_cast<int32_t>(DivideUp(slices.inputs[s + 1] - slices.inputs[s], kQuantGroup));
    if (index < own) break;
    index -= own;
  }
  const int32_t begin = index * kQuantGroup;
  const int32_t left = slices.inputs[s + 1] - slices.inputs[s] - begin;
  return {slices.inputs[s] + begin, left < kQuantGroup ? left : kQuantGroup,
          slices.units[s] + begin / kUnitInputs<format>};
}

// Columns [begin, begin + count) of the tile from rows of a part, from `row` on. Neighbouring threads read neighbours.
template <typename T>
__device__ void ReadPart(const WeightRows& part, int32_t row, int begin, int count, const Piece& piece, PackTile tile) {
  const DevicePtr<const T> data(static_cast<const T*>(part.data));
  for (int e = threadIdx.x; e < count * kQuantGroup; e += kPackThreads) {
    const int j = part.is_transposed != 0 ? e % count : e / kQuantGroup;
    const int i = part.is_transposed != 0 ? e / count : e % kQuantGroup;
    const int64_t input = piece.first_input + i;
    const int64_t at = part.is_transposed != 0 ? input * part.stride + row + j : (row + j) * part.stride + input;
    tile[(begin + j) * kPackStride + i] = i < piece.num_inputs ? ToFloat(data[at]) : 0.0f;
  }
}

__device__ void ReadTile(int32_t num_parts, DevicePtr<const WeightRows> parts, int32_t first_column, const Piece& piece,
                         PackTile tile) {
  int32_t part_begin = 0;
  int filled = 0;
  for (int32_t p = 0; p < num_parts; ++p) {
    const WeightRows part = LoadStruct(parts, p);
    const int32_t begin = first_column > part_begin ? first_column : part_begin;
    const int32_t part_end = part_begin + part.num_rows;
    const int32_t end = first_column + kPanelColumns < part_end ? first_column + kPanelColumns : part_end;
    if (begin < end) {
      const int32_t row = begin - part_begin;
      if (part.dtype == WeightDType::kFloat32) {
        ReadPart<float>(part, row, begin - first_column, end - begin, piece, tile);
      } else if (part.dtype == WeightDType::kBFloat16) {
        ReadPart<bf16>(part, row, begin - first_column, end - begin, piece, tile);
      } else {
        ReadPart<half16>(part, row, begin - first_column, end - begin, piece, tile);
      }
      filled = end - first_column;
    }
    part_begin = part_end;
  }
  for (int e = threadIdx.x; e < (kPanelColumns - filled) * kQuantGroup; e += kPackThreads) {
    tile[(filled + e / kQuantGroup) * kPackStride + e % kQuantGroup] = 0.0f;
  }
}

// The scale of each column and what its values are multiplied by; all threads call it and wait at its end.
template <LinearFormat format>
__device__ void ScaleColumns(PackTile tile, DevicePtr<float> scales, DevicePtr<float> inverses) {
  FDSD_SHARED(float, peaks, kPackWarps* kPanelColumns);
  const int column = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const DevicePtr<float> values = tile + column * kPackStride;
  peaks[threadIdx.x] = PeakOf(values + warp * (kQuantGroup / kPackWarps), kQuantGroup / kPackWarps);
  __syncthreads();
  const float peak = PeakOf(peaks + column, kPackWarps, kPanelColumns);
  const bool has_scale = HasScale(peak);
  if (warp == 0) {
    constexpr float kMaxValue = format == LinearFormat::kFp8 ? kFloat8Max : 127.0f;
    const float magnitude = fabsf(peak);
    scales[column] = has_scale ? magnitude / kMaxValue : NoScale(peak);
    inverses[column] = has_scale ? kMaxValue / magnitude : 0.0f;
  }
  __syncthreads();
}

// Four inputs of a column, in the bytes of a word.
template <LinearFormat format>
__device__ uint32_t QuantizedWord(DevicePtr<const float> values, float inverse) {
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    const float value = values[i];
    uint32_t byte;
    if constexpr (format == LinearFormat::kWint8) {
      byte =
          static_cast<uint32_t>((inverse == 0.0f ? 0 : static_cast<int32_t>(rintf(value * inverse))) + kWint8ZeroPoint);
    } else {
      byte = inverse == 0.0f ? 0u : RoundToE4m3(value * inverse);
    }
    word |= byte << (8 * i);
  }
  return word;
}

template <LinearFormat format>
__device__ void PackGroup(PackTile tile, DevicePtr<uint8_t> out) {
  FDSD_SHARED(float, scales, kPanelColumns);
  FDSD_SHARED(float, inverses, kPanelColumns);
  ScaleColumns<format>(tile, scales, inverses);
  const DevicePtr<uint32_t> words = ViewAs<uint32_t>(out);
  for (int w = threadIdx.x; w < kGroupSteps * kPanelColumns; w += kPackThreads) {
    const int column = w % kPanelColumns;
    words[w] = QuantizedWord<format>(tile + (column * kPackStride + w / kPanelColumns * 4), inverses[column]);
  }
  if (threadIdx.x < kPanelColumns)
    words[kGroupSteps * kPanelColumns + threadIdx.x] = __float_as_uint(scales[threadIdx.x]);
}

template <LinearFormat format>
__device__ void PackFloats(PackTile tile, int num_inputs, DevicePtr<uint8_t> out) {
  const int num_steps = kIsPaired<format> ? (num_inputs + 1) / 2 : num_inputs;
  const DevicePtr<uint32_t> words = ViewAs<uint32_t>(out);
  for (int w = threadIdx.x; w < num_steps * kPanelColumns; w += kPackThreads) {
    const DevicePtr<float> values = tile + w % kPanelColumns * kPackStride;
    const int step = w / kPanelColumns;
    if constexpr (kIsPaired<format>) {
      using Half = std::conditional_t<format == LinearFormat::kBFloat16, bf16, half16>;
      words[w] = RoundedWord<Half>(values[2 * step], values[2 * step + 1]);
    } else {
      words[w] = __float_as_uint(values[step]);
    }
  }
}

// Block (panel, piece).
template <LinearFormat format>
__global__ __launch_bounds__(kPackThreads) void PackLinearKernel(const __grid_constant__ Slices slices,
                                                                 int64_t panel_bytes, int64_t unit_bytes,
                                                                 int32_t num_parts, DevicePtr<const WeightRows> parts,
                                                                 DevicePtr<uint8_t> packed) {
  FDSD_SHARED(float, tile, kPanelColumns* kPackStride);
  const Piece piece = PieceOf<format>(slices, static_cast<int32_t>(blockIdx.y));
  ReadTile(num_parts, parts, static_cast<int32_t>(blockIdx.x) * kPanelColumns, piece, tile);
  __syncthreads();
  const DevicePtr<uint8_t> out = packed + (blockIdx.x * panel_bytes + piece.unit * unit_bytes);
  if constexpr (format == LinearFormat::kWint4) {
    PackInt4(tile, out);
  } else if constexpr (kIsQuantized<format>) {
    PackGroup<format>(tile, out);
  } else {
    PackFloats<format>(tile, piece.num_inputs, out);
  }
}

template <LinearFormat format>
Error LaunchPack(const PackLinearParams& p, Stream stream) {
  const Slices slices = SlicesOf(p.in_features, format, p.slices);
  int64_t num_pieces = 0;
  for (int s = 0; s < slices.count; ++s) {
    num_pieces += DivideUp(slices.inputs[s + 1] - slices.inputs[s], kQuantGroup);
  }
  const LaunchShape shape{
      dim3(static_cast<unsigned>(DivideUp(p.out_features, kPanelColumns)), static_cast<unsigned>(num_pieces)),
      dim3(kPackThreads)};
  return Launch<PackLinearKernel<format>>(shape, stream, slices, PanelBytes(slices, format), PanelUnitBytes(format),
                                          p.num_parts, DevicePtr<const WeightRows>(p.parts),
                                          DevicePtr<uint8_t>(p.packed));
}

}  // namespace

Error PackLinear(const PackLinearParams& p, Stream stream) {
  if (const Error error = CheckLinear(p.in_features, p.out_features, p.format, p.slices, p.packed)) return error;
  if (p.num_parts < 0) return "num_parts: expected 0 or more, got a negative number";
  switch (p.format) {
    case LinearFormat::kFloat32:
      return LaunchPack<LinearFormat::kFloat32>(p, stream);
    case LinearFormat::kBFloat16:
      return LaunchPack<LinearFormat::kBFloat16>(p, stream);
    case LinearFormat::kFloat16:
      return LaunchPack<LinearFormat::kFloat16>(p, stream);
    case LinearFormat::kWint8:
      return LaunchPack<LinearFormat::kWint8>(p, stream);
    case LinearFormat::kWint4:
      return LaunchPack<LinearFormat::kWint4>(p, stream);
    case LinearFormat::kFp8:
    case LinearFormat::kE4m3:
      return LaunchPack<LinearFormat::kFp8>(p, stream);
    default:
      return "format: expected one that numbers are rounded to, got one of integers with groups";
  }
}

}  // namespace fdsd::cuda
