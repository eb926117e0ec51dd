#pragma once
// What a device with memory of its own does besides the ops. Pointers are the device's.
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

// A column of a step whose rows after the step's own are filled.
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

// A part of what blocks hold in a layer, on its way to packed blocks or from there.
struct BlockPiece {
  void* blocks;       // [any number, num_bytes]
  int64_t begin;      // of it in a packed block
  int64_t num_bytes;  // of one block
};

// Most blocks that are copied at once: their ids are arguments of the kernel.
constexpr int32_t kMaxCopiedBlocks = 256;

// Copy pieces of blocks into packed ones, or back. No block is there twice. What is counted in bytes, and addresses,
// are multiples of unit_bytes.
struct CopyBlocksParams {
  int32_t num_pieces;
  int32_t num_blocks;        // 0..kMaxCopiedBlocks
  int32_t is_unpacking;      // whether to blocks, else from them
  int32_t unit_bytes;        // 4 or 16
  int64_t max_num_bytes;     // of the largest piece
  int64_t packed_bytes;      // of a packed block
  int64_t begin;             // of the pieces, each of which begins so much earlier in a packed block
  const BlockPiece* pieces;  // [num_pieces]
  const int32_t* block_ids;  // [num_blocks] the host's, read before this returns; below 0: its place is left alone
  uint8_t* packed;           // [num_blocks, packed_bytes]
};

}  // namespace fdsd
