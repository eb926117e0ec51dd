// y = x . weight^T: packs blocks of rows into tiles, then multiplies tiles and panels on all threads.
#include "fdsd/linear.h"

#include "fdsd/runtime.h"
#include "linear_tile.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// Rows multiplied per pass over the weights: few enough that their packed form stays in the second-level cache, many
// enough that a pass is bound by arithmetic and not by reading the weights.
constexpr int64_t kBlockBytes = 512 * 1024;
constexpr int32_t kMinBlockRows = 96;
// Weights a task streams through, at least; a smaller task costs more to hand out than it balances.
constexpr int64_t kMinTaskBytes = 64 * 1024;
// Tasks per thread when there is enough work: the last ones to finish then leave little idle time.
constexpr int64_t kTasksPerThread = 8;
// Inputs one thread packs faster than two can share.
constexpr int64_t kSerialPackInputs = 8192;
constexpr int32_t kPackInputs = 2048;

// `num_rows` rows cut into tiles whose sizes differ by at most one.
struct Tiling {
  int32_t num_rows;
  int32_t num_tiles;

  explicit Tiling(int32_t rows) : num_rows(rows), num_tiles(static_cast<int32_t>(DivideUp(rows, kMaxTileRows))) {}
  int32_t Begin(int64_t tile) const { return static_cast<int32_t>(num_rows * tile / num_tiles); }
  int32_t Size(int64_t tile) const { return Begin(tile + 1) - Begin(tile); }
};

const TileFunctions& TilesOf(LinearFormat format) {
  switch (format) {
    case LinearFormat::kFloat32:
      return kFloat32Tiles;
    case LinearFormat::kBFloat16:
      return kBf16Tiles;
    case LinearFormat::kWint8:
      return kWint8Tiles;
    case LinearFormat::kWint4:
      break;
  }
  return kWint4Tiles;
}

template <typename T>
void StoreSums(const LinearParams& p, const float* sums, int32_t num_rows, int64_t row, int32_t column) {
  const int count = std::min(kPanelColumns, p.out_features - column);
  for (int32_t r = 0; r < num_rows; ++r) {
    T* y = static_cast<T*>(p.y) + (row + r) * p.out_features + column;
    for (int i = 0; i < count; i += kLanes) {
      const int n = std::min(kLanes, count - i);
      F32x16 v = Load(sums + r * kPanelColumns + i);
      if (p.bias != nullptr) v = Add(v, LoadPartial(p.bias + column + i, n));
      StorePartial(v, y + i, n);
    }
  }
}

// Rows [first_row, first_row + tiling.num_rows) of one call.
class Block {
 public:
  Block(const LinearParams& p, int32_t first_row, int32_t num_rows)
      : p_(p),
        first_row_(first_row),
        tiling_(num_rows),
        num_units_(NumUnits(p.in_features, p.format)),
        row_bytes_(static_cast<int64_t>(num_units_) * RowUnitBytes(p.format)),
        panel_bytes_(PanelBytes(p.in_features, p.format)),
        num_panels_(DivideUp(p.out_features, kPanelColumns)),
        // The op may be called by another op, which owns the other slots.
        packed_x_(ScratchArray<uint8_t>(Scratch::kInner, num_rows * row_bytes_)) {}

  void Pack() const {
    const int32_t unit_inputs = IsQuantized(p_.format) ? kQuantGroup : p_.format == LinearFormat::kBFloat16 ? 2 : 1;
    const int64_t inputs = static_cast<int64_t>(tiling_.num_rows) * p_.in_features;
    const int32_t part_units = inputs <= kSerialPackInputs ? std::max(num_units_, 1) : kPackInputs / unit_inputs;
    const int64_t num_parts = DivideUp(num_units_, part_units);
    const auto pack = [&](int64_t task) {
      const int64_t tile = task / num_parts;
      const int32_t begin = static_cast<int32_t>(task % num_parts) * part_units;
      PackTile(Rows(tile), tiling_.Size(tile), begin, std::min(num_units_, begin + part_units), TileAt(tile));
    };
    const int64_t num_tasks = tiling_.num_tiles * num_parts;
    if (inputs <= kSerialPackInputs) {
      for (int64_t task = 0; task < num_tasks; ++task) pack(task);
    } else {
      ParallelFor(num_tasks, pack);
    }
  }

