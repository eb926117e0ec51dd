// Inner loops of the float formats.
#include "linear_tile.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// 16 columns of one step of a panel, and the same step of one row of x. Dot adds x * weight to 16 sums, in order of k.
struct Float32Step {
  using Weights = F32x16;
  static constexpr int kXBytes = kStepBytes;

  static FDSD_INLINE Weights LoadWeights(const uint8_t* p) { return Load(reinterpret_cast<const float*>(p)); }
  static FDSD_INLINE F32x16 Dot(F32x16 sum, Weights w, const uint8_t* x) {
    return Fma(w, Set1(*reinterpret_cast<const float*>(x)), sum);
  }
};

#if defined(FDSD_SIMD_AVX512)

struct Bf16Step {
  using Weights = __m512i;
  static constexpr int kXBytes = kBf16StepBytes;

  static FDSD_INLINE Weights LoadWeights(const uint8_t* p) { return _mm512_loadu_si512(p); }
  // As _mm512_dpbf16_ps, but with x broadcast by the instruction itself: a register per row less, so more loads of
  // weights are under way at a time.
  static FDSD_INLINE F32x16 Dot(F32x16 sum, Weights w, const uint8_t* x) {
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum.v) : "v"(w), "m"(*reinterpret_cast<const int32_t*>(x)));
    return sum;
  }
};

#else

// A pair is two floats here: the first input's weights are the low halves of 16 words, the second's the high halves.
struct Bf16Step {
  struct Weights {
    F32x16 first, second;
  };
  static constexpr int kXBytes = kBf16StepBytes;

  static FDSD_INLINE Weights LoadWeights(const uint8_t* p) {
#if defined(FDSD_SIMD_AVX2)
    const __m256i lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i hi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + 1);
    const __m256i high_half = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u));
    return {
        {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))},
        {_mm256_castsi256_ps(_mm256_and_si256(lo, high_half)), _mm256_castsi256_ps(_mm256_and_si256(hi, high_half))}};
#else
    const bf16* pairs = reinterpret_cast<const bf16*>(p);
    Weights w;
    for (int i = 0; i < kLanes; ++i) {
      w.first.v[i] = ToFloat(pairs[2 * i]);
      w.second.v[i] = ToFloat(pairs[2 * i + 1]);
    }
    return w;
#endif
  }
  static FDSD_INLINE F32x16 Dot(F32x16 sum, const Weights& w, const uint8_t* x) {
    const float* pair = reinterpret_cast<const float*>(x);
    return Fma(w.second, Set1(pair[1]), Fma(w.first, Set1(pair[0]), sum));
  }
};

#endif

template <class Step, int kRows>
void MultiplyTile(const uint8_t* panel, const uint8_t* tile, const Slices& slices, int64_t ahead, float* levels) {
  constexpr int kVectors = kVectorsAtOnce<kRows>;
  constexpr int kVectorBytes = kLanes * kStepBytes;
  for (int32_t s = 0; s < slices.count; ++s) {
    const int32_t num_units = slices.units[s + 1] - slices.units[s];
    for (int first = 0; first < kPanelVectors; first += kVectors) {
      F32x16 sum[kRows][kVectors];
      for (auto& row : sum)
        for (auto& v : row) v = Set1(0.0f);
      const uint8_t* weights = panel;
      const uint8_t* x = tile;
      AskingOrNot(ahead, [&](auto asks) {
        for (int32_t k = 0; k < num_units; ++k) {
          typename Step::Weights w[kVectors];
          for (int v = 0; v < kVectors; ++v) w[v] = Step::LoadWeights(weights + (first + v) * kVectorBytes);
          if constexpr (asks) PrefetchStep<kPanelVectors * kVectorBytes>(weights, ahead);
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) sum[r][v] = Step::Dot(sum[r][v], w[v], x + r * Step::kXBytes);
          }
          weights += kPanelVectors * kVectorBytes;
          x += kRows * Step::kXBytes;
        }
      });
      StoreSlice<kRows, kVectors>(sum, s, levels + first * kLanes);
    }
    panel += int64_t{num_units} * kPanelVectors * kVectorBytes;
    tile += int64_t{num_units} * kRows * Step::kXBytes;
  }
}

template <int kRows>
struct Float32Tile {
  static constexpr TileFunction Run = MultiplyTile<Float32Step, kRows>;
};
template <int kRows>
struct Bf16Tile {
  static constexpr TileFunction Run = MultiplyTile<Bf16Step, kRows>;
};

}  // namespace

const TileFunctions kFloat32Tiles = MakeTileFunctions<Float32Tile>();
const TileFunctions kBf16Tiles = MakeTileFunctions<Bf16Tile>();

}  // namespace FDSD_ISA
}  // namespace fdsd
