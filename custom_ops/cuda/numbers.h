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

#if defined(FDSD_EMULATED)

__device__ __forceinline__ float ToFloat(half16 x) {
  constexpr unsigned kMaxExponent = 31;
  const unsigned exponent = x.bits >> 10 & kMaxExponent;
  const unsigned rebias = exponent == kMaxExponent ? 255 - kMaxExponent : 127 - 15;  // infinity and NaN keep all ones
  const float subnormal = static_cast<float>(x.bits & 0x3ffu) * 0x1p-24f;
  const unsigned normal = ((x.bits & 0x7fffu) << 13) + (rebias << 23);
  return __uint_as_float((exponent == 0 ? __float_as_uint(subnormal) : normal) | (x.bits & 0x8000u) << 16);
}

// Round to nearest, ties to even, to infinity from 65520 on; NaN becomes the NaN that GPUs have.
__device__ __forceinline__ half16 RoundToHalf16(float x) {
  const unsigned magnitude = __float_as_uint(x) & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return half16{0x7fff};
  const unsigned sign = __float_as_uint(x) >> 16 & 0x8000u;
  const float value = __uint_as_float(magnitude);
  unsigned bits;
  if (value < 0x1p-14f) {
    bits = static_cast<unsigned>(rintf(value * 0x1p24f));
  } else {
    bits = ((magnitude + 0xfffu + (magnitude >> 13 & 1u)) >> 13) - ((127u - 15u) << 10);
  }
  return half16{static_cast<uint16_t>(sign | (value >= 65520.0f ? 0x7c00u : bits))};
}

#else

__device__ __forceinline__ float ToFloat(half16 x) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
  return value;
}
__device__ __forceinline__ half16 RoundToHalf16(float x) {
  half16 rounded;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded.bits) : "f"(x));
  return rounded;
}

#endif

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
template <>
__device__ __forceinline__ half16 FromFloat<half16>(float x) {
  return RoundToHalf16(x);
}

// Two numbers of 16 bits, rounded, as a word.
template <typename T>
__device__ __forceinline__ uint32_t RoundedWord(float low, float high) {
  return FromFloat<T>(low).bits | static_cast<uint32_t>(FromFloat<T>(high).bits) << 16;
}

// Sets element i of an array of a type that only the call knows.
__device__ __forceinline__ void StoreFloat(DType dtype, DevicePtr<uint8_t> y, int64_t i, float x) {
  if (dtype == DType::kFloat32) {
    ViewAs<float>(y)[i] = x;
  } else {
    ViewAs<uint16_t>(y)[i] = dtype == DType::kBFloat16 ? RoundToBf16(x).bits : RoundToHalf16(x).bits;
  }
}

constexpr int64_t ElementBytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// call(element) with an element of the type.
template <typename Call>
Error WithElement(DType dtype, const Call& call) {
  switch (dtype) {
    case DType::kFloat32:
      return call(float{});
    case DType::kBFloat16:
      return call(bf16{});
    case DType::kFloat16:
      return call(half16{});
  }
  return "dtype: expected float32, bfloat16 or float16, got another number";
}

// Element i as a float.
template <typename T>
__device__ __forceinline__ float LoadFloat(DevicePtr<const T> p, int64_t i) {
  return ToFloat(p[i]);
}

__host__ __device__ constexpr int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace fdsd::cuda
