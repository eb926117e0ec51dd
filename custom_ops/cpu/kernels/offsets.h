#pragma once
// Checks of ragged arrays.
#include <cstdint>

namespace fdsd {
namespace FDSD_ISA {

// Whether cu[0..count] is not negative and never decreases: parts of an array that need not begin with its first
// element.
inline __attribute__((always_inline)) bool AreRising(const int32_t* cu, int32_t count) {
  if (cu[0] < 0) return false;
  for (int32_t i = 0; i < count; ++i)
    if (cu[i + 1] < cu[i]) return false;
  return true;
}

// Whether cu[0..count] starts at 0 and never decreases. With cu[count] equal to the size of the array it divides, which
// the caller ensures, every part lies inside that array.
inline __attribute__((always_inline)) bool AreOffsets(const int32_t* cu, int32_t count) {
  return cu[0] == 0 && AreRising(cu, count);
}

}  // namespace FDSD_ISA
}  // namespace fdsd
