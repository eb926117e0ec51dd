// Inner loops of the int formats. Integer dot products within a group of 128 are exact, and so the same on every
// instruction-set level. Then sum += float(dot) * (weight scale * x scale), in order of the groups.
#include "linear_sums.h"
#include "linear_tile.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

#if defined(FDSD_SIMD_AVX512)

// 16 columns of one step, 4 unsigned bytes each (value + zero point). The dot products start at -zero point * sum of x.
struct Wint8Step {
  using Weights = __m512i;
  using Sum = __m512i;
  static constexpr int kBytes = kPanelColumns * 4;
  static constexpr int kPartialSteps = 0;  // no sums narrower than Sum

  static FDSD_INLINE Weights LoadWeights(const uint8_t* p, int vector) { return _mm512_loadu_si512(p + vector * 64); }
  static FDSD_INLINE Sum Start(int32_t start) { return _mm512_set1_epi32(start); }
  // The same as _mm512_dpbusd_epi32, around which gcc 12 spills the sums to the stack. x is broadcast by the
  // instruction itself: a register per row less, so more loads of weights are under way at a time.
  static FDSD_INLINE Sum Dot(Sum sum, Weights w, const uint8_t* x) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const int32_t*>(x)));
    return sum;
  }
  static FDSD_INLINE F32x16 ToFloats(const Sum* sums, int vector) { return {_mm512_cvtepi32_ps(sums[vector])}; }
};

// Bytes are multiplied as they are: low nibble + 16 * high nibble for the first vector of columns, 16 * high nibble for
// the second. The nibbles' own products are taken apart once per group.
struct Wint4Step : Wint8Step {
  static constexpr int kBytes = kPanelColumns * 2;

  static FDSD_INLINE Weights LoadWeights(const uint8_t* p, int vector) {
    const __m512i pairs = _mm512_loadu_si512(p);
    return vector == 0 ? pairs : _mm512_and_si512(pairs, _mm512_set1_epi8(static_cast<char>(0xf0)));
  }
  static FDSD_INLINE F32x16 ToFloats(const Sum* sums, int vector) {
    return {_mm512_cvtepi32_ps(vector == 0 ? _mm512_sub_epi32(sums[0], sums[1]) : _mm512_srai_epi32(sums[1], 4))};
  }
};

#elif defined(FDSD_SIMD_AVX2)

struct Int32x16 {
  __m256i lo, hi;
};

// maddubs adds two products in 16 bits, which full unsigned bytes would overflow: |w| * (x with the sign of w) fits, as
// |w| and |x| are at most 127. These weights have no zero point left, so the start value is not used.
struct Wint8Step {
  using Weights = Int32x16;
  using Sum = Int32x16;
  static constexpr int kBytes = kPanelColumns * 4;
  static constexpr int kPartialSteps = 0;  // no sums narrower than Sum

  static FDSD_INLINE __m256i Signed(const uint8_t* p) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm256_xor_si256(raw, _mm256_set1_epi8(static_cast<char>(0x80)));
  }
  static FDSD_INLINE Weights LoadWeights(const uint8_t* p, int vector) {
    return {Signed(p + vector * 64), Signed(p + vector * 64 + 32)};
  }
  static FDSD_INLINE Sum Start(int32_t) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static FDSD_INLINE __m256i Broadcast(const uint8_t* x) {
    return _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(x));
  }
  static FDSD_INLINE __m256i Add4(__m256i sum, __m256i products) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
  }
  static FDSD_INLINE __m256i DotHalf(__m256i sum, __m256i w, __m256i x) {
    return Add4(sum, _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)));
  }
  static FDSD_INLINE Sum Dot(Sum sum, const Weights& w, const uint8_t* x) {
    return {DotHalf(sum.lo, w.lo, Broadcast(x)), DotHalf(sum.hi, w.hi, Broadcast(x))};
  }
  static FDSD_INLINE F32x16 ToFloats(const Sum* sums, int vector) {
    return {_mm256_cvtepi32_ps(sums[vector].lo), _mm256_cvtepi32_ps(sums[vector].hi)};
  }
};

// Nibbles are at most 15: maddubs takes them unsigned, and eight of its sums of two products fit 16 bits.
struct Wint4Step : Wint8Step {
  static constexpr int kBytes = kPanelColumns * 2;
  static constexpr int kPartialSteps = 8;

  static FDSD_INLINE __m256i Nibbles(const uint8_t* p, int vector) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm256_and_si256(vector == 0 ? pairs : _mm256_srli_epi16(pairs, 4), _mm256_set1_epi8(15));
  }
  static FDSD_INLINE Weights LoadWeights(const uint8_t* p, int vector) {
    return {Nibbles(p, vector), Nibbles(p + 32, vector)};
  }
  static FDSD_INLINE Sum Start(int32_t start) { return {_mm256_set1_epi32(start), _mm256_set1_epi32(start)}; }
  static FDSD_INLINE Sum Dot(const Sum& partial, const Weights& w, const uint8_t* x) {
    return {_mm256_add_epi16(partial.lo, _mm256_maddubs_epi16(w.lo, Broadcast(x))),
            _mm256_add_epi16(partial.hi, _mm256_maddubs_epi16(w.hi, Broadcast(x)))};
  }
  static FDSD_INLINE Sum AddPartial(const Sum& sum, const Sum& partial) {
    return {Add4(sum.lo, partial.lo), Add4(sum.hi, partial.hi)};
  }
};

#else

struct Wint8Step {
  struct Weights {
    uint8_t v[kLanes * 4];
  };
  struct Sum {
    int32_t v[kLanes];
  };
  static constexpr int kBytes = kPanelColumns * 4;
  static constexpr int kPartialSteps = 0;  // no sums narrower than Sum

