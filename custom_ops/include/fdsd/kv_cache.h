#pragma once
// Layout of one layer's paged KV cache on CPU. A GPU's holds the same otherwise: cuda/kv_layout.h.
#include "fdsd/status.h"

namespace fdsd {

// Type of the elements of k and v: that of the activations, or one of a byte with a scale per token and KV head. Those
// of a byte are int8 and float8 of 4 bits of exponent and 3 of mantissa (e4m3). Only GPUs have float8, and float16.
enum class KvDType : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kFloat8 = 3, kFloat16 = 4 };

// Both are stored so that one vector load fetches the operands of 16 dot products of s elements, 4 bytes each. In K
// these are the same s elements of the head dimension for 16 neighbouring tokens; each score is summed over the head
// dimension. In V they are the same s neighbouring tokens for 16 elements of the head dimension; each output element is
// summed over the tokens. s = 4 / sizeof(element): 1 for float32, 2 for bfloat16, 4 for int8.
//
// A cache without v is one of latent vectors (arXiv:2405.04434, section 2.1): its keys are its values too. It has one
// KV head, which all query heads read, and elements of the activations' type.
struct KvCache {
  int32_t num_blocks;
  int32_t block_size;    // tokens per block, a multiple of 16
  int32_t num_kv_heads;  // Hkv
  int32_t head_dim;      // D, a multiple of 16 up to 256, of latent vectors up to 640
  DType dtype;           // of qkv, q and y
  KvDType kv_dtype;      // of k and v
  void* k;               // [num_blocks, Hkv, D / s, block_size, s]
  void* v;               // [num_blocks, Hkv, block_size / s, D, s], or nullptr: the keys are the values
  float* k_scale;        // [num_blocks, Hkv, block_size], an element of a byte times this is its value; else nullptr
  float* v_scale;        // likewise
};

}  // namespace fdsd
