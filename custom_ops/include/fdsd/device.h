#pragma once
// What a device with memory of its own does beside the ops. Pointers are the device's.
#include "fdsd/status.h"

namespace fdsd {

// A piece of the host's memory on its way up.
struct ScatterPiece {
  void* to;
  int64_t begin;      // of its bytes in what was copied, a multiple of 4
  int64_t num_bytes;  // a multiple of 4
};

// Put every piece in its place. No byte is in two of them.
struct ScatterPiecesParams {
  int32_t num_pieces;
  int32_t max_num_bytes;       // of the largest
  const ScatterPiece* pieces;  // [num_pieces]
  const uint8_t* bytes;        // what was copied
};

// A column of a step whose rows behind the step's own are filled.
struct PadColumn {
  void* column;
  int32_t element_bytes;  // 4 or 8
  int32_t extra;          // the column has so many elements more than there are rows
  int32_t repeats_last;   // whether it is filled with its last element, else with value
  int32_t value;
};

// Fill columns from their number of rows up to another one.
struct PadColumnsParams {
  int32_t num_columns;
  int32_t num_rows;          // up to which they are filled
  const PadColumn* columns;  // [num_columns]
  const int32_t* num_own;    // [1] rows that are the step's own
};

}  // namespace fdsd
