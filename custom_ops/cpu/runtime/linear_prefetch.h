#pragma once
// How far ahead of their loads linear ops ask for weights, as it was measured on this machine.
#include <cstdint>

#include "fdsd/linear.h"

namespace fdsd {

constexpr int kMaxPrefetchRows = 32;
constexpr int32_t kNotMeasured = -1;

// Bytes ahead for tiles of so many rows; 0 = ask for nothing, kNotMeasured = as the kernel thinks best. Changes no bit
// of any result.
//   num_rows    1..kMaxPrefetchRows
int32_t PrefetchBytes(LinearFormat format, int num_rows);

// Set it, for tiles of any level. It may be called while ops run.
//   num_bytes    0..65536 or kNotMeasured
Error SetPrefetchBytes(LinearFormat format, int32_t num_rows, int32_t num_bytes);

}  // namespace fdsd
