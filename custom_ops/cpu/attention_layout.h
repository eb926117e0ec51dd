#pragma once
// Addresses inside the paged KV cache, for kernel files: compiled once per instruction-set level.
#include "fdsd/kv_cache.h"
#include "simd.h"

namespace fdsd {
namespace FDSD_ISA {

// Elements of a head that lie next to each other in K: s in kv_cache.h.
template <typename T>
constexpr int kPairSize = 4 / static_cast<int>(sizeof(T));

// First element of head `head` of token `offset` of block `block`. Element d of the head is
// (d / s) * block_size * s + d % s further on.
template <typename T>
FDSD_INLINE T* KeyAddress(const KvCache& cache, int64_t block, int64_t head, int64_t offset) {
  const int64_t panel = (block * cache.num_kv_heads + head) * cache.head_dim * cache.block_size;
  return static_cast<T*>(cache.k) + panel + offset * kPairSize<T>;
}

// First of the head_dim neighbouring elements of a token's value.
template <typename T>
FDSD_INLINE T* ValueAddress(const KvCache& cache, int64_t block, int64_t head, int64_t offset) {
  const int64_t row = (block * cache.num_kv_heads + head) * cache.block_size + offset;
  return static_cast<T*>(cache.v) + row * cache.head_dim;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
