#pragma once
// Vectors of codes of 4, 5, 6 and 8 bits, their dot products with int8, and scales read as floats. LoadInt8Codes:
// wint4's codes once their factors are in, as codes of 8 bits.
#include "float16.h"
#include "linear_grouped.h"
#include "linear_tile.h"

namespace fdsd {
namespace FDSD_ISA {

// Steps whose upper bits share a byte. Those of step s begin at bit (s % kSteps * bits + 4) % 8: where they belong in a
// code, for the first of them.
template <int kHighBits>
constexpr int kHighSteps = kHighBits == 0 ? kGroupSteps : 8 / kHighBits;

#if defined(FDSD_SIMD_AVX512)

using Codes = __m512i;
using Dots = __m512i;
template <int kBits>
constexpr bool kHasZero = true;
template <int kBits>
constexpr int kUnpackedBits = 8;  // what matters of the bits of codes that have a byte each

template <int kBits>
FDSD_INLINE Codes LoadCodes(const uint8_t* codes, const uint8_t* highs, int step, int vector) {
  if constexpr (kBits == 8) return _mm512_loadu_si512(codes + vector * 64);
  const __m512i pairs = _mm512_loadu_si512(codes);
  const __m512i low =
      _mm512_and_si512(vector == 0 ? pairs : _mm512_srli_epi16(pairs, 4), _mm512_set1_epi8(static_cast<char>(15)));
  if constexpr (kBits == 4) return low;
  constexpr int kHighBits = kBits - 4;
  const __m512i high = _mm512_loadu_si512(highs + vector * 64);
  const int shift = step * kHighBits;
  const __m512i placed = shift < 4 ? _mm512_srli_epi16(high, shift) : _mm512_slli_epi16(high, 8 - shift);
  const __m512i mask = _mm512_set1_epi8(static_cast<char>(((1 << kHighBits) - 1) << 4));
  return _mm512_ternarylogic_epi32(low, placed, mask, 0xf8);  // low | (placed & mask)
}
// Of 16 columns: the factors in 16 bits each, of the second 16 at their top, and 128 - factor * zero in the bytes of
// the column.
struct Factors {
  __m512i factors;
  __m512i offsets;
};
FDSD_INLINE Factors LoadFactors(const uint8_t* p, int vector) {
  const __m512i spread =
      _mm512_set_epi32(0x0f0f0f0f, 0x0e0e0e0e, 0x0d0d0d0d, 0x0c0c0c0c, 0x0b0b0b0b, 0x0a0a0a0a, 0x09090909, 0x08080808,
                       0x07070707, 0x06060606, 0x05050505, 0x04040404, 0x03030303, 0x02020202, 0x01010101, 0);
  const __m128i own = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + vector * kLanes));
  const __m512i pairs = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(own), spread);
  const __m512i factors = _mm512_and_si512(pairs, _mm512_set1_epi16(15));
  const __m512i zeros = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), _mm512_set1_epi8(15));
  const __m512i offsets =
      _mm512_sub_epi8(_mm512_set1_epi8(static_cast<char>(0x80)), _mm512_mullo_epi16(zeros, factors));
  return {vector == 0 ? factors : _mm512_slli_epi16(factors, 12), offsets};
}
FDSD_INLINE Codes LoadInt8Codes(const uint8_t* codes, const Factors& factors, int vector) {
  // Products of nibbles stay in their bytes: two at a time. Those of high nibbles are moved down by the product itself.
  const __m512i pairs = _mm512_loadu_si512(codes);
  const __m512i own = _mm512_and_si512(pairs, _mm512_set1_epi8(static_cast<char>(vector == 0 ? 0x0f : 0xf0)));
  const __m512i products =
      vector == 0 ? _mm512_mullo_epi16(own, factors.factors) : _mm512_mulhi_epu16(own, factors.factors);
  return _mm512_add_epi8(products, factors.offsets);
}
FDSD_INLINE void StoreCodes(const Codes& codes, uint8_t* to) { _mm512_storeu_si512(to, codes); }
FDSD_INLINE void StoreInt8Codes(const Codes& codes, uint8_t* to) { StoreCodes(codes, to); }
template <int kBits>
FDSD_INLINE Codes LoadUnpacked(const uint8_t* codes) {
  return _mm512_loadu_si512(codes);
}
FDSD_INLINE Dots Start(int32_t start) { return _mm512_set1_epi32(start); }
template <int kBits>
FDSD_INLINE Dots Dot(Dots sum, Codes w, const uint8_t* x) {
  // The same as _mm512_dpbusd_epi32, around which gcc 12 spills the sums to the stack. x is broadcast by the
  // instruction itself: a register per row less, so more loads of weights are under way at a time.
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const int32_t*>(x)));
  return sum;
}
FDSD_INLINE F32x16 ToFloats(Dots dots) { return {_mm512_cvtepi32_ps(dots)}; }
FDSD_INLINE F32x16 LoadHalves(const uint8_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
FDSD_INLINE F32x16 LoadInt8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}

#elif defined(FDSD_SIMD_AVX2)

