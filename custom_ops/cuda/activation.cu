#include "fdsd/activation.h"
#include "logistic.h"
#include "numbers.h"
#include "ops.h"
#include "swiglu_rows.h"

namespace fdsd::cuda {
namespace {

constexpr int kThreads = 256;

constexpr float kClampedSlope = 1.702f;

// x / 2 * (1 + tanh(u)) = x / (1 + e^-2u) with u = sqrt(2 / pi) * (x + 0.044715 * x^3).
struct GeluTanh {
  __device__ float operator()(float x) const {
    constexpr float kLinear = 1.5957691216057308f;
    constexpr float kCubic = 0.071354816272600960f;
    return Gated(x, x * fmaf(x * x, kCubic, kLinear));
  }
};

// Block (row, part): kThreads neighbouring elements of a row.
template <typename T, typename Activation>
__global__ __launch_bounds__(kThreads) void GateKernel(int32_t intermediate_size, DevicePtr<const int32_t> num_rows,
                                                       DevicePtr<const T> gate_up, DevicePtr<T> y) {
  const int64_t i = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  const int64_t row = blockIdx.x;
  if (i >= intermediate_size || (num_rows != nullptr && row >= num_rows[0])) return;
  const DevicePtr<const T> gates = gate_up + row * 2 * intermediate_size;
  const float up = LoadFloat<T>(gates, i + intermediate_size);
  y[row * intermediate_size + i] = FromFloat<T>(Activation()(LoadFloat<T>(gates, i)) * up);
}

// Block (row, part): kThreads neighbouring elements of a row.
template <typename T>
__global__ __launch_bounds__(kThreads) void ExpertGateKernel(int32_t intermediate_size, ExpertRows rows,
                                                             DevicePtr<const T> gate_up, DevicePtr<T> y) {
  const int64_t i = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  const auto row = static_cast<int32_t>(blockIdx.x);
  if (i >= intermediate_size || row >= rows.first[rows.num_experts]) return;
  const DevicePtr<const T> gates = gate_up + int64_t{row} * 2 * intermediate_size;
  float gate = LoadFloat<T>(gates, i);
  float up = LoadFloat<T>(gates, i + intermediate_size);
  if (rows.bias != nullptr) {
    int32_t low = 0;
    int32_t high = rows.num_experts;
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      (rows.first[middle] > row ? high : low) = middle;
    }
    const DevicePtr<const float> bias = rows.bias + int64_t{low} * 2 * intermediate_size;
    gate += bias[i];
    up += bias[i + intermediate_size];
  }
  float value = Silu()(gate) * up;
  if (rows.gate_limit > 0.0f) {
    const float cut = gate > rows.gate_limit ? rows.gate_limit : gate;
    const float linear = up > rows.gate_limit ? rows.gate_limit : up < -rows.gate_limit ? -rows.gate_limit : up;
    value = Gated(cut, cut * kClampedSlope) * (linear + 1.0f);
  }
  y[int64_t{row} * intermediate_size + i] = FromFloat<T>(value);
}

template <typename Activation, typename Params>
Error LaunchGate(const Params& p, DevicePtr<const int32_t> num_rows, Stream stream) {
  if (p.num_rows < 0) return "num_rows: expected no negative number";
  if (p.intermediate_size <= 0) return "intermediate_size: expected a positive number";
  const auto num_parts = static_cast<unsigned>(DivideUp(p.intermediate_size, kThreads));
  const LaunchShape shape{dim3(static_cast<unsigned>(p.num_rows), num_parts), dim3(kThreads)};
  return WithElement(p.dtype, [&](auto element) {
    using T = decltype(element);
    return Launch<GateKernel<T, Activation>>(shape, stream, p.intermediate_size, num_rows,
                                             DevicePtr<const T>(p.gate_up), DevicePtr<T>(p.y));
  });
}

// x * Phi(x) = max(x, 0) - |x| * q / 2, where Phi is the normal distribution and q = 1 - erf(|x| / sqrt(2)).
// Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
__device__ __forceinline__ float Gelu(float x) {
  const float size = fabsf(x);
  const float t = 1.0f / fmaf(size, 0.231641888f, 1.0f);
  float q = 1.061405429f;
  q = fmaf(q, t, -1.453152027f);
  q = fmaf(q, t, 1.421413741f);
  q = fmaf(q, t, -0.284496736f);
  q = fmaf(q, t, 0.254829592f);
  q = q * t * expf(x * x * -0.5f);
  return fmaxf(x, 0.0f) - size * 0.5f * q;
}

// Block (row, part): kThreads neighbouring elements of a row.
template <typename T>
__global__ __launch_bounds__(kThreads) void AddSiluKernel(int32_t num_columns, DevicePtr<const T> residual,
                                                          DevicePtr<const T> x, DevicePtr<T> y) {
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (column >= num_columns) return;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * num_columns + column;
  y[i] = FromFloat<T>(LoadFloat<T>(residual, i) + Silu()(LoadFloat<T>(x, i)));
}

// Block (row, part): kThreads neighbouring elements of a row.
template <typename T>
__global__ __launch_bounds__(kThreads) void BiasGeluKernel(int32_t num_columns, DevicePtr<const T> x,
                                                           DevicePtr<const float> bias, DevicePtr<T> y) {
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (column >= num_columns) return;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * num_columns + column;
  y[i] = FromFloat<T>(Gelu(LoadFloat<T>(x, i) + bias[column]));
}

// Block (row, part): kThreads neighbouring elements of a row.
template <typename T>
__global__ __launch_bounds__(kThreads) void SigmoidGateKernel(int32_t num_columns, int32_t num_gates,
                                                              DevicePtr<const T> x, DevicePtr<const T> gate,
                                                              DevicePtr<T> y) {
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (column >= num_columns) return;
  const int64_t row = blockIdx.x;
  const int64_t i = row * num_columns + column;
  y[i] =
      FromFloat<T>(Gated(LoadFloat<T>(x, i), LoadFloat<T>(gate, row * num_gates + column / (num_columns / num_gates))));
}

// launch(T{}, shape) with blocks (row, part) of kThreads threads, where y has elements of type T.
template <typename Params, typename F>
Error WithRowParts(const Params& p, const F& launch) {
  if (p.num_rows < 0) return "num_rows: expected no negative number";
  if (p.num_columns <= 0) return "num_columns: expected a positive number";
  const auto num_parts = static_cast<unsigned>(DivideUp(p.num_columns, kThreads));
  const LaunchShape shape{dim3(static_cast<unsigned>(p.num_rows), num_parts), dim3(kThreads)};
  return WithElement(p.dtype, [&](auto element) { return launch(element, shape); });
}

// Block (row, part): kThreads neighbouring elements of a row.
__global__ __launch_bounds__(kThreads) void SoftcapKernel(int32_t num_columns, float cap, DevicePtr<const float> x,
                                                          DevicePtr<float> y) {
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (column >= num_columns) return;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * num_columns + column;
  y[i] = cap * (Gated(2.0f, x[i] * (2.0f / cap)) - 1.0f);  // tanh(u) = 2 / (1 + e^-2u) - 1
}

}  // namespace

