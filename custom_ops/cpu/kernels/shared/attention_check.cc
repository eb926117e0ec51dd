#include "attention_plan.h"

namespace fdsd {
namespace {

Error CheckBlocks(const CascadeAppendAttentionParams& p, int32_t r) {
  const int32_t num_rows = p.query_start_loc[r + 1] - p.query_start_loc[r];
  if (num_rows == 0) return nullptr;
  const int64_t num_blocks = (static_cast<int64_t>(p.seq_lens[r]) + p.cache.block_size - 1) / p.cache.block_size;
  const int32_t* table = BlocksOf(p, r);
  for (int64_t i = FirstKeySeen(p, p.seq_lens[r] - num_rows + 1) / p.cache.block_size; i < num_blocks; ++i) {
    if (table[i] < 0 || table[i] >= p.cache.num_blocks)
      return "block_tables: expected a block of the cache for every token that is seen, got an id outside";
  }
  return nullptr;
}

}  // namespace

Error CheckCpuKvCache(const KvCache& cache) {
  if (const Error error = CheckKvCache(cache); error != nullptr) return error;
  if (cache.kv_dtype == KvDType::kFloat8)
    return "kv_dtype: expected a type that CPUs have a kernel for (float32, bfloat16, int8), got float8";
  return nullptr;
}

Error CheckAttention(const CascadeAppendAttentionParams& p) {
  if (const Error error = CheckCpuKvCache(p.cache); error != nullptr) return error;
  if (p.num_heads <= 0 || p.num_heads % p.cache.num_kv_heads != 0)
    return "num_heads: expected a positive multiple of num_kv_heads";
  if (p.num_heads / p.cache.num_kv_heads > kMaxGroupSize)
    return "num_heads: expected at most 256 per KV head, got more";
  if (p.num_requests < 0 || p.num_tokens < 0 || p.max_blocks < 0) return "sizes: expected no negative number";
  if (p.scores.first_key < 0 || p.scores.first_key > kMaxFirstKey)
    return "first_key: expected 0..63, got a number outside";
  if (p.scores.window < 0) return "window: expected 0 (none) or a number of tokens, got less";
  if (p.scores.window > 0 && p.prefixes.group_rows != nullptr) return "prefixes: expected none with a window";
  if (!(p.scores.softcap >= 0)) return "softcap: expected 0 (none) or a positive number, got another";
  if (p.query_start_loc[0] != 0 || p.query_start_loc[p.num_requests] != p.num_tokens)
    return "query_start_loc: expected to start at 0 and to end at the number of rows of q";
  for (int32_t r = 0; r < p.num_requests; ++r) {
    if (const Error error = CheckRequest(p, r, p.cache.block_size); error != nullptr) return error;
    if (const Error error = CheckBlocks(p, r); error != nullptr) return error;
  }
  return p.prefixes.group_rows == nullptr ? nullptr : CheckPrefixes(p);
}

}  // namespace fdsd
