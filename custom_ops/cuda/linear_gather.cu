// Rows of a packed weight matrix of integers as numbers, and columns of x; see custom_ops/cpu/kernels/linear_gather.cc.
#include "fdsd/linear.h"
#include "linear_groups.h"
#include "ops.h"

namespace fdsd::cuda {
namespace {

// A step's four codes of a column of a unit.
__device__ __forceinline__ uint32_t CodesOf(const GroupLayout& groups, DevicePtr<const uint8_t> unit, int step,
                                            int column) {
  const DevicePtr<const uint32_t> words = ViewAs<const uint32_t>(unit);
  if (groups.bits == 8) return words[step * kPanelColumns + column];
  constexpr int kHalf = kPanelColumns / 2;
  const uint32_t low = words[step * kHalf + column % kHalf] >> (column < kHalf ? 0 : 4) & 0x0f0f0f0fu;
  if (groups.bits == 4) return low;
  const int num_bits = groups.bits - 4;
  const int sharing = 8 / num_bits;
  const int32_t at = groups.unit[1] / int32_t{sizeof(uint32_t)} + step / sharing * kPanelColumns + column;
  return low | HighBits(words[at], step % sharing, num_bits);
}

// Block (row, unit): a lane has four inputs of a unit.
__global__ __launch_bounds__(kWarpSize) void GatherKernel(const __grid_constant__ GroupLayout groups,
                                                          int32_t in_features, DevicePtr<const uint8_t> packed,
                                                          DevicePtr<const int32_t> indices, DType y_dtype,
                                                          DevicePtr<uint8_t> y) {
  const int64_t row = blockIdx.x;
  const int32_t index = indices[row];
  const int64_t num_unit = int64_t{index / kPanelColumns} * gridDim.y + blockIdx.y;
  const DevicePtr<const uint8_t> unit = packed + num_unit * groups.unit_bytes();
  const int column = index % kPanelColumns;
  const int step = static_cast<int>(threadIdx.x);
  const int group = step / groups.group_words;
  const DevicePtr<const uint8_t> plane = unit + groups.unit[kScalePlane];
  const FactorPair scales = FactorsOf(groups.scale, plane, group, column & ~1);
  const FactorPair minima = MinimaOf(groups.minimum, unit + groups.unit[kMinimumPlane], group, column & ~1, scales);
  const float scale = column % 2 == 0 ? scales.low : scales.high;
  const uint32_t zero = groups.scale == FactorKind::kOfWint4 ? plane[group * kPanelColumns + column] >> 4
                                                             : static_cast<uint32_t>(groups.zero);
  const uint32_t codes = SignedCodes(CodesOf(groups, unit, step, column), zero);
  for (int i = 0; i < 4; ++i) {
    const int32_t k = static_cast<int32_t>(blockIdx.y) * kQuantGroup + 4 * step + i;
    if (k >= in_features) return;
    float value = static_cast<float>(static_cast<int8_t>(codes >> (8 * i))) * scale;
    if (groups.minimum != FactorKind::kNone) value = value + (column % 2 == 0 ? minima.low : minima.high);
    StoreFloat(y_dtype, y, row * in_features + k, value);
  }
}

constexpr int kThreads = 128;

// Block (row, part): a thread has a column.
template <typename T>
__global__ __launch_bounds__(kThreads) void GatherColumnsKernel(int32_t num_columns, int32_t num_gathered,
                                                                DevicePtr<const T> x, DevicePtr<const int32_t> columns,
                                                                DevicePtr<T> y) {
  const int64_t row = blockIdx.x;
  const int32_t i = static_cast<int32_t>(blockIdx.y * kThreads + threadIdx.x);
  if (i >= num_gathered) return;
  const int32_t column = columns[i];
  y[row * num_gathered + i] = column < 0 ? T{} : x[row * num_columns + column];
}

template <typename T>
Error LaunchGatherColumns(const GatherColumnsParams& p, Stream stream) {
  const dim3 grid(static_cast<unsigned>(p.num_rows), static_cast<unsigned>(DivideUp(p.num_gathered, kThreads)));
  return Launch<GatherColumnsKernel<T>>(LaunchShape{grid, dim3(kThreads)}, stream, p.num_columns, p.num_gathered,
                                        DevicePtr<const T>(p.x), DevicePtr<const int32_t>(p.columns),
                                        DevicePtr<T>(p.y));
}

}  // namespace

Error GatherColumns(const GatherColumnsParams& p, Stream stream) {
  if (p.num_rows < 0) return "num_rows: expected 0 or more, got a negative number";
  if (p.dtype == DType::kFloat32) return LaunchGatherColumns<uint32_t>(p, stream);
  return LaunchGatherColumns<uint16_t>(p, stream);
}

Error GatherWeightRows(const GatherWeightRowsParams& p, Stream stream) {
  if (p.num_rows_out < 0) return "num_rows_out: expected 0 or more, got a negative number";
  if (const Error error = CheckLinear(p.in_features, p.out_features, p.format, {1, 1}, p.packed)) return error;
  const dim3 grid(static_cast<unsigned>(p.num_rows_out), static_cast<unsigned>(DivideUp(p.in_features, kQuantGroup)));
  const GroupLayout groups = GroupLayoutOf(p.format);
  if (groups.bits == 0) return "format: expected one of integers, got another";
  return Launch<GatherKernel>(LaunchShape{grid, dim3(kWarpSize)}, stream, groups, p.in_features,
                              DevicePtr<const uint8_t>(p.packed), DevicePtr<const int32_t>(p.indices), p.y_dtype,
                              DevicePtr<uint8_t>(p.y));
}

}  // namespace fdsd::cuda
