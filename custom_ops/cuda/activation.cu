#include "fdsd/activation.h"
#include "numbers.h"
#include "ops.h"
#include "swiglu_rows.h"

namespace fdsd::cuda {
namespace {

constexpr int kThreads = 256;

// Block (row, part): kThreads neighbouring elements of a row.
template <typename T>
__global__ __launch_bounds__(kThreads) void SwigluKernel(int32_t intermediate_size, DevicePtr<const int32_t> num_rows,
                                                         DevicePtr<const T> gate_up, DevicePtr<T> y) {
  constexpr float kMaxExponent = 88.0f;  // e^88 is finite: no finite gate overflows
  const int64_t i = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  const int64_t row = blockIdx.x;
  if (i >= intermediate_size || (num_rows != nullptr && row >= num_rows[0])) return;
  const DevicePtr<const T> gates = gate_up + row * 2 * intermediate_size;
  const float gate = LoadFloat<T>(gates, i);
  const float up = LoadFloat<T>(gates, i + intermediate_size);
  const float silu = gate / (1.0f + expf(fminf(-gate, kMaxExponent)));
  y[row * intermediate_size + i] = FromFloat<T>(silu * up);
}

template <typename T>
Error LaunchSwiglu(const SwigluParams& p, DevicePtr<const int32_t> num_rows, Stream stream) {
  const auto num_parts = static_cast<unsigned>(DivideUp(p.intermediate_size, kThreads));
  const LaunchShape shape{dim3(static_cast<unsigned>(p.num_rows), num_parts), dim3(kThreads)};
  return Launch<SwigluKernel<T>>(shape, stream, p.intermediate_size, num_rows, DevicePtr<const T>(p.gate_up),
                                 DevicePtr<T>(p.y));
}

}  // namespace

Error SwigluFirstRows(const SwigluParams& p, DevicePtr<const int32_t> num_rows, Stream stream) {
  if (p.num_rows < 0) return "num_rows: expected no negative number";
  if (p.intermediate_size <= 0) return "intermediate_size: expected a positive number";
  return WithElement(p.dtype, [&](auto element) { return LaunchSwiglu<decltype(element)>(p, num_rows, stream); });
}

Error Swiglu(const SwigluParams& p, Stream stream) { return SwigluFirstRows(p, nullptr, stream); }

}  // namespace fdsd::cuda