Error SwigluFirstRows(const SwigluParams& p, DevicePtr<const int32_t> num_rows, Stream stream) {
  return LaunchGate<Silu>(p, num_rows, stream);
}

Error SwigluExpertRows(const SwigluParams& p, const ExpertRows& rows, Stream stream) {
  if (rows.bias == nullptr && !(rows.gate_limit > 0.0f))
    return SwigluFirstRows(p, rows.first + rows.num_experts, stream);
  const auto num_parts = static_cast<unsigned>(DivideUp(p.intermediate_size, kThreads));
  const LaunchShape shape{dim3(static_cast<unsigned>(p.num_rows), num_parts), dim3(kThreads)};
  return WithElement(p.dtype, [&](auto element) {
    using T = decltype(element);
    return Launch<ExpertGateKernel<T>>(shape, stream, p.intermediate_size, rows, DevicePtr<const T>(p.gate_up),
                                       DevicePtr<T>(p.y));
  });
}

Error Swiglu(const SwigluParams& p, Stream stream) { return SwigluFirstRows(p, nullptr, stream); }

Error Geglu(const GegluParams& p, Stream stream) { return LaunchGate<GeluTanh>(p, nullptr, stream); }

Error AddSilu(const AddSiluParams& p, Stream stream) {
  return WithRowParts(p, [&]<typename T>(T, const LaunchShape& shape) {
    return Launch<AddSiluKernel<T>>(shape, stream, p.num_columns, DevicePtr<const T>(p.residual),
                                    DevicePtr<const T>(p.x), DevicePtr<T>(p.y));
  });
}

Error BiasGelu(const BiasGeluParams& p, Stream stream) {
  return WithRowParts(p, [&]<typename T>(T, const LaunchShape& shape) {
    return Launch<BiasGeluKernel<T>>(shape, stream, p.num_columns, DevicePtr<const T>(p.x),
                                     DevicePtr<const float>(p.bias), DevicePtr<T>(p.y));
  });
}

Error SigmoidGate(const SigmoidGateParams& p, Stream stream) {
  if (p.num_gates <= 0) return "num_gates: expected a positive number";
  if (p.num_columns % p.num_gates != 0) return "num_columns: expected a positive multiple of num_gates";
  return WithRowParts(p, [&]<typename T>(T, const LaunchShape& shape) {
    return Launch<SigmoidGateKernel<T>>(shape, stream, p.num_columns, p.num_gates, DevicePtr<const T>(p.x),
                                        DevicePtr<const T>(p.gate), DevicePtr<T>(p.y));
  });
}

Error Softcap(const SoftcapParams& p, Stream stream) {
  if (p.num_rows < 0) return "num_rows: expected no negative number";
  if (p.num_columns <= 0) return "num_columns: expected a positive number";
  if (!(p.cap > 0.0f)) return "cap: expected a positive number";
  const auto num_parts = static_cast<unsigned>(DivideUp(p.num_columns, kThreads));
  const LaunchShape shape{dim3(static_cast<unsigned>(p.num_rows), num_parts), dim3(kThreads)};
  return Launch<SoftcapKernel>(shape, stream, p.num_columns, p.cap, DevicePtr<const float>(p.x), DevicePtr<float>(p.y));
}

}  // namespace fdsd::cuda
