#include "kv_check.h"

namespace fdsd {

Error CheckKvStorage(const KvCache& cache) {
  const bool is_scaled = cache.kv_dtype == KvDType::kInt8 || cache.kv_dtype == KvDType::kFloat8;
  if ((cache.k_scale != nullptr) != is_scaled || (cache.v_scale != nullptr) != is_scaled)
    return "k_scale, v_scale: expected both for int8 and float8 and neither else, got others";
  if (cache.num_blocks < 0) return "num_blocks: expected no negative number";
  if (cache.num_kv_heads <= 0 || cache.num_kv_heads > kMaxKvHeads) return "num_kv_heads: expected 1 to 1024";
  if (cache.block_size <= 0 || cache.block_size % 16 != 0) return "block_size: expected a positive multiple of 16";
  const bool is_latent = cache.v == nullptr;
  if (is_latent && is_scaled) return "v: expected values besides keys of int8 or float8, got none";
  if (is_latent && cache.num_kv_heads != 1) return "num_kv_heads: expected 1 where keys are values too, got more";
  if (cache.head_dim <= 0 || cache.head_dim > (is_latent ? kMaxLatentDim : kMaxHeadDim) || cache.head_dim % 16 != 0)
    return "head_dim: expected a multiple of 16 in 16..256, or up to 640 where keys are values too";
  return nullptr;
}

Error CheckKvCache(const KvCache& cache) {
  if (cache.dtype != DType::kFloat32 && cache.dtype != DType::kBFloat16 && cache.dtype != DType::kFloat16)
    return "dtype: expected float32, bfloat16 or float16";
  const auto same = static_cast<KvDType>(cache.dtype);
  const bool is_scaled = cache.kv_dtype == KvDType::kInt8 || cache.kv_dtype == KvDType::kFloat8;
  if (cache.kv_dtype != same && !is_scaled)
    return "kv_dtype: expected int8, float8 or the type of the activations, got another";
  return CheckKvStorage(cache);
}

}  // namespace fdsd
