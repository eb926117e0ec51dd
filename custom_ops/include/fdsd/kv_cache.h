#pragma once
// Layout of one layer's paged KV cache on CPU.
#include "fdsd/status.h"

namespace fdsd {

// K is stored so that one vector load fetches the same 4 bytes of the head dimension for 16 neighbouring tokens: a
// query row meets 16 keys per instruction and each score is summed over the head dimension in one fixed order. V keeps
// one token's head dimension contiguous. s = 4 / sizeof(element): 1 for float32, 2 for bfloat16.
struct KvCache {
  int32_t num_blocks;
  int32_t block_size;    // tokens per block, a multiple of 16
  int32_t num_kv_heads;  // Hkv
  int32_t head_dim;      // D, a multiple of 16
  DType dtype;
  void* k;  // [num_blocks, Hkv, D / s, block_size, s]
  void* v;  // [num_blocks, Hkv, block_size, D]
};

}  // namespace fdsd
