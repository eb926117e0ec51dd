#pragma once
// Number formats: arithmetic is in float, whatever the storage.
#include "device.h"

namespace fdsd::cuda {

__device__ __forceinline__ float ToFloat(float x) { return x; }
__device__ __forceinline__ float ToFloat(bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

// Round to nearest, ties to even; NaN stays NaN.
__device__ __forceinline__ bf16 RoundToBf16(float x) {
  const unsigned bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return bf16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// To the 8-bit float e4m3 (a sign, 4 bits of exponent with bias 7, 3 of fraction), to nearest, ties to even; magnitudes
// below 464.
__device__ __forceinline__ uint32_t RoundToE4m3(float x) {
  const unsigned magnitude = __float_as_uint(x) & 0x7fffffffu;
  const unsigned sign = __float_as_uint(x) >> 24 & 0x80u;
  const float value = __uint_as_float(magnitude);
  if (value < 0x1p-6f) return sign | static_cast<unsigned>(rintf(value * 0x1p9f));
  return sign | (((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - ((127u - 7u) << 3));
}

// A number of e4m3, exactly.
__device__ __forceinline__ float FromE4m3(uint32_t code) {
  return __uint_as_float((code & 0x80u) << 24 | (code & 0x7fu) << 20) * 0x1p120f;
}

// Storage of e4m3, which has no infinities and is NaN where all bits but the sign are set.
struct float8 {
  uint8_t bits;
};
constexpr float kFloat8Max = 448.0f;

__device__ __forceinline__ float ToFloat(float8 x) { return FromE4m3(x.bits); }
__device__ __forceinline__ float8 RoundToFloat8(float x) { return float8{static_cast<uint8_t>(RoundToE4m3(x))}; }

// x as an element of type T.
template <typename T>
__device__ __forceinline__ T FromFloat(float x);
template <>
__device__ __forceinline__ float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 FromFloat<bf16>(float x) {
  return RoundToBf16(x);
}

// Element i as a float.
template <typename T>
__device__ __forceinline__ float LoadFloat(DevicePtr<const T> p, int64_t i) {
  return ToFloat(p[i]);
}

__host__ __device__ constexpr int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace fdsd::cuda
