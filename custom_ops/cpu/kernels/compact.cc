#include <cstring>

#include "fdsd/attention.h"
#include "kv_check.h"
#include "offsets.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

Error CheckPaths(const VerifiedPaths& p) {
  if (!AreOffsets(p.cu_num_logits, p.num_requests))
    return "cu_num_logits: expected 0 and rising offsets, got a decrease";
  if (!AreOffsets(p.cu_num_output, p.num_requests))
    return "cu_num_output: expected 0 and rising offsets, got a decrease";
  if (p.cu_num_logits[p.num_requests] > p.num_logits) return "cu_num_logits: expected at most num_logits, got more";
  for (int32_t l = 0; l < p.cu_num_logits[p.num_requests]; ++l)
    if (p.logits_indices[l] < 0 || p.logits_indices[l] >= p.num_tokens)
      return "logits_indices: expected tokens of the step, got one outside";
  for (int32_t r = 0; r < p.num_requests; ++r) {
    int32_t place = p.cu_num_logits[r];
    for (int32_t o = p.cu_num_output[r]; o < p.cu_num_output[r + 1]; ++o, ++place)
      if (p.output_rows[o] < place || p.output_rows[o] >= p.cu_num_logits[r + 1])
        return "output_rows: expected rows of the request, each at or after its place; got another";
  }
  return nullptr;
}

// visit(from, to): the tokens of the step whose place another one takes, in an order that loses none.
template <typename Visit>
void ForEachMove(const VerifiedPaths& p, int32_t r, const Visit& visit) {
  int32_t place = p.cu_num_logits[r];
  for (int32_t o = p.cu_num_output[r]; o < p.cu_num_output[r + 1]; ++o, ++place)
    if (p.output_rows[o] != place) visit(p.logits_indices[p.output_rows[o]], p.logits_indices[place]);
}

// One token of a KV head, of `Element`s that lie `s` together.
template <typename Element>
void MoveHead(const KvCache& cache, int64_t from, int64_t to, int32_t head) {
  constexpr int64_t s = 4 / sizeof(Element);
  const int64_t size = cache.block_size;
  const int64_t from_head = from / size * cache.num_kv_heads + head;
  const int64_t to_head = to / size * cache.num_kv_heads + head;
  uint32_t* k = static_cast<uint32_t*>(cache.k);
  for (int64_t d = 0; d < cache.head_dim / s; ++d)
    k[(to_head * (cache.head_dim / s) + d) * size + to % size] =
        k[(from_head * (cache.head_dim / s) + d) * size + from % size];
  if (cache.v == nullptr) return;
  Element* v = static_cast<Element*>(cache.v);
  for (int64_t d = 0; d < cache.head_dim; ++d)
    v[((to_head * (size / s) + to % size / s) * cache.head_dim + d) * s + to % s] =
        v[((from_head * (size / s) + from % size / s) * cache.head_dim + d) * s + from % s];
  if (cache.k_scale == nullptr) return;
  cache.k_scale[to_head * size + to % size] = cache.k_scale[from_head * size + from % size];
  cache.v_scale[to_head * size + to % size] = cache.v_scale[from_head * size + from % size];
}

void MoveToken(const KvCache& cache, int64_t from, int64_t to, int32_t head) {
  switch (cache.kv_dtype) {
    case KvDType::kFloat32:
      return MoveHead<uint32_t>(cache, from, to, head);
    case KvDType::kBFloat16:
    case KvDType::kFloat16:
      return MoveHead<uint16_t>(cache, from, to, head);
    case KvDType::kInt8:
    case KvDType::kFloat8:
      return MoveHead<uint8_t>(cache, from, to, head);
  }
}

}  // namespace

Error CompactKv(const CompactKvParams& p) {
  if (Error error = CheckKvStorage(p.cache)) return error;
  if (Error error = CheckPaths(p.paths)) return error;
  for (int32_t l = 0; l < p.paths.cu_num_logits[p.paths.num_requests]; ++l) {
    const int64_t slot = p.slot_mapping[p.paths.logits_indices[l]];
    if (slot < 0 || slot / p.cache.block_size >= p.cache.num_blocks)
      return "slot_mapping: expected slots of the cache, got one outside";
  }
  const int64_t num_heads = p.cache.num_kv_heads;
  ParallelFor(p.paths.num_requests * num_heads, [&](int64_t i) {
    ForEachMove(p.paths, static_cast<int32_t>(i / num_heads), [&](int32_t from, int32_t to) {
      MoveToken(p.cache, p.slot_mapping[from], p.slot_mapping[to], static_cast<int32_t>(i % num_heads));
    });
  });
  return nullptr;
}

Error CompactRows(const CompactRowsParams& p) {
  if (p.row_bytes < 0) return "row_bytes: expected >= 0, got a negative size";
  if (Error error = CheckPaths(p.paths)) return error;
  char* rows = static_cast<char*>(p.rows);
  for (int32_t r = 0; r < p.paths.num_requests; ++r) {
    ForEachMove(p.paths, r, [&](int32_t from, int32_t to) {
      std::memcpy(rows + to * p.row_bytes, rows + from * p.row_bytes, static_cast<size_t>(p.row_bytes));
    });
  }
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