struct Int32x16 {
  __m256i lo, hi;
};
using Codes = Int32x16;
using Dots = Int32x16;
// maddubs adds two products in 16 bits, which full unsigned bytes would overflow: codes of eight bits are multiplied as
// signed ones, without a zero.
template <int kBits>
constexpr bool kHasZero = kBits < 8;
template <int kBits>
constexpr int kUnpackedBits = kBits;

template <int kBits>
FDSD_INLINE __m256i LoadHalf(const uint8_t* codes, const uint8_t* highs, int step, int vector, int half) {
  if constexpr (kBits == 8) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + vector * 64 + half * 32));
    return _mm256_xor_si256(raw, _mm256_set1_epi8(static_cast<char>(0x80)));
  }
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + half * 32));
  const __m256i low = _mm256_and_si256(vector == 0 ? pairs : _mm256_srli_epi16(pairs, 4), _mm256_set1_epi8(15));
  if constexpr (kBits == 4) return low;
  constexpr int kHighBits = kBits - 4;
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(highs + vector * 64 + half * 32));
  const int shift = step * kHighBits;
  const __m256i placed = shift < 4 ? _mm256_srli_epi16(high, shift) : _mm256_slli_epi16(high, 8 - shift);
  return _mm256_or_si256(low, _mm256_and_si256(placed, _mm256_set1_epi8(((1 << kHighBits) - 1) << 4)));
}
template <int kBits>
FDSD_INLINE Codes LoadCodes(const uint8_t* codes, const uint8_t* highs, int step, int vector) {
  return {LoadHalf<kBits>(codes, highs, step, vector, 0), LoadHalf<kBits>(codes, highs, step, vector, 1)};
}
// Of 16 columns: factors and zeros in 16 bits each, and factor * zero in the bytes of the column.
struct Factors {
  Int32x16 factors;
  Int32x16 zeros;
  Int32x16 offsets;
};
FDSD_INLINE void LoadHalfFactors(const uint8_t* p, __m256i* factors, __m256i* zeros, __m256i* offsets) {
  const __m256i own = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m256i spread = _mm256_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0, 0x0c0c0c0c, 0x08080808, 0x04040404, 0);
  const __m256i pairs = _mm256_shuffle_epi8(own, spread);
  const __m256i high = _mm256_and_si256(_mm256_srli_epi16(pairs, 4), _mm256_set1_epi8(15));
  *factors = _mm256_and_si256(pairs, _mm256_set1_epi16(15));
  *zeros = _mm256_and_si256(high, _mm256_set1_epi16(15));
  *offsets = _mm256_mullo_epi16(high, *factors);
}
FDSD_INLINE Factors LoadFactors(const uint8_t* p, int vector) {
  Factors own;
  LoadHalfFactors(p + vector * kLanes, &own.factors.lo, &own.zeros.lo, &own.offsets.lo);
  LoadHalfFactors(p + vector * kLanes + kLanes / 2, &own.factors.hi, &own.zeros.hi, &own.offsets.hi);
  return own;
}
FDSD_INLINE Codes LoadInt8Codes(const uint8_t* codes, const Factors& factors, int vector) {
  // Products of nibbles stay in their bytes: two at a time.
  const Codes own = LoadCodes<4>(codes, nullptr, 0, vector);
  return {_mm256_sub_epi8(_mm256_mullo_epi16(own.lo, factors.factors.lo), factors.offsets.lo),
          _mm256_sub_epi8(_mm256_mullo_epi16(own.hi, factors.factors.hi), factors.offsets.hi)};
}
FDSD_INLINE void StoreCodes(const Codes& codes, uint8_t* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), codes.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32), codes.hi);
}
template <int kBits>
FDSD_INLINE Codes LoadUnpacked(const uint8_t* codes) {
  if constexpr (kBits == 8) return LoadCodes<8>(codes, nullptr, 0, 0);
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 32))};
}
FDSD_INLINE void StoreInt8Codes(const Codes& codes, uint8_t* to) {
  const __m256i zero = _mm256_set1_epi8(static_cast<char>(0x80));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_xor_si256(codes.lo, zero));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32), _mm256_xor_si256(codes.hi, zero));
}
FDSD_INLINE Dots Start(int32_t start) { return {_mm256_set1_epi32(start), _mm256_set1_epi32(start)}; }
template <int kBits>
FDSD_INLINE __m256i DotHalf(__m256i sum, __m256i w, __m256i x) {
  const __m256i products =
      kBits == 8 ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)) : _mm256_maddubs_epi16(w, x);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
}
template <int kBits>
FDSD_INLINE Dots Dot(const Dots& sum, const Codes& w, const uint8_t* x) {
  const __m256i broadcast = _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(x));
  return {DotHalf<kBits>(sum.lo, w.lo, broadcast), DotHalf<kBits>(sum.hi, w.hi, broadcast)};
}
// Sums of products in 16 bits, which hold those of so many steps.
template <int kBits>
constexpr int kShortSteps = kBits == 4   ? 8
                            : kBits == 5 ? 4
                                         : 2;
