#include "attention_plan.h"

namespace fdsd {

Error CheckKvCache(const KvCache& cache) {
  if (cache.dtype != DType::kFloat32 && cache.dtype != DType::kBFloat16) return "dtype: expected float32 or bfloat16";
  if (cache.num_blocks < 0) return "num_blocks: expected no negative number";
  if (cache.num_kv_heads <= 0) return "num_kv_heads: expected a positive number";
  if (cache.block_size <= 0 || cache.block_size % 16 != 0) return "block_size: expected a positive multiple of 16";
  if (cache.head_dim <= 0 || cache.head_dim > kMaxHeadDim || cache.head_dim % 16 != 0)
    return "head_dim: expected a multiple of 16 in 16..256";
  return nullptr;
}

}  // namespace fdsd
