#pragma once
// The int formats on tiles, with the bits of every level: exact sums within a group of 128, then
// sum += float(dot) * (weight scale * x scale), in the order of the groups.
#include "amx/linear_block.h"
#include "linear_codes.h"

namespace fdsd {
namespace FDSD_ISA {
namespace FDSD_TILES {

// The columns of a group of the int formats as two tiles of B per step of 64 inputs.
struct Wint8 {
  static constexpr int kGroupBytes = kWint8Bytes + kScaleBytes;
  static constexpr int kBufferBytes = 64;  // none wanted

  static FDSD_INLINE void Unpack(const uint8_t*, uint8_t*) {}
  static FDSD_INLINE const uint8_t* Int8Codes(const uint8_t* group, const uint8_t*) { return group; }
};

struct Wint4 {
  static constexpr int kGroupBytes = kWint4Bytes + kFactorBytes + kScaleBytes;
  static constexpr int kBufferBytes = kWint8Bytes;

  static FDSD_INLINE void Unpack(const uint8_t* group, uint8_t* buffer) { UnpackInt8Codes(group, buffer); }
  static FDSD_INLINE const uint8_t* Int8Codes(const uint8_t*, const uint8_t* buffer) { return buffer; }
};

template <class Weights>
struct Int {
  static constexpr int kChunkSteps = kChunkBytes / (Weights::kGroupBytes - kScaleBytes);  // a step is a group

  static int64_t NumSteps(const Slice& slice) { return slice.num_units; }

  template <bool kBoth>
  static FDSD_INLINE void MultiplyGroup(const uint8_t* a, int num_rows, const uint8_t* b) {
    ZeroSums<kBoth>();
    for (int step = 0; step < kGroupRowSteps; ++step) {
      LoadTile<4>(a, kStepRowBytes);
      LoadTile<6>(b, kPanelStepBytes);
      LoadTile<7>(b + kHalfColumnsBytes, kPanelStepBytes);
      DotS8U8<0, 4, 6>();
      DotS8U8<1, 4, 7>();
      if constexpr (kBoth) {
        LoadTile<5>(a + kTileRows * kStepRowBytes, kStepRowBytes);
        DotS8U8<2, 5, 6>();
        DotS8U8<3, 5, 7>();
      }
      a += num_rows * kStepRowBytes;
      b += kTileRows * kPanelStepBytes;
    }
  }

  static FDSD_INLINE void AddGroup(const int32_t* dots, int num_rows, const float* w_scales, const float* x_scales,
                                   const int32_t* starts, float* sums) {
    const F32x16 w_scale[kPanelVectors] = {Load(w_scales), Load(w_scales + kLanes)};
    for (int r = 0; r < num_rows; ++r, dots += kPanelColumns, sums += kPanelColumns) {
      const __m512i start = _mm512_set1_epi32(starts[r]);
      const F32x16 x_scale = Set1(x_scales[r]);
      for (int v = 0; v < kPanelVectors; ++v) {
        const F32x16 dot = ToFloats(_mm512_add_epi32(_mm512_load_si512(dots + v * kLanes), start));
        Store(Fma(dot, Mul(w_scale[v], x_scale), Load(sums + v * kLanes)), sums + v * kLanes);
      }
    }
  }

  // While the tiles multiply a group, the vectors add the previous group to the sums and unpack the next one. Tiles
  // cannot be loaded from what has just been stored without a wait.
  template <bool kBoth>
  static void Multiply(const PackedRows& x, const Rows& rows, const Slice& slice, int64_t begin, int64_t end,
                       float* sums, Ahead* ahead) {
    IntPack pack(const_cast<uint8_t*>(rows.pack), x.slices, rows.count);
    alignas(64) int32_t dots[2][kBlockSums];
    alignas(64) uint8_t buffers[2][Weights::kBufferBytes];
    if (begin == 0) std::memset(sums, 0, sizeof(float) * kBlockSums);
    const uint8_t* const weights = slice.weights;
    const auto add = [&](int64_t g) {
      const int64_t at = (slice.first + g) * rows.count;
      const float* w_scales = reinterpret_cast<const float*>(weights + (g + 1) * Weights::kGroupBytes - kScaleBytes);
      AddGroup(dots[g & 1], rows.count, w_scales, pack.scales + at, pack.starts + at, sums);
    };
    Weights::Unpack(weights + begin * Weights::kGroupBytes, buffers[begin & 1]);
    for (int64_t g = begin; g < end; ++g) {
      ahead->Step();
      const uint8_t* const group = weights + g * Weights::kGroupBytes;
      MultiplyGroup<kBoth>(pack.integers + (slice.first + g) * rows.count * kQuantGroup, rows.count,
                           Weights::Int8Codes(group, buffers[g & 1]));
      if (g + 1 < end) Weights::Unpack(group + Weights::kGroupBytes, buffers[(g + 1) & 1]);
      if (g > begin) add(g - 1);
      StoreTiles<kBoth>(dots[g & 1]);
    }
    add(end - 1);
  }
};

}  // namespace FDSD_TILES
}  // namespace FDSD_ISA
}  // namespace fdsd
