// Attention over a paged cache. The query rows of a request that share a KV head (its group of heads times its new
// tokens) are packed into tiles of 16, so that one read of keys and values serves all of them.
//
// Keys are split at fixed positions: a warp takes 64 of them, the four warps of a block a partition of 256. A
// partition's result is that of its warps merged in order, a row's that of its partitions merged in order. Where the
// tiles alone do not fill a GPU, partitions are computed by blocks of their own and merged by another kernel, by the
// same additions: the bits are the same. Keys that a row does not see add nothing, exactly, so it does not matter whose
// tile it is in.
//
// Partitions that a group of requests shares are computed by tiles of the group's rows, which leave their results for
// the rows' own tiles: these go on from there.
//
// In a tree of drafts the keys of each new token are put together as if they followed one another, so
// its rows have the bits of a chain.
//
// On Hopper tiles are of 64 or 128 rows for most models: attention_wide_kernels.h.
//
// Source: arXiv:2307.08691 (online softmax in tiles); the packing of heads and drafts and the fixed split are ours.
#include "attention_grid.h"
#include "attention_over.h"
#include "ops.h"

namespace fdsd::cuda {

int64_t CascadeAppendAttentionWorkspaceBytes(const CascadeAppendAttentionParams& p) {
  const AttentionGrid grid = GridOf(p);
  const AttentionShape shape = ShapeOf(p, grid);
  const int64_t num_shared = grid.num_shared_rows * grid.num_parts * grid.num_slots;
  return OwnBytes(grid, shape) + num_shared * shape.PartialSize() * static_cast<int64_t>(sizeof(float));
}

Error CascadeAppendAttention(const CascadeAppendAttentionParams& p, void* workspace, Stream stream) {
  if (const Error error = CheckKvCache(p.cache); error != nullptr) return error;
  if (p.num_heads <= 0 || p.num_heads % p.cache.num_kv_heads != 0)
    return "num_heads: expected a positive multiple of num_kv_heads";
  if (p.num_requests < 0 || p.num_tokens < 0 || p.max_blocks < 0) return "sizes: expected no negative number";
  if (p.scores.window < 0) return "window: expected 0 (none) or a number of tokens, got less";
  if (p.scores.window > 0 && p.prefixes.group_rows != nullptr) return "prefixes: expected none with a window";
  if (p.cache.head_dim > kMaxHeadDim && p.cache.kv_dtype == KvDType::kFloat32)
    return "head_dim: expected at most 256 elements of float32, for which there is shared memory, got more";
  if (!(p.scores.softcap >= 0)) return "softcap: expected 0 (none) or a positive number, got another";
  if (p.scores.first_key < 0 || p.scores.first_key > 63) return "first_key: expected 0..63, got a number outside";
  switch (p.cache.kv_dtype) {
    case KvDType::kFloat32:
      return LaunchOver<float>(p, workspace, stream);
    case KvDType::kBFloat16:
      return LaunchOver<bf16>(p, workspace, stream);
    case KvDType::kInt8:
      return LaunchOver<int8_t>(p, workspace, stream);
    case KvDType::kFloat8:
      return LaunchOver<float8>(p, workspace, stream);
    case KvDType::kFloat16:
      return LaunchOver<half16>(p, workspace, stream);
  }
  return "kv_dtype: expected one of the types of a cache, got another";
}

}  // namespace fdsd::cuda
