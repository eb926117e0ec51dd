#include "paddle/phi/api/include/api.h"
#include "paddle_binding.h"

namespace {
using namespace fdsd_paddle;  // NOLINT: a binding file is all bindings

fdsd::KvDType ToKvDType(const char* op, DataType dtype) {
  if (dtype == DataType::FLOAT32) return fdsd::KvDType::kFloat32;
  if (dtype == DataType::BFLOAT16) return fdsd::KvDType::kBFloat16;
  if (dtype == DataType::INT8) return fdsd::KvDType::kInt8;
  Fail(op, "k_cache: expected float32, bfloat16 or int8");
}

// A layer's cache as the op gets it.
struct CacheTensors {
  const Tensor& k;
  const Tensor& v;
  const OptionalTensor& k_scale;
  const OptionalTensor& v_scale;
};

fdsd::KvCache ToKvCache(const char* op, const CacheTensors& cache, DataType activations) {
  const Shape k = cache.k.shape();
  if (k.size() != 5) {
    Fail(op, "k_cache: expected [num_blocks, num_kv_heads, head_dim / s, block_size, s], got " + ShapeText(k));
  }
  const DataType dtype = cache.k.dtype();
  const fdsd::KvDType kv_dtype = ToKvDType(op, dtype);
  const bool has_scales = kv_dtype == fdsd::KvDType::kInt8;
  if (static_cast<bool>(cache.k_scale) != has_scales || static_cast<bool>(cache.v_scale) != has_scales) {
    Fail(op, "k_scale, v_scale: expected both for int8 and neither else");
  }
  const int64_t s = kv_dtype == fdsd::KvDType::kFloat32 ? 1 : has_scales ? 4 : 2;
  const int64_t block_size = k[3];
  const int64_t head_dim = k[2] * s;
  const Shape scales{k[0], k[1], block_size};
  return fdsd::KvCache{
      static_cast<int32_t>(k[0]),
      static_cast<int32_t>(block_size),
      static_cast<int32_t>(k[1]),
      static_cast<int32_t>(head_dim),
      ToDType(op, "activations", activations),
      kv_dtype,
      Data<void>(op, "k_cache", cache.k, dtype, {k[0], k[1], k[2], block_size, s}),
      Data<void>(op, "v_cache", cache.v, dtype, {k[0], k[1], block_size / s, head_dim, s}),
      OptionalData<float>(op, "k_scale", cache.k_scale, DataType::FLOAT32, scales),
      OptionalData<float>(op, "v_scale", cache.v_scale, DataType::FLOAT32, scales),
  };
}

// Heads in the columns of a matrix that has `extra` heads beside them.
int64_t NumHeads(const char* op, const char* name, const Tensor& x, int64_t extra, int64_t head_dim) {
  const Shape shape = x.shape();
  if (shape.size() != 2 || head_dim <= 0 || shape[1] % head_dim != 0 || shape[1] / head_dim <= extra) {
    Fail(op, std::string(name) + ": expected [T, heads * head_dim], got " + ShapeText(shape));
  }
  return shape[1] / head_dim - extra;
}

std::vector<Tensor> RopeStoreKv(const Tensor& qkv, const Tensor& positions, const Tensor& slot_mapping,
                                const Tensor& cos_sin, Tensor& k_cache, Tensor& v_cache,  // NOLINT: written in place
                                OptionalTensor& k_scale, OptionalTensor& v_scale,         // NOLINT: likewise
                                const OptionalTensor& q_norm, const OptionalTensor& k_norm, float eps,
                                bool interleaved) {
  constexpr const char* kOp = "rope_store_kv_";
  const fdsd::KvCache cache = ToKvCache(kOp, {k_cache, v_cache, k_scale, v_scale}, qkv.dtype());
  const int64_t num_heads = NumHeads(kOp, "qkv", qkv, 2 * cache.num_kv_heads, cache.head_dim);
  const int64_t num_tokens = qkv.shape()[0];
  const Shape table = cos_sin.shape();
  if (table.size() != 2) Fail(kOp, "cos_sin: expected [max_position, rotary_dim], got " + ShapeText(table));
  Tensor q = paddle::experimental::empty({num_tokens, num_heads * cache.head_dim}, qkv.dtype(), qkv.place());
  const fdsd::RopeStoreKvParams p{
      cache,
      static_cast<int32_t>(num_tokens),
      static_cast<int32_t>(num_heads),
      static_cast<int32_t>(table[1]),
      static_cast<int32_t>(table[0]),
      interleaved ? 1 : 0,
      eps,
      Data<void>(kOp, "qkv", qkv, qkv.dtype(), {-1, -1}),
      Data<int32_t>(kOp, "positions", positions, DataType::INT32, {num_tokens}),
      Data<int64_t>(kOp, "slot_mapping", slot_mapping, DataType::INT64, {num_tokens}),
      Data<float>(kOp, "cos_sin", cos_sin, DataType::FLOAT32, table),
      OptionalData<float>(kOp, "q_norm", q_norm, DataType::FLOAT32, {cache.head_dim}),
      OptionalData<float>(kOp, "k_norm", k_norm, DataType::FLOAT32, {cache.head_dim}),
      q.data(),
  };
  Check(kOp, fdsd_rope_store_kv(&p));
  return {q};
}

std::vector<Tensor> CascadeAppendAttention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                           const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                                           const Tensor& query_start_loc, const Tensor& seq_lens,
                                           const Tensor& block_tables, float scale, int first_key) {
  constexpr const char* kOp = "cascade_append_attention";
  const fdsd::KvCache cache = ToKvCache(kOp, {k_cache, v_cache, k_scale, v_scale}, q.dtype());
  const int64_t num_heads = NumHeads(kOp, "q", q, 0, cache.head_dim);
  const Shape tables = block_tables.shape();
  if (tables.size() != 2) Fail(kOp, "block_tables: expected [R, max_blocks], got " + ShapeText(tables));
  Tensor y = paddle::experimental::empty(q.shape(), q.dtype(), q.place());
  const fdsd::CascadeAppendAttentionParams p{
      cache,
      static_cast<int32_t>(tables[0]),
      static_cast<int32_t>(q.shape()[0]),
      static_cast<int32_t>(num_heads),
      static_cast<int32_t>(tables[1]),
      scale,
      first_key,
      Data<void>(kOp, "q", q, q.dtype(), {-1, -1}),
      Data<int32_t>(kOp, "query_start_loc", query_start_loc, DataType::INT32, {tables[0] + 1}),
      Data<int32_t>(kOp, "seq_lens", seq_lens, DataType::INT32, {tables[0]}),
      Data<int32_t>(kOp, "block_tables", block_tables, DataType::INT32, tables),
      y.data(),
  };
  Check(kOp, fdsd_cascade_append_attention(&p));
  return {y};
}
}  // namespace

