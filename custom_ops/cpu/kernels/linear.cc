// y = x . weight^T: packs blocks of rows into tiles, then multiplies tiles and panels on all threads.
#include "fdsd/linear.h"

#include "fdsd/runtime.h"
#include "linear_panel.h"
#include "parallel_ranges.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// Rows multiplied per pass over the weights. They are few enough that their packed form stays in the second-level cache
// (Blocking::block_bytes). They are many enough that a pass is bound by arithmetic and not by reading the weights.
constexpr int32_t kMinBlockRows = 96;
// Units of work per thread, if there are as many: the last ones to finish then leave little idle time.
constexpr int64_t kUnitsPerThread = 16;
// Inputs that a thread packs at a time; fewer would cost more to hand out than they take. Quantising is the slower.
constexpr int64_t kPackInputs = 16384;
constexpr int64_t kQuantizeInputs = 4096;

// The rows of one pass.
class Block {
 public:
  Block(const LinearParams& p, const RowKernels& kernels, const Blocking& blocking, const Slices& slices,
        int32_t first_row, int32_t num_rows)
      : p_(p),
        first_row_(first_row),
        rows_(kernels, blocking, slices, p.format, num_rows,
              ScratchArray<uint8_t>(Scratch::kInner, PackedRows::Bytes(kernels, slices, p.format, num_rows))) {}

  // The unit of work is a tile, for few tiles a part of its inputs.
  void Pack() const {
    const int64_t num_inputs = static_cast<int64_t>(rows_.num_rows) * p_.in_features;
    const int64_t wanted = DivideUp(num_inputs, IsQuantized(p_.format) ? kQuantizeInputs : kPackInputs);
    const int64_t num_units = rows_.slices.num_units();
    const int64_t num_parts = std::clamp<int64_t>(wanted / rows_.num_tiles, 1, std::max<int64_t>(num_units, 1));
    ParallelFor(rows_.num_tiles * num_parts, [&](int64_t task) {
      const int64_t tile = task / num_parts;
      const int64_t part = task % num_parts;
      rows_.kernels->pack_tile(TileX(tile), rows_.slices, rows_.Size(tile),
                               static_cast<int32_t>(num_units * part / num_parts),
                               static_cast<int32_t>(num_units * (part + 1) / num_parts), rows_.Tile(tile));
    });
  }

  // The unit of work is a panel, for few panels a part of its tiles.
  void Multiply() const {
    const int64_t panel_bytes = PanelBytes(rows_.slices, p_.format);
    const int64_t num_panels = DivideUp(p_.out_features, kPanelColumns);
    const int64_t num_tiles = rows_.num_tiles;
    const int64_t wanted = NumThreads() * kUnitsPerThread;
    const int64_t num_splits = std::clamp<int64_t>(wanted / std::max<int64_t>(num_panels, 1), 1, num_tiles);
    const int64_t unit_bytes = std::max<int64_t>(panel_bytes * num_tiles / num_splits, 1);
    const LinearOutput out{p_.y_dtype, p_.out_features, p_.bias,
                           static_cast<char*>(p_.y) + first_row_ * p_.out_features * ElementBytes(p_.y_dtype)};
    const auto multiply = [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t panel = unit / num_splits;
        const int64_t split = unit % num_splits;
        rows_.kernels->multiply_panel(rows_, num_tiles * split / num_splits, num_tiles * (split + 1) / num_splits,
                                      static_cast<const uint8_t*>(p_.packed) + panel * panel_bytes, panel, out);
      }
      rows_.kernels->leave();
    };
    ParallelRanges(num_panels * num_splits, DivideUp(kMinPieceBytes, unit_bytes), multiply, panel_bytes);
  }

 private:
  XRows TileX(int64_t tile) const {
    const int64_t row = first_row_ + rows_.Begin(tile);
    const void* x = static_cast<const char*>(p_.x) + row * p_.in_features * ElementBytes(p_.x_dtype);
    return {p_.format, p_.x_dtype, p_.in_features, p_.in_features, x, nullptr};
  }

  const LinearParams& p_;
  const int64_t first_row_;
  const PackedRows rows_;
};

}  // namespace

Error Linear(const LinearParams& p) {
  if (p.num_rows < 0) return "num_rows: expected 0 or more, got a negative number";
  if (const Error error = CheckLinear(p.in_features, p.out_features, p.format, p.slices, p.packed)) return error;
  if (const Error error = CheckProcessorFormat(p.format)) return error;
  const Slices slices = SlicesOf(p.in_features, p.format, p.slices);
  const RowKernels& kernels = RowKernelsOf(p.format, p.num_rows);
  const Blocking blocking = BlockingOf(kernels, p.format);
  const int64_t row_bytes = std::max<int64_t>(kernels.row_bytes(slices, p.format), 1);
  const int32_t block_rows = static_cast<int32_t>(std::max<int64_t>(blocking.block_bytes / row_bytes, kMinBlockRows));
  const int32_t num_blocks = static_cast<int32_t>(DivideUp(p.num_rows, block_rows));
  for (int64_t b = 0; b < num_blocks; ++b) {
    const int32_t begin = static_cast<int32_t>(p.num_rows * b / num_blocks);
    const int32_t end = static_cast<int32_t>(p.num_rows * (b + 1) / num_blocks);
    const Block block(p, kernels, blocking, slices, begin, end - begin);
    block.Pack();
    block.Multiply();
  }
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