  // A task is a range of panels, for few panels also a range of tiles.
  void Multiply() const {
    const int64_t wanted = NumThreads() * kTasksPerThread;
    const int64_t fewest = DivideUp(kMinTaskBytes, std::max<int64_t>(panel_bytes_ * tiling_.num_tiles, 1));
    const int64_t panels = std::max(num_panels_ / wanted, std::min(fewest, num_panels_ / NumThreads()));
    const int64_t panels_per_task = std::max<int64_t>(panels, 1);
    const int64_t num_ranges = DivideUp(num_panels_, panels_per_task);
    const int64_t num_splits = std::clamp<int64_t>(wanted / std::max<int64_t>(num_ranges, 1), 1, tiling_.num_tiles);
    ParallelFor(num_ranges * num_splits, [&](int64_t task) {
      const int64_t range = task / num_splits;
      const int64_t split = task % num_splits;
      const int64_t end = std::min(num_panels_, (range + 1) * panels_per_task);
      for (int64_t panel = range * panels_per_task; panel < end; ++panel) {
        MultiplyPanel(panel, tiling_.num_tiles * split / num_splits, tiling_.num_tiles * (split + 1) / num_splits);
      }
    });
  }

 private:
  uint8_t* TileAt(int64_t tile) const { return packed_x_ + tiling_.Begin(tile) * row_bytes_; }

  XRows Rows(int64_t tile) const {
    const int64_t element = p_.x_dtype == DType::kFloat32 ? 4 : 2;
    const int64_t row = first_row_ + tiling_.Begin(tile);
    return {p_.format, p_.x_dtype, p_.in_features, static_cast<const char*>(p_.x) + row * p_.in_features * element};
  }

  void MultiplyPanel(int64_t panel, int64_t tile_begin, int64_t tile_end) const {
    const uint8_t* weights = static_cast<const uint8_t*>(p_.packed) + panel * panel_bytes_;
    const int32_t column = static_cast<int32_t>(panel * kPanelColumns);
    const TileFunctions& tiles = TilesOf(p_.format);
    for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
      alignas(64) float sums[kMaxTileRows * kPanelColumns];
      const int32_t size = tiling_.Size(tile);
      tiles.of[size - 1](weights, TileAt(tile), num_units_, sums);
      if (p_.y_dtype == DType::kFloat32) {
        StoreSums<float>(p_, sums, size, first_row_ + tiling_.Begin(tile), column);
      } else {
        StoreSums<bf16>(p_, sums, size, first_row_ + tiling_.Begin(tile), column);
      }
    }
  }

  const LinearParams& p_;
  const int64_t first_row_;
  const Tiling tiling_;
  const int32_t num_units_;
  const int64_t row_bytes_;
  const int64_t panel_bytes_;
  const int64_t num_panels_;
  uint8_t* const packed_x_;
};

}  // namespace

Error Linear(const LinearParams& p) {
  if (p.num_rows < 0) return "num_rows: expected 0 or more, got a negative number";
  if (const Error error = CheckLinear(p.in_features, p.out_features, p.format, p.packed)) return error;
  const int64_t row_bytes =
      std::max<int64_t>(static_cast<int64_t>(NumUnits(p.in_features, p.format)) * RowUnitBytes(p.format), 1);
  const int32_t block_rows = static_cast<int32_t>(std::max<int64_t>(kBlockBytes / row_bytes, kMinBlockRows));
  const int32_t num_blocks = static_cast<int32_t>(DivideUp(p.num_rows, block_rows));
  for (int64_t b = 0; b < num_blocks; ++b) {
    const int32_t begin = static_cast<int32_t>(p.num_rows * b / num_blocks);
    const int32_t end = static_cast<int32_t>(p.num_rows * (b + 1) / num_blocks);
    const Block block(p, begin, end - begin);
    block.Pack();
    block.Multiply();
  }
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
