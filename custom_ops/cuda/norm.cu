#include "fdsd/norm.h"
#include "numbers.h"
#include "ops.h"
#include "reduce.h"

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

}  // namespace fdsd::cuda
