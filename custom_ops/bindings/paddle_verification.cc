#include "paddle/phi/api/include/api.h"
#include "paddle_ragged.h"

namespace {
using namespace fdsd_paddle;  // NOLINT: a binding file is all bindings

constexpr DataType kInt32 = DataType::INT32;

// token_ids has room for every row; the outputs are its first cu_num_output[R] entries.
std::vector<Tensor> VerifyDraftTokens(const Tensor& sampled_token_ids, const Tensor& cu_num_logits,
                                      const Tensor& draft_token_ids, const Tensor& cu_num_draft,
                                      const OptionalTensor& candidate_token_ids, const OptionalTensor& candidate_lens,
                                      int accept_policy, int verify_window) {
  constexpr const char* kOp = "verify_draft_tokens";
  const int64_t num_requests = cu_num_logits.numel() - 1;
  if (num_requests < 0) Fail(kOp, "cu_num_logits: expected [R + 1], got no entry");
  const int64_t num_rows = sampled_token_ids.numel();
  const Shape candidates = candidate_token_ids ? candidate_token_ids->shape() : Shape{num_rows, 0};
  if (candidates.size() != 2) Fail(kOp, "candidate_token_ids: expected [L, C], got " + ShapeText(candidates));
  // A tensor without elements arrives as an absent one.
  if (!candidate_token_ids != !candidate_lens)
    Fail(kOp,
         "candidate_token_ids: expected at least one per row, with candidate_lens, or neither; got one of the two");
  const auto empty = [&](int64_t size) {
    return paddle::experimental::empty({size}, kInt32, sampled_token_ids.place());
  };
  std::vector<Tensor> out = {empty(num_rows), empty(num_requests + 1), empty(num_requests)};
  const fdsd::VerifyDraftTokensParams p{
      static_cast<int32_t>(num_requests),
      static_cast<fdsd::AcceptPolicy>(accept_policy),
      static_cast<int32_t>(candidates[1]),
      verify_window,
      Data<int32_t>(kOp, "sampled_token_ids", sampled_token_ids, kInt32, {-1}),
      OffsetsData(kOp, "cu_num_logits", cu_num_logits, num_requests, num_rows),
      Data<int32_t>(kOp, "draft_token_ids", draft_token_ids, kInt32, {-1}),
      OffsetsData(kOp, "cu_num_draft", cu_num_draft, num_requests, draft_token_ids.numel()),
      OptionalData<int32_t>(kOp, "candidate_token_ids", candidate_token_ids, kInt32, {num_rows, candidates[1]}),
      OptionalData<int32_t>(kOp, "candidate_lens", candidate_lens, kInt32, {num_rows}),
      static_cast<int32_t*>(out[0].data()),
      static_cast<int32_t*>(out[1].data()),
      static_cast<int32_t*>(out[2].data()),
  };
  Check(kOp, fdsd_verify_draft_tokens(&p));
  return out;
}
}  // namespace

PD_BUILD_OP(fdsd_verify_draft_tokens)
    .Inputs({"sampled_token_ids", "cu_num_logits", "draft_token_ids", "cu_num_draft",
             paddle::Optional("candidate_token_ids"), paddle::Optional("candidate_lens")})
    .Outputs({"token_ids", "cu_num_output", "num_accepted"})
    .Attrs({"accept_policy: int", "verify_window: int"})
    .SetKernelFn(PD_KERNEL(VerifyDraftTokens));
