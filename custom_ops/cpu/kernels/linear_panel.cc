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

template <typename T>
void StoreSums(const float* sums, int32_t num_rows, int64_t row, int32_t column, const LinearOutput& out) {
  const int count = std::min(kPanelColumns, out.out_features - column);
  for (int32_t r = 0; r < num_rows; ++r) {
    T* y = static_cast<T*>(out.y) + (row + r) * out.out_features + column;
    for (int i = 0; i < count; i += kLanes) {
      const int n = std::min(kLanes, count - i);
      F32x16 v = Load(sums + r * kPanelColumns + i);
      if (out.bias != nullptr) v = Add(v, LoadPartial(out.bias + column + i, n));
      StorePartial(v, y + i, n);
    }
  }
}

}  // namespace

void MultiplyPanel(const PackedRows& x, int64_t tile_begin, int64_t tile_end, const uint8_t* panel, int64_t index,
                   const LinearOutput& out) {
  const TileFunctions& tiles = TilesOf(x.format);
  const int32_t column = static_cast<int32_t>(index * kPanelColumns);
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    alignas(64) float levels[kSumLevels * kTileSums];
    const int32_t size = x.Size(tile);
    tiles.of[size - 1](panel, x.Tile(tile), x.slices, levels);
    const float* sums = levels + SumLevel(x.slices.count - 1) * kTileSums;
    if (out.dtype == DType::kFloat32) {
      StoreSums<float>(sums, size, x.Begin(tile), column, out);
    } else {
      StoreSums<bf16>(sums, size, x.Begin(tile), column, out);
    }
  }
}

}  // namespace FDSD_ISA
}  // namespace fdsd
