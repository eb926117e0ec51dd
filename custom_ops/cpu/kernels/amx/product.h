#pragma once
// One product of tiles, for tests that compare the twin with the chip and both with the definition.
#include <cstdint>

#include "fdsd/status.h"

namespace fdsd {

// The first letter is of A's elements, the second of B's.
enum class TileProduct : int32_t { kBf16 = 0, kS8S8 = 1, kS8U8 = 2, kU8S8 = 3, kU8U8 = 4 };

// c [rows, 16] += a [rows, 64 bytes] . b [16, 64 bytes], 1 to 16 rows; sums are float32 (bf16) or int32.
namespace avx512::amx {
Error AddTileProduct(TileProduct product, int32_t rows, const void* a, const void* b, void* c);
}
namespace avx512::amx_twin {
Error AddTileProduct(TileProduct product, int32_t rows, const void* a, const void* b, void* c);
}

}  // namespace fdsd
