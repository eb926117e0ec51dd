#include "paddle/phi/api/include/api.h"
#include "paddle_ragged.h"

namespace {
using namespace fdsd_paddle;  // NOLINT: a binding file is all bindings

constexpr DataType kInt32 = DataType::INT32;
constexpr DataType kFloat32 = DataType::FLOAT32;

Shape LogitsShape(const char* op, const Tensor& logits) {
  const Shape shape = logits.shape();
  if (shape.size() != 2) Fail(op, "logits: expected [L, V], got " + ShapeText(shape));
  return shape;
}

std::vector<Tensor> ProcessLogits(const Tensor& logits, const Tensor& rows, const Tensor& cu_num_logits,
                                  const Tensor& draft_token_ids, const Tensor& cu_num_draft,
                                  const Tensor& repetition_penalty, const Tensor& presence_penalty,
                                  const Tensor& frequency_penalty, const Tensor& penalty_slot,
                                  const Tensor& token_counts, const Tensor& cu_bias, const Tensor& bias_token_ids,
                                  const Tensor& bias_values, const Tensor& cu_mask, const Tensor& mask_token_ids) {
  constexpr const char* kOp = "process_logits";
  const Shape shape = LogitsShape(kOp, logits);
  const int64_t num_requests = penalty_slot.numel();
  const int64_t num_slots = token_counts.shape().empty() ? 0 : token_counts.shape()[0];
  const int64_t num_processed = rows.numel();
  Tensor y = paddle::experimental::empty({num_processed, shape[1]}, kFloat32, logits.place());
  const auto penalty = [&](const char* name, const Tensor& column) {
    return Data<float>(kOp, name, column, kFloat32, {num_requests});
  };
  const fdsd::ProcessLogitsParams p{
      static_cast<int32_t>(shape[0]),
      static_cast<int32_t>(num_processed),
      static_cast<int32_t>(num_requests),
      static_cast<int32_t>(shape[1]),
      static_cast<int32_t>(num_slots),
      Data<float>(kOp, "logits", logits, kFloat32, shape),
      Data<int32_t>(kOp, "rows", rows, kInt32, {-1}),
      OffsetsData(kOp, "cu_num_logits", cu_num_logits, num_requests, shape[0]),
      Data<int32_t>(kOp, "draft_token_ids", draft_token_ids, kInt32, {-1}),
      OffsetsData(kOp, "cu_num_draft", cu_num_draft, num_requests, draft_token_ids.numel()),
      {penalty("repetition_penalty", repetition_penalty), penalty("presence_penalty", presence_penalty),
       penalty("frequency_penalty", frequency_penalty),
       Data<int32_t>(kOp, "penalty_slot", penalty_slot, kInt32, {num_requests}),
       Data<int32_t>(kOp, "token_counts", token_counts, kInt32, {num_slots, shape[1]})},
      {OffsetsData(kOp, "cu_bias", cu_bias, num_requests, bias_token_ids.numel()),
       Data<int32_t>(kOp, "bias_token_ids", bias_token_ids, kInt32, {-1}),
       Data<float>(kOp, "bias_values", bias_values, kFloat32, {bias_token_ids.numel()})},
      {OffsetsData(kOp, "cu_mask", cu_mask, shape[0], mask_token_ids.numel()),
       Data<int32_t>(kOp, "mask_token_ids", mask_token_ids, kInt32, {-1})},
      static_cast<float*>(y.data()),
  };
  Check(kOp, fdsd_process_logits(&p));
  return {y};
}

fdsd::SampleParams SampleParamsOf(const char* op, const Tensor& logits, const Tensor& batch_id_per_output,
                                  const Tensor& positions, const Tensor& temperature, const Tensor& top_k,
                                  const Tensor& top_p, const Tensor& min_p, const Tensor& seed,
                                  const OptionalTensor& processed, const OptionalTensor& processed_row,
                                  Tensor* token_ids) {
  const Shape shape = LogitsShape(op, logits);
  const int64_t num_requests = seed.numel();
  const int64_t num_processed = processed ? LogitsShape(op, *processed)[0] : 0;
  *token_ids = paddle::experimental::empty({shape[0]}, kInt32, logits.place());
  return fdsd::SampleParams{
      static_cast<int32_t>(shape[0]),
      static_cast<int32_t>(num_requests),
      static_cast<int32_t>(shape[1]),
      static_cast<int32_t>(num_processed),
      Data<float>(op, "logits", logits, kFloat32, shape),
      OptionalData<float>(op, "processed", processed, kFloat32, {num_processed, shape[1]}),
      OptionalData<int32_t>(op, "processed_row", processed_row, kInt32, {shape[0]}),
      Data<int32_t>(op, "batch_id_per_output", batch_id_per_output, kInt32, {shape[0]}),
      Data<int32_t>(op, "positions", positions, kInt32, {shape[0]}),
      Data<float>(op, "temperature", temperature, kFloat32, {num_requests}),
      Data<int32_t>(op, "top_k", top_k, kInt32, {num_requests}),
      Data<float>(op, "top_p", top_p, kFloat32, {num_requests}),
      Data<float>(op, "min_p", min_p, kFloat32, {num_requests}),
      Data<uint64_t>(op, "seed", seed, DataType::UINT64, {num_requests}),
      static_cast<int32_t*>(token_ids->data()),
      {},
  };
}

std::vector<Tensor> Sample(const Tensor& logits, const Tensor& batch_id_per_output, const Tensor& positions,
                           const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const Tensor& min_p,
                           const Tensor& seed, const OptionalTensor& processed, const OptionalTensor& processed_row,
                           const OptionalTensor& cu_num_logits, const OptionalTensor& draft_token_ids,
                           const OptionalTensor& cu_num_draft) {
  constexpr const char* kOp = "sample";
  Tensor token_ids;
  fdsd::SampleParams p = SampleParamsOf(kOp, logits, batch_id_per_output, positions, temperature, top_k, top_p, min_p,
                                        seed, processed, processed_row, &token_ids);
  if (!cu_num_logits != !cu_num_draft)
    Fail(kOp, "cu_num_logits: expected it with cu_num_draft, or neither; got one of the two");
  if (cu_num_logits) {
    // A tensor without elements arrives as an absent one.
    const int64_t num_drafts = draft_token_ids ? draft_token_ids->numel() : 0;
    p.drafts = {OffsetsData(kOp, "cu_num_logits", *cu_num_logits, p.num_requests, p.num_rows),
                OptionalData<int32_t>(kOp, "draft_token_ids", draft_token_ids, kInt32, {num_drafts}),
                OffsetsData(kOp, "cu_num_draft", *cu_num_draft, p.num_requests, num_drafts)};
  }
  Check(kOp, fdsd_sample(&p));
  return {token_ids};
}

std::vector<Tensor> TopPCandidates(const Tensor& logits, const Tensor& batch_id_per_output, const Tensor& positions,
                                   const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                                   const Tensor& min_p, const Tensor& seed, const OptionalTensor& processed,
                                   const OptionalTensor& processed_row, int max_candidate_len) {
  constexpr const char* kOp = "top_p_candidates";
  if (max_candidate_len <= 0)
    Fail(kOp, "max_candidate_len: expected a positive number, got " + std::to_string(max_candidate_len));
  Tensor token_ids;
  const fdsd::SampleParams rows = SampleParamsOf(kOp, logits, batch_id_per_output, positions, temperature, top_k, top_p,
                                                 min_p, seed, processed, processed_row, &token_ids);
  Tensor candidates = paddle::experimental::empty({rows.num_rows, max_candidate_len}, kInt32, logits.place());
  Tensor lens = paddle::experimental::empty({rows.num_rows}, kInt32, logits.place());
  const fdsd::TopPCandidatesParams p{
      rows,
      max_candidate_len,
      static_cast<int32_t*>(candidates.data()),
      static_cast<int32_t*>(lens.data()),
  };
  Check(kOp, fdsd_top_p_candidates(&p));
  return {token_ids, candidates, lens};
}

std::vector<Tensor> TokenLogprobs(const Tensor& logits, const Tensor& token_ids, int num_top) {
  constexpr const char* kOp = "token_logprobs";
  const Shape shape = LogitsShape(kOp, logits);
  if (num_top < 0) Fail(kOp, "num_top: expected >= 0, got " + std::to_string(num_top));
  const auto empty = [&](const Shape& size, DataType dtype) {
    return paddle::experimental::empty(size, dtype, logits.place());
  };
  std::vector<Tensor> out = {empty({shape[0]}, kFloat32), empty({shape[0]}, kInt32), empty({shape[0], num_top}, kInt32),
                             empty({shape[0], num_top}, kFloat32)};
  const fdsd::TokenLogprobsParams p{
      static_cast<int32_t>(shape[0]),
      static_cast<int32_t>(shape[1]),
      num_top,
      Data<float>(kOp, "logits", logits, kFloat32, shape),
      Data<int32_t>(kOp, "token_ids", token_ids, kInt32, {shape[0]}),
      static_cast<float*>(out[0].data()),
      static_cast<int32_t*>(out[1].data()),
      static_cast<int32_t*>(out[2].data()),
      static_cast<float*>(out[3].data()),
  };
  Check(kOp, fdsd_token_logprobs(&p));
  return out;
}
}  // namespace

