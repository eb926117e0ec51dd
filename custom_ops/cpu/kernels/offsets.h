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

// Error of DraftedRows::parent_rows, nullptr where each row follows one before it and first rows none.
inline const char* CheckParentRows(const int32_t* parent_rows, const int32_t* cu_num_logits, int32_t num_requests) {
  for (int32_t r = 0; r < num_requests; ++r) {
    for (int32_t row = cu_num_logits[r]; row < cu_num_logits[r + 1]; ++row) {
      const int32_t j = row - cu_num_logits[r];
      if (parent_rows[row] < (j > 0 ? 0 : -1) || parent_rows[row] >= j)
        return "parent_rows: expected a row of the request before each, -1 of its first; got another";
    }
  }
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
