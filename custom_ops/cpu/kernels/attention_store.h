#pragma once
// Writes keys and values into the paged cache, those of neighbouring tokens together. A line of the cache holds
// elements of several tokens, and so is written in few large pieces instead of many small ones.
#include "attention_layout.h"
#include "attention_quantize.h"
#include "interleave.h"

namespace fdsd {
namespace FDSD_ISA {

// Tokens written together: neighbours within a fourth of a line of K, which begins at a multiple of four.
constexpr int kMaxRun = kInterleavedRows;

// Tokens in offsets [offset, offset + count) of a block.
struct SlotRun {
  int64_t block;
  int64_t offset;
  int count;
};

// The run that begins with the first of `num_tokens` slots, which is not -1.
FDSD_INLINE SlotRun FirstRun(const int64_t* slots, int64_t num_tokens, int32_t block_size) {
  const int64_t offset = slots[0] % block_size;
  const int64_t most = std::min<int64_t>(kMaxRun - offset % kMaxRun, num_tokens);
  int count = 1;
  while (count < most && slots[count] == slots[0] + count) ++count;
  return {slots[0] / block_size, offset, count};
}

// One head of a run's tokens.
template <typename T>
struct RunHead {
  alignas(64) T values[kMaxRun][kMaxLatentDim];
};

template <typename T>
void PutKeys(const KvCache& cache, const SlotRun& run, int64_t head_index, const RunHead<T>& x) {
  const uint8_t* rows[kMaxRun];
  for (int r = 0; r < kMaxRun; ++r) rows[r] = reinterpret_cast<const uint8_t*>(x.values[r]);
  T* const k = KeyAddress<T>(cache, run.block, head_index, run.offset);
  Interleave(rows, run.count, cache.head_dim / kPackSize<T>, int64_t{cache.block_size} * kWordBytes,
             reinterpret_cast<uint8_t*>(k));
}

FDSD_INLINE uint32_t ElementBits(bf16 x) { return x.bits; }
FDSD_INLINE uint32_t ElementBits(int8_t x) { return static_cast<uint8_t>(x); }

// The tokens that share all of their words: kPackSize rows of `size` elements.
template <typename T>
FDSD_INLINE void JoinRows(const T* const* rows, int size, T* __restrict out) {
  constexpr int kPack = kPackSize<T>;
  if constexpr (kPack == 1) {
    std::memcpy(out, rows[0], static_cast<size_t>(size) * sizeof(T));
  } else {
    const T* x[kPack];
    for (int r = 0; r < kPack; ++r) x[r] = rows[r];
    for (int d = 0; d < size; ++d) {
      uint32_t word = 0;
      for (int r = 0; r < kPack; ++r) word |= ElementBits(x[r][d]) << (r * 32 / kPack);
      std::memcpy(out + d * kPack, &word, sizeof(word));
    }
  }
}

// Of words that other tokens share, only these tokens' elements are written: the others' may be at the same time.
template <typename T>
void PutValues(const KvCache& cache, const SlotRun& run, int64_t head_index, const T* const* x) {
  constexpr int kPack = kPackSize<T>;
  for (int r = 0; r < run.count;) {
    T* const v = ValueAddress<T>(cache, run.block, head_index, run.offset + r);
    if ((run.offset + r) % kPack == 0 && r + kPack <= run.count) {
      JoinRows(x + r, cache.head_dim, v);
      r += kPack;
    } else {
      for (int d = 0; d < cache.head_dim; ++d) v[d * kPack] = x[r][d];
      ++r;
    }
  }
}

}  // namespace FDSD_ISA
}  // namespace fdsd
