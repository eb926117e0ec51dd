// Rows of a packed weight matrix of integers as numbers, and columns of x; see custom_ops/cpu/kernels/linear_gather.cc.
#include "fdsd/linear.h"
#include "linear_grouped_kernel.h"
#include "ops.h"

namespace fdsd::cuda {
namespace {

// Block (row, unit): a lane has four inputs of a unit.
template <LinearFormat kFormat>
__global__ __launch_bounds__(kWarpSize) void GatherKernel(int32_t in_features, DevicePtr<const uint8_t> packed,
                                                          DevicePtr<const int32_t> indices, DType y_dtype,
                                                          DevicePtr<uint8_t> y) {
  using Unit = GroupedUnit<kFormat>;
  const int64_t row = blockIdx.x;
  const int32_t index = indices[row];
  const int64_t num_unit = int64_t{index / kPanelColumns} * gridDim.y + blockIdx.y;
  const Unit unit{packed + num_unit * Unit::kUnitBytes, index % kPanelColumns};
  const int step = static_cast<int>(threadIdx.x);
  const int group = step / Unit::kGroupWords;
  const float scale = unit.Scale(group);
  const float minimum = unit.Minimum(group, scale);
  const uint32_t codes = unit.Codes(step);
  for (int i = 0; i < 4; ++i) {
    const int32_t k = static_cast<int32_t>(blockIdx.y) * kQuantGroup + 4 * step + i;
    if (k >= in_features) return;
    float value = static_cast<float>(static_cast<int8_t>(codes >> (8 * i))) * scale;
    if constexpr (Unit::kHasMinima) value = value + minimum;
    StoreFloat(y_dtype, y, row * in_features + k, value);
  }
}

// By the kernel of the format, which is one from kFirst on.
template <int32_t kFirst = static_cast<int32_t>(LinearFormat::kWint8)>
Error LaunchGather(const GatherWeightRowsParams& p, const LaunchShape& launch, Stream stream) {
  if constexpr (kFirst < kNumLinearFormats) {
    constexpr auto kFormat = static_cast<LinearFormat>(kFirst);
    if (p.format != kFormat) return LaunchGather<kFirst + 1>(p, launch, stream);
    if constexpr (GroupFormatOf(kFormat).bits != 0) {
      return Launch<GatherKernel<kFormat>>(launch, stream, p.in_features, DevicePtr<const uint8_t>(p.packed),
                                           DevicePtr<const int32_t>(p.indices), p.y_dtype, DevicePtr<uint8_t>(p.y));
    }
  }
  return "format: expected one of integers, got another";
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
  return LaunchGather(p, LaunchShape{grid, dim3(kWarpSize)}, stream);
}

}  // namespace fdsd::cuda
