#pragma once
// IEEE half precision: checkpoints have it, which is widened while it is read, and GPUs, whose weights are packed here.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "fdsd/status.h"
#include "simd.h"

namespace fdsd {
namespace FDSD_ISA {

// Exact, and without subnormal floats on the way: a processor may be set to treat those as zero.
FDSD_INLINE float ToFloat(half16 x) {
  constexpr uint32_t kMaxExponent = 31;
  const uint32_t exponent = x.bits >> 10 & kMaxExponent;
  const float subnormal = static_cast<float>(static_cast<int32_t>(x.bits & 0x3ffu)) * 0x1p-24f;
  uint32_t bits;
  std::memcpy(&bits, &subnormal, sizeof(bits));
  const uint32_t rebias = exponent == kMaxExponent ? 255 - kMaxExponent : 127 - 15;  // infinity and NaN keep all ones
  if (exponent != 0) bits = (static_cast<uint32_t>(x.bits & 0x7fffu) << 13) + (rebias << 23);
  bits |= static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof(f));
  return f;
}

// To nearest, ties to even, to infinity from 65520 on; NaN becomes the NaN that GPUs have.
FDSD_INLINE half16 RoundToHalf16(float x) {
  uint32_t magnitude;
  std::memcpy(&magnitude, &x, sizeof(magnitude));
  const uint32_t sign = magnitude >> 16 & 0x8000u;
  magnitude &= 0x7fffffffu;
  if (magnitude > 0x7f800000u) return half16{0x7fff};
  if (magnitude >= 0x477ff000u) return half16{static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {  // below 2^-14: a multiple of 2^-24, which an integer counts
    const auto count = static_cast<uint32_t>(std::nearbyint(std::fabs(x) * 0x1p24f));
    return half16{static_cast<uint16_t>(sign | count)};
  }
  const uint32_t rounded = ((magnitude + 0xfffu + (magnitude >> 13 & 1u)) >> 13) - ((127u - 15u) << 10);
  return half16{static_cast<uint16_t>(sign | rounded)};
}

}  // namespace FDSD_ISA
}  // namespace fdsd
