#pragma once
// The paged KV cache as GPUs have it: k and v are [num_blocks, Hkv, block_size, D], a head's tokens one after the
// other; k_scale and v_scale as on the CPU, [num_blocks, Hkv, block_size]. See fdsd/kv_cache.h for the CPU's, which
// differs.
#include "device.h"
#include "kv_check.h"

namespace fdsd::cuda {

// What a kernel needs to know of a cache besides its arrays.
struct KvShape {
  int32_t block_size;
  int32_t num_kv_heads;
  int32_t head_dim;

  // Index of a token's head in k_scale and v_scale; its elements in k and v begin at head_dim times that.
  __device__ __forceinline__ int64_t Index(int64_t slot, int64_t head) const {
    return (slot / block_size * num_kv_heads + head) * block_size + slot % block_size;
  }
};

inline KvShape ShapeOf(const KvCache& cache) { return KvShape{cache.block_size, cache.num_kv_heads, cache.head_dim}; }

}  // namespace fdsd::cuda
