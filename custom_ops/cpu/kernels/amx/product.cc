#include "amx/product.h"

#include "amx/tiles.h"

namespace fdsd {
namespace FDSD_ISA {
namespace FDSD_TILES {

Error AddTileProduct(TileProduct product, int32_t rows, const void* a, const void* b, void* c) {
  if (rows < 1 || rows > kTileRows) return "rows: expected 1..16, got a number outside";
  const uint8_t height = static_cast<uint8_t>(rows);
  ConfigureTiles({{height, height, kTileRows}});
  LoadTile<0>(c, kTileRowBytes);
  LoadTile<1>(a, kTileRowBytes);
  LoadTile<2>(b, kTileRowBytes);
  switch (product) {
    case TileProduct::kBf16:
      DotBf16<0, 1, 2>();
      break;
    case TileProduct::kS8S8:
      DotS8S8<0, 1, 2>();
      break;
    case TileProduct::kS8U8:
      DotS8U8<0, 1, 2>();
      break;
    case TileProduct::kU8S8:
      DotU8S8<0, 1, 2>();
      break;
    case TileProduct::kU8U8:
      DotU8U8<0, 1, 2>();
      break;
  }
  StoreTile<0>(c, kTileRowBytes);
  ReleaseTiles();
  return nullptr;
}

}  // namespace FDSD_TILES
}  // namespace FDSD_ISA
}  // namespace fdsd
