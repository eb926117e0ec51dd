#pragma once
// The tile instructions of AMX, and an emulation in plain C++ (amx_twin) with the same arithmetic.
//
// The files of this folder are compiled for the level avx512 twice. With FDSD_TILES=amx they run on the chip's tiles.
// With FDSD_TILES=amx_twin they run on tiles in memory, so that any processor with AVX-512 can test them. No compiler
// flag for AMX is needed or given: the instructions stand here, as assembly, and nowhere else.
//
// A tile has up to 16 rows of 64 bytes. A product multiplies A [rows, 64 bytes] and B [16, 64 bytes] and adds to C
// [rows, 16 x 4 bytes]. Row k of B holds, for each of 16 columns, the 4 bytes that meet bytes 4 k .. 4 k + 3 of a row
// of A. That is the layout of packed weights and of the KV cache. A row of C depends on the same row of A alone.
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace fdsd {
namespace FDSD_ISA {
namespace FDSD_TILES {

constexpr int kNumTiles = 8;
constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;
constexpr int kTileColumns = 16;  // of C
constexpr int kTileBytes = kTileRows * kTileRowBytes;

// Rows of each tile, 0 for one that is not used, and bytes of a row. A product's A has four bytes for each row of B.
struct TileShape {
  uint8_t rows[kNumTiles];
  uint8_t row_bytes[kNumTiles] = {64, 64, 64, 64, 64, 64, 64, 64};

  bool operator==(const TileShape&) const = default;
};

#define FDSD_AMX_CHIP_amx 1
#define FDSD_AMX_CHIP_amx_twin 0
#define FDSD_AMX_CHIP_2(tiles) FDSD_AMX_CHIP_##tiles
#define FDSD_AMX_CHIP_1(tiles) FDSD_AMX_CHIP_2(tiles)
#define FDSD_AMX_CHIP FDSD_AMX_CHIP_1(FDSD_TILES)

#if FDSD_AMX_CHIP

// What the calling thread's tiles are configured to. Code that configures them releases them before its task ends:
// other libraries may use tiles on the same thread.
inline thread_local TileShape configured_shape;

FDSD_INLINE void LoadTileConfig(const TileShape& shape) {
  struct alignas(64) {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  static_assert(sizeof(config) == 64);
  for (int t = 0; t < kNumTiles; ++t) {
    config.rows[t] = shape.rows[t];
    config.row_bytes[t] = shape.rows[t] == 0 ? 0 : shape.row_bytes[t];
  }
  asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
  configured_shape = shape;
}

FDSD_INLINE void ReleaseTiles() {
  asm volatile("tilerelease" : : : "memory");
  configured_shape = {};
}

template <int kTile>
FDSD_INLINE void ZeroTile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

// Rows lie `stride` bytes apart.
template <int kTile>
FDSD_INLINE void LoadTile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
FDSD_INLINE void StoreTile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
}

#define FDSD_TILE_DOT(Name, instruction)                                                     \
  template <int kC, int kA, int kB>                                                          \
  FDSD_INLINE void Name() {                                                                  \
    static_assert(kC != kA && kC != kB && kA != kB);                                         \
    asm volatile(instruction " %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB)); \
  }
FDSD_TILE_DOT(DotBf16, "tdpbf16ps")
FDSD_TILE_DOT(DotS8S8, "tdpbssd")
FDSD_TILE_DOT(DotS8U8, "tdpbsud")
FDSD_TILE_DOT(DotU8S8, "tdpbusd")
FDSD_TILE_DOT(DotU8U8, "tdpbuud")
#undef FDSD_TILE_DOT

#else

struct TileFile {
  TileShape shape;
  alignas(64) uint8_t data[kNumTiles][kTileBytes];
};
inline thread_local TileFile tile_file;
inline thread_local TileShape configured_shape;

// What the chip answers with an illegal-instruction fault.
FDSD_INLINE void Require(bool is_legal) {
  if (!is_legal) __builtin_trap();
}

FDSD_INLINE void LoadTileConfig(const TileShape& shape) {
  for (const uint8_t rows : shape.rows) Require(rows <= kTileRows);
  for (const uint8_t bytes : shape.row_bytes) Require(bytes > 0 && bytes <= kTileRowBytes);
  tile_file = {shape, {}};
  configured_shape = shape;
}

FDSD_INLINE void ReleaseTiles() {
  tile_file = {};
  configured_shape = {};
}

template <int kTile>
FDSD_INLINE void ZeroTile() {
  Require(tile_file.shape.rows[kTile] > 0);
  std::memset(tile_file.data[kTile], 0, kTileBytes);
}

template <int kTile>
FDSD_INLINE void LoadTile(const void* from, int64_t stride) {
  ZeroTile<kTile>();
  for (int r = 0; r < tile_file.shape.rows[kTile]; ++r) {
    std::memcpy(tile_file.data[kTile] + r * kTileRowBytes, static_cast<const uint8_t*>(from) + r * stride,
                tile_file.shape.row_bytes[kTile]);
  }
}

template <int kTile>
FDSD_INLINE void StoreTile(void* to, int64_t stride) {
  Require(tile_file.shape.rows[kTile] > 0);
  for (int r = 0; r < tile_file.shape.rows[kTile]; ++r) {
    std::memcpy(static_cast<uint8_t*>(to) + r * stride, tile_file.data[kTile] + r * kTileRowBytes,
                tile_file.shape.row_bytes[kTile]);
  }
}

// A product's operands: A and C with the same rows, B with a row for each word of those of A.
struct Operands {
  int rows;
  int words;
  uint8_t* c;
  const uint8_t* a;
  const uint8_t* b;
};
template <int kC, int kA, int kB>
FDSD_INLINE Operands OperandsOf() {
  static_assert(kC != kA && kC != kB && kA != kB);
  const TileShape& shape = tile_file.shape;
  Require(shape.rows[kC] > 0 && shape.rows[kC] == shape.rows[kA] && 4 * shape.rows[kB] == shape.row_bytes[kA]);
  Require(shape.row_bytes[kC] == kTileRowBytes && shape.row_bytes[kB] == kTileRowBytes);
  return {shape.rows[kC], shape.rows[kB], tile_file.data[kC], tile_file.data[kA], tile_file.data[kB]};
}

template <typename A, typename B>
inline void DotBytes(const Operands& o) {
  for (int r = 0; r < o.rows; ++r) {
    uint32_t sums[kTileColumns];
    std::memcpy(sums, o.c + r * kTileRowBytes, sizeof(sums));
    for (int k = 0; k < 4 * o.words; ++k) {
      const int32_t a = static_cast<A>(o.a[r * kTileRowBytes + k]);
      const uint8_t* b = o.b + k / 4 * kTileRowBytes + k % 4;
      for (int n = 0; n < kTileColumns; ++n) sums[n] += static_cast<uint32_t>(a * static_cast<B>(b[4 * n]));
    }
    std::memcpy(o.c + r * kTileRowBytes, sums, sizeof(sums));
  }
}

// Not inlined, so that no arithmetic moves out of the settings around the call.
__attribute__((noinline)) inline void AddBf16Products(const Operands& o) {
  for (int r = 0; r < o.rows; ++r) {
    F32x16 even = Set1(0.0f), odd = Set1(0.0f);
    for (int k = 0; k < o.words; ++k) {
      bf16 x[2];
      std::memcpy(x, o.a + r * kTileRowBytes + k * 4, sizeof(x));
      const __m512i pairs = _mm512_load_si512(o.b + k * kTileRowBytes);
      const F32x16 low = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
      const F32x16 high = {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-65536)))};
      even = Fma(Set1(ToFloat(x[0])), low, even);
      odd = Fma(Set1(ToFloat(x[1])), high, odd);
    }
    float* c = reinterpret_cast<float*>(o.c + r * kTileRowBytes);
    Store(Add(Load(c), Add(even, odd)), c);
  }
}

// Source: TDPBF16PS in Intel's Software Developer's Manual, volume 2. Within one product the first and the second
// elements of the pairs are two chains of fused multiply-adds that start at 0, over k in order; their sum is added to
// C. All of it rounds to nearest, ties to even, takes denormal inputs as zeros and flushes denormal results to zero,
// whatever the thread's own settings are.
template <int kC, int kA, int kB>
FDSD_INLINE void DotBf16() {
  constexpr unsigned kAllMasked = 0x1f80, kDenormalsAreZeros = 0x40, kFlushToZero = 0x8000;
  const Operands operands = OperandsOf<kC, kA, kB>();
  const unsigned before = _mm_getcsr();
  _mm_setcsr(kAllMasked | kDenormalsAreZeros | kFlushToZero);
  AddBf16Products(operands);
  _mm_setcsr(before);
}
template <int kC, int kA, int kB>
FDSD_INLINE void DotS8S8() {
  DotBytes<int8_t, int8_t>(OperandsOf<kC, kA, kB>());
}
template <int kC, int kA, int kB>
FDSD_INLINE void DotS8U8() {
  DotBytes<int8_t, uint8_t>(OperandsOf<kC, kA, kB>());
}
template <int kC, int kA, int kB>
FDSD_INLINE void DotU8S8() {
  DotBytes<uint8_t, int8_t>(OperandsOf<kC, kA, kB>());
}
template <int kC, int kA, int kB>
FDSD_INLINE void DotU8U8() {
  DotBytes<uint8_t, uint8_t>(OperandsOf<kC, kA, kB>());
}

#endif

// Give the calling thread's tiles this shape; what they hold is lost if it is another than before. Costs some hundred
// cycles where it is another, nearly nothing where it is the same.
FDSD_INLINE void ConfigureTiles(const TileShape& shape) {
  if (!(configured_shape == shape)) LoadTileConfig(shape);
}

}  // namespace FDSD_TILES
}  // namespace FDSD_ISA
}  // namespace fdsd
