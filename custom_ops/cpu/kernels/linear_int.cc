// Inner loops of wint8 and wint4, whose weights are int8 once their factors are in. Integer dot products within a group
// of 128 are exact, and so the same on every instruction-set level. Then sum += float(dot) * (weight scale * x scale),
// in order of the groups.
#include "linear_codes.h"
#include "linear_sums.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// Steps of 4 inputs whose weights are made alike, and their bytes.
template <LinearFormat kFormat>
constexpr int kAlikeSteps = kFormat == LinearFormat::kWint4 ? kFactorInputs / kStepBytes : kGroupSteps;
template <LinearFormat kFormat>
constexpr int kCodeBytes = kPanelColumns * (kFormat == LinearFormat::kWint4 ? 2 : 4);

// Dot products over kAlikeSteps steps, added to `dots`.
template <LinearFormat kFormat, int kRows, int kVectors, bool kAsks>
FDSD_INLINE void MultiplySteps(const uint8_t* weights, const uint8_t* factors, const uint8_t* x, int first,
                               int64_t ahead, Dots (*dots)[kVectors]) {
  constexpr bool kHasFactors = kFormat == LinearFormat::kWint4;
  Factors own[kVectors];
  for (int v = 0; v < kVectors && kHasFactors; ++v) own[v] = LoadFactors(factors, first + v);
  const auto multiply_step = [&](int s) __attribute__((always_inline)) {
    Codes w[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      w[v] = kHasFactors ? LoadInt8Codes(weights, own[v], first + v) : LoadCodes<8>(weights, nullptr, s, first + v);
    }
    if constexpr (kAsks) PrefetchStep<kCodeBytes<kFormat>>(weights, ahead);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) dots[r][v] = Dot<8>(dots[r][v], w[v], x + r * 4);
    }
    weights += kCodeBytes<kFormat>;
    x += kRows * 4;
  };
  if constexpr (kHasFactors) {
#pragma GCC unroll 4
    for (int s = 0; s < kAlikeSteps<kFormat>; ++s) multiply_step(s);
  } else {
#pragma GCC unroll 1
    for (int s = 0; s < kAlikeSteps<kFormat>; ++s) multiply_step(s);
  }
}

#if defined(FDSD_SIMD_AVX2)
// The same with factors, which multiply sums of nibbles over 16 inputs: these fit 16 bits, and maddubs takes nibbles as
// they are. Zeros multiply the sums of x.
template <int kRows, int kVectors, bool kAsks>
FDSD_INLINE void MultiplyNibbles(const uint8_t* weights, const uint8_t* factors, const uint8_t* x, int first,
                                 int64_t ahead, Dots (*dots)[kVectors]) {
  constexpr int kSteps = kAlikeSteps<LinearFormat::kWint4>;
  const auto broadcast = [&](int s, int r) __attribute__((always_inline)) {
    return _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(x + (s * kRows + r) * kStepBytes));
  };
  __m256i x_sums[kRows];
  for (int r = 0; r < kRows; ++r) {
    x_sums[r] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int s = 0; s < kSteps; ++s) {
      x_sums[r] = _mm256_add_epi16(x_sums[r], _mm256_maddubs_epi16(_mm256_set1_epi8(1), broadcast(s, r)));
    }
  }
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    const Factors own = LoadFactors(factors, first + v);
    Codes sums[kRows];
    for (int r = 0; r < kRows; ++r) {
      sums[r] = {_mm256_mullo_epi16(x_sums[r], own.zeros.lo), _mm256_mullo_epi16(x_sums[r], own.zeros.hi)};
    }
#pragma GCC unroll 4
    for (int s = 0; s < kSteps; ++s) {
      const uint8_t* const codes = weights + s * kCodeBytes<LinearFormat::kWint4>;
      const Codes w = LoadCodes<4>(codes, nullptr, s, first + v);
      if constexpr (kAsks) {
        if (v == 0) PrefetchStep<kCodeBytes<LinearFormat::kWint4>>(codes, ahead);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        sums[r].lo = _mm256_sub_epi16(sums[r].lo, _mm256_maddubs_epi16(w.lo, broadcast(s, r)));
        sums[r].hi = _mm256_sub_epi16(sums[r].hi, _mm256_maddubs_epi16(w.hi, broadcast(s, r)));
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      dots[r][v].lo = _mm256_sub_epi32(dots[r][v].lo, _mm256_madd_epi16(sums[r].lo, own.factors.lo));
      dots[r][v].hi = _mm256_sub_epi32(dots[r][v].hi, _mm256_madd_epi16(sums[r].hi, own.factors.hi));
    }
  }
}
#endif