  static FDSD_INLINE Weights LoadWeights(const uint8_t* p, int vector) {
    Weights w;
    std::memcpy(w.v, p + vector * sizeof(w.v), sizeof(w.v));
    return w;
  }
  static FDSD_INLINE Sum Start(int32_t start) {
    Sum sum;
    for (int32_t& v : sum.v) v = start;
    return sum;
  }
  static FDSD_INLINE Sum Dot(Sum sum, const Weights& w, const uint8_t* x) {
    for (int i = 0; i < kLanes; ++i)
      for (int b = 0; b < 4; ++b) sum.v[i] += w.v[4 * i + b] * static_cast<int8_t>(x[b]);
    return sum;
  }
  static FDSD_INLINE F32x16 ToFloats(const Sum* sums, int vector) {
    F32x16 f;
    for (int i = 0; i < kLanes; ++i) f.v[i] = static_cast<float>(sums[vector].v[i]);
    return f;
  }
};

struct Wint4Step : Wint8Step {
  static constexpr int kBytes = kPanelColumns * 2;

  static FDSD_INLINE Weights LoadWeights(const uint8_t* p, int vector) {
    Weights w;
    for (int i = 0; i < kBytes; ++i) w.v[i] = vector == 0 ? p[i] & 15 : p[i] >> 4;
    return w;
  }
};

#endif

// Dot products over `kSteps` steps, added to `dots`.
template <class Step, int kRows, int kVectors, int kSteps, bool kAsks>
FDSD_INLINE void MultiplySteps(const uint8_t* weights, const uint8_t* x, int first, int64_t ahead,
                               typename Step::Sum (*dots)[kVectors]) {
#pragma GCC unroll 1
  for (int s = 0; s < kSteps; ++s) {
    typename Step::Weights w[kVectors];
    for (int v = 0; v < kVectors; ++v) w[v] = Step::LoadWeights(weights, first + v);
    if constexpr (kAsks) PrefetchStep<Step::kBytes>(weights, ahead);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) dots[r][v] = Step::Dot(dots[r][v], w[v], x + r * 4);
    }
    weights += Step::kBytes;
    x += kRows * 4;
  }
}

// One group's integer dot products, for vectors [first, first + kVectors) of the panel's columns.
template <class Step, int kRows, int kVectors, bool kAsks>
FDSD_INLINE void MultiplyGroup(const uint8_t* weights, const uint8_t* x, const int32_t* starts, int first,
                               int64_t ahead, typename Step::Sum (*dots)[kVectors]) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) dots[r][v] = Step::Start(starts[(first + v) * kRows + r]);
  if constexpr (Step::kPartialSteps == 0) {
    MultiplySteps<Step, kRows, kVectors, kGroupSteps, kAsks>(weights, x, first, ahead, dots);
  } else {
    for (int s = 0; s < kGroupSteps; s += Step::kPartialSteps) {
      typename Step::Sum partial[kRows][kVectors];
      for (auto& row : partial)
        for (auto& v : row) v = Step::Start(0);
      MultiplySteps<Step, kRows, kVectors, Step::kPartialSteps, kAsks>(weights + s * Step::kBytes, x + s * kRows * 4,
                                                                       first, ahead, partial);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) dots[r][v] = Step::AddPartial(dots[r][v], partial[r][v]);
    }
  }
}

template <class Step, int kRows>
void MultiplyTile(const uint8_t* panel, const uint8_t* tile, const Slices& slices, int64_t ahead, float* levels) {
  constexpr int kVectors = kVectorsAtOnce<kRows>;
  constexpr int kPanelGroupBytes = kGroupSteps * Step::kBytes + kScaleBytes;
  for (int32_t s = 0; s < slices.count; ++s) {
    const int32_t num_units = slices.units[s + 1] - slices.units[s];
    for (int first = 0; first < kPanelVectors; first += kVectors) {
      const uint8_t* weights = panel;
      const uint8_t* x = tile;
      TileSums<kRows, kVectors, (2 * kRows * kVectors <= kMaxSums)> tile_sums(levels + first * kLanes, s);
      for (int32_t g = 0; g < num_units; ++g) {
        const float* w_scales = reinterpret_cast<const float*>(weights + kGroupSteps * Step::kBytes);
        const float* x_scales = reinterpret_cast<const float*>(x + kRows * kQuantGroup);
        typename Step::Sum dots[kRows][kVectors];
        const int32_t* starts = reinterpret_cast<const int32_t*>(x_scales + kRows);
        AskingOrNot(ahead, [&](auto asks) {
          if constexpr (asks) PrefetchStep<kScaleBytes>(weights + kGroupSteps * Step::kBytes, ahead);
          MultiplyGroup<Step, kRows, kVectors, asks>(weights, x, starts, first, ahead, dots);
        });
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          const F32x16 w_scale = Load(w_scales + (first + v) * kLanes);
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) {
            tile_sums.Add(r, v, Step::ToFloats(dots[r], v), Mul(w_scale, Set1(x_scales[r])));
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
  static constexpr TileFunction Run = MultiplyTile<Wint8Step, kRows>;
};
template <int kRows>
struct Wint4Tile {
  static constexpr TileFunction Run = MultiplyTile<Wint4Step, kRows>;
};

}  // namespace

const TileFunctions kWint8Tiles = MakeTileFunctions<Wint8Tile>();
const TileFunctions kWint4Tiles = MakeTileFunctions<Wint4Tile>();

}  // namespace FDSD_ISA
}  // namespace fdsd
