#include "paddle/phi/api/include/api.h"
#include "paddle_ragged.h"

namespace {
using namespace fdsd_paddle;  // NOLINT: a binding file is all bindings

constexpr DataType kInt32 = DataType::INT32;

// Bytes of a row of a matrix.
int64_t RowBytes(const Tensor& x) { return x.shape()[1] * static_cast<int64_t>(phi::SizeOf(x.dtype())); }

const int32_t* PerRequest(const char* op, const char* name, const Tensor& tensor, int64_t num_requests) {
  return Data<int32_t>(op, name, tensor, kInt32, {num_requests});
}

std::vector<Tensor> MtpPreprocess(const Tensor& slots, const Tensor& begin, const Tensor& end,
                                  const Tensor& hidden_begin, const Tensor& hidden_end, const Tensor& cu_hidden,
                                  const Tensor& num_committed, const Tensor& cu_num_draft,
                                  const Tensor& draft_token_ids, const Tensor& token_table, const Tensor& block_table,
                                  const Tensor& hidden, Tensor& block_hidden,  // NOLINT: written in place
                                  Tensor& request_hidden,                      // NOLINT: written in place
                                  int block_size, int source, int num_tokens, int num_draft_rows) {
  constexpr const char* kOp = "mtp_preprocess_";
  const int64_t num_requests = slots.numel();
  if (hidden.shape().size() != 2) Fail(kOp, "hidden: expected [rows, H], got " + ShapeText(hidden.shape()));
  if (token_table.shape().size() != 2) Fail(kOp, "token_table: expected [num_slots, max_tokens_per_row]");
  if (block_table.shape().size() != 2) Fail(kOp, "block_table: expected [num_slots, max_blocks]");
  if (num_tokens < 0 || num_draft_rows < 0) Fail(kOp, "num_tokens, num_draft_rows: expected >= 0");
  const int64_t num_slots = token_table.shape()[0];
  const int64_t width = hidden.shape()[1];
  const auto empty = [&](int64_t size, DataType dtype) {
    return paddle::experimental::empty({size}, dtype, token_table.place());
  };
  std::vector<Tensor> out = {
      empty(num_tokens, kInt32),
      empty(num_tokens, kInt32),
      empty(num_tokens, DataType::INT64),
      empty(num_requests + 1, kInt32),
      empty(num_requests, kInt32),
      empty(num_draft_rows, kInt32),
      paddle::experimental::empty({num_tokens, width}, hidden.dtype(), hidden.place()),
  };
  const auto i32 = [&](size_t i) { return static_cast<int32_t*>(out[i].data()); };
  const fdsd::MtpPreprocessParams p{
      static_cast<int32_t>(num_requests),
      num_tokens,
      num_draft_rows,
      static_cast<int32_t>(hidden.shape()[0]),
      static_cast<int32_t>(num_slots),
      static_cast<int32_t>(token_table.shape()[1]),
      static_cast<int32_t>(block_table.shape()[1]),
      static_cast<int32_t>(block_hidden.shape()[0]),
      block_size,
      source,
      RowBytes(hidden),
      PerRequest(kOp, "slots", slots, num_requests),
      PerRequest(kOp, "begin", begin, num_requests),
      PerRequest(kOp, "end", end, num_requests),
      PerRequest(kOp, "hidden_begin", hidden_begin, num_requests),
      PerRequest(kOp, "hidden_end", hidden_end, num_requests),
      Data<int32_t>(kOp, "cu_hidden", cu_hidden, kInt32, {num_requests + 1}),
      PerRequest(kOp, "num_committed", num_committed, num_requests),
      OffsetsData(kOp, "cu_num_draft", cu_num_draft, num_requests, draft_token_ids.numel()),
      Data<int32_t>(kOp, "draft_token_ids", draft_token_ids, kInt32, {-1}),
      Data<int32_t>(kOp, "token_table", token_table, kInt32, {-1, -1}),
      Data<int32_t>(kOp, "block_table", block_table, kInt32, {num_slots, -1}),
      Data<void>(kOp, "hidden", hidden, hidden.dtype(), {-1, -1}),
      Data<void>(kOp, "block_hidden", block_hidden, hidden.dtype(), {-1, width}),
      Data<void>(kOp, "request_hidden", request_hidden, hidden.dtype(), {num_slots, width}),
      {i32(0), i32(1), static_cast<int64_t*>(out[2].data()), i32(3), i32(4), i32(5), out[6].data()},
  };
  Check(kOp, fdsd_mtp_preprocess(&p));
  return out;
}

std::vector<Tensor> MtpPostprocess(const Tensor& slots, const Tensor& num_committed, const Tensor& cu_num_draft,
                                   const Tensor& block_table, const Tensor& logits, const Tensor& hidden,
                                   Tensor& draft_token_ids,  // NOLINT: written in place
                                   int block_size, int step, int num_next) {
  constexpr const char* kOp = "mtp_postprocess_";
  const int64_t num_requests = slots.numel();
  const Shape shape = logits.shape();
  if (shape.size() != 2) Fail(kOp, "logits: expected [A, V], got " + ShapeText(shape));
  if (hidden.shape().size() != 2) Fail(kOp, "hidden: expected [A, H], got " + ShapeText(hidden.shape()));
  if (block_table.shape().size() != 2) Fail(kOp, "block_table: expected [num_slots, max_blocks]");
  if (num_next < 0) Fail(kOp, "num_next: expected >= 0");
  const auto empty = [&](int64_t size, DataType dtype) {
    return paddle::experimental::empty({size}, dtype, draft_token_ids.place());
  };
  std::vector<Tensor> out = {
      empty(num_next, kInt32),
      empty(num_next, kInt32),
      empty(num_next, DataType::INT64),
      empty(num_requests + 1, kInt32),
      empty(num_requests, kInt32),
      paddle::experimental::empty({num_next, hidden.shape()[1]}, hidden.dtype(), hidden.place()),
  };
  const auto i32 = [&](size_t i) { return static_cast<int32_t*>(out[i].data()); };
  const fdsd::MtpPostprocessParams p{
      static_cast<int32_t>(num_requests),
      static_cast<int32_t>(shape[0]),
      num_next,
      static_cast<int32_t>(shape[1]),
      static_cast<int32_t>(block_table.shape()[0]),
      static_cast<int32_t>(block_table.shape()[1]),
      block_size,
      step,
      RowBytes(hidden),
      PerRequest(kOp, "slots", slots, num_requests),
      PerRequest(kOp, "num_committed", num_committed, num_requests),
      OffsetsData(kOp, "cu_num_draft", cu_num_draft, num_requests, draft_token_ids.numel()),
      Data<int32_t>(kOp, "block_table", block_table, kInt32, {-1, -1}),
      Data<float>(kOp, "logits", logits, DataType::FLOAT32, {-1, -1}),
      Data<void>(kOp, "hidden", hidden, hidden.dtype(), {shape[0], -1}),
      Data<int32_t>(kOp, "draft_token_ids", draft_token_ids, kInt32, {-1}),
      {i32(0), i32(1), static_cast<int64_t*>(out[2].data()), i32(3), i32(4), out[5].data()},
  };
  Check(kOp, fdsd_mtp_postprocess(&p));
  return out;
}
}  // namespace

PD_BUILD_OP(fdsd_mtp_preprocess)
    .Inputs({"slots", "begin", "end", "hidden_begin", "hidden_end", "cu_hidden", "num_committed", "cu_num_draft",
             "draft_token_ids", "token_table", "block_table", "hidden", "block_hidden", "request_hidden"})
    .Outputs({"input_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens", "draft_rows", "hidden_out",
              "block_hidden_out", "request_hidden_out"})
    .Attrs({"block_size: int", "source: int", "num_tokens: int", "num_draft_rows: int"})
    .SetInplaceMap({{"block_hidden", "block_hidden_out"}, {"request_hidden", "request_hidden_out"}})
    .SetKernelFn(PD_KERNEL(MtpPreprocess));

PD_BUILD_OP(fdsd_mtp_postprocess)
    .Inputs({"slots", "num_committed", "cu_num_draft", "block_table", "logits", "hidden", "draft_token_ids"})
    .Outputs({"input_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens", "hidden_out",
              "draft_token_ids_out"})
    .Attrs({"block_size: int", "step: int", "num_next: int"})
    .SetInplaceMap({{"draft_token_ids", "draft_token_ids_out"}})
    .SetKernelFn(PD_KERNEL(MtpPostprocess));
