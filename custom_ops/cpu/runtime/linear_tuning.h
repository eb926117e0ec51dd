#pragma once
// How linear ops go over memory, as it was measured on this machine: how far ahead of their loads they ask for weights,
// and in what blocks they take rows. Changes no bit of any result. All may be set while ops run.
#include <cstdint>

#include "fdsd/linear.h"

namespace fdsd {

constexpr int kMaxPrefetchRows = 32;
constexpr int32_t kNotMeasured = -1;

// Bytes ahead for tiles of so many rows; 0 = ask for nothing, kNotMeasured = as the kernel thinks best.
//   num_rows    1..kMaxPrefetchRows
int32_t PrefetchBytes(LinearFormat format, int num_rows);

// Set it, for tiles of any level.
//   num_bytes    0..65536 or kNotMeasured
Error SetPrefetchBytes(LinearFormat format, int32_t num_rows, int32_t num_bytes);

// How rows that need more than one tile are taken; 0 = as the kernel thinks best.
struct RowBlocking {
  int32_t tile_rows;    // of a tile at most; what a level's registers do not hold counts as its own most
  int32_t block_bytes;  // packed rows that are multiplied per pass over the weights
};
RowBlocking MeasuredBlocking(LinearFormat format);

// Set it, for any level.
//   tile_rows      0..64
//   block_bytes    0..2^30
Error SetRowBlocking(LinearFormat format, RowBlocking blocking);

}  // namespace fdsd
