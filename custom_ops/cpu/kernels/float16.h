#pragma once
// IEEE half precision, which only checkpoints have: it is widened while it is read.
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace fdsd {
namespace FDSD_ISA {

struct f16 {
  uint16_t bits;
};
static_assert(sizeof(f16) == 2);

// Exact, and without subnormal floats on the way: a processor may be set to treat those as zero.
FDSD_INLINE float ToFloat(f16 x) {
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

}  // namespace FDSD_ISA
}  // namespace fdsd
