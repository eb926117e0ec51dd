// The product of packed rows and one panel.
#include "linear_panel.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

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

constexpr int kTileSums = kMaxTileRows * kPanelColumns;

// 16 of the sums of every slice, added in their tree.
template <int kSlices>
FDSD_INLINE F32x16 AddSlices(const float* sums) {
  if constexpr (kSlices == 1) {
    return Load(sums);
  } else {
    return Add(AddSlices<kSlices / 2>(sums), AddSlices<kSlices / 2>(sums + kSlices / 2 * kTileSums));
  }
}

template <int kSlices, typename T>
void StoreSums(const float* sums, int32_t num_rows, int64_t row, int32_t column, const LinearOutput& out) {
  const int count = std::min(kPanelColumns, out.out_features - column);
  for (int32_t r = 0; r < num_rows; ++r) {
    T* y = static_cast<T*>(out.y) + (row + r) * out.out_features + column;
    for (int i = 0; i < count; i += kLanes) {
      const int n = std::min(kLanes, count - i);
      F32x16 v = AddSlices<kSlices>(sums + r * kPanelColumns + i);
      if (out.bias != nullptr) v = Add(v, LoadPartial(out.bias + column + i, n));
      StorePartial(v, y + i, n);
    }
  }
}

template <int kSlices>
void MultiplyTiles(const PackedRows& x, int64_t tile_begin, int64_t tile_end, const uint8_t* panel, int64_t index,
                   const LinearOutput& out) {
  const TileFunctions& tiles = TilesOf(x.format);
  const int64_t panel_unit_bytes = PanelUnitBytes(x.format);
  const int32_t column = static_cast<int32_t>(index * kPanelColumns);
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    alignas(64) float sums[kSlices * kTileSums];
    const int32_t size = x.Size(tile);
    const int64_t tile_unit_bytes = int64_t{size} * RowUnitBytes(x.format);
    for (int s = 0; s < kSlices; ++s) {
      const int32_t unit = x.slices.units[s];
      tiles.of[size - 1](panel + unit * panel_unit_bytes, x.Tile(tile) + unit * tile_unit_bytes,
                         x.slices.units[s + 1] - unit, sums + s * kTileSums);
    }
    if (out.dtype == DType::kFloat32) {
      StoreSums<kSlices, float>(sums, size, x.Begin(tile), column, out);
    } else {
      StoreSums<kSlices, bf16>(sums, size, x.Begin(tile), column, out);
    }
  }
}

}  // namespace

void MultiplyPanel(const PackedRows& x, int64_t tile_begin, int64_t tile_end, const uint8_t* panel, int64_t index,
                   const LinearOutput& out) {
  switch (x.slices.count) {
    case 1:
      return MultiplyTiles<1>(x, tile_begin, tile_end, panel, index, out);
    case 2:
      return MultiplyTiles<2>(x, tile_begin, tile_end, panel, index, out);
    default:
      return MultiplyTiles<kMaxSlices>(x, tile_begin, tile_end, panel, index, out);
  }
}

}  // namespace FDSD_ISA
}  // namespace fdsd
