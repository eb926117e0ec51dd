#pragma once
// Products of tiles outside of any op: for tests that compare the emulation (kTwin) with the chip and both with the
// definition, and for the peak of the chip's arithmetic.
#include <cstdint>

#include "fdsd/status.h"

namespace fdsd {

// The first letter is of A's elements, the second of B's.
enum class TileProduct : int32_t { kBf16 = 0, kS8S8 = 1, kS8U8 = 2, kU8S8 = 3, kU8U8 = 4 };

// c [rows, 16] += a [rows, 64 bytes] . b [16, 64 bytes], 1 to 16 rows; sums are float32 (bf16) or int32.
namespace avx512::amx {
Error AddTileProduct(TileProduct product, int32_t rows, const void* a, const void* b, void* c);

// `rounds` times four products of whole tiles, from registers; operations of one: a multiplication and an addition each
// count as one.
void RepeatTileProducts(bool is_int, int64_t rounds);
constexpr int64_t TileOperations(bool is_int) { return 2 * 16 * 16 * (is_int ? 64 : 32); }
}  // namespace avx512::amx
namespace avx512::amx_twin {
Error AddTileProduct(TileProduct product, int32_t rows, const void* a, const void* b, void* c);
}

}  // namespace fdsd
