// The product of packed rows and one panel.
#include "linear_panel.h"

#include "fdsd/runtime.h"

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
    case LinearFormat::kE4m3:
      return kFloat8Tiles;
    default:  // float16 and fp8 were refused before
      break;
  }
  return kWint4Tiles;
}

template <typename T>
void StoreSumsAs(const float* sums, int32_t num_rows, int64_t row, int32_t column, const LinearOutput& out) {
  const int count = std::min(kPanelColumns, out.out_features - column);
  for (int32_t r = 0; r < num_rows; ++r) {
    T* y = static_cast<T*>(out.y) + (row + r) * out.y_stride + column;
    for (int i = 0; i < count; i += kLanes) {
      const int n = std::min(kLanes, count - i);
      F32x16 v = Load(sums + r * kPanelColumns + i);
      if (out.bias != nullptr) v = Add(v, LoadPartial(out.bias + column + i, n));
      StorePartial(v, y + i, n);
    }
  }
}

void MultiplyPanel(const PackedRows& x, int64_t tile_begin, int64_t tile_end, const uint8_t* panel, int64_t index,
                   const LinearOutput& out) {
#if !defined(FDSD_SIMD_AVX2)  // which multiplies codes as they are
  // Several tiles share the work of making int8 of codes.
  if (x.format == LinearFormat::kWint4 && tile_end - tile_begin > 1) {
    return kGroupedRowKernels.multiply_panel(x, tile_begin, tile_end, panel, index, out);
  }
#endif
  const TileFunctions& tiles = TilesOf(x.format);
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    alignas(64) float levels[kSumLevels * kTileSums];
    const int32_t size = x.Size(tile);
    tiles.of[size - 1](panel, x.Tile(tile), x.slices, PrefetchAhead(x.format, size), levels);
    StoreSums(levels + SumLevel(x.slices.count - 1) * kTileSums, size, x.Begin(tile), index, out);
  }
}

#if defined(FDSD_SIMD_AVX512)
// Rows from which on formats with groups go through AMX: fewer multiply codes as they are read.
constexpr int64_t kGroupedTileRows = 8;
#endif

constexpr RowKernels kOnVectors = {kMaxTileRows, kBlockBytes, RowBytes, PackTile, MultiplyPanel, Leave};

}  // namespace

const RowKernels& RowKernelsOf(LinearFormat format, [[maybe_unused]] int64_t num_rows) {
  const bool is_grouped = IsGrouped(format);
#if defined(FDSD_SIMD_AVX512)
  if (is_grouped ? num_rows >= kGroupedTileRows : format != LinearFormat::kFloat32 && format != LinearFormat::kE4m3) {
    switch (TilesInUse()) {
      case Tiles::kChip:
        return is_grouped ? amx::kGroupedRowKernels : amx::kRowKernels;
      case Tiles::kTwin:
        return is_grouped ? amx_twin::kGroupedRowKernels : amx_twin::kRowKernels;
      case Tiles::kNone:
        break;
    }
  }
#endif
  return is_grouped ? kGroupedRowKernels : kOnVectors;
}

Blocking BlockingOf(const RowKernels& kernels, LinearFormat format) {
  const RowBlocking measured = MeasuredBlocking(format);
  const int32_t most = kernels.max_tile_rows;
  return {most, measured.tile_rows == 0 ? most : std::min(measured.tile_rows, most),
          measured.block_bytes == 0 ? kernels.block_bytes : measured.block_bytes};
}

void StoreSums(const float* sums, int32_t num_rows, int64_t row, int64_t index, const LinearOutput& out) {
  const int32_t column = static_cast<int32_t>(index * kPanelColumns);
  if (out.dtype == DType::kFloat32) {
    StoreSumsAs<float>(sums, num_rows, row, column, out);
  } else {
    StoreSumsAs<bf16>(sums, num_rows, row, column, out);
  }
}

}  // namespace FDSD_ISA
}  // namespace fdsd