PD_BUILD_OP(fdsd_rope_store_kv)
    .Inputs({"qkv", "positions", "slot_mapping", "cos_sin", "k_cache", "v_cache", paddle::Optional("k_scale"),
             paddle::Optional("v_scale"), paddle::Optional("q_norm"), paddle::Optional("k_norm")})
    .Outputs({"q", "k_cache_out", "v_cache_out", paddle::Optional("k_scale_out"), paddle::Optional("v_scale_out")})
    .Attrs({"eps: float", "interleaved: bool"})
    .SetInplaceMap({{"k_cache", "k_cache_out"},
                    {"v_cache", "v_cache_out"},
                    {paddle::Optional("k_scale"), paddle::Optional("k_scale_out")},
                    {paddle::Optional("v_scale"), paddle::Optional("v_scale_out")}})
    .SetKernelFn(PD_KERNEL(RopeStoreKv));

PD_BUILD_OP(fdsd_cascade_append_attention)
    .Inputs({"q", "k_cache", "v_cache", paddle::Optional("k_scale"), paddle::Optional("v_scale"), "query_start_loc",
             "seq_lens", "block_tables"})
    .Outputs({"y"})
    .Attrs({"scale: float", "first_key: int"})
    .SetKernelFn(PD_KERNEL(CascadeAppendAttention));
