#pragma once
// Elements of a KV cache on their way into products. bfloat16 and float16 stay as they are. Elements of a byte become
// the bfloat16 of the same value or, with activations of float16, the float16; both have it exactly. float32 is not
// multiplied by matrix instructions.
#include <type_traits>

#include "kv_layout.h"
#include "matrix.h"
#include "numbers.h"

namespace fdsd::cuda {

template <typename Cached>
constexpr bool kIsScaled = sizeof(Cached) == 1;  // an element times its token's scale is its value

// An element of a byte, with activations of float16.
template <typename Stored>
struct ForHalf16 {
  Stored element;
};

// Whether a cache's elements are multiplied as float16.
template <typename Cached>
constexpr bool kIsHalf16 = std::is_same_v<Cached, half16>;
template <typename Stored>
constexpr bool kIsHalf16<ForHalf16<Stored>> = true;

// What words of products have two of.
template <typename Cached>
using WordOf = std::conditional_t<kIsHalf16<Cached>, half16, bf16>;

__device__ __forceinline__ float FloatOf(int8_t, uint32_t byte) {
  // 2^23 + 128 + the value, as a float: its last bits are the integer's.
  return __uint_as_float(0x4b000000u | (byte ^ 0x80u)) - 8388736.0f;
}
__device__ __forceinline__ float FloatOf(float8, uint32_t byte) { return ToFloat(float8{static_cast<uint8_t>(byte)}); }

template <typename Stored>
__device__ __forceinline__ float FloatOf(ForHalf16<Stored>, uint32_t byte) {
  return FloatOf(Stored{}, byte);
}

// Two floats as a word, rounded.
template <typename Cached>
__device__ __forceinline__ uint32_t RoundedPair(float low, float high) {
#if defined(__CUDA_ARCH__)
  if constexpr (!kIsHalf16<Cached>) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
#endif
  return RoundedWord<WordOf<Cached>>(low, high);
}
// Two floats that the word has exactly.
template <typename Cached>
__device__ __forceinline__ uint32_t ExactPair(float low, float high) {
  if constexpr (kIsHalf16<Cached>) return RoundedPair<Cached>(low, high);
  return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000u);
}

// c += A . B with such words. All lanes of a warp.
template <typename Cached>
__device__ __forceinline__ void AddPairProduct(float* c, const uint32_t* a, const uint32_t* b) {
  if constexpr (kIsHalf16<Cached>) {
    AddHalf16Product(c, a, b);
  } else {
    AddMatrixProduct(c, a, b);
  }
}

// Four elements of a byte as two words.
template <typename Cached>
__device__ __forceinline__ void ExactWords(uint32_t bytes, uint32_t* words) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t pair = bytes >> (16 * i);
    words[i] = ExactPair<Cached>(FloatOf(Cached{}, pair & 0xffu), FloatOf(Cached{}, pair >> 8 & 0xffu));
  }
}
// The same times `scale`, rounded.
template <typename Cached>
__device__ __forceinline__ void ScaledWords(uint32_t bytes, float scale, uint32_t* words) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t pair = bytes >> (16 * i);
    words[i] =
        RoundedPair<Cached>(FloatOf(Cached{}, pair & 0xffu) * scale, FloatOf(Cached{}, pair >> 8 & 0xffu) * scale);
  }
}

// A chunk of 16 elements of a byte as two of 8, exactly, or times `scale` and rounded.
template <typename Cached, bool kScale>
__device__ __forceinline__ void WordsOf(const uint4& bytes, float scale, uint4* words) {
  const uint32_t from[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
  uint32_t to[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kScale) {
      ScaledWords<Cached>(from[i], scale, to + 2 * i);
    } else {
      ExactWords<Cached>(from[i], to + 2 * i);
    }
  }
  words[0] = uint4{to[0], to[1], to[2], to[3]};
  words[1] = uint4{to[4], to[5], to[6], to[7]};
}

// Place of a word of 8 of a query, so that what lane t of a product takes belongs to what it takes of a key: of a key
// of bytes that is four elements in a row, which are words 2t and 2t + 1.
template <typename Cached>
__device__ __forceinline__ int QueryWord(int word) {
  if constexpr (!kIsScaled<Cached>) return word;
  return word / kMatrixWords * kMatrixWords + word % 2 * 4 + word % kMatrixWords / 2;
}

// Whether a word holds a number of two bytes, or is a float, that is infinite or NaN.
template <typename Cached>
__device__ __forceinline__ bool IsBad(uint32_t word) {
  if constexpr (sizeof(Cached) == 4) return (word & 0x7f800000u) == 0x7f800000u;
  constexpr uint32_t kExponent = kIsHalf16<Cached> ? 0x7c00u : 0x7f80u;
  return (word & kExponent << 16) == kExponent << 16 || (word & kExponent) == kExponent;
}

}  // namespace fdsd::cuda
