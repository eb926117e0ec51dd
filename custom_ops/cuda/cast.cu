#include "fdsd/cast.h"
#include "numbers.h"
#include "ops.h"

namespace fdsd::cuda {
namespace {

constexpr int kThreads = 256;

template <typename From, typename To>
__global__ __launch_bounds__(kThreads) void CastKernel(int64_t count, DevicePtr<const From> x, DevicePtr<To> y) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) y[i] = FromFloat<To>(LoadFloat<From>(x, i));
}

template <typename From, typename To>
Error LaunchCast(const CastParams& p, Stream stream) {
  const int64_t count = static_cast<int64_t>(p.num_rows) * p.num_columns;
  const LaunchShape shape{dim3(static_cast<unsigned>(DivideUp(count, kThreads))), dim3(kThreads)};
  return Launch<CastKernel<From, To>>(shape, stream, count, DevicePtr<const From>(p.x), DevicePtr<To>(p.y));
}

}  // namespace

Error Cast(const CastParams& p, Stream stream) {
  if (p.num_rows < 0) return "num_rows: expected 0 or more, got a negative number";
  if (p.num_columns < 0) return "num_columns: expected 0 or more, got a negative number";
  return WithElement(p.x_dtype, [&](auto from) {
    return WithElement(p.y_dtype, [&](auto to) { return LaunchCast<decltype(from), decltype(to)>(p, stream); });
  });
}

}  // namespace fdsd::cuda