FDSD_INLINE Dots DotShorts(const Dots& sum, const Codes& w, const uint8_t* x) {
  const __m256i broadcast = _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(x));
  return {_mm256_add_epi16(sum.lo, _mm256_maddubs_epi16(w.lo, broadcast)),
          _mm256_add_epi16(sum.hi, _mm256_maddubs_epi16(w.hi, broadcast))};
}
FDSD_INLINE Dots AddShorts(const Dots& dots, const Dots& shorts) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(dots.lo, _mm256_madd_epi16(shorts.lo, ones)),
          _mm256_add_epi32(dots.hi, _mm256_madd_epi16(shorts.hi, ones))};
}
FDSD_INLINE F32x16 ToFloats(const Dots& dots) { return {_mm256_cvtepi32_ps(dots.lo), _mm256_cvtepi32_ps(dots.hi)}; }
FDSD_INLINE F32x16 LoadHalves(const uint8_t* p) {
  const auto* halves = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
FDSD_INLINE F32x16 LoadInt8(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}

#else

struct Codes {
  uint8_t v[kLanes * 4];
};
struct Dots {
  int32_t v[kLanes];
};
template <int kBits>
constexpr bool kHasZero = true;
template <int kBits>
constexpr int kUnpackedBits = 8;

template <int kBits>
FDSD_INLINE Codes LoadCodes(const uint8_t* codes, const uint8_t* highs, int step, int vector) {
  Codes w;
  for (int i = 0; i < kLanes * 4; ++i) {
    if (kBits == 8) {
      w.v[i] = codes[vector * 64 + i];
      continue;
    }
    constexpr int kHighBits = kBits - 4;
    const int low = vector == 0 ? codes[i] & 15 : codes[i] >> 4;
    const int from = (step * kHighBits + 4) % 8;
    const int high = kHighBits == 0 ? 0 : highs[vector * 64 + i] >> from & ((1 << kHighBits) - 1);
    w.v[i] = static_cast<uint8_t>(low | high << 4);
  }
  return w;
}
struct Factors {
  uint8_t v[kLanes];
};
FDSD_INLINE Factors LoadFactors(const uint8_t* p, int vector) {
  Factors own;
  std::memcpy(own.v, p + vector * kLanes, sizeof(own.v));
  return own;
}
FDSD_INLINE Codes LoadInt8Codes(const uint8_t* codes, const Factors& factors, int vector) {
  Codes w = LoadCodes<4>(codes, nullptr, 0, vector);
  for (int i = 0; i < kLanes * 4; ++i) {
    const int factor = factors.v[i / 4] & 15;
    w.v[i] = static_cast<uint8_t>(factor * (w.v[i] - (factors.v[i / 4] >> 4)) + kWint8ZeroPoint);
  }
  return w;
}
FDSD_INLINE void StoreCodes(const Codes& codes, uint8_t* to) { std::memcpy(to, codes.v, sizeof(codes.v)); }
FDSD_INLINE void StoreInt8Codes(const Codes& codes, uint8_t* to) { StoreCodes(codes, to); }
template <int kBits>
FDSD_INLINE Codes LoadUnpacked(const uint8_t* codes) {
  Codes w;
  std::memcpy(w.v, codes, sizeof(w.v));
  return w;
}
FDSD_INLINE Dots Start(int32_t start) {
  Dots dots;
  for (int32_t& v : dots.v) v = start;
  return dots;
}
template <int kBits>
FDSD_INLINE Dots Dot(Dots sum, const Codes& w, const uint8_t* x) {
  for (int i = 0; i < kLanes; ++i)
    for (int b = 0; b < 4; ++b) sum.v[i] += w.v[4 * i + b] * static_cast<int8_t>(x[b]);
  return sum;
}
FDSD_INLINE F32x16 ToFloats(const Dots& dots) {
  F32x16 f;
  for (int i = 0; i < kLanes; ++i) f.v[i] = static_cast<float>(dots.v[i]);
  return f;
}
FDSD_INLINE F32x16 LoadHalves(const uint8_t* p) {
  F32x16 f;
  for (int i = 0; i < kLanes; ++i) {
    half16 half;
    std::memcpy(&half, p + 2 * i, sizeof(half));
    f.v[i] = ToFloat(half);
  }
  return f;
}
FDSD_INLINE F32x16 LoadInt8(const uint8_t* p) {
  F32x16 f;
  for (int i = 0; i < kLanes; ++i) f.v[i] = static_cast<float>(static_cast<int8_t>(p[i]));
  return f;
}

#endif

// The codes of a unit of wint4 as those of wint8.
FDSD_INLINE void UnpackInt8Codes(const uint8_t* unit, uint8_t* codes) {
  constexpr int kSteps = kFactorInputs / kStepBytes;
  for (int g = 0; g < kFactorGroups; ++g) {
    for (int v = 0; v < kPanelVectors; ++v) {
      const Factors own = LoadFactors(unit + kWint4Bytes + g * kPanelColumns, v);
      for (int step = g * kSteps; step < (g + 1) * kSteps; ++step) {
        StoreInt8Codes(LoadInt8Codes(unit + step * kPanelColumns * 2, own, v), codes + (step * kPanelVectors + v) * 64);
      }
    }
  }
}

}  // namespace FDSD_ISA
}  // namespace fdsd