PD_BUILD_OP(fdsd_process_logits)
    .Inputs({"logits", "rows", "cu_num_logits", "draft_token_ids", "cu_num_draft", "repetition_penalty",
             "presence_penalty", "frequency_penalty", "penalty_slot", "token_counts", "cu_bias", "bias_token_ids",
             "bias_values", "cu_mask", "mask_token_ids"})
    .Outputs({"y"})
    .SetKernelFn(PD_KERNEL(ProcessLogits));

PD_BUILD_OP(fdsd_sample)
    .Inputs({"logits", "batch_id_per_output", "positions", "temperature", "top_k", "top_p", "min_p", "seed",
             paddle::Optional("processed"), paddle::Optional("processed_row"), paddle::Optional("cu_num_logits"),
             paddle::Optional("draft_token_ids"), paddle::Optional("cu_num_draft")})
    .Outputs({"token_ids"})
    .SetKernelFn(PD_KERNEL(Sample));

PD_BUILD_OP(fdsd_top_p_candidates)
    .Inputs({"logits", "batch_id_per_output", "positions", "temperature", "top_k", "top_p", "min_p", "seed",
             paddle::Optional("processed"), paddle::Optional("processed_row")})
    .Outputs({"token_ids", "candidate_token_ids", "candidate_lens"})
    .Attrs({"max_candidate_len: int"})
    .SetKernelFn(PD_KERNEL(TopPCandidates));

PD_BUILD_OP(fdsd_token_logprobs)
    .Inputs({"logits", "token_ids"})
    .Outputs({"logprobs", "ranks", "top_token_ids", "top_logprobs"})
    .Attrs({"num_top: int"})
    .SetKernelFn(PD_KERNEL(TokenLogprobs));
