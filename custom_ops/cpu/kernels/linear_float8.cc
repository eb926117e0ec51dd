// Inner loops of e4m3: codes are widened to the bf16 numbers that they are times 2^-8, and multiplied with bf16 rows as
// bf16 weights are. Then sum += dot * (weight scale * 2^8), in order of the groups of 128 inputs.
#include "linear_sums.h"
#include "linear_tile.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

constexpr float kCodeScale = 256.0f;
constexpr int kXBytes = kBf16StepBytes;

// 16 columns of a step, 4 inputs each. Dot adds x * weight to 16 sums, in order of k; x has the steps of two pairs,
// `next` bytes apart.
#if defined(FDSD_SIMD_AVX512)

struct Float8Step {
  struct Weights {
    __m512i pairs[2];
  };

  static FDSD_INLINE Weights LoadWeights(const uint8_t* p) {
    const __m512i codes = _mm512_loadu_si512(p);
    // Rare: dot products take subnormal bf16 numbers for zeros, so those of e4m3 are made normal ones.
    if (_mm512_testn_epi8_mask(codes, _mm512_set1_epi8(0x78)) != 0) [[unlikely]]
      return WidenSubnormals(p);
    return {{Widen(_mm512_shuffle_epi8(codes, UpperBytes(0x01'80'00'80))),
             Widen(_mm512_shuffle_epi8(codes, UpperBytes(0x03'80'02'80)))}};
  }
  static FDSD_INLINE F32x16 Dot(F32x16 sum, const Weights& w, const uint8_t* x, int64_t next) {
    // As in linear_float.cc.
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum.v) : "v"(w.pairs[0]), "m"(*reinterpret_cast<const int32_t*>(x)));
    asm("vdpbf16ps %2%{1to16%}, %1, %0"
        : "+v"(sum.v)
        : "v"(w.pairs[1]), "m"(*reinterpret_cast<const int32_t*>(x + next)));
    return sum;
  }

 private:
  // Bytes of a word, 0x80 = zero, for the four words of a lane of 16 bytes.
  static FDSD_INLINE __m512i UpperBytes(int32_t bytes) {
    return _mm512_broadcast_i32x4(
        _mm_add_epi32(_mm_set1_epi32(bytes), _mm_setr_epi32(0, 0x04'00'04'00, 0x08'00'08'00, 0x0c'00'0c'00)));
  }
  // Sign, exponent and fraction to their places; an exponent below 16 and that of 2^-15 have no bit in common.
  static FDSD_INLINE __m512i Widen(__m512i upper) {
    return _mm512_ternarylogic_epi32(_mm512_srai_epi16(upper, 4), _mm512_set1_epi16(static_cast<int16_t>(0x87f0)),
                                     _mm512_set1_epi16(0x3800), 0xea);  // (a & b) | c
  }
  // As half floats, codes have the same numbers, subnormal ones too.
  static FDSD_INLINE Weights WidenSubnormals(const uint8_t* p) {
    __m512i wide[2];
    for (int h = 0; h < 2; ++h) {
      const __m512i codes = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + h));
      const __m512i halves =
          _mm512_and_si512(_mm512_slli_epi16(codes, 7), _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
      wide[h] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)),
                                                              _mm512_cvtph_ps(_mm512_castsi512_si256(halves))));
    }
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
    return {{_mm512_permutex2var_epi32(wide[0], even, wide[1]), _mm512_permutex2var_epi32(wide[0], odd, wide[1])}};
  }
};

#else

struct Float8Step {
  struct Weights {
    F32x16 inputs[4];
  };

  static FDSD_INLINE Weights LoadWeights(const uint8_t* p) {
    Weights w;
#if defined(FDSD_SIMD_AVX2)
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + 1);
    for (int i = 0; i < 4; ++i) w.inputs[i] = {Widen(low, 24 - 8 * i), Widen(high, 24 - 8 * i)};
#else
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < kLanes; ++j) w.inputs[i].v[j] = Widen(p[4 * j + i]);
#endif
    return w;
  }
  static FDSD_INLINE F32x16 Dot(F32x16 sum, const Weights& w, const uint8_t* x, int64_t next) {
    const float* first = reinterpret_cast<const float*>(x);
    const float* second = reinterpret_cast<const float*>(x + next);
    sum = Fma(w.inputs[1], Set1(first[1]), Fma(w.inputs[0], Set1(first[0]), sum));
    return Fma(w.inputs[3], Set1(second[1]), Fma(w.inputs[2], Set1(second[0]), sum));
  }

 private:
  // Sign, exponent and fraction to their places make the number times 2^-120.
#if defined(FDSD_SIMD_AVX2)
  static FDSD_INLINE __m256 Widen(__m256i codes, int shift) {
    const __m256i placed = _mm256_srai_epi32(_mm256_slli_epi32(codes, shift), 4);
    const __m256i bits = _mm256_and_si256(placed, _mm256_set1_epi32(static_cast<int32_t>(0x87f00000u)));
    return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p112f));
  }
#else
  static float Widen(uint8_t code) {
    const uint32_t bits = (code & 0x80u) << 24 | (code & 0x7fu) << 20;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value * 0x1p112f;
  }
#endif
};

