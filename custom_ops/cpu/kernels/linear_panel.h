#pragma once
// What linear and moe_ffn share above the inner loops: rows packed in tiles, and their product with one panel.
#include "linear_tile.h"

namespace fdsd {
namespace FDSD_ISA {

// Weights that a thread streams through at a time, at least; less would cost more to hand out than it balances.
constexpr int64_t kMinPieceBytes = 32 * 1024;

// `num_rows` rows of x packed in tiles whose sizes differ by at most one, tile after tile.
struct PackedRows {
  LinearFormat format;
  Slices slices;
  int32_t num_rows;
  int32_t num_tiles;
  uint8_t* data;  // [num_rows * RowBytes]

  static int64_t RowBytes(const Slices& x_slices, LinearFormat format) {
    return static_cast<int64_t>(x_slices.num_units()) * RowUnitBytes(format);
  }
  PackedRows(const Slices& x_slices, LinearFormat x_format, int32_t rows, uint8_t* memory)
      : format(x_format),
        slices(x_slices),
        num_rows(rows),
        num_tiles(static_cast<int32_t>(DivideUp(rows, kMaxTileRows))),
        data(memory) {}

  int32_t Begin(int64_t tile) const { return static_cast<int32_t>(num_rows * tile / num_tiles); }
  int32_t Size(int64_t tile) const { return Begin(tile + 1) - Begin(tile); }
  uint8_t* Tile(int64_t tile) const { return data + Begin(tile) * RowBytes(slices, format); }
};

// Where products go: row r of the packed rows to row r of y.
struct LinearOutput {
  DType dtype;
  int32_t out_features;
  const float* bias;  // [out_features], may be nullptr
  void* y;            // [., out_features]
};

// y = x . panel^T for tiles [tile_begin, tile_end) of x, in columns [32 * index, 32 * index + 32) of y. The panel has
// the slices that x has.
void MultiplyPanel(const PackedRows& x, int64_t tile_begin, int64_t tile_end, const uint8_t* panel, int64_t index,
                   const LinearOutput& out);

}  // namespace FDSD_ISA
}  // namespace fdsd