// One group's integer dot products, for vectors [first, first + kVectors) of the panel's columns.
template <LinearFormat kFormat, int kRows, int kVectors, bool kAsks>
FDSD_INLINE void MultiplyGroup(const uint8_t* weights, const uint8_t* x, const int32_t* starts, int first,
                               int64_t ahead, Dots (*dots)[kVectors]) {
  constexpr int kSteps = kAlikeSteps<kFormat>;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) dots[r][v] = Start(kHasZero<8> ? starts[r] : 0);
  const uint8_t* factors = weights + kGroupSteps * kCodeBytes<kFormat>;
  for (int s = 0; s < kGroupSteps; s += kSteps) {
#if defined(FDSD_SIMD_AVX2)
    if constexpr (kFormat == LinearFormat::kWint4) {
      MultiplyNibbles<kRows, kVectors, kAsks>(weights, factors, x, first, ahead, dots);
    } else {
      MultiplySteps<kFormat, kRows, kVectors, kAsks>(weights, factors, x, first, ahead, dots);
    }
#else
    MultiplySteps<kFormat, kRows, kVectors, kAsks>(weights, factors, x, first, ahead, dots);
#endif
    weights += kSteps * kCodeBytes<kFormat>;
    factors += kPanelColumns;
    x += kSteps * kRows * 4;
  }
}

template <LinearFormat kFormat, int kRows>
void MultiplyTile(const uint8_t* panel, const uint8_t* tile, const Slices& slices, int64_t ahead, float* levels) {
  constexpr int kVectors = kVectorsAtOnce<kRows>;
  constexpr int kPanelGroupBytes = GroupFormatOf(kFormat).unit_bytes();
  constexpr int kScalesAt = kPanelGroupBytes - kScaleBytes;
  constexpr int kAllCodesBytes = kGroupSteps * kCodeBytes<kFormat>;
  for (int32_t s = 0; s < slices.count; ++s) {
    const int32_t num_units = slices.units[s + 1] - slices.units[s];
    for (int first = 0; first < kPanelVectors; first += kVectors) {
      const uint8_t* weights = panel;
      const uint8_t* x = tile;
      TileSums<kRows, kVectors, (2 * kRows * kVectors <= kMaxSums)> tile_sums(levels + first * kLanes, s);
      for (int32_t g = 0; g < num_units; ++g) {
        const float* w_scales = reinterpret_cast<const float*>(weights + kScalesAt);
        const float* x_scales = reinterpret_cast<const float*>(x + kRows * kQuantGroup);
        Dots dots[kRows][kVectors];
        const int32_t* starts = reinterpret_cast<const int32_t*>(x_scales + kRows);
        AskingOrNot(ahead, [&](auto asks) {
          if constexpr (asks) PrefetchStep<kPanelGroupBytes - kAllCodesBytes>(weights + kAllCodesBytes, ahead);
          MultiplyGroup<kFormat, kRows, kVectors, asks>(weights, x, starts, first, ahead, dots);
        });
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          const F32x16 w_scale = Load(w_scales + (first + v) * kLanes);
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) {
            tile_sums.Add(r, v, ToFloats(dots[r][v]), Mul(w_scale, Set1(x_scales[r])));
          }
        }
        tile_sums.NextGroup();
        weights += kPanelGroupBytes;
        x += kRows * kRowGroupBytes;
      }
      tile_sums.End(levels + first * kLanes, s);
    }
    panel += int64_t{num_units} * kPanelGroupBytes;
    tile += int64_t{num_units} * kRows * kRowGroupBytes;
  }
}

template <int kRows>
struct Wint8Tile {
  static constexpr TileFunction Run = MultiplyTile<LinearFormat::kWint8, kRows>;
};
template <int kRows>
struct Wint4Tile {
  static constexpr TileFunction Run = MultiplyTile<LinearFormat::kWint4, kRows>;
};

}  // namespace

const TileFunctions kWint8Tiles = MakeTileFunctions<Wint8Tile>();
const TileFunctions kWint4Tiles = MakeTileFunctions<Wint4Tile>();

}  // namespace FDSD_ISA
}  // namespace fdsd