#endif

template <int kRows>
void MultiplyTile(const uint8_t* panel, const uint8_t* tile, const Slices& slices, int64_t ahead, float* levels) {
  constexpr int kVectors = kVectorsAtOnce<kRows>;
  constexpr int kVectorBytes = kLanes * kStepBytes;
  constexpr int64_t kGroupBytes = kWint8Bytes + kScaleBytes;
  constexpr int64_t kNext = int64_t{kRows} * kXBytes;
  for (int32_t s = 0; s < slices.count; ++s) {
    const int32_t num_units = slices.units[s + 1] - slices.units[s];
    for (int first = 0; first < kPanelVectors; first += kVectors) {
      const uint8_t* weights = panel;
      const uint8_t* x = tile;
      TileSums<kRows, kVectors, (2 * kRows * kVectors <= kMaxSums)> tile_sums(levels + first * kLanes, s);
      for (int32_t g = 0; g < num_units; ++g) {
        F32x16 dots[kRows][kVectors];
        for (auto& row : dots)
          for (auto& v : row) v = Set1(0.0f);
        AskingOrNot(ahead, [&](auto asks) {
          if constexpr (asks) PrefetchStep<kScaleBytes>(weights + kWint8Bytes, ahead);
#pragma GCC unroll 1
          for (int step = 0; step < kGroupSteps; ++step) {
            typename Float8Step::Weights w[kVectors];
            for (int v = 0; v < kVectors; ++v) w[v] = Float8Step::LoadWeights(weights + (first + v) * kVectorBytes);
            if constexpr (asks) PrefetchStep<kPanelVectors * kVectorBytes>(weights, ahead);
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
              for (int v = 0; v < kVectors; ++v) dots[r][v] = Float8Step::Dot(dots[r][v], w[v], x + r * kXBytes, kNext);
            }
            weights += kPanelVectors * kVectorBytes;
            x += 2 * kNext;
          }
        });
        const float* scales = reinterpret_cast<const float*>(weights);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          const F32x16 scale = Mul(Load(scales + (first + v) * kLanes), Set1(kCodeScale));
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) tile_sums.Add(r, v, dots[r][v], scale);
        }
        tile_sums.NextGroup();
        weights += kScaleBytes;
      }
      tile_sums.End(levels + first * kLanes, s);
    }
    panel += int64_t{num_units} * kGroupBytes;
    tile += int64_t{num_units} * kRows * RowUnitBytes(LinearFormat::kE4m3);
  }
}

template <int kRows>
struct Float8Tile {
  static constexpr TileFunction Run = MultiplyTile<kRows>;
};

}  // namespace

const TileFunctions kFloat8Tiles = MakeTileFunctions<Float8Tile>();

}  // namespace FDSD_ISA
}  // namespace fdsd
