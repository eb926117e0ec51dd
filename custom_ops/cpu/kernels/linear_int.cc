// Inner loops of the int formats: integer dot products within a group of 128, which are exact and so the same on every
// instruction-set level; then sum += float(dot) * (weight scale * x scale), in order of the groups.
#include "linear_tile.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

#if defined(FDSD_SIMD_AVX512)

// 16 columns of one step, 4 unsigned bytes each (value + zero point). The dot products start at -zero point * sum of x.
struct Wint8Step {
  using Weights = __m512i;
  using Sum = __m512i;
  using X = __m512i;
  static constexpr int kBytes = kPanelColumns * 4;

  static FDSD_INLINE Weights LoadWeights(const uint8_t* p, int vector) { return _mm512_loadu_si512(p + vector * 64); }
  static FDSD_INLINE Sum Start(int32_t start) { return _mm512_set1_epi32(start); }
  static FDSD_INLINE X LoadX(const uint8_t* p) { return _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(p)); }
  // The same as _mm512_dpbusd_epi32, around which gcc 12 spills the sums to the stack.
  static FDSD_INLINE Sum Dot(Sum sum, Weights w, X x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
    return sum;
  }
  static FDSD_INLINE F32x16 ToFloats(Sum sum) { return {_mm512_cvtepi32_ps(sum)}; }
};

struct Wint4Step : Wint8Step {
  static constexpr int kBytes = kPanelColumns * 2;

  static FDSD_INLINE Weights LoadWeights(const uint8_t* p, int vector) {
    const __m512i pairs = _mm512_loadu_si512(p);
    return _mm512_and_si512(vector == 0 ? pairs : _mm512_srli_epi16(pairs, 4), _mm512_set1_epi8(15));
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
  using X = __m256i;
  static constexpr int kBytes = kPanelColumns * 4;

  static FDSD_INLINE __m256i Signed(const uint8_t* p) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm256_xor_si256(raw, _mm256_set1_epi8(static_cast<char>(0x80)));
  }
  static FDSD_INLINE Weights LoadWeights(const uint8_t* p, int vector) {
    return {Signed(p + vector * 64), Signed(p + vector * 64 + 32)};
  }
  static FDSD_INLINE Sum Start(int32_t) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static FDSD_INLINE X LoadX(const uint8_t* p) { return _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(p)); }
  static FDSD_INLINE __m256i Add4(__m256i sum, __m256i products) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
  }
  static FDSD_INLINE __m256i DotHalf(__m256i sum, __m256i w, X x) {
    return Add4(sum, _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)));
  }
  static FDSD_INLINE Sum Dot(Sum sum, const Weights& w, X x) {
    return {DotHalf(sum.lo, w.lo, x), DotHalf(sum.hi, w.hi, x)};
  }
  static FDSD_INLINE F32x16 ToFloats(const Sum& sum) {
    return {_mm256_cvtepi32_ps(sum.lo), _mm256_cvtepi32_ps(sum.hi)};
  }
};

// Nibbles are at most 15: maddubs takes them unsigned.
struct Wint4Step : Wint8Step {
  static constexpr int kBytes = kPanelColumns * 2;

  static FDSD_INLINE __m256i Nibbles(const uint8_t* p, int vector) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm256_and_si256(vector == 0 ? pairs : _mm256_srli_epi16(pairs, 4), _mm256_set1_epi8(15));
  }
  static FDSD_INLINE Weights LoadWeights(const uint8_t* p, int vector) {
    return {Nibbles(p, vector), Nibbles(p + 32, vector)};
  }
  static FDSD_INLINE Sum Start(int32_t start) { return {_mm256_set1_epi32(start), _mm256_set1_epi32(start)}; }
  static FDSD_INLINE Sum Dot(const Sum& sum, const Weights& w, X x) {
    return {Add4(sum.lo, _mm256_maddubs_epi16(w.lo, x)), Add4(sum.hi, _mm256_maddubs_epi16(w.hi, x))};
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
  struct X {
    int8_t v[4];
  };
  static constexpr int kBytes = kPanelColumns * 4;

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
  static FDSD_INLINE X LoadX(const uint8_t* p) {
    X x;
    std::memcpy(x.v, p, sizeof(x.v));
    return x;
  }
  static FDSD_INLINE Sum Dot(Sum sum, const Weights& w, X x) {
    for (int i = 0; i < kLanes; ++i)
      for (int b = 0; b < 4; ++b) sum.v[i] += w.v[4 * i + b] * x.v[b];
    return sum;
  }
  static FDSD_INLINE F32x16 ToFloats(const Sum& sum) {
    F32x16 f;
    for (int i = 0; i < kLanes; ++i) f.v[i] = static_cast<float>(sum.v[i]);
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

// One group's integer dot products, for vectors [first, first + kVectors) of the panel's columns.
template <class Step, int kRows, int kVectors>
FDSD_INLINE void MultiplyGroup(const uint8_t* weights, const uint8_t* x, const int32_t* starts, int first,
                               typename Step::Sum (*dots)[kVectors]) {
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) dots[r][v] = Step::Start(starts[r]);
  for (int s = 0; s < kGroupSteps; ++s) {
    typename Step::Weights w[kVectors];
    for (int v = 0; v < kVectors; ++v) w[v] = Step::LoadWeights(weights, first + v);
    PrefetchStep<Step::kBytes>(weights);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const typename Step::X step = Step::LoadX(x + r * 4);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) dots[r][v] = Step::Dot(dots[r][v], w[v], step);
    }
    weights += Step::kBytes;
    x += kRows * 4;
  }
}

template <class Step, int kRows>
void MultiplyTile(const uint8_t* panel, const uint8_t* tile, int32_t num_units, float* sums) {
  constexpr int kVectors = kVectorsAtOnce<kRows>;
  std::memset(sums, 0, sizeof(float) * kRows * kPanelColumns);
  for (int32_t g = 0; g < num_units; ++g) {
    const float* w_scales = reinterpret_cast<const float*>(panel + kGroupSteps * Step::kBytes);
    const float* x_scales = reinterpret_cast<const float*>(tile + kRows * kQuantGroup);
    const int32_t* starts = reinterpret_cast<const int32_t*>(x_scales + kRows);
    for (int first = 0; first < kPanelVectors; first += kVectors) {
      typename Step::Sum dots[kRows][kVectors];
      MultiplyGroup<Step, kRows, kVectors>(panel, tile, starts, first, dots);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const F32x16 w_scale = Load(w_scales + (first + v) * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          float* sum = sums + r * kPanelColumns + (first + v) * kLanes;
          Store(Fma(Step::ToFloats(dots[r][v]), Mul(w_scale, Set1(x_scales[r])), Load(sum)), sum);
        }
      }
    }
    panel += kGroupSteps * Step::kBytes + kScaleBytes;
    tile += kRows * kRowGroupBytes;
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
