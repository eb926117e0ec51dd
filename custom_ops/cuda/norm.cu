#include "fdsd/norm.h"
#include "numbers.h"
#include "ops.h"
#include "reduce.h"
#include "row_copy.h"

namespace fdsd::cuda {
namespace {

constexpr int kThreads = 256;

// The block's threads: y = h / sqrt(mean(h^2) + eps) * weight for one row, with h = x * x_scale (+ residual). Each
// thread takes every kThreads-th element, so the order of a sum is the row's length alone.
template <typename T>
__device__ void NormRow(int32_t hidden_size, float eps, float x_scale, DevicePtr<const T> x,
                        DevicePtr<const float> residual, DevicePtr<const float> weight, DevicePtr<T> y,
                        DevicePtr<float> h) {
  float squares = 0.0f;
  for (int i = threadIdx.x; i < hidden_size; i += kThreads) {
    float v = LoadFloat<T>(x, i) * x_scale;
    if (residual != nullptr) v += residual[i];
    squares = fmaf(v, v, squares);
  }
  const float mean = BlockSum<kThreads>(squares) / static_cast<float>(hidden_size);
  const float scale = 1.0f / sqrtf(mean + eps);
  for (int i = threadIdx.x; i < hidden_size; i += kThreads) {
    float v = LoadFloat<T>(x, i) * x_scale;
    if (residual != nullptr) v += residual[i];
    if (h != nullptr) h[i] = v;
    y[i] = FromFloat<T>(v * scale * weight[i]);
  }
}

template <typename T>
__global__ __launch_bounds__(kThreads) void RmsNormKernel(int32_t hidden_size, float eps, float x_scale,
                                                          DevicePtr<const T> x, DevicePtr<const float> residual,
                                                          DevicePtr<const float> weight, DevicePtr<T> y,
                                                          DevicePtr<float> residual_out) {
  const int64_t offset = static_cast<int64_t>(blockIdx.x) * hidden_size;
  NormRow<T>(hidden_size, eps, x_scale, x + offset, residual == nullptr ? residual : residual + offset, weight,
             y + offset, residual_out == nullptr ? residual_out : residual_out + offset);
}

// Block (row, 0) writes the left half of a row, block (row, 1) the right one.
template <typename T>
__global__ __launch_bounds__(kThreads) void ConcatRmsNormKernel(int32_t hidden_size, float eps,
                                                                DevicePtr<const T> first, DevicePtr<const T> second,
                                                                DevicePtr<const float> first_weight,
                                                                DevicePtr<const float> second_weight, DevicePtr<T> y) {
  const int64_t offset = static_cast<int64_t>(blockIdx.x) * hidden_size;
  const bool is_first = blockIdx.y == 0;
  NormRow<T>(hidden_size, eps, 1.0f, (is_first ? first : second) + offset, nullptr,
             is_first ? first_weight : second_weight, y + (2 * offset + (is_first ? 0 : hidden_size)), nullptr);
}

// Block (row, 0) copies the left part of a row, block (row, 1) the right one.
template <typename Unit>
__global__ __launch_bounds__(kCopyThreads) void ConcatColumnsKernel(int64_t first_units, int64_t second_units,
                                                                    DevicePtr<const Unit> first,
                                                                    DevicePtr<const Unit> second, DevicePtr<Unit> y) {
  const int64_t row = blockIdx.x;
  const DevicePtr<Unit> to = y + row * (first_units + second_units);
  if (blockIdx.y == 0) {
    CopyRow(first + row * first_units, to, first_units);
  } else {
    CopyRow(second + row * second_units, to + first_units, second_units);
  }
}

template <typename T>
Error LaunchRmsNorm(const RmsNormParams& p, Stream stream) {
  const LaunchShape shape{dim3(static_cast<unsigned>(p.num_rows)), dim3(kThreads)};
  return Launch<RmsNormKernel<T>>(shape, stream, p.hidden_size, p.eps, p.x_scale, DevicePtr<const T>(p.x),
                                  DevicePtr<const float>(p.residual), DevicePtr<const float>(p.weight),
                                  DevicePtr<T>(p.y), DevicePtr<float>(p.residual_out));
}

template <typename T>
Error LaunchConcatRmsNorm(const ConcatRmsNormParams& p, Stream stream) {
  const LaunchShape shape{dim3(static_cast<unsigned>(p.num_rows), 2), dim3(kThreads)};
  return Launch<ConcatRmsNormKernel<T>>(shape, stream, p.hidden_size, p.eps, DevicePtr<const T>(p.first),
                                        DevicePtr<const T>(p.second), DevicePtr<const float>(p.first_weight),
                                        DevicePtr<const float>(p.second_weight), DevicePtr<T>(p.y));
}

}  // namespace

Error RmsNorm(const RmsNormParams& p, Stream stream) {
  if (p.num_rows < 0) return "num_rows: expected no negative number";
  if (p.hidden_size <= 0) return "hidden_size: expected a positive number";
  return WithElement(p.dtype, [&](auto element) { return LaunchRmsNorm<decltype(element)>(p, stream); });
}

Error ConcatRmsNorm(const ConcatRmsNormParams& p, Stream stream) {
  if (p.num_rows < 0) return "num_rows: expected no negative number";
  if (p.hidden_size <= 0) return "hidden_size: expected a positive number";
  return WithElement(p.dtype, [&](auto element) { return LaunchConcatRmsNorm<decltype(element)>(p, stream); });
}

Error ConcatColumns(const ConcatColumnsParams& p, Stream stream) {
  if (p.num_rows < 0) return "num_rows: expected no negative number";
  if (p.first_bytes < 0 || p.second_bytes < 0) return "row bytes: expected >= 0, got a negative size";
  const void* const rows[] = {p.first, p.second, p.y};
  // A power of two divides both widths if it divides the bits that either has.
  return WithCopyUnit(p.first_bytes | p.second_bytes, rows, [&]<typename Unit>(Unit) {
    const auto size = static_cast<int64_t>(sizeof(Unit));
    const LaunchShape shape{dim3(static_cast<unsigned>(p.num_rows), 2), dim3(kCopyThreads)};
    return Launch<ConcatColumnsKernel<Unit>>(shape, stream, p.first_bytes / size, p.second_bytes / size,
                                             DevicePtr<const Unit>(p.first), DevicePtr<const Unit>(p.second),
                                             DevicePtr<Unit>(p.y));
  });
}

}  // namespace fdsd::cuda
