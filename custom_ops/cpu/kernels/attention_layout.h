#pragma once
// Addresses inside the paged KV cache, for kernel files: compiled once per instruction-set level.
#include "fdsd/kv_cache.h"
#include "simd.h"

namespace fdsd {
namespace FDSD_ISA {

// Elements of 4 bytes, which lie next to each other: s in kv_cache.h.
template <typename T>
constexpr int kPackSize = 4 / static_cast<int>(sizeof(T));

// First element of head `head` of token `offset` of block `block` in K. Element d of the head is
// d / s * block_size * s + d % s further on.
template <typename T>
FDSD_INLINE T* KeyAddress(const KvCache& cache, int64_t block, int64_t head, int64_t offset) {
  const int64_t panel = (block * cache.num_kv_heads + head) * cache.head_dim * cache.block_size;
  return static_cast<T*>(cache.k) + panel + offset * kPackSize<T>;
}

// The same in V, where element d of the head is d * s further on.
template <typename T>
FDSD_INLINE T* ValueAddress(const KvCache& cache, int64_t block, int64_t head, int64_t offset) {
  const int64_t panel = (block * cache.num_kv_heads + head) * cache.head_dim * cache.block_size;
  const int64_t row = offset / kPackSize<T> * kPackSize<T>;
  return static_cast<T*>(cache.v) + panel + row * cache.head_dim + offset % kPackSize<T>;
}

// Index of a token's scale in k_scale and v_scale.
FDSD_INLINE int64_t ScaleIndex(const KvCache& cache, int64_t block, int64_t head, int64_t offset) {
  return (block * cache.num_kv_heads + head) * cache.block_size + offset;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
