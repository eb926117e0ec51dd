#pragma once
// What linear and moe_ffn share above the inner loops: rows packed in tiles, and their product with one panel.
#include "linear_tile.h"

namespace fdsd {
namespace FDSD_ISA {

// Weights that a thread streams through at a time, at least; less would cost more to hand out than it balances.
constexpr int64_t kMinPieceBytes = 32 * 1024;

struct LinearOutput;
struct PackedRows;

// How rows are packed and multiplied: on vector registers or, at level amx, on tiles.
struct RowKernels {
  int32_t max_tile_rows;
  // Packed rows multiplied per pass over the weights, in bytes, where that was not measured: so many stay in the
  // second-level cache.
  int64_t block_bytes;
  int64_t (*row_bytes)(const Slices& slices, LinearFormat format);
  // See PackTile.
  void (*pack_tile)(const XRows& rows, const Slices& slices, int num_rows, int32_t unit_begin, int32_t unit_end,
                    uint8_t* tile);
  // y = x . panel^T for tiles [tile_begin, tile_end) of x, in columns [32 * index, 32 * index + 32) of y. The panel has
  // the slices that x has.
  void (*multiply_panel)(const PackedRows& x, int64_t tile_begin, int64_t tile_end, const uint8_t* panel, int64_t index,
                         const LinearOutput& out);
  // Called by a thread after its last multiply_panel of a task.
  void (*leave)();
};
// For an op with so many rows of a matrix: all kernels of a format give a row the same bits, or there is one.
const RowKernels& RowKernelsOf(LinearFormat format, int64_t num_rows);
extern const RowKernels kGroupedRowKernels;

// Parts of those on vector registers.
constexpr int64_t kBlockBytes = 512 * 1024;
FDSD_INLINE int64_t RowBytes(const Slices& slices, LinearFormat format) {
  return static_cast<int64_t>(slices.num_units()) * RowUnitBytes(format);
}
FDSD_INLINE void Leave() {}

// How an op takes rows: read once per op, as a measurement may change it meanwhile.
struct Blocking {
  int32_t max_tile_rows;  // of a tile that is alone
  int32_t tile_rows;      // of each of several
  int64_t block_bytes;

  // All rows that one tile holds are one: it reads the weights once.
  FDSD_INLINE int32_t NumTiles(int32_t num_rows) const {
    return static_cast<int32_t>(num_rows <= max_tile_rows ? 1 : DivideUp(num_rows, tile_rows));
  }
};
Blocking BlockingOf(const RowKernels& kernels, LinearFormat format);

#if defined(FDSD_SIMD_AVX512)
namespace amx {
extern const RowKernels kRowKernels;
extern const RowKernels kGroupedRowKernels;
}  // namespace amx
namespace amx_twin {
extern const RowKernels kRowKernels;
extern const RowKernels kGroupedRowKernels;
}  // namespace amx_twin
#endif

// `num_rows` rows of x, at least one, packed in tiles whose sizes differ by at most one, tile after tile.
struct PackedRows {
  const RowKernels* kernels;
  LinearFormat format;
  Slices slices;
  int32_t num_rows;
  int32_t num_tiles;
  uint8_t* data;  // [Bytes]

  // Of the packed form of so many rows. Some bytes after the last row may be read, as many as another row has of a
  // unit; they mean nothing.
  static int64_t Bytes(const RowKernels& kernels, const Slices& x_slices, LinearFormat format, int64_t rows) {
    return rows * kernels.row_bytes(x_slices, format) + kQuantGroup;
  }
  PackedRows(const RowKernels& row_kernels, const Blocking& blocking, const Slices& x_slices, LinearFormat x_format,
             int32_t rows, uint8_t* memory)
      : kernels(&row_kernels),
        format(x_format),
        slices(x_slices),
        num_rows(rows),
        num_tiles(blocking.NumTiles(rows)),
        data(memory) {}

  int32_t Begin(int64_t tile) const { return static_cast<int32_t>(num_rows * tile / num_tiles); }
  int32_t Size(int64_t tile) const { return Begin(tile + 1) - Begin(tile); }
  uint8_t* Tile(int64_t tile) const { return data + Begin(tile) * kernels->row_bytes(slices, format); }
};

// Where products go: row r of the packed rows to row r of y.
struct LinearOutput {
  DType dtype;
  int32_t out_features;
  const float* bias;                // [out_features], may be nullptr
  void* y;                          // [., out_features]
  int64_t y_stride = out_features;  // elements from one row of y to the next
};

// Sums [num_rows][32], the bias added, to the columns of panel `index` in rows of y from `row` on.
void StoreSums(const float* sums, int32_t num_rows, int64_t row, int64_t index, const LinearOutput& out);

}  // namespace FDSD_ISA
}  // namespace fdsd
