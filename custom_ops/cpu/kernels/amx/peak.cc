#include "amx/product.h"
#include "amx/tiles.h"

namespace fdsd {
namespace FDSD_ISA {
namespace FDSD_TILES {

void RepeatTileProducts(bool is_int, int64_t rounds) {
  constexpr uint8_t kAll = kTileRows;
  ConfigureTiles({{kAll, kAll, kAll, kAll, kAll, kAll, kAll, kAll}});
  for (int64_t i = 0; i < rounds; ++i) {
    if (is_int) {
      DotS8U8<0, 4, 6>();
      DotS8U8<1, 4, 7>();
      DotS8U8<2, 5, 6>();
      DotS8U8<3, 5, 7>();
    } else {
      DotBf16<0, 4, 6>();
      DotBf16<1, 4, 7>();
      DotBf16<2, 5, 6>();
      DotBf16<3, 5, 7>();
    }
  }
  ReleaseTiles();
}

}  // namespace FDSD_TILES
}  // namespace FDSD_ISA
}  // namespace fdsd
