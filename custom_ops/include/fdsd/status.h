#pragma once
// Types shared by every op. Nothing below custom_ops/bindings knows a framework.
#include <cstdint>

namespace fdsd {

// nullptr on success, else a static message naming the violated precondition ("argument: expected ..., got ...").
using Error = const char*;

// Of activations. Only GPUs compute in float16; its code is that of caches (kv_cache.h).
enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 4 };

// Instruction-set levels, in order. Every kernel exists at every level. kAmx is kAvx512 with matrix products on tiles.
enum class Isa : int32_t { kScalar = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3 };

// Storage of bfloat16; arithmetic is always done in float.
struct bf16 {
  uint16_t bits;
};
static_assert(sizeof(bf16) == 2);

// Storage of float16: IEEE half precision, whose largest number is 65504.
struct half16 {
  uint16_t bits;
};
static_assert(sizeof(half16) == 2);

}  // namespace fdsd
