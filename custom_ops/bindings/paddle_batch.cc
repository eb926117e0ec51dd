#include "paddle/phi/api/include/api.h"
#include "paddle_ragged.h"

namespace {
using namespace fdsd_paddle;  // NOLINT: a binding file is all bindings

constexpr DataType kInt32 = DataType::INT32;

std::vector<Tensor> PrepareBatch(const Tensor& num_computed, const Tensor& num_new, const Tensor& num_known,
                                 const Tensor& token_table, const Tensor& slots, const Tensor& draft_token_ids,
                                 const Tensor& cu_num_draft, const Tensor& block_tables, int block_size, int num_tokens,
                                 int num_logits) {
  constexpr const char* kOp = "prepare_batch";
  const int64_t num_requests = num_computed.numel();
  if (token_table.shape().size() != 2) Fail(kOp, "token_table: expected [num_slots, max_tokens_per_row]");
  if (block_tables.shape().size() != 2) Fail(kOp, "block_tables: expected [R, max_blocks]");
  if (num_tokens < 0 || num_logits < 0) Fail(kOp, "num_tokens, num_logits: expected >= 0");
  const auto empty = [&](int64_t size, DataType dtype) {
    return paddle::experimental::empty({size}, dtype, token_table.place());
  };
  std::vector<Tensor> out = {
      empty(num_tokens, kInt32),       empty(num_tokens, kInt32),   empty(num_tokens, DataType::INT64),
      empty(num_requests + 1, kInt32), empty(num_requests, kInt32), empty(num_logits, kInt32),
      empty(num_requests + 1, kInt32), empty(num_logits, kInt32),
  };
  const auto i32 = [&](size_t i) { return static_cast<int32_t*>(out[i].data()); };
  const fdsd::PrepareBatchParams p{
      static_cast<int32_t>(num_requests),
      num_tokens,
      num_logits,
      static_cast<int32_t>(token_table.shape()[0]),
      block_size,
      static_cast<int32_t>(token_table.shape()[1]),
      static_cast<int32_t>(block_tables.shape()[1]),
      Data<int32_t>(kOp, "num_computed", num_computed, kInt32, {num_requests}),
      Data<int32_t>(kOp, "num_new", num_new, kInt32, {num_requests}),
      Data<int32_t>(kOp, "num_known", num_known, kInt32, {num_requests}),
      Data<int32_t>(kOp, "token_table", token_table, kInt32, {-1, -1}),
      Data<int32_t>(kOp, "slots", slots, kInt32, {num_requests}),
      Data<int32_t>(kOp, "draft_token_ids", draft_token_ids, kInt32, {-1}),
      OffsetsData(kOp, "cu_num_draft", cu_num_draft, num_requests, draft_token_ids.numel()),
      Data<int32_t>(kOp, "block_tables", block_tables, kInt32, {num_requests, -1}),
      {i32(0), i32(1), static_cast<int64_t*>(out[2].data()), i32(3), i32(4), i32(5), i32(6), i32(7)},
  };
  Check(kOp, fdsd_prepare_batch(&p));
  return out;
}

std::vector<Tensor> GatherOutputRows(const Tensor& x, const Tensor& indices) {
  constexpr const char* kOp = "gather_output_rows";
  const Shape shape = x.shape();
  if (shape.size() != 2) Fail(kOp, "x: expected [T, H], got " + ShapeText(shape));
  const int64_t num_rows_out = indices.numel();
  Tensor y = paddle::experimental::empty({num_rows_out, shape[1]}, x.dtype(), x.place());
  const fdsd::GatherOutputRowsParams p{
      static_cast<int32_t>(shape[0]),
      static_cast<int32_t>(num_rows_out),
      shape[1] * static_cast<int64_t>(phi::SizeOf(x.dtype())),
      Data<void>(kOp, "x", x, x.dtype(), shape),
      Data<int32_t>(kOp, "indices", indices, kInt32, {-1}),
      y.data(),
  };
  Check(kOp, fdsd_gather_output_rows(&p));
  return {y};
}
}  // namespace

PD_BUILD_OP(fdsd_prepare_batch)
    .Inputs({"num_computed", "num_new", "num_known", "token_table", "slots", "draft_token_ids", "cu_num_draft",
             "block_tables"})
    .Outputs({"input_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens", "logits_indices",
              "cu_num_logits", "batch_id_per_output"})
    .Attrs({"block_size: int", "num_tokens: int", "num_logits: int"})
    .SetKernelFn(PD_KERNEL(PrepareBatch));

PD_BUILD_OP(fdsd_gather_output_rows).Inputs({"x", "indices"}).Outputs({"y"}).SetKernelFn(PD_KERNEL(GatherOutputRows));
